"""Tiny models that go wrong in known places."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from autotune_amp.runtime.diagnosis import Finding, diagnose

WIDTH = 4


class FeedForward(nn.Module):
    """Puts out about `level` in every element, a sum that is large where no term of it is."""

    def __init__(self, level: float = 1.0) -> None:
        super().__init__()
        self.wi = nn.Linear(WIDTH, 8)
        self.wo = nn.Linear(8, WIDTH, bias=False)
        with torch.no_grad():
            self.wi.weight.mul_(1e-3)
            self.wi.bias.fill_(level / 8)
            self.wo.weight.fill_(1.0)

    def forward(self, hidden: Tensor) -> Tensor:
        output: Tensor = self.wo(self.wi(hidden))
        return output


class Written(nn.Module):
    """A module whose forward computes `function` between two children that are innocent."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function
        self.first = nn.Identity()
        self.last = nn.Linear(WIDTH, WIDTH)

    def forward(self, hidden: Tensor) -> Tensor:
        output: Tensor = self.last(self.function(self.first(hidden)))
        return output


class Block(nn.Module):
    def __init__(self, ff: nn.Module) -> None:
        super().__init__()
        self.ff = ff
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, hidden: Tensor) -> Tensor:
        output: Tensor = self.norm(hidden + self.ff(hidden))
        return output


class Model(nn.Module):
    """Blocks around `inner`, and a head; `num_idle` modules do nothing but count."""

    def __init__(self, *inner: nn.Module, num_idle: int = 0) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(module) for module in inner)
        self.head = nn.Linear(WIDTH, WIDTH)
        self.idle = nn.ModuleList(nn.Identity() for _ in range(num_idle))

    def forward(self, hidden: Tensor) -> Tensor:
        for block in self.blocks:
            hidden = block(hidden)
        output: Tensor = self.head(hidden)
        return output


def batch() -> Tensor:
    return torch.linspace(-1, 1, 3 * WIDTH).reshape(3, WIDTH)


def square(output: Tensor) -> Tensor:
    return output.float().square().mean()


def find(model: nn.Module, *inputs: Tensor, loss_fn: Callable[[Tensor], Tensor] = square, **changes: Any) -> Finding:
    """The finding for one batch, in fp16 at a scale that leaves room."""
    given = inputs or (batch(),)
    return find_rerun(model, lambda: loss_fn(model(*given)), **changes)


def find_rerun(model: nn.Module, rerun: Callable[[], Tensor], **changes: Any) -> Finding:
    options: dict[str, Any] = {
        "current": "fp16",
        "lower": ("bf16", "fp32"),
        "loss_scale": 16.0,
        "device_type": "cpu",
        "already_pinned": False,
    }
    return diagnose(model, rerun, **options | changes)
