"""The adapters for Accelerate, Lightning and Transformers on a CUDA device."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from autotune_amp import AmpConfig, LossScale, PrecisionController
from autotune_amp.integrations.export import Exportable, export
from autotune_amp.precision import torch_state

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore:.*does not have many workers which may be a bottleneck"),  # tiny data on purpose
    pytest.mark.filterwarnings("ignore:.*isinstance.treespec, LeafSpec"),  # Lightning under this torch
    pytest.mark.filterwarnings("ignore:The number of training batches"),  # fewer than its logging interval
]
DEVICE = "cuda"
BATCH, NUM_BATCHES, FIRST_LARGE = 4, 24, 8
CONFIG = AmpConfig(
    precision="fp16",
    batch_size=BATCH,
    loss_scale=LossScale(init_scale=256.0, growth_factor=4.0, backoff_factor=0.25, growth_interval=3),
    fallback=["fp32"],
)


class Net(nn.Module):
    """Notes where its forward runs and what autocast casts to.

    The norm makes large inputs harmless where they do not overflow.
    """

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.one, self.other, self.head = nn.Linear(8, 16), nn.Linear(8, 16), nn.Linear(16, 1)
        self.dtypes: list[torch.dtype] = []
        self.devices: set[str] = set()

    def forward(self, inputs: Tensor, labels: Tensor) -> dict[str, Tensor]:
        kind = inputs.device.type
        self.devices.add(kind)
        self.dtypes.append(torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else torch.float32)
        hidden = self.one(inputs) + self.other(inputs)  # two, so that pinning a single one does not do
        outputs = self.head(nn.functional.layer_norm(hidden, (16,))).squeeze(1)
        return {"loss": nn.functional.mse_loss(outputs.float(), labels), "logits": outputs}


Trained = tuple[PrecisionController, Net]


def rows(num_batches: int, first_large: int | None = None) -> list[dict[str, Tensor]]:
    """Samples; those of the batches from `first_large` on are past fp16's range."""
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(num_batches, BATCH, 8, generator=generator)
    labels = inputs.mean(2)
    if first_large is not None:
        inputs[first_large:] *= 1e6
    return [{"inputs": x, "labels": y} for x, y in zip(inputs.flatten(0, 1), labels.flatten(), strict=True)]


def with_accelerate(folder: Path, samples: Any, *, resumes: bool = False) -> Trained:
    from autotune_amp.integrations.accelerate import AutotuneAccelerator

    net = Net()
    plain: Any = torch.optim.SGD(net.parameters(), lr=0.05)

    def compute_loss(batch: dict[str, Tensor]) -> Tensor:
        with accelerator.autocast():
            loss: Tensor = model(**batch)["loss"]
        return loss

    accelerator = AutotuneAccelerator(CONFIG, cpu=DEVICE == "cpu", rerun=lambda: compute_loss(batch))
    model, optimizer, loader = accelerator.prepare(net, plain, DataLoader(samples, batch_size=BATCH))
    if resumes:
        accelerator.load_state(str(folder))
    for batch in accelerator.windows(loader):
        with accelerator.accumulate(model):
            accelerator.backward(compute_loss(batch))
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
    accelerator.save_state(str(folder))
    return accelerator.controller, net


def with_lightning(folder: Path, samples: Any, *, resumes: bool = False) -> Trained:
    lightning = pytest.importorskip("lightning")
    from autotune_amp.integrations.lightning import trainer_arguments

    class Module(lightning.LightningModule):  # type: ignore[misc,name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.net = Net()

        def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
            loss: Tensor = self.net(**batch)["loss"]
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.05)

    module = Module()
    trainer = lightning.Trainer(
        accelerator="cpu" if DEVICE == "cpu" else "gpu",
        devices=1,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
        default_root_dir=folder,
        **trainer_arguments(CONFIG, max_epochs=2 if resumes else 1, gradient_clip_val=1.0),
    )
    saved = folder / "run.ckpt"
    trainer.fit(module, DataLoader(samples, batch_size=BATCH), ckpt_path=saved if resumes else None)
    trainer.save_checkpoint(saved)
    return trainer.precision_plugin.controller, module.net


def with_transformers(folder: Path, samples: Any, *, resumes: bool = False) -> Trained:
    pytest.importorskip("transformers")
    from autotune_amp.integrations.transformers import AutotuneTrainer

    num_steps = len(samples) // BATCH
    arguments = CONFIG.to_training_arguments(
        output_dir=str(folder),
        num_train_epochs=2 if resumes else 1,
        save_strategy="steps",
        save_steps=num_steps,
        train_sampling_strategy="sequential",
        learning_rate=0.01,
        report_to="none",
        disable_tqdm=True,
        use_cpu=DEVICE == "cpu",
    )
    assert arguments.device.type == DEVICE
    arguments._n_gpu = 1  # where there are more, the Trainer would use nn.DataParallel
    net = Net()
    trainer = AutotuneTrainer(net, arguments, train_dataset=samples, amp_config=CONFIG)
    trainer.train(resume_from_checkpoint=resumes)
    return trainer.controller, net


@pytest.fixture(autouse=True)
def _state_of_the_process() -> Iterator[None]:
    """Accelerate keeps its settings for the process; the controller and Transformers set TF32 flags."""
    state = pytest.importorskip("accelerate.state")
    before = torch_state.capture()
    yield
    torch_state.apply(before)
    for one in (state.AcceleratorState, state.GradientState, state.PartialState):
        one._reset_state()


@pytest.mark.parametrize("train", [with_accelerate, with_lightning, with_transformers])
def test_fp16_is_scaled_demoted_and_resumed_at_its_rung(train: Callable[..., Trained], tmp_path: Path) -> None:
    controller, net = train(tmp_path / "clean", rows(4))
    assert set(net.dtypes) == {torch.float16}
    assert (controller.status().num_steps, controller.get_scale()) == (4, 1024.0)
    found = (controller.get_growth_factor(), controller.get_backoff_factor(), controller.get_growth_interval())
    assert found == (4.0, 0.25, 3)

    controller, net = train(tmp_path / "run", rows(NUM_BATCHES, FIRST_LARGE))
    status = controller.status()
    assert [(move.kind, move.before, move.after) for move in status.history] == [("demotion", "fp16", "fp32")]
    assert "first in module" in status.history[0].reason, "the batch was not run again"
    assert set(net.dtypes[:FIRST_LARGE]) == {torch.float16}
    assert net.dtypes[-1] == torch.float32
    assert net.devices == {DEVICE}
    assert all(bool(parameter.isfinite().all()) for parameter in net.parameters())

    again, resumed = train(tmp_path / "run", rows(NUM_BATCHES, FIRST_LARGE), resumes=True)
    assert set(resumed.dtypes) == {torch.float32}
    assert (again.status().num_updates, len(resumed.dtypes)) == (2 * NUM_BATCHES, NUM_BATCHES)
    assert again.status().history == status.history


def test_the_exported_accelerator_scales_as_the_config_says() -> None:
    net = Net()
    names: dict[str, Any] = {
        "dataset": rows(4),
        "model": net,
        "optimizer": torch.optim.SGD(net.parameters(), lr=0.05),
        "compute_loss": lambda model, batch: model(**batch)["loss"],
    }
    exec(export(Exportable(CONFIG, DEVICE), "accelerate").text, names)
    scaler = names["accelerator"].scaler
    assert set(net.dtypes) == {torch.float16}
    assert isinstance(scaler, PrecisionController)
    found = (scaler.get_growth_factor(), scaler.get_backoff_factor(), scaler.get_growth_interval())
    assert (scaler.get_scale(), *found) == (1024.0, 4.0, 0.25, 3)
