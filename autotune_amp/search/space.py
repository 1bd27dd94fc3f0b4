"""The legal candidates, and why the others are not. Pure: hardware, workload and options in, plain data out."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, NamedTuple

import msgspec

from autotune_amp.core.errors import InvalidRequestError
from autotune_amp.core.recommendation import Exclusion
from autotune_amp.core.setting import Setting
from autotune_amp.search.accumulate import without_accumulation
from autotune_amp.search.batch_sizes import Sizing, batch_sizes, first_too_large, largest_divisor, of_all_ranks

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping

    from autotune_amp.core.config import Precision
    from autotune_amp.core.hardware import Hardware
    from autotune_amp.core.outcome import Description
    from autotune_amp.search.options import SearchOptions

ASSUMED_BATCH_SIZE = 32
SAME_MEMORY = 0.98  # peaks of one candidate differ by a percent or two between processes

_TRIED: tuple[Precision, ...] = ("fp32", "tf32", "bf16", "fp16")
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
