"""A workload of next to nothing."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from autotune_amp import Workload


def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    result: Tensor = (model(batch[0]) - batch[1]).square().mean()
    return result


def workload() -> Workload:
    return Workload(
        lambda: nn.Linear(8, 1), loss, lambda size: (torch.randn(size, 8), torch.randn(size, 1)), torch.optim.SGD
    )
