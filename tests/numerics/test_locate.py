"""The guilty module is named, not those around it, whatever the innocent ones do."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

import pytest
import torch
from subjects import Applied, compiled, running_sum, subject
from torch import nn

from autotune_amp.core.precisions import Precision
from autotune_amp.numerics.locate import first_inaccurate_module, nonfinite_parameters
from autotune_amp.numerics.passes import Passes


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


def offset() -> nn.Module:
    return Applied(lambda x: (x + 3000.0) - 3000.0)


INNOCENT: dict[str, Callable[[], nn.Module]] = {
    "dropout": lambda: nn.Dropout(0.5),
    "in-place ReLU": lambda: nn.ReLU(inplace=True),
    "BatchNorm": lambda: nn.BatchNorm1d(16),
}
GUILTY: dict[str, Callable[[], nn.Module]] = {
    "block.guilty": lambda: Applied(running_sum),
    "block.guilty.offset": lambda: nn.Sequential(
        OrderedDict(enter=nn.Linear(16, 16), offset=offset(), leave=nn.Linear(16, 16))
    ),
    # What samples differ by is lost where the offset is added, though little beside the offset itself.
    "block.guilty.add": lambda: nn.Sequential(
        OrderedDict(add=Applied(lambda x: x + 3000.0), subtract=Applied(lambda x: x - 3000.0))
    ),
}


def chain(guilty: nn.Module, innocent: Callable[[], nn.Module]) -> nn.Module:
    block = nn.Sequential(OrderedDict(first=nn.Linear(16, 16), guilty=guilty, after=innocent()))
    return nn.Sequential(OrderedDict(enter=nn.Linear(8, 16), before=innocent(), block=block, head=nn.Linear(16, 4)))


def found_in(passes: Passes, precision: Precision = "bf16") -> str | None:
    return first_inaccurate_module(passes, passes, 0, precision)


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


def test_in_fp16_with_a_pin_and_compiled() -> None:
    made = subject(chain(offset(), lambda: nn.Dropout(0.5)))
    passes = Passes(made)
    assert found_in(passes, "fp16") == "block.guilty"
    assert found_in(Passes(made, compiled(made.model))) == "block.guilty"
    with passes.pinned(["block.guilty"]):
        assert found_in(passes) is None


def test_a_mask_that_is_kept_as_a_parameter_is_no_weight_that_is_not_finite() -> None:
    values = torch.full((2, 2), -torch.inf).triu(1)
    model = nn.ParameterDict({"mask": nn.Parameter(values, requires_grad=False), "trained": nn.Parameter(values)})
    model["nan"] = nn.Parameter(values * 0, requires_grad=False)
    assert nonfinite_parameters(model) == ("trained", "nan")
