"""One whole batch of the user's data, and the same samples as micro-batches, each as the loader would have made it."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from contextlib import closing, suppress
from itertools import chain, islice
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset

from autotune_amp.core.fidelity import MIN_CUT_SAMPLES
from autotune_amp.numerics import batches
from autotune_amp.numerics.accumulation import num_micro_batches
from autotune_amp.precision import torch_state
from autotune_amp.trial import data
from autotune_amp.trial.sizes import MAX_SCANNED_SAMPLES
from autotune_amp.trial.unequal import LOOK_SECONDS, MAX_SAMPLES_SEEN, copied, counts_of_samples, inequality, picked

MAX_BATCHES_SEEN = 16


class CannotCutError(Exception):
    """Why there are no micro-batches; no error of the user's."""


def whole_and_pieces(user_data: Any, num_samples: int, seed: int, seconds: float = LOOK_SECONDS) -> list[Any]:
    """A batch of `num_samples`, and then its micro-batches, equal in size and in its order, unequal in what counts.

    The samples of a map-style dataset are picked after a look of at most `seconds`, and collated twice, so that padding
    is what it really is. Elsewhere the most unequal of some batches is cut along the first dimension of its tensors, as
    is one whose collating draws at random. Raises `CannotCutError` where that cannot be done, and what the user's data
    raises.
    """
    if num_samples < MIN_CUT_SAMPLES:
        raise CannotCutError(f"fewer than {MIN_CUT_SAMPLES} samples cannot be cut into micro-batches of two at least")
    opened = data.opened(user_data, num_samples)
    with closing(opened.stream):
        if opened.loader is None or not _has_indices(opened.loader):
            return _most_unequal(opened.stream, num_samples, seconds)
    return _collated(opened.loader.collate_fn, _samples(opened.loader, num_samples, seed, seconds), seed)


def _has_indices(loader: DataLoader[Any]) -> bool:
    """Whether it fetches samples one by one and collates them; else the dataset gives ready batches, or a stream."""
    return loader.batch_sampler is not None and not isinstance(loader.dataset, IterableDataset)


def _most_unequal(stream: data.Stream, num_samples: int, seconds: float) -> list[Any]:
    """Of the first batches the one whose micro-batches are the most unequal."""
    best = _cut_batch(next(stream), num_samples)
    deadline = time.monotonic() + seconds
    with suppress(Exception):  # of batches that nobody had asked for
        for batch in islice(stream, MAX_BATCHES_SEEN - 1):
            best = max(best, _cut_batch(batch, num_samples), key=lambda made: inequality(made[1:]))
            if time.monotonic() > deadline:
                break
    return best


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
