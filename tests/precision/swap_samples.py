"""Modules to pin, override and observe."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from autotune_amp.core.setting import Precision
from autotune_amp.precision.mode import (
    Observer,
    clear_override,
    observe,
    override,
    pin_fp32,
    stop_observing,
    unpin,
)

HALF: dict[Precision, torch.dtype] = {"bf16": torch.bfloat16, "fp16": torch.float16}


class Block(nn.Module):
    """A block."""

    registry: list[type] = []  # noqa: RUF012 # what a framework's base class does with every subclass

    def __init_subclass__(cls) -> None:
        Block.registry.append(cls)

    def __init__(self, width: int = 8, *, gain: float = 2.0) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.norm = nn.LayerNorm(width)
        self.gain = gain

    def forward(self, x: Tensor, *, scale: float = 1.0) -> Tensor:
        out: Tensor = self.norm(self.linear(x) * scale) * self.gain
        return out


class Model(nn.Module):
    def __init__(self, num_blocks: int = 2) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(num_blocks))

    def forward(self, x: Tensor) -> tuple[Tensor]:
        for block in self.blocks:
            x = block(x)
        return (x,)

    def linear(self, index: int) -> nn.Module:
        block = self.blocks[index]
        assert isinstance(block, Block)
        return block.linear


class Pair(NamedTuple):
    left: Tensor
    right: Tensor


class Recorder(nn.Module):
    """Keeps what its forward was given, and whether autocast was on; gives out what it is told to."""

    def __init__(self, output: Any = None) -> None:
        super().__init__()
        self.output = output

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self.args, self.kwargs = args, kwargs
        self.autocast = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else None
        return self.output


def give_roles(module: nn.Module) -> None:
    pin_fp32(module, "cpu")
    override(module, "fp16", "cpu")
    observe(module, Observer(1, "cpu"), 0)


def take_roles(module: nn.Module) -> None:
    unpin(module)
    clear_override(module)
    stop_observing(module)


def doubled(forward: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Tensor:
    return forward(*args, **kwargs) * 2


def wrap_as_accelerate(module: nn.Module) -> None:
    """What Accelerate does: the class's function taken out, wrapped, and put on the instance."""
    inner = module.forward.__func__  # type: ignore[attr-defined] # mypy does not know a bound method here
    module.forward = functools.update_wrapper(functools.partial(doubled, inner, module), module.forward)
