"""What an agent's observations are to the jobs that examine a command's steps."""

from __future__ import annotations

from types import SimpleNamespace

import torch
from torch import nn

from autotune_amp.trial.observed_steps import ObservedTraining


class U_Net(nn.Linear):  # noqa: N801 - a name as users have it
    """A class whose name has an underscore."""


def test_each_of_several_models_keeps_its_parameters() -> None:
    models = [U_Net(2, 2), U_Net(2, 2), nn.Linear(2, 2)]
    observer = SimpleNamespace(
        passes=None,
        loaders=None,
        device=torch.device("meta"),
        live_optimizers=list,
        live_modules=lambda: models,
    )
    training = ObservedTraining(observer, memory={}, regions=(), num_ranks=1)
    assert training.device == torch.device("meta"), "also where an optimizer has no parameters left, as DeepSpeed's"
    assert list(training.model._modules.values()) == models
