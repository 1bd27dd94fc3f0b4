"""An optimizer that a trial cannot step, or that trains nothing, is refused with what to do instead."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from autotune_amp import Workload
from autotune_amp.core.errors import WorkloadError
from autotune_amp.precision.step_amp import parameters_of
from autotune_amp.trial.context import make_optimizer


class Sharpness(torch.optim.SGD):
    """As SAM is written by hand: two steps around a second backward pass."""

    def first_step(self) -> None: ...


def workload(model: nn.Module, optimizer: Any) -> Workload:
    return Workload(
        model=model,
        loss=lambda model, batch: model(batch[0]).square().mean(),
        data=torch.utils.data.TensorDataset(torch.ones(8, 4)),
        optimizer=optimizer,
    )


@pytest.mark.parametrize("kind", [torch.optim.LBFGS, Sharpness])
@pytest.mark.parametrize("is_instance", [True, False])
def test_one_that_steps_by_a_closure_is_sent_to_a_loop_of_its_own(kind: Any, is_instance: bool) -> None:
    model = nn.Linear(4, 1)
    given = kind(model.parameters(), lr=0.1) if is_instance else lambda parameters: kind(parameters, lr=0.1)
    with pytest.raises(WorkloadError, match=kind.__name__) as caught:
        make_optimizer(workload(model, given), model)
    assert "train_step=" in caught.value.next_step
    assert "search -- python" in caught.value.next_step


def test_one_over_another_models_parameters_is_refused() -> None:
    model, other = nn.Linear(4, 1), nn.Linear(4, 1)
    with pytest.raises(WorkloadError, match="no parameter of the model"):
        make_optimizer(workload(model, lambda _: torch.optim.SGD(other.parameters(), lr=0.1)), model)


def test_a_second_one_of_a_loss_that_learns_is_taken() -> None:
    model, loss = nn.Linear(4, 1), nn.Linear(1, 1)
    given = workload(model, lambda p: [torch.optim.SGD(p, lr=0.1), torch.optim.SGD(loss.parameters(), lr=0.1)])
    assert make_optimizer(given, model).param_groups


class Rounding(torch.optim.SGD):
    """As those of torchao and bitsandbytes: one argument is an attribute."""

    def __init__(self, params: Any, lr: float, *, is_stochastic: bool = False) -> None:
        super().__init__(params, lr=lr)
        self.is_stochastic = is_stochastic


def test_an_instance_whose_arguments_are_not_all_in_its_defaults_is_refused() -> None:
    model = nn.Linear(4, 1)
    with pytest.raises(WorkloadError, match=r"Rounding.*is_stochastic") as caught:
        make_optimizer(workload(model, Rounding(model.parameters(), lr=0.1, is_stochastic=True)), model)
    assert "lambda parameters: Rounding(parameters" in caught.value.next_step
    assert "optimizer_cls_and_kwargs=(Rounding" in caught.value.next_step
    made: Any = make_optimizer(
        workload(model, lambda parameters: Rounding(parameters, lr=0.1, is_stochastic=True)), model
    )
    assert made.is_stochastic is True


def test_an_instance_that_also_trains_the_loss_keeps_the_parameters_of_both() -> None:
    model, head = nn.Linear(4, 1), nn.Linear(1, 3)
    there = copy.deepcopy(model)
    groups: list[dict[str, Any]] = [{"params": model.parameters()}, {"params": head.parameters(), "lr": 1.0}]
    two_groups = torch.optim.SGD(groups, lr=0.1)
    one_group = torch.optim.SGD([*model.parameters(), *head.parameters()], lr=0.1)
    two_instances = [torch.optim.SGD(part.parameters(), lr=0.1) for part in (model, head)]
    for given in (two_groups, one_group, two_instances):
        optimized = parameters_of(make_optimizer(workload(model, given), there))
        assert list(map(id, optimized)) == list(map(id, (*there.parameters(), *head.parameters())))
