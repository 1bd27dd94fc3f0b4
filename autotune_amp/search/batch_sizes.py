"""Which batch sizes are tried: the divisors of an effective batch size that is kept, or a free range. Pure."""

from __future__ import annotations

import math
from typing import NamedTuple

from autotune_amp.core.errors import InvalidRequestError

MAX_BATCH_SIZES = 10
# Without --batch-size: from an eighth of the baseline's batch up to the effective batch or, where that is free, to
# sixteen times the baseline's.
SEARCH_DOWN, SEARCH_UP = 8, 16
# Sizes between an eighth of an effective batch and all of it: a power of two has four.
FEW_SIZES, ENOUGH_SIZES = 2, 4
NEIGHBOUR_SHARE = 0.1


class Sizing(NamedTuple):
    """What bounds the batch sizes, in samples on one device.

    `baseline` is what the user runs today, `effective` what one optimizer step keeps to (None: free), `asked` the range
    asked for with --batch-size, `num_samples` the dataset's length. `num_ranks` share the effective batch that the user
    speaks of.
    """

    baseline: int
    effective: int | None = None
    asked: tuple[int, int] | None = None
    num_samples: int | None = None
    num_ranks: int = 1


def batch_sizes(sizing: Sizing) -> list[int]:
    """What is tried, ascending; raises `InvalidRequestError` where nothing is left, naming what would do."""
    low, high = _range(sizing)
    limit = high if sizing.num_samples is None else max(1, min(high, sizing.num_samples))
    sizes = [size for size in _grid(sizing) if size <= limit]
    if sizing.asked is not None and sizing.effective is None and low <= limit:
        sizes = sorted({*sizes, limit})
    if not sizes:
        raise _nothing_left(sizing, low, high)
    return _thin(sizes, keep=sizing.baseline)


def first_too_large(sizing: Sizing) -> int | None:
    """The smallest size in the range that the dataset has too few samples for."""
    return next((s for s in _grid(sizing) if sizing.num_samples is not None and s > sizing.num_samples), None)


def largest_divisor(number: int, at_most: int) -> int:
    """The largest divisor of `number` up to `at_most`."""
    return max(d for d in divisors(number) if d <= at_most)


def divisors(number: int) -> list[int]:
    """All of them, ascending."""
    small = [d for d in range(1, math.isqrt(number) + 1) if number % d == 0]
    return sorted({*small, *(number // d for d in small)})


def has_few(effective: int) -> bool:
    """Whether an effective batch size leaves hardly a choice of batch sizes: a prime, or twice a prime."""
    return _num_sizes(effective) <= FEW_SIZES


def neighbours(effective: int) -> list[int]:
    """The nearest effective batch size within a tenth on either side that leaves a choice; empty for the smallest."""
    reach = int(NEIGHBOUR_SHARE * effective)
    below = (n for n in range(effective - 1, effective - reach - 1, -1) if _num_sizes(n) >= ENOUGH_SIZES)
    above = (n for n in range(effective + 1, effective + reach + 1) if _num_sizes(n) >= ENOUGH_SIZES)
    return [n for n in (next(below, None), next(above, None)) if n is not None]


def of_all_ranks(effective: int, num_ranks: int) -> str:
    """An effective batch size in the terms of --effective-batch-size."""
    return f"{effective}" if num_ranks == 1 else f"{effective * num_ranks} ({effective} on each of {num_ranks} ranks)"


def _num_sizes(effective: int) -> int:
    return sum(d >= effective // SEARCH_DOWN for d in divisors(effective))


def _range(sizing: Sizing) -> tuple[int, int]:
    high = SEARCH_UP * sizing.baseline if sizing.effective is None else sizing.effective
    return sizing.asked or (max(1, sizing.baseline // SEARCH_DOWN), high)


def _grid(sizing: Sizing) -> list[int]:
    """Every size worth a thought in the range: the divisors of what is kept, or the baseline halved and doubled."""
    base, (low, high) = sizing.baseline, _range(sizing)
    if sizing.effective is not None:
        sizes = set(divisors(sizing.effective))
    else:
        powers = [2**k for k in range(max(base, high).bit_length() + 1)]
        sizes = {base // power for power in powers} | {base * power for power in powers}
        if sizing.asked is not None:
            sizes |= {low, high}
    return sorted(size for size in sizes if low <= size <= high)


def _nothing_left(sizing: Sizing, low: int, high: int) -> InvalidRequestError:
    num_samples, effective = sizing.num_samples, sizing.effective
    if num_samples is not None and low > num_samples:
        return InvalidRequestError(
            f"--batch-size is {low}:{high}, but the dataset has only {num_samples} samples.",
            f"Give a range that begins at {num_samples} or less.",
        )
    assert effective is not None  # without it, low itself is in the grid
    fitting = [d for d in divisors(effective) if num_samples is None or d <= num_samples]
    named = ", ".join(map(str, _thin(fitting, keep=1)))
    return InvalidRequestError(
        f"No batch size from {low} to {high} divides the effective batch size "
        f"{of_all_ranks(effective, sizing.num_ranks)}, which is kept.",
        f"Give a --batch-size range that holds one of {named}, or --effective-batch-size free, which lets it change.",
    )


def _thin(sizes: list[int], keep: int) -> list[int]:
    """At most `MAX_BATCH_SIZES` of the sorted `sizes`, evenly spread over the logarithm; both ends and `keep` stay."""
    if len(sizes) <= MAX_BATCH_SIZES:
        return sizes
    num = MAX_BATCH_SIZES - 1  # one place is for `keep`
    ratio = math.log(sizes[-1] / sizes[0]) / (num - 1)
    wanted = [sizes[0] * math.exp(ratio * k) for k in range(num)]
    chosen = {min(sizes, key=lambda size: abs(math.log(size / target))) for target in wanted}
    return sorted(chosen | {sizes[0], sizes[-1]} | ({keep} & set(sizes)))
