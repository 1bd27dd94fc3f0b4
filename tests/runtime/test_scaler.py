"""The check of gradients: what one rank makes of another's, and the share that fp16 lost."""

from __future__ import annotations

import math
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode

from autotune_amp.runtime.model import RunningStatistics
from autotune_amp.runtime.scaler import BAD_LOSS, CLEAN, GradientCheck, Ranks, check_gradients, lost_share

CPU = torch.device("cpu")


class TwoRanks(Ranks):
    """Ranks of which the other one has these values, whatever is compared."""

    are_many = True

    def __init__(self, *others: float) -> None:
        super().__init__(CPU)
        self.others = others

    def maximum_(self, values: Tensor) -> Tensor:
        others = torch.tensor(self.others).reshape(values.shape)
        return values.copy_(torch.maximum(values, others))


def test_a_device_without_an_index_is_that_of_the_first_tensor_there() -> None:
    ranks = Ranks(torch.device("cuda", 0), is_assumed=True)
    given = Ranks(torch.device("cuda", 0))
    with FakeTensorMode():
        tensors = [torch.zeros(1, device=name) for name in ("cpu", "cuda:1", "cuda:2")]
    for index in (0, 1, 2):
        ranks.note_device(tensors[index:])
        given.note_device(tensors[index:])
    assert (str(ranks.device), str(given.device)) == ("cuda:1", "cuda:0")


def optimizer_of(*gradient: float) -> torch.optim.Optimizer:
    weight = nn.Parameter(torch.zeros(len(gradient)))
    weight.grad = torch.tensor(gradient)
    return torch.optim.SGD([weight], lr=0.1)


def test_the_loss_of_another_rank_stands_where_this_one_has_none() -> None:
    check = GradientCheck(TwoRanks(0.0, 1.5))
    check.see_losses([torch.tensor(math.nan)], CPU)
    optimizer = optimizer_of(1.0)
    check.examine(optimizer, CPU, None, samples=False)
    assert (check.verdict_of(optimizer), check.window.loss) == (BAD_LOSS, 1.5)


@pytest.mark.parametrize("is_on_host", [True, False])
def test_the_loss_of_a_window_is_that_of_all_its_passes(is_on_host: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(GradientCheck, "is_on_host", staticmethod(lambda tensor: is_on_host))
    check = GradientCheck(Ranks(CPU))
    for loss in (0.5, 1.0, 0.25):
        check.see_losses([torch.tensor(loss)], CPU)
    assert float(check.window.loss) == 1.75


def test_a_share_read_with_a_late_verdict_is_the_largest_of_all_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(GradientCheck, "is_on_host", staticmethod(lambda tensor: False))
    ranks = TwoRanks(0.0, 0.0)
    check, optimizer = GradientCheck(ranks), optimizer_of(1.0)
    check.see_losses([torch.tensor(2.0)], CPU)
    check.examine(optimizer, CPU, None, samples=True)
    ranks.others = (0.25,)
    assert check.wait_for(optimizer) == CLEAN
    assert (check.window.loss, check.window.lost_share) == (2.0, 0.25)


def test_losses_and_gradients_on_other_devices_are_judged_where_the_loss_scale_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As those of a model that is split over two GPUs; the meta device stands for the scale's."""
    monkeypatch.setattr(GradientCheck, "is_on_host", staticmethod(lambda tensor: False))
    scale = torch.device("meta")
    check, optimizer = GradientCheck(Ranks(CPU)), optimizer_of(1.0)
    check.see_losses([torch.tensor(2.0)], scale)
    skipped = check.examine(optimizer, scale, None, samples=False)
    window = check.window
    found = [skipped, check.verdict_of(optimizer), window.loss, window.loss_probe]
    assert [value.device for value in found if isinstance(value, Tensor)] == [scale] * 4


class Copied(Tensor):
    """Notes whether its copies to the host are non-blocking, which is seen on an accelerator alone."""

    noted: ClassVar[list[object]] = []

    def to(self, *args: Any, **kwargs: Any) -> Any:
        self.noted.append(kwargs.get("non_blocking", False))
        return super().to(*args, **kwargs)


def test_what_the_host_reads_at_once_is_copied_there_blocking(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Copied, "noted", [])
    optimizer = optimizer_of(2.0)
    check_gradients(optimizer, torch.tensor(0.5).as_subclass(Copied))
    RunningStatistics(nn.BatchNorm1d(2)).undo_where(torch.tensor(1.0).as_subclass(Copied))
    assert Copied.noted == [False] * 3  # statistics of two dtypes


@pytest.mark.parametrize("order", [1, -1])
def test_the_share_of_several_optimizers_is_the_largest(order: int) -> None:
    check = GradientCheck(Ranks(CPU))
    for optimizer in [optimizer_of(*12 * [2.0**-23], *36 * [2.0**-16]), optimizer_of(2.0**-16)][::order]:
        check.examine(optimizer, CPU, None, samples=True)
    assert float(check.window.lost_share or 0.0) == pytest.approx(12 / 48 / 6)


def test_what_fp16_lost_is_estimated_from_what_it_barely_kept() -> None:
    optimizer = optimizer_of(*60 * [2.0**-23], *940 * [2.0**-16])
    assert lost_share(optimizer, CPU).item() == pytest.approx(0.01)


def test_entries_that_are_rounding_noise_beside_the_largest_are_not_counted_as_nearly_lost() -> None:
    assert lost_share(optimizer_of(1.0, *99 * [2.0**-23]), CPU).item() == 0.0
