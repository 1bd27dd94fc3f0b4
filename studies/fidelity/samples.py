"""Fresh random batches with a structure that a tiny model learns within some ten steps.

The structure (teachers, prototypes, successor tables) is fixed by a seed; the batches are drawn anew at each call.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor


@cache
def fixed(*shape: int, seed: int = 0) -> Tensor:
    """Standard normal numbers, the same in every process."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@cache
def _successors(vocab: int) -> Tensor:
    return torch.randperm(vocab, generator=torch.Generator().manual_seed(vocab))


def tokens(n: int, length: int, vocab: int, noise: float = 0.1) -> Tensor:
    """Sequences in which each token has one successor, but for a share `noise` of random ones; (n, length)."""
    column = torch.randint(vocab, (n,))
    columns = [column]
    for _ in range(length - 1):
        column = torch.where(torch.rand(n) < noise, torch.randint(vocab, (n,)), _successors(vocab)[column])
        columns.append(column)
    return torch.stack(columns, 1)


def features(n: int, num_inputs: int, num_outputs: int) -> tuple[Tensor, Tensor]:
    """Standardised inputs and what a fixed random teacher of one hidden layer says; outputs of unit size."""
    x = torch.randn(n, num_inputs)
    hidden = torch.tanh(x @ fixed(num_inputs, 16, seed=1) / num_inputs**0.5)
    return x, hidden @ fixed(16, num_outputs, seed=2) / 2


def labelled(n: int, num_inputs: int, num_classes: int) -> tuple[Tensor, Tensor]:
    """Standardised inputs and the class with the teacher's largest output."""
    x, outputs = features(n, num_inputs, num_classes)
    return x, outputs.argmax(1)


def images(n: int, size: int, num_classes: int, channels: int = 3) -> tuple[Tensor, Tensor]:
    """A fixed prototype of each class under noise of its own size; (n, channels, size, size) and the classes."""
    labels = torch.randint(num_classes, (n,))
    prototypes = fixed(num_classes, channels, size, size, seed=3)
    return prototypes[labels] + torch.randn(n, channels, size, size), labels
