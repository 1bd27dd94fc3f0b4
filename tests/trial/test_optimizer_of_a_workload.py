"""An optimizer that a trial cannot step, or that trains nothing, is refused with what to do instead."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from autotune_amp import Workload
from autotune_amp.core.errors import WorkloadError
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
