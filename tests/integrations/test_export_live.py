"""Exported texts run in their frameworks: every value is read back from what trains, after steps."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from accelerate import Accelerator
from accelerate.commands.config.config_args import load_config_from_file
from accelerate_training import fresh_accelerate
from export_samples import CONFIGS, PINNED, exec_text, precision_here, precision_of, scaler_values, values_after
from torch import Tensor

from autotune_amp.core.config import AmpConfig
from autotune_amp.integrations.export import Exportable, accelerate_file, export


@pytest.fixture(autouse=True)
def _fresh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)  # trainers write where they are
    with fresh_accelerate():
        yield


def num_steps(config: AmpConfig, num_samples: int = 32) -> int:
    return num_samples // config.batch_size // config.accumulation_steps


@pytest.mark.parametrize("config", [*CONFIGS, PINNED], ids=["fp32", "bf16", "fp16", "pinned"])
def test_accelerate(config: AmpConfig) -> None:
    ran = exec_text(export(Exportable(config, "cpu"), "accelerate").text)
    accelerator = ran.names["accelerator"]
    assert accelerator.device.type == "cpu"
    assert accelerator.gradient_accumulation_steps == config.accumulation_steps
    assert ran.loader.num_workers == (config.num_workers or 0)
    assert set(ran.net.batch_sizes) == {config.batch_size}
    assert {*ran.net.precisions, *ran.loss_precisions} == {config.precision}
    assert ran.num_steps == num_steps(config)
    assert accelerator.controller.config == config
    assert accelerator.controller.status().pinned_modules == config.pinned_modules
    if config.precision == "fp16":
        assert ran.net.second_dtypes == {torch.float32 if config.pinned_modules else torch.float16}
        assert scaler_values(accelerator.scaler) == values_after(config.loss_scale, ran.num_steps)


def test_accelerate_with_a_loop_of_its_own() -> None:
    config, seen = CONFIGS[1], []

    def train_step(state: Any, batch: Any, amp: Any) -> None:
        seen.append((state, len(batch), amp.config))

    text = export(Exportable(config, "cpu", is_loop=True), "accelerate").text
    exec_text(text, train_step=train_step, state="mine")
    assert seen[0] == ("mine", config.batch_size, config)


@pytest.mark.parametrize("config", CONFIGS[:2], ids=precision_of)
def test_a_plain_accelerator_takes_the_launch_file(config: AmpConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    Path("accelerate.yaml").write_text(accelerate_file(Exportable(config, "cpu")).text)
    loaded = load_config_from_file("accelerate.yaml")
    assert (loaded.distributed_type.value, loaded.num_processes) == ("NO", 1)
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", loaded.mixed_precision)  # as `accelerate launch` does
    monkeypatch.setenv("ACCELERATE_USE_CPU", str(loaded.use_cpu))
    made = Accelerator()
    assert (made.mixed_precision, made.device.type) == ({"fp32": "no"}.get(config.precision, config.precision), "cpu")


SCRIPT = """
import sys
from pathlib import Path
from accelerate import Accelerator
sys.path.append(sys.argv[1])
from accelerate_training import reset
from export_samples import exec_text
plain = Accelerator()
print(plain.mixed_precision, plain.device, plain.distributed_type.value, plain.num_processes)
reset()
ran = exec_text(Path("loop.py").read_text())
print(*set(ran.net.precisions), *ran.net.second_dtypes, ran.num_steps)
"""


@pytest.mark.slow
def test_the_exported_loop_trains_under_the_launch_file_as_a_plain_accelerator_would_not() -> None:
    setting = Exportable(PINNED, "cpu")
    Path("accelerate.yaml").write_text(accelerate_file(setting).text)
    Path("loop.py").write_text(export(setting, "accelerate").text)
    Path("train.py").write_text(SCRIPT)
    launch = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", "accelerate.yaml", "train.py"]
    command = [*launch, str(Path(__file__).parent)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["no cpu NO 1", f"fp16 torch.float32 {num_steps(PINNED)}"]


@pytest.mark.parametrize("config", [CONFIGS[1], PINNED], ids=["bf16", "pinned"])
def test_transformers(config: AmpConfig) -> None:
    pytest.importorskip("transformers")
    text = export(Exportable(config, "cpu"), "transformers").text
    samples = [
        {"inputs": sample, "labels": torch.zeros(1)}
        for sample in torch.randn(32, 8, generator=torch.Generator().manual_seed(0))
    ]
    ran = exec_text(text, dataset=samples)
    trainer = ran.names["trainer"]
    trainer.args.max_steps, trainer.args.save_strategy, trainer.args.disable_tqdm = 2, "no", True
    around_loss = set()

    def loss_of(outputs: Tensor, *_: Any, **__: Any) -> Tensor:
        around_loss.add((precision_here(), outputs.dtype))
        return outputs.float().pow(2).mean()

    trainer.compute_loss_func = loss_of
    trainer.train()
    held = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[config.precision]
    assert around_loss == {(config.precision, torch.float32 if config.pinned_modules else held)}  # as a trial runs it
    args = trainer.args
    assert trainer.state.global_step == 2
    assert (args.per_device_train_batch_size, args.gradient_accumulation_steps) == (
        config.batch_size,
        config.accumulation_steps,
    )
    assert args.dataloader_num_workers == (config.num_workers or 0)
    assert (args.fp16, args.bf16, args.tf32) == (config.precision == "fp16", config.precision == "bf16", False)
    assert trainer.get_train_dataloader().num_workers == (config.num_workers or 0)
    assert set(ran.net.batch_sizes) == {config.batch_size}
    assert len(ran.net.batch_sizes) == 2 * config.accumulation_steps
    assert set(ran.net.precisions) == {config.precision}
    if config.loss_scale is not None:
        assert trainer.controller.config == config
        assert trainer.controller.status().pinned_modules == config.pinned_modules
        assert scaler_values(trainer.accelerator.scaler) == values_after(config.loss_scale, trainer.state.global_step)


PINNED_IN_A_MODULE = msgspec.structs.replace(PINNED, pinned_modules=("net.second",))


@pytest.mark.parametrize("config", [CONFIGS[2], PINNED_IN_A_MODULE], ids=["fp16", "pinned"])
@pytest.mark.slow  # importing Lightning
@pytest.mark.filterwarnings("ignore:.*does not have many workers")  # the config decides
@pytest.mark.filterwarnings("ignore:.*number of training batches")  # it logs every 50 steps, of which there are few
@pytest.mark.filterwarnings("ignore:.*tensorboardX")  # its default logger, which is not installed
@pytest.mark.filterwarnings("ignore:.*not supported by the model summary")  # which counts fp16 as fp32
@pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning")  # Lightning's use of torch
def test_lightning(config: AmpConfig) -> None:
    lightning = pytest.importorskip("lightning.pytorch")

    class Module(lightning.LightningModule):  # type: ignore[misc,name-defined]
        def __init__(self, net: Any) -> None:
            super().__init__()
            self.net = net
            self.precisions: list[str] = []

        def training_step(self, batch: Tensor, index: int) -> Tensor:
            self.precisions.append(precision_here())
            loss: Tensor = self.net(batch).float().pow(2).mean()
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.net.parameters(), lr=0.01)

    ran = exec_text(export(Exportable(config, "cpu"), "lightning").text)
    trainer, module = ran.names["trainer"], Module(ran.net)
    trainer.fit_loop.max_epochs = 1
    trainer.fit(module, ran.loader)
    controller = trainer.precision_plugin.controller
    assert controller.config == config
    assert controller.status().pinned_modules == config.pinned_modules
    assert trainer.accumulate_grad_batches == config.accumulation_steps
    assert trainer.train_dataloader.batch_size == config.batch_size
    assert trainer.train_dataloader.num_workers == (config.num_workers or 0)
    assert trainer.global_step == num_steps(config)
    assert {*module.precisions, *ran.net.precisions} == {config.precision}
    if config.loss_scale is not None:
        assert scaler_values(controller) == values_after(config.loss_scale, trainer.global_step)
