from __future__ import annotations

import os
from collections import namedtuple
from collections.abc import Iterator
from itertools import islice
from typing import Any

import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

from autotune_amp.core.errors import WorkloadError
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
    assert values.tolist() == [values[0] + index for index in range(4)]
    assert values[0] % 4 == 0


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
        (
            DataLoader(TensorDataset(*pairs(50)), batch_size=7, sampler=SubsetRandomSampler(range(10))),
            ("DataLoader, 0 workers", 7, 10),
        ),
        (
            DataLoader(
                TensorDataset(*pairs(50)),
                batch_size=7,
                sampler=DistributedSampler(TensorDataset(*pairs(50)), num_replicas=4, rank=0),
            ),
            ("DataLoader, 0 workers", 7, 13),
        ),
        (DataLoader(TensorDataset(*pairs(50)), batch_size=7, sampler=iter(range(9))), ("DataLoader, 0 workers", 7, 50)),
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


@pytest.mark.parametrize(
    "given",
    [
        TensorDataset(torch.arange(40.0)),
        LOADER,
        DataLoader(LOADER.dataset, batch_size=5),
        lambda size: DataLoader(LOADER.dataset, batch_size=size, drop_last=True, num_workers=1, prefetch_factor=3),
        lambda size: DataLoader(LOADER.dataset, batch_sampler=BatchSampler(range(20), size, True), num_workers=1),
        lambda size: DataLoader(Counting(), batch_size=size),
        lambda size: DataLoader([torch.zeros(size, 2)] * 3, batch_size=None),  # type: ignore[arg-type]
    ],
)
@pytest.mark.parametrize("num_workers", [0, 1])
def test_another_number_of_workers_keeps_everything_else(given: Any, num_workers: int) -> None:
    opened = data.opened(given, 4, num_workers)
    assert opened.loader is not None
    assert opened.loader.num_workers == num_workers
    if num_workers == 0:
        assert data.num_samples(next(opened.stream), 4) == 4
    if given is LOADER and num_workers:
        assert (opened.loader.prefetch_factor, opened.loader.persistent_workers, opened.loader.timeout) == (4, True, 30)
        assert opened.loader.collate_fn is LOADER.collate_fn


def test_what_has_no_loader_has_no_workers() -> None:
    assert data.opened(pairs, 4, 2).loader is None
    assert data.opened(lambda size: iter([pairs(size)]), 4, 2).loader is None


def test_the_worst_batch_is_of_the_samples_named_collated_by_the_loader() -> None:
    numbers: Any = list(range(100))
    loader: DataLoader[int] = DataLoader(numbers, batch_size=3, shuffle=True, collate_fn=tuple)
    assert worst(None, loader, (7, 42), 5) == [(7, 42, 7, 42, 7)] * 2
    assert worst(lambda size: list(range(size)), loader, (7,), 2) == [[0, 1]] * 2
    assert worst(None, loader, (), 2) == []
    assert worst(None, None, (1, 2), 2) == []


def worst(named: Any, loader: Any, samples: tuple[int, ...], size: int, *, is_exact: bool = True) -> list[Any]:
    return list(data.worst_batches(named, loader, samples, size, 2, is_exact=is_exact))


def process_id(samples: list[Any]) -> torch.Tensor:
    return torch.tensor([[os.getpid(), int(sample[0][0])] for sample in samples])


def test_one_worker_makes_all_worst_batches() -> None:
    loader = data.rebuilt(LOADER, batch_size=5, collate_fn=process_id)
    first, second = worst(None, loader, (7, 3), 2)
    assert first[:, 1].tolist() == second[:, 1].tolist() == [14, 6]
    assert len({os.getpid(), *first[:, 0].tolist()}) == 2
    assert torch.equal(first, second)


@pytest.mark.parametrize("given", [None, torch.zeros(3, 2)])
def test_a_worst_batch_of_too_few_samples_is_refused(given: Any) -> None:
    with pytest.raises(WorkloadError, match=r"worst batch of 8 samples and gave [03]"):
        worst(lambda size: given, None, (), 8)


def test_a_worst_batch_of_too_many_samples_is_refused_where_others_have_what_was_asked() -> None:
    def too_many(size: int) -> torch.Tensor:
        return torch.zeros(100, 2)

    with pytest.raises(WorkloadError, match="worst batch of 8 samples and gave 100"):
        worst(too_many, None, (), 8)
    assert len(worst(too_many, None, (), 8, is_exact=False)) == 2


def test_a_function_that_ignores_the_batch_size_is_refused() -> None:
    def make(size: int) -> Any:
        return DataLoader(TensorDataset(*pairs(50)), batch_size=16)

    with pytest.raises(WorkloadError, match=r"batches of 8 samples .* batch_size=16"):
        data.opened(make, 8)
    assert data.opened(make, 16).loader is not None


class Unsized(Dataset[int]):
    def __getitem__(self, index: int) -> int:
        return index


def test_a_dataset_without_a_length() -> None:
    assert data.describe(Unsized()) == ("Dataset", None, None)


def test_a_sampler_that_draws_more_than_the_dataset_holds_is_kept() -> None:
    dataset = TensorDataset(*pairs(5))
    loader = DataLoader(dataset, batch_size=2, sampler=RandomSampler(dataset, replacement=True, num_samples=20))
    assert data.describe(loader) == ("DataLoader, 0 workers", 2, 20)
    assert data.num_samples(next(data.stream(loader, 16)), 16) == 16
