"""A model whose two middle layers can multiply in fp8, and its training."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from autotune_amp import Workload

NUM_SAMPLES, WIDTH, NUM_CLASSES = 16, 64, 10


def model() -> nn.Sequential:
    """Of four Linear layers the middle ones are not the first, not the last, and in multiples of 16."""
    torch.manual_seed(0)
    hidden = (part for _ in range(2) for part in (nn.Linear(WIDTH, WIDTH), nn.ReLU()))
    return nn.Sequential(nn.Linear(32, WIDTH), nn.ReLU(), *hidden, nn.Linear(WIDTH, NUM_CLASSES))


def batch(num_samples: int = NUM_SAMPLES) -> tuple[Tensor, Tensor]:
    """Samples and their classes."""
    return torch.randn(num_samples, 32), torch.randint(NUM_CLASSES, (num_samples,))


def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Cross entropy."""
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


def workload() -> Workload:
    """It, as a search gets it."""
    return Workload(model, loss, batch, lambda parameters: torch.optim.AdamW(parameters, lr=1e-3))
