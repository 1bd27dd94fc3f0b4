"""Datasets that tests/trial draws from."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

NUM_SAMPLES = 8000


class Counting(IterableDataset[torch.Tensor]):
    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter(torch.arange(10.0))


class Sized(Counting):
    def __len__(self) -> int:
        return 10


class Sorted(Dataset[int]):
    """The value of a sample is its place in the dataset."""

    def __init__(self, num_samples: int = NUM_SAMPLES) -> None:
        self.num_samples = num_samples

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, index: int) -> int:
        return index


LOADER = DataLoader(
    TensorDataset(torch.arange(40.0).reshape(20, 2)),
    batch_size=5,
    num_workers=1,
    collate_fn=lambda samples: torch.stack([sample[0] for sample in samples]),
    prefetch_factor=4,
    persistent_workers=True,
    timeout=30,
    multiprocessing_context="fork",
)
