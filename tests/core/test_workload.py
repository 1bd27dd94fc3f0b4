"""What a Workload may be made of."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset

from autotune_amp import Workload
from autotune_amp.core.errors import WorkloadError


class Endless(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter([1, 2])


class Prefetching:
    """A loader that can be iterated over, and nothing else."""

    def __iter__(self) -> Iterator[int]:
        return iter([1, 2])


def workload(data: Any) -> Workload:
    return Workload(lambda: nn.Linear(1, 1), lambda model, batch: Tensor(), data)


@pytest.mark.parametrize("data", [[1, 2], Endless(), DataLoader([1, 2]), lambda size: [1] * size])  # type: ignore[arg-type]
def test_data_that_batches_of_any_size_can_be_taken_from(data: Any) -> None:
    assert workload(data).data is data


@pytest.mark.parametrize("data", [Prefetching(), iter([1, 2]), 7])
def test_data_that_has_no_batches_of_another_size_is_refused(data: Any) -> None:
    with pytest.raises(WorkloadError, match="a function of the batch size"):
        workload(data)
