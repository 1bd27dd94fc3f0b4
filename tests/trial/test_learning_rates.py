"""A trial's learning rate where a schedule keeps the user's own near 0; the user's optimizer is left alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR, OneCycleLR

from autotune_amp import Workload
from autotune_amp.trial.context import make_optimizer


def loss(model: nn.Module, batch: Tensor) -> Tensor:
    result: Tensor = model(batch).square().mean()
    return result


def warm_up(optimizer: Optimizer) -> None:
    LambdaLR(optimizer, lambda step: step / 100)


def one_cycle(optimizer: Optimizer) -> None:
    OneCycleLR(optimizer, max_lr=2.0, total_steps=100)


def near_its_peak(optimizer: Optimizer) -> None:
    CosineAnnealingLR(optimizer, T_max=100)


def by_hand(optimizer: Optimizer) -> None:
    optimizer.param_groups[0]["lr"] = 0.0


@pytest.mark.parametrize(
    ("schedule", "number", "expected"),
    [
        (warm_up, float, 0.05),
        (warm_up, torch.tensor, 0.05),
        (one_cycle, float, 0.2),
        (near_its_peak, float, 0.5),
        (by_hand, float, 0.0),
    ],
)
def test_a_rate_below_a_tenth_of_its_schedules_peak_is_that_tenth(schedule: Any, number: Any, expected: float) -> None:
    model = nn.Linear(4, 1)
    lr = number(0.5)
    given = SGD(model.parameters(), lr=lr, momentum=0.75, foreach=True)
    schedule(given)
    (group,) = given.param_groups
    before, rate = dict(group), float(group["lr"])
    made = make_optimizer(Workload(model, loss, torch.randn, given), model)
    assert made is not given
    assert float(made.param_groups[0]["lr"]) == pytest.approx(expected)
    assert type(made.param_groups[0]["lr"]) is type(lr)
    assert made.param_groups[0]["momentum"] == group["momentum"]
    assert (given.param_groups[0], float(group["lr"])) == (before, rate), "the user's own"
