"""Batches come from all over an epoch where its order can be listed, and from the same places for every candidate."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
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
    Sampler,
    SequentialSampler,
    SubsetRandomSampler,
)

from autotune_amp.core.errors import WorkloadError
from autotune_amp.trial import data

NUM_SAMPLES = 8000


class Sorted(Dataset[int]):
    """The value of a sample is its place in the dataset."""

    def __init__(self, num_samples: int = NUM_SAMPLES) -> None:
        self.num_samples = num_samples

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, index: int) -> int:
        return index


class Growing(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(NUM_SAMPLES))


class LongestFirst(Sampler[int]):
    """Groups of 800 samples in a random order, the last of the dataset among the first, as a length-grouped sampler."""

    def __iter__(self) -> Iterator[int]:
        order = torch.randperm(NUM_SAMPLES).tolist()
        groups = [sorted(order[start : start + 800], reverse=True) for start in range(0, NUM_SAMPLES, 800)]
        groups.sort(key=lambda group: group[0], reverse=True)
        return (index for group in groups for index in group)


class OwnBatches(Sampler[list[int]]):
    def __init__(self, order: Iterable[int], batch_size: int) -> None:
        self.order, self.batch_size = order, batch_size

    def __iter__(self) -> Iterator[list[int]]:
        return iter(BatchSampler(self.order, self.batch_size, drop_last=True))


class OwnLoader(DataLoader[Any]):
    """Its batches are not those of a DataLoader."""

    def __iter__(self) -> Any:
        return (batch + 1 for batch in super().__iter__())


def drawn(given: Any, batch_size: int, num: int) -> list[list[int]]:
    torch.manual_seed(0)
    return [batch.tolist() for batch in islice(data.stream(given, batch_size), num)]


def mean_place(batches: list[list[int]]) -> float:
    """As a share of the epoch."""
    return sum(map(sum, batches)) / sum(map(len, batches)) / NUM_SAMPLES


LOADERS = [
    DataLoader(Sorted(), batch_size=16),
    DataLoader(Sorted(), batch_size=16, sampler=LongestFirst()),
    DataLoader(Sorted(), batch_size=16, sampler=DistributedSampler(Sorted(), 4, 1, shuffle=False)),
    lambda size: DataLoader(Sorted(), batch_size=size),
    lambda size: DataLoader(Sorted(), batch_sampler=OwnBatches(range(NUM_SAMPLES), size)),
    lambda size: DataLoader(Sorted(), batch_sampler=list(BatchSampler(range(NUM_SAMPLES), size, drop_last=False))),
    lambda size: DataLoader([torch.full((size,), i) for i in range(NUM_SAMPLES)], batch_size=None),  # type: ignore[arg-type]
]


@pytest.mark.parametrize("given", LOADERS)
def test_the_first_batches_are_like_the_epoch_for_every_batch_size(given: Any) -> None:
    few, many = (mean_place(drawn(given, size, 24)) for size in (4, 32))
    assert few == pytest.approx(0.5, abs=0.1)
    assert many == pytest.approx(few, abs=0.03)


@pytest.mark.parametrize("given", LOADERS)
def test_they_are_the_same_every_time(given: Any) -> None:
    assert drawn(given, 4, 5) == drawn(given, 4, 5)


@pytest.mark.parametrize("batch_size", [1, 4])
def test_an_epoch_draws_each_batch_once_as_its_sampler_makes_it(batch_size: int) -> None:
    loader = DataLoader(Sorted(40), batch_size=8, drop_last=False)
    batches = drawn(loader, batch_size, 2 * 40 // batch_size)
    expected = list(BatchSampler(range(40), batch_size, drop_last=True))
    first, second = batches[: len(expected)], batches[len(expected) :]
    assert sorted(first) == sorted(second) == expected
    assert first != expected
    assert first != second


def test_an_incomplete_batch_of_the_users_own_is_still_told() -> None:
    def make(size: int) -> DataLoader[int]:
        return DataLoader(Sorted(5), batch_size=size)

    with pytest.raises(WorkloadError, match="its largest batch held 5"):
        next(data.stream(make, 8))


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (DataLoader(Growing(), batch_size=4), [[0, 1, 2, 3], [4, 5, 6, 7]]),
        (lambda size: DataLoader(Growing(), batch_size=size), [[0, 1, 2, 3], [4, 5, 6, 7]]),
        (lambda size: OwnLoader(Sorted(), batch_size=size), [[1, 2, 3, 4], [5, 6, 7, 8]]),
    ],
)
def test_what_cannot_be_listed_keeps_its_order(given: Any, expected: list[list[int]]) -> None:
    assert drawn(given, 4, 2) == expected


@pytest.mark.parametrize(
    "sampler", [RandomSampler(range(NUM_SAMPLES), generator=torch.Generator()), SubsetRandomSampler(range(1000))]
)
def test_what_shuffles_draws_as_it_does(sampler: Any) -> None:
    generator = sampler.generator
    state = None if generator is None else generator.get_state()
    torch.manual_seed(0)
    expected = list(islice(BatchSampler(sampler, 4, drop_last=True), 3))
    if generator is not None:
        generator.set_state(state)
    torch.manual_seed(0)
    opened = data.opened(DataLoader(Sorted(), batch_size=16, sampler=sampler), 4)
    assert opened.loader is not None
    assert list(islice(opened.loader.batch_sampler, 3)) == expected  # type: ignore[arg-type]


def test_the_users_loader_and_its_workers_stay_as_they_are() -> None:
    loader = DataLoader(Sorted(64), batch_size=16, num_workers=1, multiprocessing_context="fork", timeout=60)
    before = dict(vars(loader))
    opened = data.opened(loader, 4, 1)
    batches = [next(opened.stream).tolist() for _ in range(16)]
    opened.stream.close()
    assert sorted(batches) == [list(range(start, start + 4)) for start in range(0, 64, 4)]
    assert opened.loader is not None
    assert (opened.loader.num_workers, opened.loader.timeout) == (1, 60)
    assert vars(loader) == before


class Counted(Sampler[int]):
    """Says how many it was asked for."""

    def __init__(self, num: int) -> None:
        self.num, self.num_asked = num, 0

    def __iter__(self) -> Iterator[int]:
        for index in range(self.num):
            self.num_asked += 1
            yield index


def test_an_epoch_without_end_is_listed_as_far_as_it_is_cheap(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data, "_MAX_LISTED_INDICES", 1000)
    sampler = Counted(10**9)
    loader = DataLoader(Sorted(), batch_size=16, sampler=sampler)
    assert mean_place(drawn(loader, 4, 24)) == pytest.approx(500 / NUM_SAMPLES, rel=0.2)
    assert 1000 <= sampler.num_asked < 1100
    batches = OwnBatches(Counted(10**9), 4)
    assert mean_place(drawn(lambda size: DataLoader(Sorted(), batch_sampler=batches), 4, 24)) < 1000 / NUM_SAMPLES


def test_a_sampler_that_takes_long_keeps_its_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data, "_LISTING_SECONDS", -1.0)
    sampler = Counted(NUM_SAMPLES)
    loader = DataLoader(Sorted(), batch_size=16, sampler=sampler)
    assert drawn(loader, 4, 100) == [list(range(start, start + 4)) for start in range(0, 400, 4)]
    assert sampler.num_asked < 500


def test_a_huge_dataset_in_its_own_order_is_not_listed() -> None:
    loader = DataLoader(Sorted(10**11), batch_size=16, sampler=SequentialSampler(Sorted(10**11)))
    batches = drawn(loader, 4, 24)
    assert all(batch == list(range(batch[0], batch[0] + 4)) and batch[0] % 4 == 0 for batch in batches)
    assert mean_place(batches) * NUM_SAMPLES / 10**11 == pytest.approx(0.5, abs=0.1)
