"""Samples of which micro-batches hold unequal shares, picked on purpose: a draw has them only by luck.

Where nearly all samples are cut to one length, sixteen that are drawn are often all of it, and a mean over tokens then
looks like one over samples.
"""

from __future__ import annotations

import copy
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, TypeAlias

import torch
from torch.utils.data import DataLoader

from autotune_amp.numerics import batches
from autotune_amp.numerics.accumulation import IGNORED_LABEL
from autotune_amp.trial import data

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


def inequality(pieces: Sequence[Any]) -> float:
    """By how much the micro-batches part in what may count, from the least to the most, added up over all of it."""
    by_piece = [counts(piece) for piece in pieces]
    columns = [[of_piece.get(name, 0) for of_piece in by_piece] for name in by_piece[0]]
    return sum(1 - min(column) / max(column) for column in columns if max(column))


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
