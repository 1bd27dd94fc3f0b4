"""The look through the data: what it finds, and that nothing is changed by it."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from random import randint
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, SubsetRandomSampler

from autotune_amp import Workload
from autotune_amp.precision import torch_state
from autotune_amp.trial import sizes, worker
from autotune_amp.trial.context import Context
from autotune_amp.trial.jobs import Describe
from autotune_amp.trial.sizes import Look, look


class Texts(Dataset[dict[str, Any]]):
    """Sample i has i + 1 tokens; every look at one draws from each generator."""

    def __init__(self) -> None:
        self.seen: list[int] = []

    def __len__(self) -> int:
        return 100

    def __getitem__(self, index: int) -> dict[str, Any]:
        self.seen.append(index)
        torch.rand(())
        random.random()
        np.random.rand()
        return {"tokens": [7] * (index + 1), "label": 1}


class Words(Dataset[str]):
    def __init__(self) -> None:
        self.seen: list[int] = []

    def __len__(self) -> int:
        return 1_000_000

    def __getitem__(self, index: int) -> str:
        self.seen.append(index)
        return "x" * index


class Stream(IterableDataset[torch.Tensor]):
    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter(torch.zeros(3, 5))


class Batches(Dataset[torch.Tensor]):
    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return 32

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.zeros(self.size, index + 1)


def padded(samples: list[dict[str, Any]]) -> torch.Tensor:
    longest = max(len(sample["tokens"]) for sample in samples)
    return torch.tensor([sample["tokens"] + [0] * (longest - len(sample["tokens"])) for sample in samples])


def seen_in(data: Any, batch_size: int = 4, **parts: Any) -> Look:
    return look(Workload(nn.Linear(1, 1), lambda model, batch: batch, data, **parts), batch_size)


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (torch.zeros(2, 3), 6),
        (np.zeros((4, 5)), 20),
        ("words", 5),
        ({"ids": [1, 2, 3], "label": 0}, 4),
        ((3, torch.zeros(7)), 8),
        ([[1, 2], [3]], 3),
        (SimpleNamespace(x=torch.zeros(9), y=None), 10),
        (SimpleNamespace(size=(32, 16)), 512),
        (2.5, 1),
    ],
)
def test_how_many_numbers_a_sample_holds(value: Any, expected: int) -> None:
    assert sizes.size(value) == expected


@pytest.mark.parametrize(
    "given",
    [
        Texts(),
        DataLoader(Texts(), batch_size=4, shuffle=True, collate_fn=padded),
        lambda size: DataLoader(Texts(), batch_size=size, collate_fn=padded),
        lambda size: DataLoader(Texts(), batch_sampler=torch.utils.data.BatchSampler(range(100), size, False)),
    ],
)
def test_every_sample_of_a_small_dataset_is_looked_at(given: Any) -> None:
    found = seen_in(given)
    assert found.num_workers == 0
    assert found.batch_sizes_seen is None
    sample_sizes = found.sample_sizes
    assert sample_sizes is not None
    assert (sample_sizes.num_seen, sample_sizes.num_samples) == (100, 100)
    assert (sample_sizes.smallest_size, sample_sizes.median_size, sample_sizes.largest_size) == (2, 51, 101)
    assert sample_sizes.largest == tuple(range(99, -1, -1))
    assert sample_sizes.smallest == tuple(range(64))


def test_a_large_one_is_looked_at_in_random_order_until_the_time_is_up(monkeypatch: pytest.MonkeyPatch) -> None:
    ticks = iter(range(1000))
    monkeypatch.setattr(sizes, "time", SimpleNamespace(monotonic=lambda: next(ticks) / 10))
    dataset = Words()
    found = seen_in(dataset).sample_sizes
    assert found is not None
    assert found.num_samples == 1_000_000
    assert found.num_seen == len(dataset.seen) == len(set(dataset.seen))
    assert sizes.SAMPLES_AT_ONCE < found.num_seen < 100
    assert dataset.seen != sorted(dataset.seen)
    assert found.largest == tuple(sorted(dataset.seen, reverse=True))


def test_as_many_of_the_largest_are_kept_as_the_largest_batch_may_need() -> None:
    words = ["x" * length for length in range(2000)]
    small, large = seen_in(words, 4).sample_sizes, seen_in(words, 64).sample_sizes
    assert small is not None
    assert large is not None
    assert small.largest == tuple(range(1999, 1999 - 512, -1))
    assert large.largest == tuple(range(1999, 1999 - 1024, -1))


@pytest.mark.parametrize("indices", [[3, 1, 8], torch.tensor([3, 1, 8])])
def test_only_what_the_loader_may_draw_is_looked_at(indices: Any) -> None:
    sampler = SubsetRandomSampler(indices)
    found = seen_in(DataLoader(Texts(), batch_size=2, sampler=sampler)).sample_sizes
    assert found is not None
    assert (found.num_seen, found.num_samples) == (3, 3)
    assert found.largest == (8, 3, 1)


def test_a_loaders_own_workers_open_its_dataset() -> None:
    dataset = Texts()
    found = seen_in(DataLoader(dataset, batch_size=4, num_workers=1, persistent_workers=True, timeout=60))
    assert found.num_workers == 1
    assert found.sample_sizes is not None
    assert found.sample_sizes.num_seen == 100
    assert dataset.seen == []


class Names(Dataset[str]):
    """Sample i is the name of file i, of equal length or the longer the less there is in the file."""

    def __init__(self, *, are_alike: bool) -> None:
        self.are_alike = are_alike

    def __len__(self) -> int:
        return 200

    def __getitem__(self, index: int) -> str:
        return f"clip-{index:0{9 if self.are_alike else 9 + (200 - index) // 20}d}"


def clip(name: str) -> torch.Tensor:
    index = int(name[5:])
    return torch.zeros(5000 if index == 77 else 100 + index)


def decoded(names: list[str]) -> torch.Tensor:
    return nn.utils.rnn.pad_sequence([clip(name) for name in names], batch_first=True)


def decoded_pairs(names: list[str]) -> torch.Tensor:
    if len(names) < 2:
        raise ValueError("no pair")
    return decoded(names)


def decoded_to_one_length(names: list[str]) -> torch.Tensor:
    return torch.stack([clip(name)[:90] for name in names])


@pytest.mark.parametrize("are_alike", [True, False])
@pytest.mark.parametrize("num_workers", [0, 1])
def test_samples_are_sized_as_they_are_collated_where_that_makes_them(are_alike: bool, num_workers: int) -> None:
    names = Names(are_alike=are_alike)
    found = seen_in(DataLoader(names, batch_size=8, shuffle=True, collate_fn=decoded, num_workers=num_workers))
    assert found.sample_sizes is not None
    assert (found.sample_sizes.largest_size, found.sample_sizes.smallest_size) == (5000, 100)
    assert found.sample_sizes.largest[:3] == (77, 199, 198)
    assert (found.batch_sizes_seen, found.scan_problem) == (None, None)


@pytest.mark.parametrize("are_alike", [True, False])
def test_the_largest_batch_seen_is_the_worst_where_samples_cannot_be_collated_alone(are_alike: bool) -> None:
    found = seen_in(DataLoader(Names(are_alike=are_alike), batch_size=8, shuffle=True, collate_fn=decoded_pairs), 8)
    assert found.batch_sizes_seen is not None
    assert found.batch_sizes_seen[1] == 8 * 5000 > found.batch_sizes_seen[0]
    assert found.scan_problem is None
    assert found.sample_sizes is not None
    assert 77 in found.sample_sizes.largest[:8]
    assert len(set(found.sample_sizes.largest)) == 200


def test_names_of_what_is_cut_to_one_length_are_alike() -> None:
    loader = DataLoader(Names(are_alike=True), batch_size=8, collate_fn=decoded_to_one_length)
    assert seen_in(loader) == Look(num_workers=0)


def test_batches_that_differ_by_chance_are_told() -> None:
    loader = DataLoader(Names(are_alike=True), batch_size=8, collate_fn=lambda names: torch.zeros(8, randint(100, 999)))
    found = seen_in(loader, 8)
    assert found.batch_sizes_seen is not None
    assert found.batch_sizes_seen[0] < found.batch_sizes_seen[1]


def test_a_file_that_cannot_be_decoded_is_told() -> None:
    def strict(names: list[str]) -> torch.Tensor:
        if any(name.endswith("123") for name in names):
            raise ValueError("clip 123 is corrupt")
        return decoded(names)

    found = seen_in(DataLoader(Names(are_alike=True), batch_size=8, collate_fn=strict))
    assert found.scan_problem == "ValueError: clip 123 is corrupt"


def test_samples_that_tell_the_largest_batch_are_not_collated_alone() -> None:
    num_collated: list[int] = []

    def counted(samples: list[dict[str, Any]]) -> torch.Tensor:
        num_collated.append(len(samples))
        return padded(samples)

    found = seen_in(DataLoader(Texts(), batch_size=16, collate_fn=counted), 16)
    assert found.sample_sizes is not None
    assert found.sample_sizes.largest_size == 101
    assert set(num_collated) == {sizes.MAX_CHECKED_BATCH_SIZE}


def broken(size: int) -> torch.Tensor:
    raise ValueError(size)


class Corrupt(Texts):
    """Cannot load what comes after `num_good` samples."""

    def __init__(self, num_good: int) -> None:
        super().__init__()
        self.num_good = num_good

    def __getitem__(self, index: int) -> dict[str, Any]:
        if len(self.seen) >= self.num_good:
            raise ValueError("corrupt sample\nof a file")
        return super().__getitem__(index)


@pytest.mark.parametrize(
    ("given", "num_seen", "problem"),
    [
        (Corrupt(42), 40, "ValueError: corrupt sample"),
        (Corrupt(0), None, "ValueError: corrupt sample"),
        (DataLoader(Corrupt(42), batch_size=4, num_workers=1), 40, "of a file"),
        (broken, None, "ValueError: 4"),
    ],
)
def test_what_ends_the_look_is_told_with_what_was_seen_before(given: Any, num_seen: int | None, problem: str) -> None:
    found = seen_in(given)
    assert (None if found.sample_sizes is None else found.sample_sizes.num_seen) == num_seen
    assert found.scan_problem == problem


@pytest.mark.parametrize(
    ("given", "num_workers"),
    [
        ([torch.zeros(1000 + index % 3) for index in range(50)], 0),
        (lambda size: torch.zeros(size, 3), None),
        (Stream(), None),
        (DataLoader(Stream(), batch_size=1), None),
        (DataLoader(Stream(), batch_size=1, num_workers=1), None),
        (DataLoader(Stream(), batch_size=1, num_workers=2), 2),
    ],
)
def test_nothing_is_said_of_what_is_alike(given: Any, num_workers: int | None) -> None:
    assert seen_in(given, 1) == Look(num_workers)


def batches_that_grow() -> Callable[[int], torch.Tensor]:
    lengths = iter(range(1, 1000))
    return lambda size: torch.zeros(size, next(lengths))


@pytest.mark.parametrize(
    "given",
    [
        batches_that_grow(),
        lambda size: iter([torch.zeros(size, length) for length in range(1, 33)]),
        lambda size: DataLoader(Batches(size), batch_size=None),
    ],
)
def test_batches_are_drawn_where_samples_cannot_be_looked_at(given: Any) -> None:
    found = seen_in(given, 4)
    assert found.sample_sizes is None
    assert found.batch_sizes_seen == (4, 4 * 32)


def test_a_description_holds_what_was_seen_unless_nobody_asks() -> None:
    context = Context(
        Workload(nn.Linear(1, 1), lambda model, batch: batch, DataLoader(Texts(), batch_size=4)), is_kept=False
    )
    asked = Describe(device="cpu", torch_state=torch_state.capture(), baseline_batch_size=32)
    described = worker.describe(context, asked, lambda event: None)
    assert described.num_workers == 0
    assert described.sample_sizes is not None
    assert not described.has_worst_batch
    asked = Describe(device="cpu", torch_state=torch_state.capture())
    assert worker.describe(context, asked, lambda event: None).sample_sizes is None


def test_a_named_worst_batch_needs_no_look() -> None:
    dataset = Texts()
    found = seen_in(DataLoader(dataset, batch_size=4), worst_batch=lambda size: torch.zeros(size, 512))
    assert found == Look(num_workers=0)
    assert dataset.seen == []


def test_what_is_drawn_next_stays_the_same() -> None:
    generator = torch.Generator().manual_seed(1)
    loader = DataLoader(Texts(), batch_size=4, shuffle=True, generator=generator)
    workload = Workload(nn.Linear(1, 1), lambda model, batch: batch, loader)

    def drawn() -> list[Any]:
        return [torch.rand(()).item(), random.random(), np.random.rand(), generator.get_state().tolist()]

    def seed() -> None:
        torch.manual_seed(3)
        random.seed(3)
        np.random.seed(3)

    seed()
    expected = drawn()
    seed()
    assert look(workload, 4).sample_sizes is not None
    assert drawn() == expected
