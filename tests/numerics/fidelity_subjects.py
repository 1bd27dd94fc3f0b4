"""What the tests of a whole check share: trainings to check, and what holds of every check."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import msgspec
import torch
from fp16_subjects import mean_square, subject
from torch import Tensor, nn

from autotune_amp.core.dimensions import Precision
from autotune_amp.core.outcome import Fidelity
from autotune_amp.numerics.fidelity import NUM_PAIRED_STEPS, check
from autotune_amp.numerics.passes import Subject
from autotune_amp.precision.forward_wrapper import is_pinned

MAX_PASSES = 60


def checked(made: Subject, precision: Precision, **options: Any) -> Fidelity:
    """A check, what holds of every one asserted."""
    before = everything_of(made.model)
    found = check(made, precision, batch_size=8, **options)
    after = everything_of(made.model)
    assert before.keys() == after.keys()
    torch.testing.assert_close(after, before, rtol=0, atol=0, equal_nan=True)
    assert found.num_passes <= MAX_PASSES
    assert found.precision == precision
    assert found.batch_size == 8
    assert found.reason.endswith(".")
    assert not found.reason.endswith("..")
    assert found.next_step.endswith(".")
    assert found.seconds > 0
    assert msgspec.json.decode(msgspec.json.encode(found), type=Fidelity).verdict == found.verdict
    if found.verdict == "faithful":
        assert not found.culprits
        assert not found.healing_pins
        assert found.num_paired_steps == NUM_PAIRED_STEPS
        assert found.fp32_step_seconds is not None
    return found


def everything_of(model: nn.Module) -> dict[str, Any]:
    state: dict[str, Any] = {}
    for name, value in (*model.named_parameters(), *model.named_buffers()):
        state[name] = value.detach().clone()
        state[name + ".address"] = value.data_ptr()
        state[name + ".flags"] = (float(value.requires_grad), float(value.grad is None))
    for name, module in model.named_modules():
        hooks = (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks)
        state[name + ".module"] = (float(module.training), float(is_pinned(module)), *(float(len(h)) for h in hooks))
        assert type(module).__name__ != "_Swapped"
        state[name + ".class"] = float(id(type(module)))
    return state


def chain(**modules: nn.Module) -> nn.Sequential:
    return nn.Sequential(OrderedDict(modules))


class Applied(nn.Module):
    """A function as a module without weights."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


def compiled(model: nn.Module) -> nn.Module:
    torch._dynamo.reset()
    made: Any = torch.compile(model, backend="eager")
    assert isinstance(made, nn.Module)
    return made


def running_sum(x: Tensor) -> Tensor:
    level = torch.full_like(x, 1000.0)
    for _ in range(8):
        level = level + 0.1 * x
    return level - 1000.0


def with_middle(function: Callable[[Tensor], Tensor], loss: Any = mean_square) -> Subject:
    return subject(
        chain(enter=nn.Linear(8, 16), middle=Applied(function), body=nn.Linear(16, 16), head=nn.Linear(16, 4)), loss
    )
