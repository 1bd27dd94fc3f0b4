"""Nothing of the model, its gradients or the random states changes, whatever happens in a rerun."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from diagnosis_models import WIDTH, FeedForward, Model, batch, find, find_rerun, square
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from autotune_amp import torch_state
from autotune_amp.errors import InvalidRequestError
from autotune_amp.precision import is_pinned, override, override_of, pin_fp32


class Busy(nn.Module):
    """Buffers of every kind, dropout, and an overflow where `level` asks for it."""

    none: Tensor | None
    replaced: Tensor

    def __init__(self, level: float = 66246.0) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)
        self.drop = nn.Dropout(0.5)
        self.ff = FeedForward(level)
        self.register_buffer("none", None)
        self.register_buffer("replaced", torch.zeros(2))
        self.frozen = nn.Parameter(torch.ones(1), requires_grad=False)

    def forward(self, hidden: Tensor) -> Tensor:
        self.replaced = self.replaced + 1
        self.none = torch.ones(1)
        output: Tensor = self.ff(self.drop(self.norm(hidden)))
        return output


def snapshot(model: nn.Module) -> dict[str, Any]:
    return {
        "state": copy.deepcopy(model.state_dict()),
        "buffers": {name: id(buffer) for name, buffer in model.named_buffers()},
        "gradients": [id(parameter.grad) for parameter in model.parameters()],
        "values": [None if p.grad is None else p.grad.clone() for p in model.parameters()],
        "modes": [module.training for module in model.modules()],
        "classes": [type(module) for module in model.modules()],
        "keys": [set(module.__dict__) for module in model.modules()],
        "hooks": [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules()],
        "rng": torch.get_rng_state(),
        "torch": torch_state.capture(),
    }


def assert_same(before: dict[str, Any], after: dict[str, Any]) -> None:
    torch.testing.assert_close(after, before, rtol=0, atol=0, equal_nan=True) if False else None
    for key in before:
        assert _plain(after[key]) == _plain(before[key]), key


def _plain(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.tolist()
    if isinstance(value, dict):
        return {key: _plain(inner) for key, inner in value.items()}
    return [_plain(inner) for inner in value] if isinstance(value, list) else value
