"""Search for the largest batch size that fits into memory: the next size to measure, the model, and its error. Pure."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

from autotune_amp.core.intervals import fit_memory
from autotune_amp.memory.results import LargestBatch

# Two sizes determine the model, a third gives its error. Until a size near the limit was measured, more are: a line
# through small batches may be wrong by a factor of two (studies/memory_fit).
LEAST_MEASURED, MOST_MEASURED = 3, 6
NEAR = 0.9  # share of the limit
FARTHEST = 4  # multiple of the largest batch size measured
_NO_END = 2**40  # samples: more than any memory holds


def next_batch_size(
    measured: Mapping[int, int | None], first: int, limit_bytes: int, may_take_bytes: int, most: int | None
) -> int | None:
    """Return the batch size to measure next, None if enough is known or no further size can be measured.

    `measured` maps each size to its memory in bytes, None if it ran out of memory. `first` is the requested size,
    `most` the number of samples in the data. Sizes that the model predicts above `may_take_bytes` are not tried.
    """
    known = {size: taken for size, taken in measured.items() if taken is not None}
    failed = min((size for size, taken in measured.items() if taken is None), default=None)
    if not measured:
        return first
    if not known:
        return min(measured) // 2 or None
    smallest, largest = min(known), max(known)
    if known[smallest] > limit_bytes:  # the model says nothing about sizes below all measured ones
        return min(smallest // 2, smallest * limit_bytes // known[smallest]) or (None if smallest == 1 else 1)
    target_bytes = min(limit_bytes, may_take_bytes)
    highest = min(most or _NO_END, FARTHEST * largest, failed - 1 if failed else _NO_END)
    model = _model(known, limit_bytes)
    if model is None:
        larger_fits = 2 * largest <= highest and 2 * known[largest] <= may_take_bytes
        return 2 * largest if larger_fits else largest // 2 or None
    is_near = any(NEAR * target_bytes <= taken <= target_bytes for taken in known.values())
    is_enough = len(known) >= LEAST_MEASURED
    if is_enough and (is_near or failed or len(known) >= MOST_MEASURED):
        return None
    end = largest_of(model, target_bytes, min(highest, math.isqrt(largest * failed)) if failed else highest)
    others = () if is_enough else (2 * largest if 2 * largest <= end else 0, smallest // 2, (smallest + largest) // 2)
    return next((size for size in (end, *others) if size >= 1 and size not in measured), None)


def largest_of(model: Callable[[float], float], limit_bytes: float, most: int) -> int:
    """Return the largest batch size up to `most` that a rising `model` puts within the limit, 0 if there is none."""
    low, high = 0, most + 1
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if model(middle) <= limit_bytes else (low, middle)
    return low


def largest_batch(measured: Mapping[int, int | None], limit_bytes: int, most: int | None) -> LargestBatch | None:
    """Return the largest batch size that fits, by the memory model; None if fewer than two sizes ran."""
    known = {size: taken for size, taken in sorted(measured.items()) if taken is not None}
    model = _model(known, limit_bytes)
    if model is None:
        return None
    checked = min(known, key=lambda size: abs(known[size] - limit_bytes))
    others = _model({size: taken for size, taken in known.items() if size != checked}, limit_bytes)
    error = None if others is None else others(checked) / known[checked] - 1
    fits = max((size for size, taken in known.items() if taken <= limit_bytes), default=0)

    def within(share: float) -> int:
        return max(fits, largest_of(lambda size: share * model(size), limit_bytes, most or _NO_END))

    by_model = within(1.0)
    is_endless = by_model == _NO_END
    end = max(known)
    return LargestBatch(
        batch_size=None if is_endless else by_model,
        cautious_batch_size=None if is_endless or error is None else within(1 + abs(error)),
        model_error=error,
        checked_batch_size=None if error is None else checked,
        bytes_per_sample=(model(2 * end) - model(end)) / end,
        measured=tuple(known.items()),
        is_all_data=by_model == most,
    )


def _model(known: Mapping[int, int], limit_bytes: int) -> Callable[[float], float] | None:
    """Return the memory model around the limit; of the sizes above it only the smallest is used."""
    points = sorted(known.items())
    num_fitting = next((number for number, (_, taken) in enumerate(points) if taken > limit_bytes), len(points))
    return fit_memory(points[: max(2, num_fitting + 1)])
