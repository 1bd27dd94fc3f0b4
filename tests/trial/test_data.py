from __future__ import annotations

from collections import namedtuple
from collections.abc import Iterator
from itertools import islice
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset, WeightedRandomSampler

from autotune_amp.errors import WorkloadError
from autotune_amp.trial import data

Pair = namedtuple("Pair", ["inputs", "targets"])


def pairs(size: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(size, 3), torch.zeros(size)


class Counting(IterableDataset[torch.Tensor]):
    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter(torch.arange(10.0))


@pytest.mark.parametrize(
    "given",
    [
        TensorDataset(*pairs(50)),
        DataLoader(TensorDataset(*pairs(50)), batch_size=7),
        DataLoader(TensorDataset(*pairs(50)), batch_size=7, shuffle=True, generator=torch.Generator()),
        DataLoader(TensorDataset(*pairs(50)), batch_size=7, sampler=WeightedRandomSampler([1.0] * 50, 50)),
        Counting(),
        DataLoader(Counting(), batch_size=2),
        pairs,
        lambda size: {"inputs": torch.randn(size, 3)},
        lambda size: DataLoader(TensorDataset(*pairs(50)), batch_size=size),
        lambda size: iter([pairs(size), pairs(size)]),
        lambda size: [torch.randn(5) for _ in range(size)],
        lambda size: torch.randn(12, size, 3),
    ],
)
@pytest.mark.parametrize("size", [1, 4, 8])
def test_batches_have_the_size_asked_for_without_end(given: Any, size: int) -> None:
    batches = list(islice(data.stream(given, size), 30))
    assert len(batches) == 30
    assert all(data.num_samples(batch, size) == size for batch in batches)


def test_a_loader_keeps_its_settings_with_another_batch_size() -> None:
    def collate(samples: list[Any]) -> tuple[str, torch.Tensor]:
        return "collated", torch.stack([sample[0] for sample in samples])

    loader = DataLoader(TensorDataset(torch.arange(12.0)), batch_size=3, shuffle=False, collate_fn=collate)
    word, values = next(data.stream(loader, 4))
    assert word == "collated"
    assert values.tolist() == [0.0, 1.0, 2.0, 3.0]


@pytest.mark.parametrize(
    ("given", "word"),
    [
        (lambda size: iter([]), "yielded no batch"),
        (lambda size: pairs(size - 1), "asked for 8 samples and gave 7"),
        (lambda size: iter([pairs(3)]), "largest batch held 3"),
        (TensorDataset(*pairs(5)), "yielded no batch"),
    ],
)
def test_no_batch_or_too_few_samples(given: Any, word: str) -> None:
    with pytest.raises(WorkloadError, match=word):
        next(data.stream(given, 8))


def test_a_batch_sampler_needs_a_function() -> None:
    sampler = torch.utils.data.BatchSampler(range(8), 2, False)
    with pytest.raises(WorkloadError, match="no batch_size"):
        data.describe(DataLoader(TensorDataset(*pairs(8)), batch_sampler=sampler))


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (DataLoader(TensorDataset(*pairs(50)), batch_size=7), ("DataLoader, 0 workers", 7, 50)),
        (DataLoader(Counting(), batch_size=2), ("DataLoader, 0 workers", 2, None)),
        (TensorDataset(*pairs(9)), ("Dataset", None, 9)),
        ([1, 2, 3], ("Dataset", None, 3)),
        (pairs, ("function of the batch size", None, None)),
    ],
)
def test_what_is_said_of_the_data(given: Any, expected: tuple[str, int | None, int | None]) -> None:
    assert data.describe(given) == expected


@pytest.mark.parametrize(
    ("batch", "expected"),
    [
        ((torch.zeros(8, 8), torch.zeros(8)), 8),
        ((torch.zeros(4, 8), torch.zeros(4, 1)), 4),
        ((torch.zeros(20, 8, 3), torch.zeros(8)), 8),
        (torch.zeros(20, 8, 3), 8),
        ({"mask": torch.zeros(5, 5), "inputs": torch.zeros(8, 2)}, 8),
        (torch.tensor(1.0), None),
        ("text", None),
    ],
)
def test_how_many_samples_a_batch_holds(batch: Any, expected: int | None) -> None:
    assert data.num_samples(batch, 8) == expected


def test_moving_keeps_the_shape_of_the_batch() -> None:
    device = torch.device("meta")
    moved = data.move({"pair": Pair(torch.zeros(2), [torch.zeros(3)]), "name": "x"}, device)
    assert isinstance(moved["pair"], Pair)
    assert moved["pair"].inputs.device == device
    assert moved["pair"].targets[0].device == device
    assert moved["name"] == "x"


class Unsized(Dataset[int]):
    def __getitem__(self, index: int) -> int:
        return index


def test_a_dataset_without_a_length() -> None:
    assert data.describe(Unsized()) == ("Dataset", None, None)
