"""The guilty module is named, not those around it, whatever the innocent ones do."""

from __future__ import annotations

import math
import random
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from fp16_subjects import CPU, Batch, Checkpointed, mean_square, subject
from torch import Tensor, nn

from autotune_amp.numerics.locate import OUTSIDE, LocalErrors, blown_up, local_errors
from autotune_amp.numerics.modules import modules_by_name
from autotune_amp.numerics.passes import Passes


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


class RunningSum(nn.Module):
    """The change of a level of 1000 over increments that bf16 and fp16 round away."""

    def forward(self, x: Tensor) -> Tensor:
        level = torch.full_like(x, 1000.0)
        for _ in range(8):
            level = level + 0.02 * x
        return level - 1000.0


class Offset(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return (x + 3000.0) - 3000.0


class Once(nn.Module):
    """Can be called once in each pass of its model."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(16, 16)
        self.is_used = False

    def forward(self, x: Tensor) -> Tensor:
        if self.is_used:
            raise RuntimeError("called twice")
        self.is_used = True
        out: Tensor = self.body(x)
        return out


class Resetting(nn.Sequential):
    def forward(self, x: Tensor) -> Tensor:
        for module in self.modules():
            if isinstance(module, Once):
                module.is_used = False
        for module in self:
            x = module(x)
        return x


class SkipsByChance(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.body(x) if random.random() < 0.5 else x


class Raising(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        raise RuntimeError("not today")


class Careful(nn.Module):
    """Goes another way where the first raises."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Raising(), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        try:
            out: Tensor = self.first(x)
        except RuntimeError:
            out = self.second(x)
        return out


INNOCENT: dict[str, Callable[[], nn.Module]] = {
    "dropout": lambda: nn.Dropout(0.5),
    "in-place ReLU": lambda: nn.ReLU(inplace=True),
    "BatchNorm": lambda: nn.BatchNorm1d(16),
    "fails when repeated": Once,
    "chance": SkipsByChance,
    "a child that raises": Careful,
}
GUILTY: dict[str, Callable[[], nn.Module]] = {
    "running sum": RunningSum,
    "inner": lambda: nn.Sequential(OrderedDict(enter=nn.Linear(16, 16), offset=Offset(), leave=nn.Linear(16, 16))),
}


def chain(guilty: nn.Module, before: nn.Module, after: nn.Module | None = None) -> nn.Module:
    block = nn.Sequential(OrderedDict(first=nn.Linear(16, 16), guilty=guilty, after=after or nn.Identity()))
    return Resetting(OrderedDict(enter=nn.Linear(8, 16), before=before, block=block, head=nn.Linear(16, 4)))


def worst(errors: LocalErrors) -> str:
    own = errors.own()
    return max(own, key=lambda name: own[name])


@pytest.mark.parametrize("guilty", sorted(GUILTY))
@pytest.mark.parametrize("innocent", sorted(INNOCENT))
def test_the_guilty_module_is_named_and_not_those_around_it(guilty: str, innocent: str) -> None:
    make = INNOCENT[innocent]
    made = subject(chain(GUILTY[guilty](), make(), None if innocent == "fails when repeated" else make()))
    errors = local_errors(Passes(made), 0, "bf16")
    assert worst(errors) == ("block.guilty.offset" if guilty == "inner" else "block.guilty")
    own = errors.own()
    assert not {"", "block"} & own.keys()
    assert max((error for name, error in own.items() if name != worst(errors)), default=0.0) < 0.05
    in_fp32 = local_errors(Passes(made), 0, "fp32").own()
    assert max(in_fp32.values(), default=0.0) < 1e-4, "in fp32 no module is wrong, but by rounding"


def test_in_fp16_with_a_pin_compiled_and_checkpointed() -> None:
    passes = Passes(subject(chain(Offset(), nn.Dropout(0.5))))
    assert worst(local_errors(passes, 0, "fp16")) == "block.guilty"
    with passes.pinned(["block.guilty"]):
        assert local_errors(passes, 0, "bf16").by_module["block.guilty"] == 0
    made = subject(chain(Offset(), nn.Dropout(0.5)))
    compiled: Any = torch.compile(made.model, backend="eager")
    assert worst(local_errors(Passes(made, compiled), 0, "bf16")) == "block.guilty"
    assert local_errors(Passes(subject(Checkpointed())), 0, "bf16").by_module.keys() == {"", "body", "head"}


def test_a_module_that_cannot_be_repeated_stays_unknown() -> None:
    model = Resetting(OrderedDict(enter=nn.Linear(8, 16), once=Once(), head=nn.Linear(16, 4)))
    errors = local_errors(Passes(subject(model)), 0, "bf16")
    assert "once" not in errors.by_module
    assert {"enter", "head", "once.body"} <= errors.by_module.keys()


def test_looking_changes_neither_the_loss_nor_the_draws_and_leaves_no_hook() -> None:
    passes = Passes(subject(chain(Offset(), nn.Sequential(nn.Dropout(0.5), SkipsByChance()))))
    plain = passes.run(0, "bf16")
    errors = LocalErrors(modules_by_name(passes.model), CPU)
    watched = passes.run(0, "bf16", around_forward=errors.watching())
    assert errors.by_module
    assert watched.loss == plain.loss
    torch.testing.assert_close(watched.gradients, plain.gradients, rtol=0, atol=0)
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in passes.model.modules())


class Huge(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * 1e5


class HugeGradient(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.body(x) * 1e-4
        return y * 1e4


@pytest.mark.parametrize("innocent", [lambda: nn.Dropout(0.5), lambda: nn.ReLU(inplace=True)])
def test_where_fp16_overflows(innocent: Callable[[], nn.Module]) -> None:
    assert blown_up(Passes(subject(chain(Huge(), innocent()))), 0, "fp16", 1.0) == ("block.guilty",)
    backwards = Passes(subject(chain(HugeGradient(), innocent())))
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
    assert blown_up(Passes(subject(chain(nn.Identity(), nn.Identity()), loss)), 0, "fp16", 1.0) == (OUTSIDE,)
