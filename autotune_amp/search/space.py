"""The legal candidates, and why the others are not. Pure: hardware, workload and options in, plain data out."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Literal

import msgspec

from autotune_amp.errors import InvalidRequestError
from autotune_amp.recommendation import Exclusion
from autotune_amp.trial.spec import Candidate

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping

    from autotune_amp.config import Precision
    from autotune_amp.hardware.types import Hardware
    from autotune_amp.search.options import SearchOptions
    from autotune_amp.trial.outcome import Description

ASSUMED_BATCH_SIZE = 32
MAX_BATCH_SIZES = 10
SEARCH_DOWN, SEARCH_UP = 8, 16  # without --batch-size: from an eighth of the baseline's batch to sixteen times it
SAME_MEMORY = 0.98  # peaks of one candidate differ by a percent or two between processes

_TRIED: tuple[Precision, ...] = ("fp32", "tf32", "bf16", "fp16")
_NO_FP8 = "this version has no fp8 training path: PyTorch's autocast has none"


class Space(msgspec.Struct, frozen=True, kw_only=True):
    """What can be tried.

    `candidates` are legal, unique by precision and batch size, ordered by precision and then batch size. `baseline`
    is measured even where it is not among them: as found, or outside the ranges asked for. `excluded` says what was
    left out before any trial, `notes` what was assumed. `weights` is what the parameters are kept in, `has_tf32`
    whether the device has it.
    """

    candidates: tuple[Candidate, ...]
    baseline: Candidate
    excluded: tuple[Exclusion, ...] = ()
    notes: tuple[str, ...] = ()
    weights: Literal["fp32", "bf16", "frozen_low"] = "fp32"
    has_tf32: bool = False


def build_space(hardware: Hardware, description: Description, options: SearchOptions) -> Space:
    """The space of a search; raises `InvalidRequestError` where the options leave nothing, naming what would do."""
    baseline, notes = _baseline(hardware, description, options)
    precisions, excluded = _legal_precisions(hardware, description, options)
    sizes = _batch_sizes(baseline.batch_size, description.num_samples, options)
    too_large = _first_too_large(baseline.batch_size, description.num_samples, options)
    if too_large is not None:
        reason = (
            f"the dataset has {description.num_samples} samples, fewer than one such batch; "
            "this and all larger batch sizes are left out"
        )
        excluded += [Exclusion(precision=p, batch_size=too_large, reason=reason) for p in precisions]
    candidates = tuple(
        Candidate(precision=p, batch_size=b, accumulation_steps=_accumulation(b, options))
        for p in precisions
        for b in sizes
    )
    return Space(
        candidates=candidates,
        baseline=baseline,
        excluded=tuple(excluded),
        notes=(*notes, *_weight_notes(description)),
        weights=description.weights,
        has_tf32="tf32" in hardware.precisions and hardware.precisions["tf32"].level != "unsupported",
    )


def without(candidates: Iterable[Candidate], exclusions: Collection[Exclusion]) -> tuple[Candidate, ...]:
    """The candidates that no exclusion names; one without a batch size names all of its precision."""
    named = {(exclusion.precision, exclusion.batch_size) for exclusion in exclusions}
    return tuple(c for c in candidates if (c.precision, c.batch_size) not in named and (c.precision, None) not in named)


def needs_at_least_as_much(measured_peaks: Mapping[Candidate, int], precision: Precision, than: Precision) -> bool:
    """Whether `precision` took at least as much memory as `than` at every batch size measured in both (one at least).

    `measured_peaks` are bytes.
    """
    ours, theirs = _peaks(measured_peaks, precision), _peaks(measured_peaks, than)
    shared = ours.keys() & theirs.keys()
    return bool(shared) and all(ours[size] >= SAME_MEMORY * theirs[size] for size in shared)


def excluded_by_oom(space: Space, measured_peaks: Mapping[Candidate, int], failed: Candidate) -> tuple[Exclusion, ...]:
    """What need not be tried once `failed` ran out of memory, `failed` itself and what was measured left out.

    That is every larger batch of its precision, and the same or a larger batch of every precision that needs at
    least as much. `measured_peaks` are bytes.
    """

    def is_out(candidate: Candidate) -> bool:
        if candidate.precision == failed.precision:
            return candidate.batch_size > failed.batch_size
        return candidate.batch_size >= failed.batch_size and needs_at_least_as_much(
            measured_peaks, candidate.precision, failed.precision
        )

    reason = f"{failed} ran out of memory, and this needs at least as much"
    return tuple(
        Exclusion(precision=c.precision, batch_size=c.batch_size, reason=reason)
        for c in space.candidates
        if c not in measured_peaks and is_out(c)
    )


def _peaks(measured_peaks: Mapping[Candidate, int], precision: Precision) -> dict[int, int]:
    return {c.batch_size: peak for c, peak in measured_peaks.items() if c.precision == precision}


def _baseline(hardware: Hardware, description: Description, options: SearchOptions) -> tuple[Candidate, list[str]]:
    precision, as_found = description.as_found_precision, not description.is_as_found_strict
    size = description.batch_size
    notes: list[str] = []
    if options.baseline is not None:
        (precision, size), as_found = options.baseline, False
        reason = _why_not(precision, hardware, description)
        if reason is not None:
            raise InvalidRequestError(
                f"--baseline is {precision}:{size}, which cannot be trained on {hardware.device}: {reason}.",
                f"Give a baseline in {' or '.join(p for p in _TRIED if _why_not(p, hardware, description) is None)}.",
            )
    if size is None:
        size = ASSUMED_BATCH_SIZE
        notes.append(
            f"The data has no batch size of its own: the baseline is assumed to be {precision} at batch {size}. "
            f"Say what you run today with --baseline PRECISION:BATCH."
        )
    if description.num_samples is not None and size > description.num_samples:
        notes.append(
            f"The baseline's batch size is {description.num_samples} instead of {size}: "
            "the dataset has no more samples."
        )
        size = max(1, description.num_samples)
    effective = options.effective_batch_size
    if effective is not None and effective % size:
        largest = max(d for d in _divisors(effective) if d <= size)
        notes.append(
            f"The baseline's batch size is {largest} instead of {size}: "
            f"{size} does not divide the effective batch size {effective}."
        )
        size = largest
    baseline = Candidate(
        precision=precision, batch_size=size, accumulation_steps=_accumulation(size, options), as_found=as_found
    )
    return baseline, notes


def _accumulation(size: int, options: SearchOptions) -> int:
    return 1 if options.effective_batch_size is None else options.effective_batch_size // size


def _legal_precisions(
    hardware: Hardware, description: Description, options: SearchOptions
) -> tuple[list[Precision], list[Exclusion]]:
    legal: list[Precision] = []
    excluded: list[Exclusion] = []
    for precision in options.precisions or (*_TRIED, "fp8"):
        reason = _why_not(precision, hardware, description)
        if reason is None:
            legal.append(precision)
        else:
            excluded.append(Exclusion(precision=precision, batch_size=None, reason=reason))
    if not legal:
        reasons = "; ".join(f"{e.precision}: {e.reason}" for e in excluded)
        usable = [p for p in _TRIED if _why_not(p, hardware, description) is None]
        raise InvalidRequestError(
            f"None of the precisions asked for can be trained in on {hardware.device}: {reasons}.",
            f"Use --precision with {' or '.join(usable)}." if usable else "Choose another device with --device.",
        )
    return legal, excluded


def _why_not(precision: Precision, hardware: Hardware, description: Description) -> str | None:
    if precision == "fp8":
        return _NO_FP8
    capability = hardware.precisions.get(precision)
    if capability is None:
        return f"the probe of {hardware.device} says nothing of it"
    if capability.level == "unsupported":
        return capability.reason
    if description.weights == "bf16" and precision == "fp16":
        return (
            "the weights are kept in bf16: values beyond fp16's range would overflow in the cast, "
            "and the gradient scaler is made for fp32 gradients"
        )
    if description.weights == "bf16" and precision == "tf32":
        return "the weights are kept in bf16: TF32 concerns fp32 products only, so it is the same as fp32"
    return None


def _weight_notes(description: Description) -> tuple[str, ...]:
    if description.weights == "bf16":
        return (
            "The weights are kept in bf16: the rows called fp32 run the model as it is, in bf16, without autocast.",
        )
    if description.weights == "frozen_low":
        return ("Frozen weights are kept in low precision: the rows called fp32 compute with them as they are.",)
    return ()


def _range(base: int, options: SearchOptions) -> tuple[int, int]:
    return options.batch_size or (max(1, base // SEARCH_DOWN), base * SEARCH_UP)


def _grid(base: int, options: SearchOptions) -> list[int]:
    """Every size worth a thought in the range: the baseline halved and doubled, or the divisors of what is exact."""
    low, high = _range(base, options)
    if options.effective_batch_size is not None:
        sizes = set(_divisors(options.effective_batch_size))
    else:
        powers = [2**k for k in range(max(base, high).bit_length() + 1)]
        sizes = {base // power for power in powers} | {base * power for power in powers}
        if options.batch_size is not None:
            sizes |= {low, high}
    return sorted(size for size in sizes if low <= size <= high)


def _batch_sizes(base: int, num_samples: int | None, options: SearchOptions) -> list[int]:
    low, high = _range(base, options)
    limit = high if num_samples is None else max(1, min(high, num_samples))
    sizes = [size for size in _grid(base, options) if size <= limit]
    if options.batch_size is not None and options.effective_batch_size is None and low <= limit:
        sizes = sorted({*sizes, limit})
    if not sizes:
        raise _nothing_left(low, high, num_samples, options)
    return _thin(sizes, keep=base)


def _first_too_large(base: int, num_samples: int | None, options: SearchOptions) -> int | None:
    return next((size for size in _grid(base, options) if num_samples is not None and size > num_samples), None)


def _nothing_left(low: int, high: int, num_samples: int | None, options: SearchOptions) -> InvalidRequestError:
    if num_samples is not None and low > num_samples:
        return InvalidRequestError(
            f"--batch-size is {low}:{high}, but the dataset has only {num_samples} samples.",
            f"Give a range that begins at {num_samples} or less.",
        )
    effective = options.effective_batch_size
    assert effective is not None  # without it, low itself is in the grid
    divisors = [d for d in _divisors(effective) if num_samples is None or d <= num_samples]
    named = ", ".join(map(str, _thin(divisors, keep=1)))
    return InvalidRequestError(
        f"No batch size from {low} to {high} divides the effective batch size {effective}.",
        f"Give a --batch-size range that holds one of {named}, or another --effective-batch-size.",
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


def _divisors(number: int) -> list[int]:
    small = [d for d in range(1, math.isqrt(number) + 1) if number % d == 0]
    return sorted({*small, *(number // d for d in small)})
