"""Modules to pin, override and observe."""

from __future__ import annotations

import abc
from collections.abc import Callable
from typing import Any, Generic, Protocol, TypeVar

import torch
from torch import Tensor, nn


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


# -- classes whose instances take no other class easily ----------------------------------------------------------------

T = TypeVar("T")


class Doubling(nn.Module):
    """Has a weight and a forward for the classes below."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.linear(x) * 2
        return out


class AbstractFirst(abc.ABC, Doubling):
    """With a base before nn.Module that adds nothing to an instance, as the next three."""


class GenericFirst(Generic[T], Doubling):
    pass


class Sized(Protocol):
    def size(self) -> int: ...


class ProtocolFirst(Sized, Doubling):
    def __init__(self) -> None:
        Doubling.__init__(self)

    def size(self) -> int:
        return 8


class Mixin:
    __slots__ = ()


class MixinFirst(Mixin, Doubling):
    pass


class Slotted(Doubling):
    __slots__ = ("gain",)


class Registering(type):
    """A metaclass that wants an argument of every class, and knows them all."""

    known: list[str] = []  # noqa: RUF012 # that it is one for all is the point

    def __new__(cls, name: str, bases: tuple[type, ...], body: dict[str, Any], *, tag: str) -> Registering:
        cls.known.append(tag)
        return super().__new__(cls, name, bases, body)

    def __init__(cls, name: str, bases: tuple[type, ...], body: dict[str, Any], *, tag: str) -> None:
        super().__init__(name, bases, body)


class OfMetaclass(Doubling, metaclass=Registering, tag="first"):
    pass


class WantsArgument(Doubling):
    def __init_subclass__(cls, *, tag: str) -> None:
        Registering.known.append(tag)


class Argued(WantsArgument, tag="second"):
    pass


class Handing(Doubling):
    """Hands what is set on it to its layer, as a wrapper does."""

    def __setattr__(self, name: str, value: Any) -> None:
        if "linear" in self.__dict__.get("_modules", ()):
            setattr(self.linear, name, value)
        else:
            super().__setattr__(name, value)


def graph_module() -> nn.Module:
    return torch.fx.symbolic_trace(nn.Sequential(nn.Linear(8, 8)))


UNUSUAL: list[Callable[[], nn.Module]] = [
    *(AbstractFirst, GenericFirst, ProtocolFirst, MixinFirst, Slotted, OfMetaclass, Argued, WantsArgument, Handing),
    *(graph_module,),
]
