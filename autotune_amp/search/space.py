"""Space of settings that a search may try, and the reasons to exclude others: hardware, workload, options, outcomes.

The batch sizes to try follow from the effective batch size: its divisors if it is kept, else a free range.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Iterable, Mapping
from typing import Any, Literal

import msgspec

from autotune_amp.core.errors import InvalidRequestError
from autotune_amp.core.hardware import Hardware
from autotune_amp.core.outcome import Accumulation, Description, Failure, Measurement, Outcome
from autotune_amp.core.precisions import PRECISIONS, Precision
from autotune_amp.core.recommendation import Exclusion
from autotune_amp.core.setting import Setting
from autotune_amp.core.text import sentence
from autotune_amp.dimensions import FP8_RECIPE, PRECISION, TRIED_ON_LEADER
from autotune_amp.dimensions.argument import arguments_of
from autotune_amp.dimensions.dimension import Dimension
from autotune_amp.search.options import SearchOptions

ASSUMED_BATCH_SIZE = 32  # baseline of data without a batch size of its own
MAX_BATCH_SIZES = 10  # maximum number of batch sizes in the space
# Range without --batch-size: from an eighth of the baseline's batch size up to the effective batch size, or to sixteen
# times the baseline's if the effective batch size is free.
SEARCH_DOWN, SEARCH_UP = 8, 16
HOPELESS_SLOWDOWN = 5.0  # ratio of speeds at the same batch size that no other batch size makes up for
SAME_MEMORY_SHARE = 0.98  # ratio of peaks that count as equal: processes of one candidate differ by 1 to 2 %


class Space(msgspec.Struct, frozen=True, kw_only=True):
    """Settings that a search may try.

    `candidates` are unique by precision and batch size, and ordered by both. `baseline` is measured even if it is not
    among them: with the user's own flags, or outside the requested ranges. `excluded` lists exclusions made before any
    trial, `notes` assumptions, `warnings` problems of the user's current training.
    `effective_batch_size` is that of every candidate, in samples on one device; None if it is free. `num_batches`
    are taken at once by all devices, which take an optimizer step together. `accumulation_withheld` is the reason that
    no setting may accumulate, or None. `weights` is the type of the parameters, `has_tf32` says whether the device has
    TF32. `weighs_passes`: the training code itself weights the passes that it accumulates;
    `keeps_effective_batch_size`: it accumulates by itself.
    `variants` are non-default values of further dimensions by name, tried on the leader; `variants_left_out` those that
    cannot be tried, with the reason; `are_variants_named`: the user named them. `argument_values` are those of a
    command's own placeholders, `num_workers` is that of the loader today, as in `Description`. `checks` are the
    possible kinds of checks, with at most `check_batch_size` samples.
    """

    candidates: tuple[Setting, ...]
    baseline: Setting
    excluded: tuple[Exclusion, ...] = ()
    notes: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    effective_batch_size: int | None = None
    num_batches: int = 1
    accumulation_withheld: str | None = None
    weights: Literal["fp32", "bf16", "fp16", "frozen_low"] = "fp32"
    has_tf32: bool = False
    weighs_passes: bool = False
    keeps_effective_batch_size: bool = False
    variants: dict[str, tuple[Any, ...]] = {}
    variants_left_out: dict[str, dict[Any, str]] = {}
    are_variants_named: bool = False
    argument_values: dict[str, tuple[str, ...]] = {}
    num_workers: int | None = None
    checks: frozenset[str] = frozenset({"fidelity", "later", "calibration", "accumulation"})
    check_batch_size: int = 16

    @property
    def accumulates(self) -> bool:
        """Whether a candidate or the baseline accumulates the gradients of several passes for an optimizer step."""
        return any(c.accumulation_steps > 1 for c in (*self.candidates, self.baseline))

    @property
    def tried_on_leader(self) -> tuple[Dimension[Any], ...]:
        """Return the dimensions whose values are tried on the leader; see `dimensions_tried_on_leader`."""
        return dimensions_tried_on_leader(self.argument_values)


def dimensions_tried_on_leader(argument_values: Mapping[str, tuple[str, ...]]) -> tuple[Dimension[Any], ...]:
    """Return the command's own arguments and then the built-in dimensions; of two of one name the command's own."""
    own = arguments_of(argument_values)
    names = {argument.name for argument in own}
    return *own, *(dimension for dimension in TRIED_ON_LEADER if dimension.name not in names)


def build_space(hardware: Hardware, description: Description, options: SearchOptions) -> Space:
    """Return the space of a search. Raises `InvalidRequestError` with the valid values if no setting is left."""
    num_batches = options.num_ranks * description.num_batches
    baseline, effective, notes = _baseline(hardware, description, options, num_batches)
    fixed = description.accumulation_steps if "accumulation_steps" in description.unsettable else None
    precisions = PRECISION.choices(hardware, description, options)
    if not precisions.values:
        reasons = "; ".join(f"{precision}: {why.rstrip('.')}" for precision, why in precisions.left_out.items())
        raise InvalidRequestError(
            f"None of the requested precisions can be used on {hardware.device}: {reasons}.",
            f"Use --precision with {_usable(hardware, description)}, or another --device.",
        )
    variants = {
        dimension.name: dimension.choices(hardware, description, options)
        for dimension in dimensions_tried_on_leader(description.argument_values)
    }
    left_out, recipes = dict(precisions.left_out), FP8_RECIPE.choices(hardware, description, options)
    if recipes.values:
        left_out.pop("fp8", None)
    elif recipes.left_out and "fp8" in left_out:
        left_out["fp8"] = next(iter(recipes.left_out.values()))
    excluded = [Exclusion(precision=p, batch_size=None, reason=why) for p, why in left_out.items()]
    sizes, too_large = _batch_sizes(baseline.batch_size, effective, description, options, num_batches)
    if "batch_size" in description.unsettable:
        sizes, too_large = [baseline.batch_size], None
        notes.append(f"Only batch {baseline.batch_size} is tried: {description.unsettable['batch_size']}.")
    if too_large is not None:
        reason = f"the dataset has only {description.num_samples} samples; this and all larger batch sizes are left out"
        excluded += [Exclusion(precision=p, batch_size=too_large, reason=reason) for p in precisions.values]
    if description.weights != "fp32":
        weights_text = "low precision" if description.weights == "frozen_low" else description.weights
        notes.append(f"Weights are kept in {weights_text}: the rows called fp32 compute with them as they are.")
    space = Space(
        candidates=tuple(
            Setting(precision=p, batch_size=b, accumulation_steps=effective // b if effective else fixed or 1)
            for p in precisions.values
            for b in sizes
        ),
        baseline=baseline,
        excluded=tuple(excluded),
        notes=(*notes, *description.notes),
        effective_batch_size=effective,
        num_batches=num_batches,
        weights=description.weights,
        has_tf32=hardware.has_tf32,
        weighs_passes=description.weighs_passes,
        keeps_effective_batch_size=description.keeps_effective_batch_size,
        variants={name: choices.values for name, choices in variants.items()},
        variants_left_out={name: dict(choices.left_out) for name, choices in variants.items()},
        are_variants_named=options.variants is not None,
        argument_values=description.argument_values,
        num_workers=description.num_workers,
        checks=frozenset(description.checks),
        check_batch_size=description.check_batch_size,
    )
    if fixed is None:
        return space
    reason = description.unsettable["accumulation_steps"]
    if any(c.accumulation_steps != fixed for c in space.candidates):
        return _with_accumulation(space, fixed, reason, "")
    return msgspec.structs.replace(space, accumulation_withheld=reason)


def without_excluded(candidates: Iterable[Setting], exclusions: Collection[Exclusion]) -> tuple[Setting, ...]:
    """Return the candidates without the excluded ones. An exclusion without a batch size holds for its precision."""
    named = {(exclusion.precision, exclusion.batch_size) for exclusion in exclusions}
    return tuple(c for c in candidates if (c.precision, c.batch_size) not in named and (c.precision, None) not in named)


def excluded_by_outcomes(space: Space, outcomes: Mapping[Setting, Outcome]) -> tuple[Exclusion, ...]:
    """Return the exclusions that follow from the outcomes so far: out of memory, too slow, unsupported."""
    measured = {c: m for c, m in outcomes.items() if isinstance(m, Measurement)}
    exclusions = _exclusions_of_slow_precisions(measured)
    for failed, failure in outcomes.items():
        if isinstance(failure, Failure):
            exclusions += _exclusions_by_failure(failed, failure, space, measured)
    return tuple({(e.precision, e.batch_size): e for e in reversed(exclusions)}.values())[::-1]


def _exclusions_of_slow_precisions(measured: Mapping[Setting, Measurement]) -> list[Exclusion]:
    """Return exclusions of the precisions that another one beats by `HOPELESS_SLOWDOWN` at the same batch size."""
    speeds = {c: m.samples_per_second for c, m in measured.items() if c.is_ordinary}
    worst: dict[Precision, tuple[float, int, str]] = {}
    for setting, rival in itertools.product(speeds, repeat=2):
        if setting.batch_size == rival.batch_size and speeds[rival] > HOPELESS_SLOWDOWN * speeds[setting]:
            slowdown = speeds[rival] / speeds[setting], setting.batch_size, rival.precision
            worst[setting.precision] = max(slowdown, worst.get(setting.precision, slowdown))
    return [
        Exclusion(precision=p, batch_size=None, reason=f"{p} is {ratio:.0f} times slower than {other} at batch {size}")
        for p, (ratio, size, other) in worst.items()
    ]


def _exclusions_by_failure(
    failed: Setting, failure: Failure, space: Space, measured: Mapping[Setting, Measurement]
) -> list[Exclusion]:
    """Return exclusions of the unmeasured settings that would fail for the same reason as `failed`."""
    # If another batch size ran in this precision, only the size is unsupported. A failure with the user's own flags
    # says nothing about strict ones.
    has_run = any(c.precision == failed.precision for c in measured)
    if failure.kind == "unsupported" and not failed.as_found and not has_run:
        return [Exclusion(precision=failed.precision, batch_size=None, reason=failure.message)]
    if failure.kind not in ("timeout", "oom") or failure.is_loading:  # loading is the same for all batch sizes
        return []
    reason = f"{failed} took too long, and this has more to do"
    hungrier: set[Precision] = set()
    if failure.kind == "oom":
        reason = f"{failed} ran out of memory, and this needs at least as much"
        hungrier = {
            p for p in PRECISIONS if p != failed.precision and _needs_as_much_memory(measured, p, failed.precision)
        }
    return [
        Exclusion(precision=c.precision, batch_size=c.batch_size, reason=reason)
        for c in space.candidates
        if c not in measured
        and (
            (c.precision == failed.precision and c.batch_size > failed.batch_size)
            or (c.precision in hungrier and c.batch_size >= failed.batch_size)
        )
    ]


def _needs_as_much_memory(measured: Mapping[Setting, Measurement], precision: Precision, other: Precision) -> bool:
    """Whether `precision` took as much memory as `other` at each batch size measured in both, of which there is one."""
    peaks, other_peaks = (
        {c.batch_size: m.reserved_memory_bytes for c, m in measured.items() if c.precision == p}
        for p in (precision, other)
    )
    shared = peaks.keys() & other_peaks.keys()
    return bool(shared) and all(peaks[size] >= SAME_MEMORY_SHARE * other_peaks[size] for size in shared)


def _baseline(
    hardware: Hardware, description: Description, options: SearchOptions, num_batches: int
) -> tuple[Setting, int | None, list[str]]:
    """Return the baseline, the effective batch size to keep (None if free), and notes on assumptions."""
    precision, as_found = description.as_found_precision, not description.is_as_found_strict
    size, notes = description.batch_size, list[str]()
    if options.baseline is not None:
        (precision, size), as_found = options.baseline, False
        reason = PRECISION.unsupported_reason(precision, hardware, description)
        if reason is not None:
            raise InvalidRequestError(
                f"--baseline is {precision}:{size}, which cannot be trained on {hardware.device}: {reason}.",
                f"Give a baseline in {_usable(hardware, description)}.",
            )
    is_assumed = size is None
    if size is None:
        size = ASSUMED_BATCH_SIZE
        notes.append(
            f"The data has no batch size of its own: the baseline is assumed to be {precision} at batch {size}. "
            f"Set yours with --baseline PRECISION:BATCH."
        )

    def replace_batch_size(other: int, why: str) -> int:
        notes.append(f"The baseline's batch size is {other} instead of {size}: {why}.")
        return other

    if description.num_samples is not None and size > description.num_samples:
        size = replace_batch_size(max(1, description.num_samples), "the dataset has no more samples")
    baseline_total = size * description.accumulation_steps
    if description.keeps_effective_batch_size:
        baseline_total = description.today.effective_batch_size
        if options.effective_batch_size not in (None, of_all := baseline_total * num_batches):
            notes.append(
                f"--effective-batch-size {options.effective_batch_size} is ignored: the command itself accumulates to "
                f"{of_all} at every batch size. Change that in the command to try others."
            )
    effective = None if is_assumed else baseline_total
    if options.effective_batch_size is not None and not description.keeps_effective_batch_size:
        free = options.effective_batch_size == "free"
        effective = None if free else _of_one_batch(int(options.effective_batch_size), num_batches)
    fixed = description.accumulation_steps if "accumulation_steps" in description.unsettable else None
    if effective is not None and fixed and effective != baseline_total and effective % fixed == 0:
        size = replace_batch_size(effective // fixed, description.unsettable["accumulation_steps"])
    elif effective is not None and effective % size:
        whole = of_all_ranks(effective, num_batches)
        divisor = max(d for d in divisors(effective) if d <= size)
        size = replace_batch_size(divisor, f"{size} does not divide the effective batch size {whole}")
    if description.is_ranked and effective is not None and options.effective_batch_size is None:
        whole = of_all_ranks(effective, num_batches)
        note = f"The effective batch size is {whole}: each rank has that of one process now."
        if effective % num_batches == 0:
            note += f" Use --effective-batch-size {effective} to keep that as the total."
        notes.append(note)
    steps = (effective or baseline_total) // size
    return Setting(precision=precision, batch_size=size, accumulation_steps=steps, as_found=as_found), effective, notes


def _of_one_batch(effective_batch_size: int, num_batches: int) -> int:
    """Return the part of an effective batch size that each of `num_batches` batches has, which are taken at once.

    Raises `InvalidRequestError` if they cannot share it.
    """
    if effective_batch_size % num_batches:
        nearest = max(1, round(effective_batch_size / num_batches)) * num_batches
        raise InvalidRequestError(
            f"--effective-batch-size {effective_batch_size} cannot be shared by the {num_batches} ranks that "
            "the command starts.",
            f"Give a multiple of {num_batches}, such as {nearest}.",
        )
    return effective_batch_size // num_batches


def _usable(hardware: Hardware, description: Description) -> str:
    """Return the names of the precisions that the device and the workload support, for a message."""
    usable = [p for p in PRECISIONS if PRECISION.unsupported_reason(p, hardware, description) is None]
    return " or ".join(usable) or "none of its precisions"


def with_accumulation_checked(space: Space, accumulation: Accumulation | None) -> Space:
    """Return the space without accumulating settings if the accumulation check failed.

    If the effective batch size is free, the settings stay: they accumulate as many passes as today's training. Raises
    `InvalidRequestError` if no setting is left.
    """
    if accumulation is None or accumulation.is_exact or not space.accumulates:
        return space
    if space.effective_batch_size is not None:
        space = _with_accumulation(space, 1, accumulation.reason, accumulation.next_step)
    if space.baseline.accumulation_steps == 1:
        return space
    note = f"The baseline, {space.baseline}, accumulates gradients that differ from those of the whole batch."
    return msgspec.structs.replace(space, warnings=(note,))


def _with_accumulation(space: Space, num: int, reason: str, next_step: str) -> Space:
    """Return the space with only the settings of `num` accumulation steps, besides the baseline.

    An exclusion for each precision and a note are added. The space must have an effective batch size. Raises
    `InvalidRequestError` if no setting is left.
    """
    whole = space.effective_batch_size
    assert whole is not None  # where it is free, all settings have the same accumulation steps
    candidates = tuple(c for c in space.candidates if c.accumulation_steps == num)
    if not candidates:
        raise InvalidRequestError(
            f"Gradient accumulation cannot be used, and every batch size in the range needs it to keep the effective "
            f"batch size {of_all_ranks(whole, space.num_batches)}. {sentence(reason)}",
            f"Give a --batch-size range and a dataset that include {whole // num}, or --effective-batch-size free.",
        )
    baseline_key = space.baseline.precision, space.baseline.batch_size
    largest: dict[str, Setting] = {}
    for candidate in space.candidates:  # ascending by batch size
        if candidate.accumulation_steps > num and (candidate.precision, candidate.batch_size) != baseline_key:
            largest[candidate.precision] = candidate
    why = f"accumulation is withheld: {reason.rstrip('.')}; this and all smaller batch sizes are left out"
    excluded = [Exclusion(precision=c.precision, batch_size=c.batch_size, reason=why) for c in largest.values()]
    note = f"Batch sizes below {whole // num} were not tried, since your effective batch size is kept. "
    note += f"{sentence(reason[0].upper() + reason[1:])} {next_step}".rstrip()
    note += " Use --effective-batch-size free to try them."
    return msgspec.structs.replace(
        space,
        candidates=candidates,
        excluded=(*space.excluded, *excluded),
        notes=(*space.notes, note) if largest else space.notes,
        accumulation_withheld=reason,
    )


def _batch_sizes(
    baseline: int, effective: int | None, description: Description, options: SearchOptions, num_batches: int
) -> tuple[list[int], int | None]:
    """Return the batch sizes to try, ascending, and the smallest one that exceeds the dataset, or None. They are
    multiples of the number of ranks that divide a batch among them.

    Raises `InvalidRequestError` if no batch size fits the range.
    """
    requested_range, num_samples = options.batch_size, description.num_samples
    low, high = requested_range or (max(1, baseline // SEARCH_DOWN), effective or SEARCH_UP * baseline)
    largest = high if num_samples is None else max(1, min(high, num_samples))
    if effective is not None:
        grid = divisors(effective)
    else:
        powers = [2**k for k in range(max(baseline, high).bit_length() + 1)]
        ends = {low, high, largest} if requested_range is not None else set()
        grid = sorted({baseline // power for power in powers} | {baseline * power for power in powers} | ends)
    grid = [size for size in grid if low <= size <= high]
    grid = [size for size in grid if size % description.num_sharing == 0] or grid
    sizes = [size for size in grid if size <= largest]
    if num_samples is not None and low > num_samples:
        raise InvalidRequestError(
            f"--batch-size is {low}:{high}, but the dataset has only {num_samples} samples.",
            f"Give a range that begins at {num_samples} or less.",
        )
    if not sizes:  # only if an effective batch size is kept: without one, `low` itself is in the grid
        fitting = [d for d in divisors(effective or 1) if d <= (num_samples or d)]
        raise InvalidRequestError(
            f"No batch size from {low} to {high} divides the effective batch size "
            f"{of_all_ranks(effective or 1, num_batches)}, which is kept.",
            f"Give a --batch-size range that includes one of {', '.join(map(str, _thin(fitting, keep=1)))}, or "
            "--effective-batch-size free, which lets it change.",
        )
    return _thin(sizes, keep=baseline), next((size for size in grid if size > largest), None)


def divisors(number: int) -> list[int]:
    """Return all divisors of `number`, ascending."""
    small = [d for d in range(1, math.isqrt(number) + 1) if number % d == 0]
    return sorted({*small, *(number // d for d in small)})


def of_all_ranks(effective: int, num_batches: int) -> str:
    """Return the text for an effective batch size over `num_batches` ranks, given that of one."""
    if num_batches == 1:
        return f"{effective}"
    return f"{effective * num_batches} ({effective} on each of {num_batches} ranks)"


def _thin(sizes: list[int], keep: int) -> list[int]:
    """Return at most `MAX_BATCH_SIZES` of the sorted `sizes`, log-evenly spread, with both ends and `keep`."""
    if len(sizes) <= MAX_BATCH_SIZES:
        return sizes
    num = MAX_BATCH_SIZES - 1  # one more for `keep`
    ratio = math.log(sizes[-1] / sizes[0]) / (num - 1)
    wanted = [sizes[0] * math.exp(ratio * k) for k in range(num)]
    chosen = {min(sizes, key=lambda size: abs(math.log(size / target))) for target in wanted}
    return sorted(chosen | {sizes[0], sizes[-1]} | ({keep} & set(sizes)))


def is_hopelessly_slow(hardware: Hardware, precision: Precision) -> bool:
    """Whether `precision` is emulated and its matrix products are over `HOPELESS_SLOWDOWN` times slower than fp32's.

    False if the device's speed in fp32 was not measured. An emulated precision without a measured speed is hopeless.
    """
    capability, reference = hardware.precisions[precision], hardware.precisions.get("fp32")
    if capability.level != "emulated" or reference is None or reference.matmul_flops_per_second is None:
        return False
    return HOPELESS_SLOWDOWN * (capability.matmul_flops_per_second or 0.0) < reference.matmul_flops_per_second
