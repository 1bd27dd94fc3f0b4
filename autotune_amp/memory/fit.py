"""Which batch size fits into a memory: what to measure next, the model of what was measured, and its error. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from autotune_amp.core.memory_model import fit_memory
from autotune_amp.memory.results import LargestBatch

FARTHEST = 16  # times the largest batch size measured: where the model is held against one more
NUM_MEASURED = 3  # two make the model, the third says how far it is off
_NO_END = 2**40  # samples: more than any memory is asked for


def next_batch_size(
    measured: Mapping[int, int | None], first: int, limit_bytes: int, may_take_bytes: int, most: int | None
) -> int | None:
    """The batch size to measure next, None where enough is known or nothing more can be.

    `measured` is what each took, in bytes, None where it ran out of memory. `first` is the size that was asked for,
    `most` the samples that the data has; a size that a model puts above `may_take_bytes` is not tried.
    """
    known = {size: taken for size, taken in measured.items() if taken is not None}
    highest = min((size for size, taken in measured.items() if taken is None), default=(most or _NO_END) + 1) - 1
    if not measured:
        return first
    if not known:
        return min(measured) // 2 or None
    smallest, largest = min(known), max(known)
    if known[smallest] > limit_bytes:  # the model says nothing of what lies below all that was measured
        return min(smallest // 2, smallest * limit_bytes // known[smallest]) or (None if smallest == 1 else 1)
    model = fit_memory(known.items())
    if model is None:
        larger_fits = 2 * largest <= highest and 2 * known[largest] <= may_take_bytes
        return 2 * largest if larger_fits else largest // 2 or None
    if len(known) >= NUM_MEASURED:
        return None
    has_failed = len(known) < len(measured)  # then nothing larger is tried again
    end = largest_of(
        model, min(limit_bytes, may_take_bytes), largest if has_failed else min(highest, FARTHEST * largest)
    )
    wanted = [end, 2 * largest if end >= 2 * largest else 0, smallest // 2, (smallest + largest) // 2]
    return next((size for size in wanted if size >= 1 and size not in measured), None)


def largest_of(model: Callable[[float], float], limit_bytes: float, most: int) -> int:
    """The largest batch size up to `most` that a rising `model` puts within the limit, 0 where none is."""
    low, high = 0, most + 1
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if model(middle) <= limit_bytes else (low, middle)
    return low


def largest_batch(measured: Mapping[int, int | None], limit_bytes: int, most: int | None) -> LargestBatch | None:
    """The largest batch size that fits, by the model of all that was measured; None where fewer than two sizes ran."""
    known = sorted((size, taken) for size, taken in measured.items() if taken is not None)
    model, smaller_model = fit_memory(known), fit_memory(known[:-1])
    if model is None:
        return None
    largest, taken = known[-1]
    error = None if smaller_model is None else smaller_model(largest) / taken - 1
    end = most or _NO_END
    fits = max((size for size, found in known if found <= limit_bytes), default=0)

    def within(share: float) -> int:
        return max(fits, largest_of(lambda size: share * model(size), limit_bytes, end))

    by_model = within(1.0)
    is_endless = by_model == _NO_END
    return LargestBatch(
        batch_size=None if is_endless else by_model,
        cautious_batch_size=None if is_endless or error is None else within(1 + abs(error)),
        model_error=error,
        checked_batch_size=None if error is None else largest,
        bytes_per_sample=model(2 * largest) / largest - model(largest) / largest,
        measured=tuple(known),
        is_all_data=by_model == most,
    )
