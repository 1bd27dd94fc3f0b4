"""A tiny training with Accelerate, and its process-wide state put back."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from framework_samples import ambient
from torch import Tensor, nn


class Net(nn.Module):
    """Notes the precision that its forward runs in. The norm keeps its loss small however large its inputs are."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(8, 16), nn.Linear(16, 4)
        self.dtypes: list[torch.dtype] = []
        self.batch_sizes: list[int] = []

    def forward(self, inputs: Tensor) -> Tensor:
        self.dtypes.append(ambient(inputs.device.type) or torch.float32)
        self.batch_sizes.append(len(inputs))
        return nn.functional.layer_norm(self.second(torch.relu(self.first(inputs))), (4,))


def inputs(num_batches: int, *, batch_size: int = 4, overflowing: range = range(0)) -> Tensor:
    """Samples (num_batches x batch_size, 8); those of the batches in `overflowing` are too large for fp16."""
    made = torch.randn(num_batches, batch_size, 8, generator=torch.Generator().manual_seed(1))
    made[overflowing.start : overflowing.stop] *= 1e6
    return made.flatten(0, 1)


def batches_of(samples: Tensor, batch_size: int = 4) -> list[Tensor]:
    return [samples[start : start + batch_size] for start in range(0, len(samples), batch_size)]


def loss_of(model: nn.Module, batch: Tensor) -> Tensor:
    return nn.functional.mse_loss(model(batch), batch[:, :4].sign())


@contextmanager
def fresh_accelerate() -> Iterator[None]:
    """Accelerate keeps its settings for the process."""
    reset()
    try:
        yield
    finally:
        reset()


def reset() -> None:
    """Forget the accelerator made before, as a new process would."""
    from accelerate.state import AcceleratorState, GradientState, PartialState

    AcceleratorState._reset_state()
    GradientState._reset_state()
    PartialState._reset_state()
