"""What default TF32 flags amount to on a CUDA device depends on the card and on what the workload runs."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

from autotune_amp import Workload
from autotune_amp.precision import torch_state
from autotune_amp.trial import worker
from autotune_amp.trial.context import Context
from autotune_amp.trial.jobs import Describe

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def _default_flags() -> Iterator[None]:
    """As a process starts with, whatever tests before have set."""
    before = torch_state.capture()
    torch.set_float32_matmul_precision("highest")
    torch.backends.cudnn.allow_tf32 = True
    yield
    torch_state.apply(before)


def loss(model: nn.Module, batch: Tensor) -> Tensor:
    found: Tensor = model(batch).square().mean()
    return found


@pytest.mark.parametrize("is_kept", [True, False])
@pytest.mark.parametrize(
    ("model", "has_tf32", "is_strict"),
    [
        (lambda: nn.Linear(8, 8), True, True),
        (lambda: nn.Linear(8, 8), False, True),
        (lambda: nn.Conv2d(3, 3, 3), True, False),
        (lambda: nn.Conv2d(3, 3, 3), False, True),
    ],
)
def test_default_flags_are_strict_fp32_where_nothing_runs_in_tf32(
    model: type[nn.Module], has_tf32: bool, is_strict: bool, is_kept: bool
) -> None:
    context = Context(Workload(model, loss, lambda size: torch.randn(size, 3, 8, 8)), is_kept=is_kept)
    described = worker.describe(
        context,
        Describe(device="cuda:0", torch_state=torch_state.capture(), baseline_batch_size=4, has_tf32=has_tf32),
        lambda event: None,
    )
    assert (described.as_found_precision, described.is_as_found_strict) == ("fp32", is_strict)
