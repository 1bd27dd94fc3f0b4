"""A config in fp8 with its fallbacks, as a search recommends it, through every adapter: who makes its layers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate_training import fresh_accelerate
from framework_samples import QUIET, ambient, are_finite
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from autotune_amp import Workload
from autotune_amp.core.config import AmpConfig, FallbackPlan
from autotune_amp.core.setting import Setting
from autotune_amp.core.workload import Fitting
from autotune_amp.precision import fp8
from autotune_amp.trial.context import make_model

pytestmark = QUIET
PLANS = [FallbackPlan(precision=name, batch_size=4, compile="off") for name in ("bf16", "fp32")]
CONFIG = AmpConfig(precision="fp8", batch_size=4, fp8_recipe="tensorwise", fallback=PLANS)


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    pytest.importorskip("torchao")
    with fresh_accelerate():
        yield


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 4))


def loader() -> DataLoader[Any]:
    return DataLoader(TensorDataset(torch.randn(10, 16), torch.randint(4, (10,))), batch_size=4)  # the last one has 2


def num_in_fp8(model: nn.Module) -> int:
    return sum(type(module).__name__ == "Fp8Linear" for module in model.modules())


def t5() -> Any:
    from transformers import T5Config, T5ForConditionalGeneration

    torch.manual_seed(0)
    sizes: dict[str, Any] = {"d_model": 16, "d_ff": 32, "d_kv": 8, "num_layers": 1, "num_heads": 2}
    sizes |= {"vocab_size": 32, "decoder_start_token_id": 0}
    return T5ForConditionalGeneration(T5Config(**sizes))


def sentences() -> list[dict[str, Tensor]]:
    return [{"input_ids": tokens, "labels": tokens} for tokens in torch.randint(2, 32, (16, 5))]


PLAIN: dict[str, Any] = {"use_cpu": True, "report_to": "none", "save_strategy": "no", "max_steps": 3}


def test_the_trainer(tmp_path: Path) -> None:
    from autotune_amp.integrations.transformers import AutotuneTrainer

    model, data = t5(), sentences()
    arguments = CONFIG.to_training_arguments(output_dir=str(tmp_path), **PLAIN)
    assert (arguments.bf16, arguments.fp16) == (True, False)
    run: Any = AutotuneTrainer(model, arguments, train_dataset=data, amp_config=CONFIG)
    seen = set()
    model.lm_head.register_forward_hook(lambda *_: seen.add(num_in_fp8(model)))
    run.train()
    num_linears = sum(isinstance(module, nn.Linear) for module in model.modules())
    assert seen == {num_linears - 2}, "the first and the last are left"
    assert run.controller.status().precision == "fp8"
    assert are_finite(model)


def module_noting(seen: set[Any]) -> Any:
    """Notes the dtype of its outputs and how many layers are in fp8."""
    from lightning.pytorch import LightningModule

    class Module(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = net()

        def training_step(self, batch: list[Tensor], _: int) -> Tensor:
            output = self.net(batch[0])
            seen.add((output.dtype, num_in_fp8(self)))
            return nn.functional.cross_entropy(output, batch[1])

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.01)

    return Module()


def test_lightning(tmp_path: Path) -> None:
    from lightning_samples import trainer

    from autotune_amp.integrations.lightning import trainer_arguments

    seen: set[Any] = set()
    module = module_noting(seen)
    trainer(tmp_path, **trainer_arguments(CONFIG)).fit(module, loader())
    assert seen == {(torch.bfloat16, 1)}
    assert are_finite(module)


def fit_in_fp8(workload: Workload, model: nn.Module) -> None:
    """Run one step of the workload's `fit` with the model's layers in fp8, as a confirmation does."""

    class EnoughError(Exception):
        pass

    def stepped(*_: object) -> None:
        raise EnoughError

    fp8.set_recipe([model], "tensorwise", torch.device("cpu"))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    fitting = Fitting(model, optimizer, loader(), Setting.of(CONFIG), None, None, stepped)
    assert workload.fit is not None
    with pytest.raises(EnoughError):
        workload.fit(fitting)


def test_a_confirmation_in_lightning_is_under_the_autocast_of_bf16() -> None:
    seen: set[Any] = set()
    workload = Workload.from_lightning(module_noting(seen), loader())
    fit_in_fp8(workload, make_model(workload))
    assert seen == {(torch.bfloat16, 1)}


def test_a_confirmation_in_transformers_is_under_the_autocast_of_bf16(tmp_path: Path) -> None:
    from transformers import Trainer, TrainingArguments

    model, seen = t5(), set()
    workload = Workload.from_trainer(
        Trainer(model, TrainingArguments(str(tmp_path), **PLAIN), train_dataset=sentences())
    )
    model.lm_head.register_forward_hook(lambda *_: seen.add((ambient(), num_in_fp8(model))))
    num_linears = sum(isinstance(module, nn.Linear) for module in model.modules())
    fit_in_fp8(workload, model)
    assert seen == {(torch.bfloat16, num_linears - 2)}


def test_accelerate() -> None:
    from autotune_amp.integrations.accelerate import AutotuneAccelerator

    accelerator = AutotuneAccelerator(CONFIG, cpu=True, mixed_precision="bf16")
    model = net()
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.01)
    prepared, optimizer, batches = accelerator.prepare(model, optimizer, loader())
    for inputs, labels in batches:
        with accelerator.accumulate(prepared):
            accelerator.backward(nn.functional.cross_entropy(prepared(inputs), labels))
            optimizer.step()
            optimizer.zero_grad()
        assert num_in_fp8(model) == 1
        accelerator.controller.set_precision("bf16")
        assert num_in_fp8(model) == 0
        accelerator.controller.set_precision("fp8")
    assert are_finite(model)
