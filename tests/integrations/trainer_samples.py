"""What tests of the Transformers integration share: a tiny model that notes how it was run, data that breaks fp16."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any, ClassVar

import torch
from framework_samples import ambient
from torch import Tensor, nn
from transformers import Trainer, TrainerCallback
from transformers.integrations.integration_utils import TensorBoardCallback

from autotune_amp.core.config import AmpConfig
from autotune_amp.integrations.transformers import AutotuneTrainer

WIDTH = 4
LARGE = 1e6  # past what fp16 holds; harmless in bf16 and fp32
Run = tuple[torch.dtype | None, torch.dtype, int]  # autocast, what a layer puts out, samples


class Notes(nn.Module):
    """Two layers side by side, so that no single one can be pinned against an input that is too large."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.one, self.other = nn.Linear(WIDTH, 1), nn.Linear(WIDTH, 1)
        self.step = 0
        self.runs: dict[int, set[Run]] = {}  # by optimizer step

    def forward(self, inputs: Tensor, labels: Tensor) -> dict[str, Tensor]:
        autocast = ambient(inputs.device.type)
        one = self.one(inputs)
        self.runs.setdefault(self.step, set()).add((autocast, one.dtype, len(inputs)))
        logits = one + self.other(inputs)
        means = logits / inputs.abs().amax(1, keepdim=True)
        return {"loss": nn.functional.mse_loss(means.squeeze(1), labels), "logits": logits}

    def dtypes(self, first: int, last: int) -> set[tuple[torch.dtype | None, torch.dtype]]:
        """How it was run in these optimizer steps, `last` not among them."""
        return {run[:2] for step in range(first, last) for run in self.runs[step]}


class StepNumbers(TrainerCallback):
    """Tells the model at which optimizer step it is."""

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        kwargs["model"].step = state.global_step


class Heard(TrainerCallback):
    """Takes 50 ms of every step, and asks for an evaluation and a checkpoint."""

    events: ClassVar[list[str]] = []

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        time.sleep(0.05)
        control.should_save = control.should_evaluate = True

    def on_train_end(self, *args: Any, **kwargs: Any) -> None:
        self.events.append("end")

    def on_log(self, *args: Any, **kwargs: Any) -> None:
        self.events.append("log")


class Tracked(TensorBoardCallback):
    """A tracker of the user's own."""

    def __init__(self) -> None:
        pass

    def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
        raise AssertionError("a tracker heard of a trial")

    on_step_end = on_log = on_train_begin


class Noting(Trainer):
    """Notes what its passes are: samples, passes of a step, autocast."""

    seen: ClassVar[set[tuple[int, int, torch.dtype | None]]] = set()

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        num_passes = self.current_gradient_accumulation_steps
        self.seen.add((len(inputs["input_ids"]), num_passes, model.transformer.h[0].mlp.c_fc(torch.ones(1, 16)).dtype))
        return super().compute_loss(model, inputs, *args, **kwargs)


class Buffered(Trainer):
    """Prepares the inputs of a step by its number, as trainers do that generate them."""

    step = num_prepared = 0

    def _prepare_inputs(self, inputs: Any) -> Any:
        self.num_prepared += 1
        assert self.num_prepared == self.step + 1
        return super()._prepare_inputs(inputs)

    def training_step(self, *args: Any, **kwargs: Any) -> Tensor:
        loss = super().training_step(*args, **kwargs)
        self.step += 1
        return loss


class AutotuneBuffered(AutotuneTrainer, Buffered):
    pass


def rows(num_rows: int, large: range = range(0)) -> list[dict[str, Tensor]]:
    """Rows whose labels a line fits; those in `large` have inputs past fp16's range."""
    generator = torch.Generator().manual_seed(1)
    made = []
    for index in range(num_rows):
        inputs = torch.randn(WIDTH, generator=generator)
        made.append({"inputs": inputs * (LARGE if index in large else 1.0), "labels": inputs.mean()})
    return made


def arguments(config: AmpConfig, folder: Path, **options: Any) -> Any:
    plain = {"use_cpu": True, "report_to": "none", "disable_tqdm": True, "save_strategy": "no", "logging_steps": 1}
    sequential = {"train_sampling_strategy": "sequential", "learning_rate": 0.05}
    return config.to_training_arguments(**{"output_dir": str(folder), **plain, **sequential, **options})


def trainer(config: AmpConfig, folder: Path, data: Any, **options: Any) -> Any:
    """An AutotuneTrainer over `Notes`; `options` are TrainingArguments'."""
    controller_options, kind = options.pop("controller_options", None), options.pop("kind", AutotuneTrainer)
    return kind(
        Notes(),
        arguments(config, folder, **options),
        train_dataset=data,
        callbacks=[StepNumbers()],
        amp_config=config,
        controller_options=controller_options,
    )
