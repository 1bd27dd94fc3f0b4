"""The user's data: batches of every size without end and from all over an epoch."""

from __future__ import annotations

import itertools
from collections import UserDict, namedtuple
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any

import pytest
import torch
from data_samples import LOADER, NUM_SAMPLES, Counting, Sorted
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    Sampler,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

from autotune_amp.core.errors import WorkloadError
from autotune_amp.trial import data

Pair = namedtuple("Pair", ["inputs", "targets"])


def pairs(size: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(size, 3), torch.zeros(size)


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
        (lambda size: DataLoader(Sorted(5), batch_size=size), "holds 5"),
        (TensorDataset(*pairs(5)), "holds 5"),
        (lambda size: DataLoader(Sorted(50), batch_size=16), "batch_size=16"),
    ],
)
def test_no_batch_too_few_samples_or_a_batch_size_that_is_ignored(given: Any, word: str) -> None:
    with pytest.raises(WorkloadError, match=word):
        next(data.stream(given, 8))


class Scenes(torch.utils.data.Dataset[Any]):
    """Samples of an object detector: an image of 3 channels and its boxes."""

    def __len__(self) -> int:
        return 21

    def __getitem__(self, index: int) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        if not 0 <= index < 21:
            raise IndexError(index)
        return torch.zeros(3, 6, 6 + index % 2), {"boxes": torch.zeros(2, 4), "index": torch.tensor(index)}


def zipped(samples: list[Any]) -> Any:
    return tuple(zip(*samples, strict=True))


def named_lists(samples: list[Any]) -> Any:
    return {"images": [image for image, _ in samples], "labels": [0 for _ in samples]}


def camera_first(samples: list[Any]) -> Any:
    return torch.zeros(3, 3), torch.zeros(100 * len(samples), 3)


def flattened(samples: list[Any]) -> Any:
    return torch.zeros(2), [len(samples)]


@pytest.mark.parametrize("collate", [zipped, named_lists, camera_first, flattened])
@pytest.mark.parametrize("arguments", [None, {"num_workers": 0}])
def test_a_loader_knows_how_many_samples_its_batches_hold_whatever_their_tensors_say(
    collate: Any, arguments: dict[str, int] | None
) -> None:
    def make(size: int) -> DataLoader[Any]:
        return DataLoader(Scenes(), batch_size=size, shuffle=True, collate_fn=collate)

    for given in (make(4), make, lambda size: DataLoader(Scenes(), batch_size=size, collate_fn=collate)):
        drawn = list(islice(data.open_data(given, 8, arguments).stream, 5))  # 2 of an epoch, whose last 5 samples go
        expected = collate([Scenes()[0]] * 8)
        for batch in drawn:
            assert [len(part) for part in tuple(batch)] == [len(part) for part in tuple(expected)]
            assert collate is not flattened or batch[1] == [8]


@pytest.mark.parametrize("collate", [zipped, named_lists])
def test_lists_count_where_no_loader_knows_the_number(collate: Any) -> None:
    def of(size: int) -> Any:
        return collate([Scenes()[index] for index in range(size)])

    assert data.num_samples(of(8), 8) == 8
    assert data.num_samples(next(data.stream(of, 8)), 8) == 8
    with pytest.raises(WorkloadError, match="held 7"):
        next(data.stream(lambda size: of(size - 1), 8))
    assert (data.num_samples(camera_first([0] * 8), 8) or 0) >= 8  # rays, not the 3 rows of the camera's matrix


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
    moved = data.move_batch({"pair": Pair(torch.zeros(2), [torch.zeros(3)]), "name": "x"}, device)
    assert isinstance(moved["pair"], Pair)
    assert {moved["pair"].inputs.device, moved["pair"].targets[0].device} == {device}
    assert moved["name"] == "x"


class AttributeDict(dict[str, Any]):
    """Whose `hasattr` raises, as this is often written."""

    __getattr__ = dict.__getitem__


@dataclass(frozen=True, slots=True)
class Scene:
    image: torch.Tensor
    name: str


def test_moving_keeps_the_class_of_the_batch() -> None:
    device, attributes = torch.device("meta"), AttributeDict(x=torch.zeros(2))
    moved = data.move_batch([attributes, UserDict(x=torch.zeros(2)), Scene(torch.zeros(2), "park")], device)
    assert [type(each) for each in moved] == [AttributeDict, UserDict, Scene]
    assert {moved[0].x.device, moved[1]["x"].device, moved[2].image.device} == {device}
    assert moved[2].name == "park"
    assert attributes["x"].device.type == "cpu", "the batch itself stays"


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
    opened = data.open_data(given, 4, {"num_workers": num_workers})
    assert opened.loader is not None
    assert opened.loader.num_workers == num_workers
    if num_workers == 0:
        assert data.num_samples(next(opened.stream), 4) == 4
    if given is LOADER and num_workers:
        assert (opened.loader.prefetch_factor, opened.loader.persistent_workers, opened.loader.timeout) == (4, True, 30)
        assert opened.loader.collate_fn is LOADER.collate_fn
    assert vars(LOADER) == before


class Doubling(DataLoader[Any]):
    """Changes the batches, by an attribute of its own."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.factor = 2.0

    def __iter__(self) -> Any:
        for (batch,) in super().__iter__():
            yield self.factor * batch


class KeepingItsIterator(DataLoader[Any]):
    """As loaders of timm and ultralytics do, whose workers go on over epochs."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.iterator = super().__iter__()

    def __iter__(self) -> Any:
        for _ in range(len(self)):
            yield next(self.iterator)


def test_a_loader_that_keeps_its_iterator_gives_batches_of_the_size_asked_for() -> None:
    opened = data.open_data(KeepingItsIterator(TensorDataset(torch.ones(40)), batch_size=2), 8)
    (batch,) = next(opened.stream)
    assert len(batch) == 8


def test_a_loader_that_changes_its_batches_changes_nothing_else() -> None:
    loader = Doubling(TensorDataset(torch.ones(40)), batch_size=2)
    sizes = data.rebuild_loader(loader, batch_size=None, sampler=range(3), collate_fn=lambda sample: len(sample))
    assert list(sizes) == [1, 1, 1]


@pytest.mark.parametrize("arguments", [{}, {"num_workers": 1}])
def test_a_loader_that_changes_its_batches_goes_on_doing_so(arguments: dict[str, int]) -> None:
    loader = Doubling(TensorDataset(torch.ones(40)), batch_size=2)
    opened = data.open_data(loader, 8, arguments)
    assert next(opened.stream).tolist() == [2.0] * 8
    assert (loader.batch_size, loader.num_workers) == (2, 0)


@pytest.mark.parametrize("given", [LOADER.dataset, LOADER, lambda size: DataLoader(LOADER.dataset, batch_size=size)])
def test_pinned_memory_and_prefetched_batches_are_set_and_nothing_is_prefetched_without_workers(given: Any) -> None:
    arguments = {"num_workers": 1, "pin_memory": True, "prefetch_factor": 5}
    loader = data.open_data(given, 4, arguments).loader
    assert loader is not None
    assert (loader.num_workers, loader.pin_memory, loader.prefetch_factor) == (1, True, 5)
    without = data.open_data(given, 4, {**arguments, "num_workers": 0}).loader
    assert without is not None
    assert without.prefetch_factor is None


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


def test_of_a_sampler_without_end_the_samples_of_a_long_epoch_are_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data, "_MAX_LISTED", 100)
    batches = (list(range(start, start + 4)) for start in itertools.count(step=4))
    spread = list(data.Spread(batches, itertools.cycle([0.5])))
    assert len(spread) == 25
    assert sorted(spread)[-1] == [96, 97, 98, 99]


def test_what_cannot_be_listed_keeps_its_order() -> None:
    for given in (DataLoader(Counting(), batch_size=4), lambda size: DataLoader(Counting(), batch_size=size)):
        assert drawn(given, 4, 1) == [[0, 1, 2, 3]]
