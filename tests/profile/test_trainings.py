"""The models that precisions are held against each other on."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from autotune_amp import Workload
from autotune_amp.core.setting import Setting
from autotune_amp.isolation.packing import compiler_of
from autotune_amp.profile.trainings import trainings
from autotune_amp.trial.context import Context
from autotune_amp.trial.jobs import Trial


class Net(nn.Module):
    """Of our own: torch compiles its own modules as parts of others alone."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 1)

    def forward(self, inputs: torch.Tensor) -> Any:
        return self.linear(inputs)


def test_a_live_model_compiled_in_place_is_compiled_in_each_precision() -> None:
    live = Net()
    live.compile(backend="eager")
    context = Context(
        Workload(
            live,
            lambda model, batch: model(batch).square().mean(),
            lambda size: torch.ones(size, 4),
            lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        ),
        is_kept=False,
    )
    trials = [Trial(candidate=Setting(precision=p, batch_size=2), device="cpu") for p in ("fp32", "bf16")]
    models = [training.model for training in trainings(context, trials)]
    assert models[0] is not models[1]
    assert [compiler_of(model) is not None for model in models] == [True, True]
