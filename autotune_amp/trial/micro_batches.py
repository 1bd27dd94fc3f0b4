"""Micro-batches: a whole batch of the user's data and the same samples in parts, each as the loader would have made it.

Samples that make the parts unequal are picked on purpose: where nearly all are cut to one length, sixteen that are
drawn are often all of it, and a mean over tokens then looks like one over samples.
"""

from __future__ import annotations

import copy
import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from functools import partial
from itertools import chain, islice
from typing import Any, TypeAlias

import torch
from torch.utils.data import DataLoader, IterableDataset

from autotune_amp.core.outcome import MIN_CUT_SAMPLES
from autotune_amp.numerics import batches
from autotune_amp.numerics.accumulation import IGNORED_LABEL, num_micro_batches
from autotune_amp.precision import torch_state
from autotune_amp.trial import data
from autotune_amp.trial.sizes import MAX_SCANNED_SAMPLES

LOOK_SECONDS = 1.0
MAX_SAMPLES_SEEN = 2048  # what is rarer than one of so many is in few windows, and weighs little there
SAMPLES_AT_ONCE = 4  # as in sizes.py: between answers of a worker the clock is looked at

Counts: TypeAlias = dict[str, int]


def counts_of_samples(loader: DataLoader[Any], order: Sequence[Any], seconds: float) -> list[Counts]:
    """The counts of the samples in `order`, each collated alone, until `seconds` are over or the user's code raises.

    A worker process fetches them if the loader has any: a dataset opened here may not survive their start.
    """
    found: list[Counts] = []
    looking = data.rebuilt(
        loader,
        min(loader.num_workers, 1),
        batch_size=SAMPLES_AT_ONCE,
        sampler=order,
        collate_fn=partial(_counts_of_each, loader.collate_fn),
        generator=torch.Generator(),
        pin_memory=False,
    )
    deadline = None
    try:
        for several in looking:
            found += several
            # From the first answer on: starting the worker takes its own time.
            deadline = deadline or time.monotonic() + seconds
            if time.monotonic() > deadline:
                break
    except Exception:  # noqa: S110 - a collate function may want more than one sample: then they are taken as drawn
        pass
    return found


def counts(batch: Any) -> Counts:
    """What a loss may average over: how many entries each tensor has, and how many of them count."""
    tensors = dict(batches.tensors(batch))
    kept = {f"{name} != {IGNORED_LABEL}": int((tensor != IGNORED_LABEL).sum()) for name, tensor in tensors.items()}
    set_ones = {f"{name} != 0": int(tensor.count_nonzero()) for name, tensor in tensors.items()}
    return {**kept, **set_ones, **{name: tensor.numel() for name, tensor in tensors.items()}}


def copied(sample: Any) -> Any:
    """A deep copy, for a collate function that takes apart what it is given.

    Tensors are cloned: deepcopy, and a worker's queue, would take the whole storage of one that is a row of it.
    """
    return copy.deepcopy(sample, {id(tensor): tensor.clone() for _, tensor in batches.tensors(sample)})


def picked(seen: Sequence[Mapping[str, int]], num: int) -> list[int]:
    """Which `num` of the samples seen to take: first half of them unlike most others, then ordinary ones.

    Of each count those below its median, or above where there are many more of these. Every count has its turn: in one
    of them all samples may be alike, and in another they differ by chance. Samples without any label come last: a
    micro-batch of nothing else has no mean, which in a training hardly happens.
    """
    beside = _beside_median(seen)
    unlabelled = frozenset(index for index, of_sample in enumerate(seen) if _lacks_labels(of_sample))
    unlike: list[int] = []
    while len(unlike) < num // 2:
        left = [group for group in beside if not group.issubset(unlabelled.union(unlike))]
        if not left:
            break
        poorest = min(left, key=lambda group: len(group.intersection(unlike)))
        unlike.append(min(poorest - unlabelled.union(unlike)))
    others = [index for index in range(len(seen)) if index not in unlike]
    ordinary = sorted(others, key=lambda index: (index in unlabelled, sum(index in group for group in beside)))
    return unlike + ordinary[: num - len(unlike)]


def _beside_median(seen: Sequence[Mapping[str, int]]) -> list[frozenset[int]]:
    groups = []
    for name in dict.fromkeys(name for of_sample in seen for name in of_sample):
        column = [of_sample.get(name, 0) for of_sample in seen]
        median = statistics.median_low(column)
        below = frozenset(index for index, count in enumerate(column) if count < median)
        above = frozenset(index for index, count in enumerate(column) if count > median)
        groups.append(below if 2 * len(below) >= len(above) else above)  # the shorter ones take less memory
    return [group for group in groups if group]


def _lacks_labels(of_sample: Mapping[str, int]) -> bool:
    return any(name.endswith(f" != {IGNORED_LABEL}") and not count for name, count in of_sample.items())


def _counts_of_each(collate: Callable[[Any], Any], samples: list[Any]) -> list[Counts]:
    return [counts(collate([copied(sample)])) for sample in samples]


class CannotCutError(Exception):
    """Why there are no micro-batches; no error of the user's."""


def whole_and_parts(user_data: Any, num_samples: int, seed: int, seconds: float = LOOK_SECONDS) -> list[Any]:
    """A batch of `num_samples`, and then its micro-batches, equal in size and in its order.

    The samples of a map-style dataset are picked after a look of at most `seconds`, and collated twice, so that padding
    is what it really is. Elsewhere the first batch is cut along the first dimension of its tensors, as is one whose
    collating draws at random. Raises `CannotCutError` where that cannot be done, and what the user's data
    raises.
    """
    if num_samples < MIN_CUT_SAMPLES:
        raise CannotCutError(f"fewer than {MIN_CUT_SAMPLES} samples cannot be cut into micro-batches of two at least")
    opened = data.opened(user_data, num_samples)
    with closing(opened.stream):
        if opened.loader is None or not _has_indices(opened.loader):
            return _cut_batch(next(opened.stream), num_samples)
    return _collated(opened.loader.collate_fn, _samples(opened.loader, num_samples, seed, seconds), seed)


def _has_indices(loader: DataLoader[Any]) -> bool:
    """Whether it fetches samples one by one and collates them; else the dataset gives ready batches, or a stream."""
    return loader.batch_sampler is not None and not isinstance(loader.dataset, IterableDataset)


def _samples(loader: DataLoader[Any], num_samples: int, seed: int, seconds: float) -> list[Any]:
    """Picked out of what the loader draws from; by a worker process if it has them, as there the dataset may differ."""
    sampler = loader.sampler if loader.batch_size is not None else chain.from_iterable(loader.batch_sampler or ())
    drawn = list(islice(sampler, MAX_SCANNED_SAMPLES))
    # Not the first, as a loader may go from the longest to the shortest.
    order = random.Random(seed).sample(drawn, min(len(drawn), MAX_SAMPLES_SEEN))  # noqa: S311 - no secret
    positions = picked(counts_of_samples(loader, order, seconds), num_samples)
    rest = [position for position in range(len(order)) if position not in positions]
    torch_state.seed(seed)  # however many were looked at
    alone = data.rebuilt(
        loader,
        min(loader.num_workers, 1),
        batch_size=None,
        sampler=[order[position] for position in (positions + rest)[:num_samples]],
        collate_fn=copied,
        generator=torch.Generator(),
        pin_memory=False,
    )
    samples = list(alone)
    if len(samples) < num_samples:
        raise CannotCutError(f"the data holds {len(samples)} samples, fewer than the {num_samples} of a batch")
    return samples


def _collated(collate: Callable[[Any], Any], samples: list[Any], seed: int) -> list[Any]:
    def of(part: list[Any], with_seed: int = seed) -> Any:
        torch_state.seed(with_seed)
        return collate(copied(part))

    whole = of(samples)
    num_samples = len(samples)
    if not _are_equal(whole, of(samples, seed + 1)):  # it masks or augments at random: micro-batches differ from it
        return _cut_batch(whole, num_samples)
    size = num_samples // num_micro_batches(num_samples)
    return [whole, *(of(samples[start : start + size]) for start in range(0, num_samples, size))]


def _cut_batch(batch: Any, num_samples: int) -> list[Any]:
    found = batches.first_dimensions(batch)
    if len(found) != 1 or min(found) < num_samples:
        dimensions = f"tensors with first dimensions {sorted(found)}" if found else "no tensors"
        raise CannotCutError(f"a batch of {num_samples} samples has {dimensions} and cannot be cut into smaller ones")
    whole = batches.cut(batch, num_samples)[0]
    return [whole, *batches.cut(whole, num_samples // num_micro_batches(num_samples))]


def _are_equal(one: Any, other: Any) -> bool:
    ours, theirs = dict(batches.tensors(one)), dict(batches.tensors(other))
    return ours.keys() == theirs.keys() and all(_same(ours[name], theirs[name]) for name in ours)


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.shape == other.shape and torch.equal(one.nan_to_num(), other.nan_to_num())
