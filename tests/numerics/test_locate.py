"""The guilty module is named, not those around it, whatever the innocent ones do."""

from __future__ import annotations

import math
import random
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from fidelity_subjects import Applied, compiled, running_sum
from fp16_subjects import Batch, Checkpointed, mean_square, subject
from torch import Tensor, nn

from autotune_amp.core.dimensions import Precision
from autotune_amp.numerics.locate import OUTSIDE, blown_up, first_wrong
from autotune_amp.numerics.passes import Passes


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


class SkipsByChance(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.body(x) if random.random() < 0.5 else x


class Careful(nn.Module):
    """Goes another way where the first raises."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Applied(self._fail), nn.Linear(16, 16)

    def _fail(self, _: Tensor) -> Tensor:
        raise RuntimeError("not today")

    def forward(self, x: Tensor) -> Tensor:
        try:
            out: Tensor = self.first(x)
        except RuntimeError:
            out = self.second(x)
        return out


def offset() -> nn.Module:
    return Applied(lambda x: (x + 3000.0) - 3000.0)


INNOCENT: dict[str, Callable[[], nn.Module]] = {
    "dropout": lambda: nn.Dropout(0.5),
    "in-place ReLU": lambda: nn.ReLU(inplace=True),
    "BatchNorm": lambda: nn.BatchNorm1d(16),
    "chance": SkipsByChance,
    "a child that raises": Careful,
}
GUILTY: dict[str, Callable[[], nn.Module]] = {
    "block.guilty": lambda: Applied(running_sum),
    "block.guilty.offset": lambda: nn.Sequential(
        OrderedDict(enter=nn.Linear(16, 16), offset=offset(), leave=nn.Linear(16, 16))
    ),
}


def chain(guilty: nn.Module, innocent: Callable[[], nn.Module]) -> nn.Module:
    block = nn.Sequential(OrderedDict(first=nn.Linear(16, 16), guilty=guilty, after=innocent()))
    return nn.Sequential(OrderedDict(enter=nn.Linear(8, 16), before=innocent(), block=block, head=nn.Linear(16, 4)))


def found_in(passes: Passes, precision: Precision = "bf16") -> str | None:
    return first_wrong(passes, passes, 0, precision)


@pytest.mark.parametrize("guilty", GUILTY)
@pytest.mark.parametrize("innocent", INNOCENT)
def test_the_guilty_module_is_named_and_not_those_around_it(guilty: str, innocent: str) -> None:
    passes = Passes(subject(chain(GUILTY[guilty](), INNOCENT[innocent])))
    plain = passes.run(0, "bf16")
    assert found_in(passes) == guilty
    assert found_in(passes, "fp32") is None
    # Looking leaves no hook, and the pass as it was.
    torch.testing.assert_close(passes.run(0, "bf16").gradients, plain.gradients, rtol=0, atol=0)
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in passes.model.modules())


def test_in_fp16_with_a_pin_compiled_and_checkpointed() -> None:
    made = subject(chain(offset(), lambda: nn.Dropout(0.5)))
    passes = Passes(made)
    assert found_in(passes, "fp16") == "block.guilty"
    assert found_in(Passes(made, compiled(made.model))) == "block.guilty"
    with passes.pinned(["block.guilty"]):
        assert found_in(passes) is None
    assert found_in(Passes(subject(Checkpointed()))) is None


class HugeGradient(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.body(x) * 1e-4
        return y * 1e4


@pytest.mark.parametrize("innocent", ["dropout", "in-place ReLU"])
def test_where_fp16_overflows(innocent: str) -> None:
    forwards = Passes(subject(chain(Applied(lambda x: x * 1e5), INNOCENT[innocent])))
    assert blown_up(forwards, 0, "fp16", 1.0) == ("block.guilty",)
    backwards = Passes(subject(chain(HugeGradient(), INNOCENT[innocent])))
    assert backwards.run(0, "fp16", scale=1.0).is_finite
    assert blown_up(backwards, 0, "fp16", 256.0) == ("block.guilty",)


def log_error(model: nn.Module, batch: Batch) -> Tensor:
    output = model(batch.x)
    total: Tensor = (100 + output).square().sum(dtype=output.dtype)
    return total.float().log()


def infinite(model: nn.Module, batch: Batch) -> Tensor:
    return mean_square(model, batch) * math.inf


@pytest.mark.parametrize("loss", [log_error, infinite, mean_square])
def test_no_module_is_named_where_the_loss_overflows_fp32_does_too_or_nothing_does(loss: Any) -> None:
    assert blown_up(Passes(subject(chain(nn.Identity(), nn.Identity), loss)), 0, "fp16", 1.0) == (OUTSIDE,)
