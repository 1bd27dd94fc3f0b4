"""Implementation of profile_memory(): measures a step of each precision in child processes, and fits batch sizes."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from msgspec.structs import replace

from autotune_amp.core.config import LossScale
from autotune_amp.core.errors import InvalidRequestError, WorkloadError
from autotune_amp.core.hardware import Hardware
from autotune_amp.core.intervals import fit_memory
from autotune_amp.core.outcome import Failure
from autotune_amp.core.precisions import Precision
from autotune_amp.core.setting import Setting
from autotune_amp.core.text import A_SIZE, count, parse_size
from autotune_amp.diagnostics.memory.results import (
    LargestBatch,
    MemoryBreakdown,
    MemoryJob,
    MemoryProfile,
    MemoryRow,
    Saving,
)
from autotune_amp.diagnostics.profile_amp import assumed_size, nothing_works, refused_in, space_at
from autotune_amp.hardware import identify
from autotune_amp.precision.modes import MIXED_PRECISIONS, MODES
from autotune_amp.search.job_defaults import is_hopeless
from autotune_amp.search.options import SearchOptions, is_count
from autotune_amp.search.planner import Budget
from autotune_amp.search.progress import Progress
from autotune_amp.search.run import ProgressWatcher
from autotune_amp.search.source import OpenedWorkload, Source, failure_message, loaded_backend, open_workload
from autotune_amp.search.space import ASSUMED_BATCH_SIZE
from autotune_amp.trial.jobs import Trial

DEADLINE_SECONDS = 600.0  # per process

MemoryResult = MemoryBreakdown | Failure


def run_memory_profile(
    source: Source,
    progress: Progress,
    precision: Sequence[str] | str | None,
    batch_size: int | None,
    device: str,
    fit: str | int | None,
    snapshot: str | os.PathLike[str] | None,
) -> MemoryProfile:
    """Measure in child processes; for the arguments see `autotune_amp.profile_memory`."""
    if not is_count(batch_size):
        raise InvalidRequestError(
            f"--batch-size is {batch_size!r}; it must be a whole number from 1 up.",
            "Give --batch-size 32, for example.",
        )
    limit_bytes = None if fit is None else _limit(fit)
    precisions = SearchOptions.from_user(device=device, precision=precision).precisions
    path = None if snapshot is None else _snapshot_path(snapshot, device)
    clock = Budget(math.inf)
    watcher = ProgressWatcher(progress, clock)
    progress.work_started(None)
    hidden = "tensors cannot be seen from outside"
    instead = "Give a Workload, or search the command: it measures the peak of each precision and batch size."
    with loaded_backend(source, watcher, clock.left(), hidden=hidden, next_step=instead) as backend:
        opened = open_workload(backend, source, device, watcher, baseline_batch_size=batch_size or ASSUMED_BATCH_SIZE)
        progress.found_hardware(opened.hardware)
        asked = precisions or ("fp32", *MIXED_PRECISIONS)
        space = space_at(batch_size, opened, asked)
        refused = refused_in(space) | ({} if precisions else _hopeless(opened.hardware, asked))
        first = space.baseline

        def measure(setting: Setting, snapshot_file: Path | None) -> MemoryResult:
            watcher.phase(f"measuring the memory of {setting.precision}, batch size {setting.batch_size}")
            found: MemoryResult = backend.submit(memory_job(setting, opened, snapshot_file)).result()
            return found

        runs: dict[Precision, PrecisionMemory] = {}
        for name in (name for name in asked if name not in refused):
            is_recorded = any(isinstance(run.first, MemoryBreakdown) for run in runs.values())
            runs[name] = measure_precision(
                Setting(precision=name, batch_size=first.batch_size, accumulation_steps=first.accumulation_steps),
                measure,
                limit_bytes,
                may_take_bytes=_may_take(opened),
                most=opened.description.num_samples,
                snapshot_file=None if is_recorded else path,
            )
    if not any(isinstance(run.first, MemoryBreakdown) for run in runs.values()):
        failures = {name: run.first for name, run in runs.items() if isinstance(run.first, Failure)}
        raise nothing_works(refused, failures, "Fix what the reasons name, or give a smaller --batch-size.")
    return MemoryProfile(
        workload=source.name,
        device=opened.hardware.device,
        device_name=opened.hardware.identity.name,
        batch_size=first.batch_size,
        accumulation_steps=first.accumulation_steps,
        rows=rows(asked, refused, runs, first.batch_size, limit_bytes, opened.description.num_samples),
        limit_bytes=limit_bytes,
        notes=_notes(batch_size, opened, limit_bytes),
        snapshot=None if path is None else str(path),
    )


class PrecisionMemory(NamedTuple):
    """Memory of one precision: the result at the requested batch size, and the bytes at every size tried, in order.

    None stands for a size that ran out of memory. `problem` is the reason why the last one failed otherwise.
    """

    first: MemoryResult
    taken_bytes: dict[int, int | None]
    problem: str | None = None


def measure_precision(
    setting: Setting,
    measure: Callable[[Setting, Path | None], MemoryResult],
    limit_bytes: int | None,
    *,
    may_take_bytes: int,
    most: int | None,
    snapshot_file: Path | None,
) -> PrecisionMemory:
    """Measure one precision at the requested batch size and, if there is a limit, at the sizes that `fit` asks for.

    Raises `WorkloadError` if the workload does not run in fp32.
    """
    first = measure(setting, snapshot_file)
    if isinstance(first, Failure) and first.kind == "workload_error" and setting.precision == "fp32":
        raise WorkloadError(*failure_message(first))
    taken: dict[int, int | None] = {}
    found, size = first, setting.batch_size
    while isinstance(found, MemoryBreakdown) or found.kind == "oom":
        taken[size] = found.taken_bytes if isinstance(found, MemoryBreakdown) else None
        following = limit_bytes and next_batch_size(taken, size, limit_bytes, may_take_bytes, most)
        if not following:
            break
        size = following
        found = measure(replace(setting, batch_size=size), None)
    problem = found.message if isinstance(found, Failure) and found.kind != "oom" else None
    return PrecisionMemory(first, taken, problem)


def rows(
    asked: Sequence[Precision],
    refused: Mapping[Precision, str],
    runs: Mapping[Precision, PrecisionMemory],
    batch_size: int,
    limit_bytes: int | None,
    most: int | None,
) -> tuple[MemoryRow, ...]:
    """Return a row for each precision in the requested order; `most` is the number of samples in the data."""
    breakdowns = {name: run.first for name, run in runs.items() if isinstance(run.first, MemoryBreakdown)}
    found = []
    for name in asked:
        if name in refused:
            found.append(MemoryRow(precision=name, reason=refused[name]))
            continue
        first, taken, problem = runs[name]
        largest = None if limit_bytes is None else largest_batch(taken, limit_bytes, most)
        if isinstance(first, Failure):
            found.append(MemoryRow(precision=name, largest=largest, failure=first.kind, reason=first.message))
            continue
        reason = None
        if limit_bytes is not None and largest is None:
            reason = f"nothing is known of what fits: {problem or 'no second batch size could be measured'}"
        found.append(
            MemoryRow(
                precision=name,
                breakdown=first,
                largest=largest,
                savings=savings(name, batch_size, breakdowns, largest),
                reason=reason,
            )
        )
    return tuple(found)


def memory_job(setting: Setting, opened: OpenedWorkload, snapshot_file: Path | None) -> MemoryJob:
    """Return the job that measures the memory of a step of `setting`."""
    sizes = opened.description.sample_sizes
    trial = Trial(
        candidate=setting,
        device=opened.hardware.device,
        loss_scale=LossScale() if MODES[setting.precision].takes_scaler else None,
        deadline_seconds=DEADLINE_SECONDS,
        memory_limit_bytes=_may_take(opened),
        torch_state=opened.torch_state,
        worst_samples=() if sizes is None else sizes.largest[: setting.batch_size],
    )
    return MemoryJob(
        device=trial.device,
        trial=trial,
        deadline_seconds=DEADLINE_SECONDS,
        snapshot_file=None if snapshot_file is None else str(snapshot_file),
    )


def _may_take(opened: OpenedWorkload) -> int:
    return SearchOptions().limit_bytes(opened.hardware.memory.available)


def _limit(fit: Any) -> int:
    try:
        return parse_size(fit)
    except ValueError:
        raise InvalidRequestError(f"--fit is {fit!r}; it must be {A_SIZE}.", "Give --fit 16GiB, for example.") from None


def _snapshot_path(snapshot: str | os.PathLike[str], device: str) -> Path:
    if (kind := identify(device).type) != "cuda":
        raise InvalidRequestError(
            f"--snapshot needs CUDA, whose allocator PyTorch can record; the device is {kind}.",
            "Leave --snapshot out: the parts and the modules are measured on every device.",
        )
    path = Path(snapshot).absolute()
    if path.is_dir() or not os.access(path.parent, os.W_OK):
        raise InvalidRequestError(
            f"--snapshot is {str(snapshot)!r}; it must be a file in a folder that can be written.",
            "Give for example --snapshot memory.pickle.",
        )
    return path


def _hopeless(hardware: Hardware, asked: Sequence[Precision]) -> dict[Precision, str]:
    """Return a reason for each precision that the device emulates so slowly that it is measured only on request."""
    return {
        name: f"emulated here, many times slower than fp32; --precision {name} measures it all the same"
        for name in asked
        if name != "fp32" and is_hopeless(hardware, name)
    }


def _notes(batch_size: int | None, opened: OpenedWorkload, limit_bytes: int | None) -> tuple[str, ...]:
    description, device = opened.description, opened.hardware.device
    notes = assumed_size(batch_size, description)
    if description.sample_sizes is not None or description.has_worst_batch:
        notes.append("Samples differ in size: what was measured is the batch that takes the most.")
    if limit_bytes is not None:
        beside = "what Python and PyTorch's libraries take" if device == "cpu" else "the device's context"
        notes.append(f"The limit is for the training alone: {beside} comes on top.")
    return tuple(notes)


# --- the largest batch that fits, and ways to free memory: pure -------------------------------------------------------

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


def savings(
    precision: Precision,
    batch_size: int,
    breakdowns: Mapping[Precision, MemoryBreakdown],
    largest: LargestBatch | None,
) -> tuple[Saving, ...]:
    """Return ways to free memory of a step in `precision`, the largest first.

    The number for another precision is measured; that for half the batch is from the memory model's slope or, without a
    model, half of the memory of its samples; the others are the bytes of the part that disappears.
    """
    own = breakdowns[precision]
    found = [
        Saving(
            kind="precision",
            num_bytes=own.taken_bytes - other.taken_bytes,
            what=f"{name}, as measured (autotune-amp fidelity --precision {name} says whether it is faithful)",
        )
        for name, other in breakdowns.items()
    ]
    if own.checkpointable_modules:
        blocks = own.checkpointable_modules
        saved = [_inside(own, block) for block in blocks]
        # One block at a time is recomputed.
        what = f"activation checkpointing of {count(len(blocks), 'block')} ({blocks[0]} ... {blocks[-1]})"
        found.append(Saving(kind="activation_checkpointing", num_bytes=sum(saved) - max(saved), what=what))
    kinds = " and ".join(dict.fromkeys(own.optimizers)) or "the optimizer"
    what = f"an optimizer without state in place of {kinds}; 8-bit state frees about three quarters of it"
    found.append(Saving(kind="optimizer_state", num_bytes=own.optimizer_state_bytes, what=what))
    if batch_size > 1:
        of_samples = own.activations_bytes + own.batch_bytes
        half = of_samples // 2 if largest is None else round(largest.bytes_per_sample * (batch_size - batch_size // 2))
        what = f"batch {batch_size // 2} with twice the accumulation steps"
        found.append(Saving(kind="batch_size", num_bytes=half, what=what))
    return tuple(sorted((s for s in found if s.num_bytes > 0), key=lambda saving: -saving.num_bytes))


def _inside(breakdown: MemoryBreakdown, block: str) -> int:
    return sum(m.num_bytes for m in breakdown.modules if m.name == block or m.name.startswith(f"{block}."))
