"""The batch that memory is measured on: what a scan of the data finds, and what is made of it."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from data_samples import LOADER, Counting, Sized, Sorted
from torch import nn
from torch.utils.data import (
    DataLoader,
    Dataset,
    SubsetRandomSampler,
)

from autotune_amp import Workload
from autotune_amp.core.errors import WorkloadError
from autotune_amp.trial import data, worst_batch
from autotune_amp.trial.worst_batch import Scan, scan


@pytest.fixture(autouse=True)
def unhurried(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that stalls ends no scan."""
    monkeypatch.setattr(worst_batch, "SCAN_SECONDS", 100.0)
    monkeypatch.setattr(worst_batch, "DRAW_SECONDS", 100.0)


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


def seen_in(given: Any, batch_size: int = 4, **parts: Any) -> Scan:
    return scan(Workload(nn.Linear(1, 1), lambda model, batch: batch, given, **parts), batch_size)


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
    monkeypatch.setattr(worst_batch, "SCAN_SECONDS", 1.5)
    monkeypatch.setattr(worst_batch, "time", SimpleNamespace(monotonic=lambda: next(ticks) / 10))
    looked_at: list[int] = []

    class Words(Sorted):
        def __getitem__(self, index: int) -> Any:
            looked_at.append(index)
            return "x" * index

    sizes = seen_in(Words(1_000_000)).sample_sizes
    assert sizes is not None
    assert sizes.num_samples == 1_000_000
    assert worst_batch.SAMPLES_AT_ONCE < sizes.num_seen == len(set(looked_at)) < 100
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
        found = seen_in(given, 1)
        assert found._replace(pins_memory=None, prefetch_factor=None) == Scan(num_workers)
        assert (found.pins_memory is None) == (not isinstance(given, list | DataLoader))
    assert found.prefetch_factor == 2


def test_batches_are_drawn_where_samples_cannot_be_looked_at_one_by_one() -> None:
    def stream(size: int) -> Iterator[torch.Tensor]:
        return iter([torch.zeros(size, length) for length in range(1, 33)])

    assert seen_in(stream) == Scan(batch_sizes_seen=(4, 4 * 32))


class AtOnce(Texts):
    """Makes the batch of some indices at once, so that there are no samples to look at."""

    def __getitems__(self, indices: list[int]) -> torch.Tensor:
        return padded([self[index] for index in indices])


def as_it_is(batch: Any) -> Any:
    return batch


def test_batches_are_drawn_where_a_dataset_makes_them_at_once() -> None:
    found = seen_in(DataLoader(AtOnce(), batch_size=4, collate_fn=as_it_is))
    assert found.sample_sizes is None
    assert found.batch_sizes_seen == (16, 400)
    assert found.scan_problem is None


def test_a_named_worst_batch_needs_no_look() -> None:
    dataset = Texts()
    found = seen_in(DataLoader(dataset, batch_size=4), worst_batch=lambda size: torch.zeros(size, 512))
    assert (found, dataset.seen) == (Scan(num_workers=0, pins_memory=False), [])


def test_what_is_drawn_next_stays_the_same() -> None:
    generator = torch.Generator().manual_seed(1)
    loader = DataLoader(Texts(), batch_size=4, shuffle=True, generator=generator)
    workload = Workload(nn.Linear(1, 1), lambda model, batch: batch, loader)

    def draws() -> list[Any]:
        torch.manual_seed(3)
        random.seed(3)
        np.random.seed(3)
        if is_looked_at:
            assert scan(workload, 4).sample_sizes is not None
        return [torch.rand(()).item(), random.random(), np.random.rand(), generator.get_state().tolist()]

    is_looked_at = False
    expected = draws()
    is_looked_at = True
    assert draws() == expected


def worst(named: Any, loader: Any, samples: tuple[int, ...], size: int) -> list[Any]:
    return list(worst_batch.worst_batches(named, loader, samples, size, 2))


def test_the_worst_batch_is_of_the_samples_named_collated_by_one_worker_of_the_loader() -> None:
    loader: DataLoader[int] = DataLoader(Sorted(100), batch_size=3, shuffle=True, collate_fn=tuple)
    assert worst(None, loader, (7, 42), 5) == [(7, 42, 7, 42, 7)] * 2
    assert worst(lambda size: list(range(size)), loader, (7,), 2) == [[0, 1]] * 2
    counted = DataLoader(Sorted(100), batch_size=3, collate_fn=lambda samples: torch.zeros(1, len(samples)))
    assert [batch.shape for batch in worst(None, counted, (7, 42), 5)] == [(1, 5)] * 2  # its loader knows it holds 5
    assert worst(None, loader, (), 2) == worst(None, None, (1, 2), 2) == []
    loader = data.rebuild_loader(
        LOADER, batch_size=5, collate_fn=lambda samples: torch.tensor([[os.getpid()]] * len(samples))
    )
    first, second = worst(None, loader, (7, 3), 2)
    assert torch.equal(first, second)
    assert os.getpid() not in first
    for given in (None, torch.zeros(3, 2)):
        with pytest.raises(WorkloadError, match=r"called with batch size 8 and returned [03] samples"):
            worst(lambda size, given=given: given, None, (), 8)
