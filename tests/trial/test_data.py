"""The user's data: batches of every size without end from all over an epoch, the worst one, and what a look finds."""

from __future__ import annotations

import os
import random
from collections import namedtuple
from collections.abc import Iterable, Iterator
from itertools import islice
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    Sampler,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

from autotune_amp import Workload
from autotune_amp.core.errors import WorkloadError
from autotune_amp.trial import data
from autotune_amp.trial.data import Look, look

Pair = namedtuple("Pair", ["inputs", "targets"])
NUM_SAMPLES = 8000


def pairs(size: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(size, 3), torch.zeros(size)


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


@pytest.mark.parametrize(
    "given",
    [
        TensorDataset(*pairs(50)),
        DataLoader(TensorDataset(*pairs(50)), batch_size=7),
        DataLoader(TensorDataset(*pairs(50)), batch_size=7, sampler=WeightedRandomSampler([1.0] * 50, 50)),
        DataLoader(Counting(), batch_size=2),
        pairs,
        lambda size: iter([pairs(size), pairs(size)]),
        lambda size: [torch.randn(5) for _ in range(size)],
        lambda size: torch.randn(12, size, 3),
    ],
)
@pytest.mark.parametrize("size", [1, 8])
def test_batches_have_the_size_asked_for_without_end(given: Any, size: int) -> None:
    batches = list(islice(data.stream(given, size), 30))
    assert len(batches) == 30
    assert all(data.num_samples(batch, size) == size for batch in batches)


@pytest.mark.parametrize(
    ("given", "word"),
    [
        (lambda size: iter([]), "no batch"),
        (lambda size: pairs(size - 1), "held 7"),
        (lambda size: iter([pairs(3)]), "held 3"),
        (lambda size: DataLoader(Sorted(5), batch_size=size), "held 5"),
        (TensorDataset(*pairs(5)), "no batch"),
        (lambda size: DataLoader(Sorted(50), batch_size=16), "batch_size=16"),
    ],
)
def test_no_batch_too_few_samples_or_a_batch_size_that_is_ignored(given: Any, word: str) -> None:
    with pytest.raises(WorkloadError, match=word):
        next(data.stream(given, 8))


def test_what_is_said_of_the_data() -> None:
    def said(**settings: Any) -> tuple[int | None, int | None]:
        kind, batch_size, num_samples = data.describe(
            DataLoader(**{"dataset": Sorted(50), "batch_size": 7, **settings})
        )
        assert kind == "DataLoader, 0 workers"
        return batch_size, num_samples

    a_share: DistributedSampler[int] = DistributedSampler(Sorted(50), num_replicas=4, rank=0)
    assert said() == (7, 50)
    assert said(dataset=Counting()) == (7, None)
    assert [said(sampler=each)[1] for each in (SubsetRandomSampler(range(10)), a_share, iter(range(9)))] == [10, 13, 50]
    assert data.describe(TensorDataset(*pairs(9))) == ("Dataset", None, 9)
    assert data.describe(pairs) == ("function of the batch size", None, None)
    with pytest.raises(WorkloadError, match="no batch_size") as caught:
        data.describe(DataLoader(Sorted(8), batch_sampler=BatchSampler(range(8), 2, False)))
    assert "function of the batch size" in caught.value.next_step


def test_how_many_samples_a_batch_holds() -> None:
    for batch, expected in (
        ((torch.zeros(8, 8), torch.zeros(8)), 8),
        ((torch.zeros(4, 8), torch.zeros(4, 1)), 4),
        (torch.zeros(20, 8, 3), 8),
        ({"mask": torch.zeros(5, 5), "inputs": torch.zeros(8, 2)}, 8),
        (torch.tensor(1.0), None),
    ):
        assert data.num_samples(batch, 8) == expected


def test_moving_keeps_the_shape_of_the_batch() -> None:
    device = torch.device("meta")
    moved = data.move({"pair": Pair(torch.zeros(2), [torch.zeros(3)]), "name": "x"}, device)
    assert isinstance(moved["pair"], Pair)
    assert {moved["pair"].inputs.device, moved["pair"].targets[0].device} == {device}
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
        lambda size: DataLoader(LOADER.dataset, batch_size=size, shuffle=True, num_workers=1, prefetch_factor=3),
        lambda size: DataLoader(LOADER.dataset, batch_sampler=BatchSampler(range(20), size, True), num_workers=1),
        lambda size: DataLoader(Counting(), batch_size=size),
        lambda size: DataLoader([torch.zeros(size, 2)] * 3, batch_size=None),  # type: ignore[arg-type]
    ],
)
@pytest.mark.parametrize("num_workers", [0, 1])
def test_another_number_of_workers_keeps_everything_else(given: Any, num_workers: int) -> None:
    before = dict(vars(LOADER))
    opened = data.opened(given, 4, num_workers)
    assert opened.loader is not None
    assert opened.loader.num_workers == num_workers
    if num_workers == 0:
        assert data.num_samples(next(opened.stream), 4) == 4
    if given is LOADER and num_workers:
        assert (opened.loader.prefetch_factor, opened.loader.persistent_workers, opened.loader.timeout) == (4, True, 30)
        assert opened.loader.collate_fn is LOADER.collate_fn
    assert vars(LOADER) == before


def worst(named: Any, loader: Any, samples: tuple[int, ...], size: int) -> list[Any]:
    return list(data.worst_batches(named, loader, samples, size, 2))


def test_the_worst_batch_is_of_the_samples_named_collated_by_one_worker_of_the_loader() -> None:
    loader: DataLoader[int] = DataLoader(Sorted(100), batch_size=3, shuffle=True, collate_fn=tuple)
    assert worst(None, loader, (7, 42), 5) == [(7, 42, 7, 42, 7)] * 2
    assert worst(lambda size: list(range(size)), loader, (7,), 2) == [[0, 1]] * 2
    assert worst(None, loader, (), 2) == worst(None, None, (1, 2), 2) == []
    loader = data.rebuilt(LOADER, batch_size=5, collate_fn=lambda samples: torch.tensor([[os.getpid()]] * len(samples)))
    first, second = worst(None, loader, (7, 3), 2)
    assert torch.equal(first, second)
    assert os.getpid() not in first
    for given in (None, torch.zeros(3, 2)):
        with pytest.raises(WorkloadError, match=r"worst batch of 8 samples and gave [03]"):
            worst(lambda size, given=given: given, None, (), 8)


# -- places all over an epoch ------------------------------------------------------------------------------------------


class OwnBatches(Sampler[list[int]]):
    def __init__(self, order: Iterable[int], batch_size: int) -> None:
        self.order, self.batch_size = order, batch_size

    def __iter__(self) -> Iterator[list[int]]:
        return iter(BatchSampler(self.order, self.batch_size, drop_last=True))


def drawn(given: Any, batch_size: int, num: int) -> list[list[int]]:
    torch.manual_seed(0)
    return [batch.tolist() for batch in islice(data.stream(given, batch_size), num)]


def mean_place(batches: list[list[int]], num_samples: int = NUM_SAMPLES) -> float:
    """As a share of the epoch."""
    return sum(map(sum, batches)) / sum(map(len, batches)) / num_samples


@pytest.mark.parametrize(
    "given",
    [
        DataLoader(Sorted(), batch_size=16),
        lambda size: DataLoader(Sorted(), batch_size=size),
        lambda size: DataLoader(Sorted(), batch_sampler=OwnBatches(range(NUM_SAMPLES), size)),
        lambda size: DataLoader([torch.full((size,), i) for i in range(NUM_SAMPLES)], batch_size=None),  # type: ignore[arg-type]
    ],
)
def test_the_first_batches_are_like_the_epoch_for_every_batch_size_and_the_same_every_time(given: Any) -> None:
    few, many = (drawn(given, size, 24) for size in (4, 32))
    assert mean_place(few) == pytest.approx(0.5, abs=0.1)
    assert mean_place(many) == pytest.approx(mean_place(few), abs=0.03)
    assert drawn(given, 4, 24) == few


@pytest.mark.parametrize("batch_size", [1, 4])
def test_an_epoch_draws_each_batch_once_as_its_sampler_makes_it(batch_size: int) -> None:
    batches = drawn(DataLoader(Sorted(40), batch_size=8, drop_last=False), batch_size, 2 * 40 // batch_size)
    expected = list(BatchSampler(range(40), batch_size, drop_last=True))
    first, second = batches[: len(expected)], batches[len(expected) :]
    assert sorted(first) == sorted(second) == expected
    assert len({str(order) for order in (first, second, expected)}) == 3


def test_what_cannot_be_listed_keeps_its_order() -> None:
    for given in (DataLoader(Counting(), batch_size=4), lambda size: DataLoader(Counting(), batch_size=size)):
        assert drawn(given, 4, 1) == [[0, 1, 2, 3]]


# -- how large samples are ---------------------------------------------------------------------------------------------


class Texts(Dataset[dict[str, Any]]):
    """Sample i has i + 1 tokens; every look at one draws from each generator. The one of `broken` cannot be loaded."""

    def __init__(self, broken: int = -1) -> None:
        self.seen: list[int] = []
        self.broken = broken

    def __len__(self) -> int:
        return 100

    def __getitem__(self, index: int) -> dict[str, Any]:
        if index == self.broken:
            raise ValueError("corrupt sample")
        self.seen.append(index)
        torch.rand(())
        random.random()
        np.random.rand()
        return {"tokens": [7] * (index + 1), "label": 1}


def padded(samples: list[dict[str, Any]]) -> torch.Tensor:
    longest = max(len(sample["tokens"]) for sample in samples)
    taken = [sample.pop("tokens") for sample in samples]  # as many do: the dataset must keep what it holds
    return torch.tensor([tokens + [0] * (longest - len(tokens)) for tokens in taken])


def seen_in(given: Any, batch_size: int = 4, **parts: Any) -> Look:
    return look(Workload(nn.Linear(1, 1), lambda model, batch: batch, given, **parts), batch_size)


@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.parametrize(
    "make",
    [
        lambda size, workers: DataLoader(Texts(), batch_size=size, num_workers=workers),
        lambda size, workers: DataLoader(
            [Texts()[i] for i in range(100)],  # type: ignore[arg-type]
            batch_size=size, shuffle=True, collate_fn=padded, num_workers=workers,
        ),
    ],
)  # fmt: skip
def test_every_sample_of_a_small_dataset_is_looked_at(make: Any, num_workers: int) -> None:
    for _ in range(2):  # a look leaves the samples as they were
        found = seen_in(lambda size: make(size, num_workers))
        assert (found.num_workers, found.batch_sizes_seen, found.scan_problem) == (num_workers, None, None)
        sizes = found.sample_sizes
        assert sizes is not None
        assert (sizes.num_seen, sizes.num_samples) == (100, 100)
        assert sizes.largest_size - sizes.smallest_size == 99
        assert sizes.largest == tuple(range(99, -1, -1))
        assert sizes.smallest == tuple(range(64))


def test_a_large_dataset_is_looked_at_in_random_order_until_the_time_is_up(monkeypatch: pytest.MonkeyPatch) -> None:
    ticks = iter(range(1000))
    monkeypatch.setattr(data, "time", SimpleNamespace(monotonic=lambda: next(ticks) / 10))
    looked_at: list[int] = []

    class Words(Sorted):
        def __getitem__(self, index: int) -> Any:
            looked_at.append(index)
            return "x" * index

    sizes = seen_in(Words(1_000_000)).sample_sizes
    assert sizes is not None
    assert sizes.num_samples == 1_000_000
    assert data.SAMPLES_AT_ONCE < sizes.num_seen == len(set(looked_at)) < 100
    assert looked_at != sorted(looked_at)
    assert sizes.largest == tuple(sorted(looked_at, reverse=True))


def test_only_what_the_loader_may_draw_is_looked_at() -> None:
    for indices in ([3, 1, 8], torch.tensor([3, 1, 8])):
        sampler = SubsetRandomSampler(indices)  # type: ignore[arg-type]  # it takes any sequence
        found = seen_in(DataLoader(Texts(), batch_size=2, sampler=sampler)).sample_sizes
        assert found is not None
        assert (found.num_seen, found.num_samples, found.largest) == (3, 3, (8, 3, 1))


class Names(Dataset[str]):
    """Sample i is the name of file i."""

    def __len__(self) -> int:
        return 200

    def __getitem__(self, index: int) -> str:
        return f"clip-{index:09d}"


def clip(name: str) -> torch.Tensor:
    index = int(name[5:])
    return torch.zeros(5000 if index == 77 else 100 + index)


def decoded(names: list[str]) -> torch.Tensor:
    return nn.utils.rnn.pad_sequence([clip(name) for name in names], batch_first=True)


def test_samples_are_sized_as_they_are_collated() -> None:
    found = seen_in(DataLoader(Names(), batch_size=8, shuffle=True, collate_fn=decoded))
    assert found.sample_sizes is not None
    assert (found.sample_sizes.largest_size, found.sample_sizes.smallest_size) == (5000, 100)
    assert found.sample_sizes.largest[:3] == (77, 199, 198)


@pytest.mark.parametrize("num_workers", [0, 1])
def test_what_ends_the_look_is_told_with_what_was_seen_before(num_workers: int) -> None:
    found = seen_in(DataLoader(Texts(broken=98), batch_size=4, num_workers=num_workers))
    assert "corrupt sample" in (found.scan_problem or "")
    assert found.sample_sizes is not None
    assert 0 < found.sample_sizes.num_seen < 100
    assert 98 not in found.sample_sizes.largest
    assert "ZeroDivisionError" in (seen_in(lambda size: 1 / 0).scan_problem or "")


def test_nothing_is_said_of_what_is_alike() -> None:
    for given, num_workers in (
        ([torch.zeros(1000 + index % 3) for index in range(50)], 0),
        (lambda size: torch.zeros(size, 3), None),
        (DataLoader(Counting(), batch_size=1, num_workers=1), None),
        (DataLoader(Sized(), batch_size=1), None),
        (DataLoader(Counting(), batch_size=1, num_workers=2), 2),
    ):
        assert seen_in(given, 1) == Look(num_workers)


def test_batches_are_drawn_where_samples_cannot_be_looked_at_one_by_one() -> None:
    def stream(size: int) -> Iterator[torch.Tensor]:
        return iter([torch.zeros(size, length) for length in range(1, 33)])

    assert seen_in(stream) == Look(batch_sizes_seen=(4, 4 * 32))


def test_a_named_worst_batch_needs_no_look() -> None:
    dataset = Texts()
    found = seen_in(DataLoader(dataset, batch_size=4), worst_batch=lambda size: torch.zeros(size, 512))
    assert (found, dataset.seen) == (Look(num_workers=0), [])


def test_what_is_drawn_next_stays_the_same() -> None:
    generator = torch.Generator().manual_seed(1)
    loader = DataLoader(Texts(), batch_size=4, shuffle=True, generator=generator)
    workload = Workload(nn.Linear(1, 1), lambda model, batch: batch, loader)

    def draws() -> list[Any]:
        torch.manual_seed(3)
        random.seed(3)
        np.random.seed(3)
        if is_looked_at:
            assert look(workload, 4).sample_sizes is not None
        return [torch.rand(()).item(), random.random(), np.random.rand(), generator.get_state().tolist()]

    is_looked_at = False
    expected = draws()
    is_looked_at = True
    assert draws() == expected
