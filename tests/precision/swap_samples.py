"""Modules to pin, override and observe."""

from __future__ import annotations

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
