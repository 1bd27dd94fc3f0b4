"""Batches from places all over an epoch: where samples are sorted or grouped, the first ones are like no others."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain, islice
from typing import Any, NamedTuple

from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

# In these orders the first batches are as good as any.
_SHUFFLED = (RandomSampler, SubsetRandomSampler, WeightedRandomSampler)
# Any few batches in a row come from all over an epoch: one from each of so many parts of it.
_NUM_PARTS = 8
# An epoch is listed as far as that, and not at all where its sampler takes long over it, as one that opens files does.
_MAX_LISTED_INDICES, _LISTING_SECONDS, _NUM_LISTED_AT_ONCE = 1_000_000, 1.0, 64
_MAX_PLACES = 100_000


def is_ordered(loader: DataLoader[Any]) -> bool:
    """Whether its batches come in an order that can be listed and that does not shuffle them."""
    if isinstance(loader.dataset, IterableDataset):
        return False
    own: Any = loader.sampler if loader.batch_sampler is None else loader.batch_sampler
    return type(own.sampler if type(own) is BatchSampler else own) not in _SHUFFLED


def shares() -> Iterator[float]:
    """Random places as shares of an epoch, always the same ones."""
    chance = random.Random(0)  # noqa: S311 - no secret
    while True:
        for part in chance.sample(range(_NUM_PARTS), _NUM_PARTS):
            yield (part + chance.random()) / _NUM_PARTS


class Spread(Sampler[Any]):
    """What `sampler` draws in an epoch, each once, from the places that `shares` says.

    The same shares give candidates alike batches, whatever their batch sizes. Of a very long epoch only some are drawn.
    Where listing it takes long, the order is the sampler's own.
    """

    def __init__(self, sampler: Iterable[Any], shares: Iterator[float]) -> None:
        self.sampler = sampler
        self._shares = shares

    def __iter__(self) -> Iterator[Any]:
        order = _order(self.sampler)
        if not isinstance(order, _Order):
            yield from order
            return
        num_places = min(order.num, _MAX_PLACES)
        left = list(range(num_places))
        while left:
            place = left.pop(int(next(self._shares) * len(left)))
            yield order.at(place * order.num // num_places)


class _Order(NamedTuple):
    """What a sampler draws, listed: how many there are, and each by its place."""

    num: int
    at: Callable[[int], Any]


def _order(sampler: Iterable[Any]) -> _Order | Iterator[Any]:
    if type(sampler) is not BatchSampler:
        listed = _listed(sampler)
        return _Order(len(listed), listed.__getitem__) if isinstance(listed, Sequence) else listed
    size, indices = sampler.batch_size, _listed(sampler.sampler)
    if not isinstance(indices, Sequence):
        return iter(BatchSampler(indices, size, sampler.drop_last))
    known = indices
    num = len(known) // size if sampler.drop_last else -(-len(known) // size)
    return _Order(num, lambda place: list(known[place * size : (place + 1) * size]))


def _listed(sampler: Iterable[Any]) -> Sequence[Any] | Iterator[Any]:
    """All it draws, or the drawing itself where that takes long."""
    if type(sampler) is SequentialSampler:
        return range(len(sampler))
    began = time.monotonic()
    drawing = iter(sampler)
    listed: list[Any] = []
    num_indices = 0
    while num_indices < _MAX_LISTED_INDICES:
        more = list(islice(drawing, _NUM_LISTED_AT_ONCE))
        if not more:
            break
        listed += more
        num_indices += sum(len(item) if isinstance(item, list) else 1 for item in more)
        if time.monotonic() - began > _LISTING_SECONDS:
            return chain(listed, drawing)
    return listed
