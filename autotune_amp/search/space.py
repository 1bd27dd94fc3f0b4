"""The legal settings, and why the others are not: what the hardware, the workload, the options and outcomes rule out.

Which batch sizes are tried follows from the effective batch size: its divisors where it is kept, else a free range.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Literal, NamedTuple

import msgspec

from autotune_amp.core.errors import InvalidRequestError
from autotune_amp.core.outcome import Failure, Measurement
from autotune_amp.core.recommendation import Exclusion
from autotune_amp.core.setting import Setting
from autotune_amp.core.text import sentence

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping, Sequence

    from autotune_amp.core.hardware import Hardware
    from autotune_amp.core.outcome import Accumulation, Description, Outcome
    from autotune_amp.core.setting import Precision
    from autotune_amp.search.options import SearchOptions

ASSUMED_BATCH_SIZE = 32
MAX_BATCH_SIZES = 10
# Without --batch-size: from an eighth of the baseline's batch up to the effective batch or, where that is free, to
# sixteen times the baseline's.
SEARCH_DOWN, SEARCH_UP = 8, 16
# Sizes between an eighth of an effective batch and all of it: a power of two has four.
FEW_SIZES, ENOUGH_SIZES = 2, 4
NEIGHBOUR_SHARE = 0.1
HOPELESS = 5.0  # times slower at the same batch: no batch size makes up for it
SAME_MEMORY = 0.98  # peaks of one candidate differ by a percent or two between processes

_TRIED: tuple[Precision, ...] = ("fp32", "tf32", "bf16", "fp16")
_FREE = "--effective-batch-size free tries them without it."
_NO_FP8 = "this version has no fp8 training path: PyTorch's autocast has none"


class Space(msgspec.Struct, frozen=True, kw_only=True):
    """What can be tried.

    `candidates` are legal, unique by precision and batch size, ordered by precision and then batch size. `baseline`
    is measured even where it is not among them: as found, or outside the ranges asked for. `excluded` says what was
    left out before any trial, `notes` what was assumed. `effective_batch_size` is that of every candidate, in samples
    on one device; None where it is free. `num_ranks` devices make an optimizer step together. `accumulation_withheld`
    is why nothing may accumulate, None where nothing speaks against it. `weights` is what the parameters are kept in,
    `has_tf32` whether the device has it. `weighs_passes`: the training itself weighs what accumulates.
    """

    candidates: tuple[Setting, ...]
    baseline: Setting
    excluded: tuple[Exclusion, ...] = ()
    notes: tuple[str, ...] = ()
    effective_batch_size: int | None = None
    num_ranks: int = 1
    accumulation_withheld: str | None = None
    weights: Literal["fp32", "bf16", "fp16", "frozen_low"] = "fp32"
    has_tf32: bool = False
    weighs_passes: bool = False

    @property
    def accumulates(self) -> bool:
        """Whether anything in it takes more than one pass for an optimizer step."""
        return any(c.accumulation_steps > 1 for c in (*self.candidates, self.baseline))


def build_space(hardware: Hardware, description: Description, options: SearchOptions) -> Space:
    """The space of a search; raises `InvalidRequestError` where the options leave nothing, naming what would do."""
    today = _today(hardware, description, options)
    precisions, excluded = _legal_precisions(hardware, description, options)
    sizing = Sizing(
        baseline=today.baseline.batch_size,
        effective=today.effective_batch_size,
        asked=options.batch_size,
        num_samples=description.num_samples,
        num_ranks=options.num_ranks,
    )
    sizes, too_large = batch_sizes(sizing), first_too_large(sizing)
    if too_large is not None:
        reason = (
            f"the dataset has {description.num_samples} samples, fewer than one such batch; "
            "this and all larger batch sizes are left out"
        )
        excluded += [Exclusion(precision=p, batch_size=too_large, reason=reason) for p in precisions]
    candidates = tuple(
        Setting(precision=p, batch_size=b, accumulation_steps=(today.effective_batch_size or b) // b)
        for p in precisions
        for b in sizes
    )
    space = Space(
        candidates=candidates,
        baseline=today.baseline,
        excluded=tuple(excluded),
        notes=(*today.notes, *_weight_notes(description)),
        effective_batch_size=today.effective_batch_size,
        num_ranks=options.num_ranks,
        weights=description.weights,
        has_tf32=hardware.has_tf32,
        weighs_passes=description.weighs_passes,
    )
    return _for_a_loop(space) if description.is_loop else space


def without(candidates: Iterable[Setting], exclusions: Collection[Exclusion]) -> tuple[Setting, ...]:
    """The candidates that no exclusion names; one without a batch size names all of its precision."""
    named = {(exclusion.precision, exclusion.batch_size) for exclusion in exclusions}
    return tuple(c for c in candidates if (c.precision, c.batch_size) not in named and (c.precision, None) not in named)


def needs_at_least_as_much(measured_peaks: Mapping[Setting, int], precision: Precision, than: Precision) -> bool:
    """Whether `precision` took at least as much memory as `than` at every batch size measured in both (one at least).

    `measured_peaks` are bytes.
    """
    ours, theirs = _peaks(measured_peaks, precision), _peaks(measured_peaks, than)
    shared = ours.keys() & theirs.keys()
    return bool(shared) and all(ours[size] >= SAME_MEMORY * theirs[size] for size in shared)


def excluded_by_oom(space: Space, measured_peaks: Mapping[Setting, int], failed: Setting) -> tuple[Exclusion, ...]:
    """What need not be tried once `failed` ran out of memory, `failed` itself and what was measured left out.

    That is every larger batch of its precision, and the same or a larger batch of every precision that needs at
    least as much. `measured_peaks` are bytes.
    """

    def is_out(candidate: Setting) -> bool:
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


def _peaks(measured_peaks: Mapping[Setting, int], precision: Precision) -> dict[int, int]:
    return {c.batch_size: peak for c, peak in measured_peaks.items() if c.precision == precision}


class _Today(NamedTuple):
    """What the user runs, the effective batch size to keep to (None: free), and what was assumed for it."""

    baseline: Setting
    effective_batch_size: int | None
    notes: list[str]


def _today(hardware: Hardware, description: Description, options: SearchOptions) -> _Today:
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
    is_assumed = size is None
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
    todays = size * description.accumulation_steps
    effective = _kept(options, None if is_assumed else todays)
    if effective is not None and effective != size and description.is_loop:
        notes.append(
            f"The baseline's batch size is {effective} instead of {size}: train_step takes an optimizer step on every "
            "batch, so a batch is the effective batch."
        )
        size = effective
    elif effective is not None and effective % size:
        largest = largest_divisor(effective, at_most=size)
        notes.append(
            f"The baseline's batch size is {largest} instead of {size}: {size} does not divide the effective batch "
            f"size {of_all_ranks(effective, options.num_ranks)}."
        )
        size = largest
    baseline = Setting(
        precision=precision, batch_size=size, accumulation_steps=(effective or todays) // size, as_found=as_found
    )
    return _Today(baseline, effective, notes)


def _kept(options: SearchOptions, known: int | None) -> int | None:
    """Samples of an optimizer step on one device that are kept: those asked for, else those `known` of today."""
    if options.effective_batch_size == "free":
        return None
    return known if options.effective_batch_size is None else options.effective_batch_size // options.num_ranks


def _for_a_loop(space: Space) -> Space:
    """A loop accumulates nothing: it is handed a batch and steps its optimizers itself."""
    reason = "train_step takes its own optimizer steps, so nothing can be accumulated around it"
    if any(c.accumulation_steps > 1 for c in space.candidates):
        return without_accumulation(space, reason, "")
    return msgspec.structs.replace(space, accumulation_withheld=reason)


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
        by_reason: dict[str, list[Precision]] = {}
        for e in excluded:
            by_reason.setdefault(e.reason.rstrip("."), []).append(e.precision)
        reasons = "; ".join(f"{', '.join(alike)}: {reason}" for reason, alike in by_reason.items())
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
    if description.weights == "fp16" and precision in ("fp16", "bf16"):
        return (
            "the weights are kept in fp16, and so are their gradients, which no gradient scaler can unscale; "
            "keep them in fp32 (model.float()), and autocast casts where it pays"
        )
    if description.weights in ("bf16", "fp16") and precision == "tf32":
        return f"the weights are kept in {description.weights}: TF32 concerns fp32 products, so it is the same as fp32"
    return None


def _weight_notes(description: Description) -> tuple[str, ...]:
    if (kept := description.weights) in ("bf16", "fp16"):
        return (f"The weights are kept in {kept}: the rows called fp32 run the model as it is, without autocast.",)
    if description.weights == "frozen_low":
        return ("Frozen weights are kept in low precision: the rows called fp32 compute with them as they are.",)
    return ()


def with_accumulation_checked(space: Space, found: Accumulation | None) -> Space:
    """The space with what accumulates only where that learns what the whole batch learns; `found` is what a check says.

    Raises `InvalidRequestError` where accumulation is withheld and nothing is left without it.
    """
    if found is None or found.is_exact or not space.accumulates:
        return space
    space = without_accumulation(space, found.reason, found.next_step)
    if space.baseline.accumulation_steps == 1:
        return space
    learns = "does not learn" if found.verdict == "inexact" else "may not learn"
    note = f"The baseline, {space.baseline}, accumulates: what runs today {learns} what "
    note += f"a batch of {space.baseline.effective_batch_size} learns."
    return msgspec.structs.replace(space, notes=(*space.notes, note))


def without_accumulation(space: Space, reason: str, next_step: str) -> Space:
    """The space without what accumulates, which is said: an exclusion for each precision, and a note.

    The baseline stays, since it is what the user runs. Raises `InvalidRequestError` where nothing is left to try.
    """
    whole = space.effective_batch_size
    assert whole is not None  # nothing accumulates where it is free
    left = tuple(c for c in space.candidates if c.accumulation_steps == 1)
    if not left:
        raise InvalidRequestError(
            f"Gradient accumulation is withheld, and no batch size in the range does without it to keep the effective "
            f"batch size {of_all_ranks(whole, space.num_ranks)}. {sentence(reason)}",
            f"Give a --batch-size range and a dataset that hold {whole}, or --effective-batch-size free.",
        )
    todays = space.baseline.precision, space.baseline.batch_size
    largest: dict[str, Setting] = {}
    for candidate in space.candidates:  # ascending by batch size
        if candidate.accumulation_steps > 1 and (candidate.precision, candidate.batch_size) != todays:
            largest[candidate.precision] = candidate
    why = f"accumulation is withheld: {reason.rstrip('.')}; this and all smaller batch sizes are left out"
    excluded = [Exclusion(precision=c.precision, batch_size=c.batch_size, reason=why) for c in largest.values()]
    note = f"Batch sizes below {whole} are left out, since gradient accumulation is withheld. {sentence(reason)} "
    note += f"{sentence(next_step)} {_FREE}" if next_step else _FREE
    return msgspec.structs.replace(
        space,
        candidates=left,
        excluded=(*space.excluded, *excluded),
        notes=(*space.notes, note) if largest else space.notes,
        accumulation_withheld=reason,
    )


def excluded_by_outcomes(space: Space, outcomes: Mapping[Setting, Outcome]) -> tuple[Exclusion, ...]:
    """What the outcomes so far rule out, with the reason: for want of memory, too slow, unsupported."""
    peaks = {c: m.reserved_memory_bytes for c, m in outcomes.items() if isinstance(m, Measurement)}
    found = list(_hopeless(outcomes))
    for candidate, outcome in outcomes.items():
        if isinstance(outcome, Failure):
            found += _ruled_out_by(candidate, outcome, space, peaks)
    return tuple({(e.precision, e.batch_size): e for e in reversed(found)}.values())[::-1]


def _hopeless(outcomes: Mapping[Setting, Outcome]) -> Iterable[Exclusion]:
    measured = {c: m for c, m in outcomes.items() if isinstance(m, Measurement) and c.is_ordinary}
    for precision in dict.fromkeys(c.precision for c in measured):
        ratios = [
            (other.samples_per_second / m.samples_per_second, c.batch_size, rival.precision)
            for c, m in measured.items()
            for rival, other in measured.items()
            if c.precision == precision and rival.batch_size == c.batch_size
        ]
        ratio, batch_size, rival_precision = max(ratios)
        if ratio > HOPELESS:
            reason = f"{precision} is {ratio:.0f} times slower than {rival_precision} at batch {batch_size}"
            yield Exclusion(precision=precision, batch_size=None, reason=reason)


def _ruled_out_by(failed: Setting, failure: Failure, space: Space, peaks: Mapping[Setting, int]) -> Sequence[Exclusion]:
    if failure.kind == "oom":
        return excluded_by_oom(space, peaks, failed)
    # Where another batch ran in it, the size is what is not supported.
    if failure.kind == "unsupported" and not failed.as_found and failed.precision not in {c.precision for c in peaks}:
        return [Exclusion(precision=failed.precision, batch_size=None, reason=failure.message)]
    if failure.kind == "timeout":
        reason = f"{failed} took too long, and this has more to do"
        return [
            Exclusion(precision=c.precision, batch_size=c.batch_size, reason=reason)
            for c in space.candidates
            if c.precision == failed.precision and c.batch_size > failed.batch_size and c not in peaks
        ]
    return []


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


def has_few_batch_sizes(effective: int) -> bool:
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
