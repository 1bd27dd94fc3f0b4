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
from autotune_amp.core.setting import Setting, arguments_label
from autotune_amp.core.text import SIZE_FORMATS, count, parse_size
from autotune_amp.diagnostics.memory.results import (
    LargestBatch,
    MemoryBreakdown,
    MemoryJob,
    MemoryProfile,
    MemoryRow,
    Saving,
)
from autotune_amp.diagnostics.profile_amp import (
    assumed_size_notes,
    command_notes,
    excluded_reasons,
    nothing_works_error,
    space_at_batch_size,
)
from autotune_amp.hardware import identify
from autotune_amp.precision.modes import MIXED_PRECISIONS, MODES
from autotune_amp.search.options import SearchOptions, is_count
from autotune_amp.search.planner import Budget
from autotune_amp.search.progress import Progress
from autotune_amp.search.run import ProgressWatcher
from autotune_amp.search.source import OpenedWorkload, Source, failure_message, loaded_backend, open_workload
from autotune_amp.search.space import ASSUMED_BATCH_SIZE, is_hopelessly_slow
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
    """Measure each precision, and each value of a command's own arguments, in a child process.

    See `autotune_amp.profile_memory` for the arguments.
    """
    if not is_count(batch_size):
        raise InvalidRequestError(
            f"--batch-size is {batch_size!r}; it must be a whole number from 1 up.",
            "Give --batch-size 32, for example.",
        )
    limit_bytes = None if fit is None else _parse_fit(fit)
    precisions = SearchOptions.from_user(device=device, precision=precision).precisions
    snapshot_file = None if snapshot is None else _snapshot_path(snapshot, device)
    clock = Budget(math.inf)
    watcher = ProgressWatcher(progress, clock)
    progress.work_started(None)
    if snapshot is not None and source.command_template is not None:
        raise InvalidRequestError(
            "--snapshot needs a Workload: what runs in a command is ended before PyTorch's snapshot is written.",
            "Leave --snapshot out: the memory by kind and by module is measured for a command too.",
        )
    with loaded_backend(source, watcher, clock.left()) as backend:
        opened = open_workload(
            backend,
            source,
            device,
            watcher,
            baseline_batch_size=batch_size or ASSUMED_BATCH_SIZE,
            is_batch_free=source.command_template is None or fit is not None or batch_size is not None,
        )
        progress.found_hardware(opened.hardware)
        requested = precisions or ("fp32", *MIXED_PRECISIONS)
        space = space_at_batch_size(batch_size, opened, requested)
        reasons = excluded_reasons(space) | ({} if precisions else _emulated_reasons(opened.hardware, requested))
        baseline = space.baseline
        fixed_reason = opened.description.unsettable.get("batch_size")
        available_bytes = _memory_limit_bytes(opened)

        def measure(setting: Setting, snapshot_file: Path | None) -> MemoryResult:
            name = setting.labelled(("precision", "arguments"))
            watcher.phase(f"measuring the memory of {name}, batch size {setting.batch_size}")
            result: MemoryResult = backend.submit(memory_job(setting, opened, snapshot_file)).result()
            return result

        def setting_in(precision: Precision) -> Setting:
            return Setting(
                precision=precision, batch_size=baseline.batch_size, accumulation_steps=baseline.accumulation_steps
            )

        def measure_series(setting: Setting, snapshot_file: Path | None) -> SettingMemory:
            run = measure_setting(
                setting,
                measure,
                limit_bytes if fixed_reason is None else None,
                available_bytes=available_bytes,
                num_samples=opened.description.num_samples,
                snapshot_file=snapshot_file,
            )
            return run if fixed_reason is None else run._replace(problem=fixed_reason)

        runs: dict[Setting, SettingMemory] = {}
        for name in (name for name in requested if name not in reasons):
            is_recorded = any(isinstance(run.first, MemoryBreakdown) for run in runs.values())
            runs[setting_in(name)] = measure_series(setting_in(name), None if is_recorded else snapshot_file)
        completed = [setting for setting, run in runs.items() if isinstance(run.first, MemoryBreakdown)]
        completed.sort(key=lambda setting: setting.precision != baseline.precision)
        for setting in completed[:1]:  # today's precision if it ran
            for argument, (_, *values) in opened.description.argument_values.items():
                for value in values:
                    changed = replace(setting, arguments=((argument, value),))
                    runs[changed] = measure_series(changed, None)
        leftovers = source.leftovers()
    if not any(num_bytes is not None for run in runs.values() for num_bytes in run.bytes_by_size.values()):
        failures = {setting.precision: run.first for setting, run in runs.items() if isinstance(run.first, Failure)}
        raise nothing_works_error(reasons, failures, "Fix the first error above, or give a smaller --batch-size.")
    return MemoryProfile(
        workload=source.name,
        device=opened.hardware.device,
        device_name=opened.hardware.identity.name,
        batch_size=baseline.batch_size,
        accumulation_steps=baseline.accumulation_steps,
        rows=make_rows(requested, reasons, runs, limit_bytes, available_bytes, opened.description.num_samples),
        limit_bytes=limit_bytes,
        notes=(*_notes(source, batch_size, opened, limit_bytes), *leftovers),
        snapshot=None if snapshot_file is None else str(snapshot_file),
    )


class SettingMemory(NamedTuple):
    """Memory of one setting: the result at the requested batch size, and the bytes of each size tried, in order.

    The bytes are None for a size that ran out of memory. `problem` is the message of any other failure, which ended
    the series.
    """

    first: MemoryResult
    bytes_by_size: dict[int, int | None]
    problem: str | None = None


def measure_setting(
    setting: Setting,
    measure: Callable[[Setting, Path | None], MemoryResult],
    limit_bytes: int | None,
    *,
    available_bytes: int,
    num_samples: int | None,
    snapshot_file: Path | None,
) -> SettingMemory:
    """Measure one setting at the requested batch size and, with a limit, at the sizes from `next_batch_size`.

    Raises `WorkloadError` if the workload does not run in fp32 with today's arguments.
    """
    first = measure(setting, snapshot_file)
    is_plain_fp32 = setting.precision == "fp32" and not setting.arguments
    if isinstance(first, Failure) and first.kind == "workload_error" and is_plain_fp32:
        raise WorkloadError(*failure_message(first))
    bytes_by_size: dict[int, int | None] = {}
    result, size = first, setting.batch_size
    while isinstance(result, MemoryBreakdown) or result.kind == "oom":
        bytes_by_size[size] = result.taken_bytes if isinstance(result, MemoryBreakdown) else None
        next_size = limit_bytes and next_batch_size(bytes_by_size, size, limit_bytes, available_bytes, num_samples)
        if not next_size:
            break
        size = next_size
        result = measure(replace(setting, batch_size=size), None)
    problem = result.message if isinstance(result, Failure) and result.kind != "oom" else None
    return SettingMemory(first, bytes_by_size, problem)


def make_rows(
    requested: Sequence[Precision],
    reasons: Mapping[Precision, str],
    runs: Mapping[Setting, SettingMemory],
    limit_bytes: int | None,
    available_bytes: int,
    num_samples: int | None,
) -> tuple[MemoryRow, ...]:
    """Return a row for each precision in the requested order, then one for each run with other arguments.

    A run that takes more than `available_bytes` has failed. `num_samples` is the dataset's size, None if unknown.
    """
    breakdowns = {setting: run.first for setting, run in runs.items() if isinstance(run.first, MemoryBreakdown)}

    def row(setting: Setting, run: SettingMemory) -> MemoryRow:
        first, bytes_by_size, problem = run
        name, arguments = setting.precision, setting.arguments
        largest = None
        if limit_bytes is not None:
            largest = largest_batch(bytes_by_size, limit_bytes, available_bytes, num_samples)
        if isinstance(first, Failure):
            return MemoryRow(
                precision=name, arguments=arguments, largest=largest, failure=first.kind, reason=first.message
            )
        reason = None
        if limit_bytes is not None and largest is None:
            reason = f"the largest batch is unknown: {problem or 'no second batch size could be measured'}"
        return MemoryRow(
            precision=name,
            arguments=arguments,
            breakdown=first,
            largest=largest,
            savings=savings(setting, breakdowns, largest),
            reason=reason,
        )

    made = [row(setting, run) for setting, run in runs.items()]
    by_precision = {each.precision: each for each in made if not each.arguments} | {
        name: MemoryRow(precision=name, reason=reason) for name, reason in reasons.items()
    }
    return (*(by_precision[name] for name in requested), *(each for each in made if each.arguments))


def memory_job(setting: Setting, opened: OpenedWorkload, snapshot_file: Path | None) -> MemoryJob:
    """Return the job that measures the memory of a step of `setting`."""
    sizes = opened.description.sample_sizes
    trial = Trial(
        candidate=setting,
        device=opened.hardware.device,
        loss_scale=LossScale() if MODES[setting.precision].takes_scaler else None,
        deadline_seconds=DEADLINE_SECONDS,
        memory_limit_bytes=_memory_limit_bytes(opened),
        torch_state=opened.torch_state,
        worst_samples=() if sizes is None else sizes.largest[: setting.batch_size],
    )
    return MemoryJob(
        device=trial.device,
        trial=trial,
        deadline_seconds=DEADLINE_SECONDS,
        snapshot_file=None if snapshot_file is None else str(snapshot_file),
    )


def _memory_limit_bytes(opened: OpenedWorkload) -> int:
    return SearchOptions().limit_bytes(opened.hardware.memory.available)


def _parse_fit(fit: Any) -> int:
    try:
        return parse_size(fit)
    except ValueError:
        message = f"--fit is {fit!r}; it must be {SIZE_FORMATS}."
        raise InvalidRequestError(message, "Give --fit 16GiB, for example.") from None


def _snapshot_path(snapshot: str | os.PathLike[str], device: str) -> Path:
    if (kind := identify(device).type) != "cuda":
        raise InvalidRequestError(
            f"--snapshot needs a CUDA device, but the device is {kind}: PyTorch records no other allocator.",
            "Leave out --snapshot: the memory by kind and by module is measured on every device.",
        )
    path = Path(snapshot).absolute()
    if path.is_dir() or not os.access(path.parent, os.W_OK):
        raise InvalidRequestError(
            f"--snapshot is {str(snapshot)!r}; it must be a file in a writable folder.",
            "Give for example --snapshot memory.pickle.",
        )
    return path


def _emulated_reasons(hardware: Hardware, requested: Sequence[Precision]) -> dict[Precision, str]:
    """Return a reason for each precision that the device emulates so slowly that it is measured only on request."""
    return {
        name: f"left out: emulated here, many times slower than fp32; to measure it give --precision {name}"
        for name in requested
        if name != "fp32" and is_hopelessly_slow(hardware, name)
    }


def _notes(source: Source, batch_size: int | None, opened: OpenedWorkload, limit_bytes: int | None) -> tuple[str, ...]:
    description, device = opened.description, opened.hardware.device
    notes = [*assumed_size_notes(batch_size, description), *command_notes(source, opened)]
    is_whole_process = source.command_template is not None and device == "cpu"
    if is_whole_process:
        notes.append("The peak is that of the command's whole process: Python, libraries and data are in the rest.")
    if description.sample_sizes is not None or description.has_worst_batch:
        notes.append("Samples differ in size: the batch that needs the most memory was measured.")
    if limit_bytes is not None and not is_whole_process:
        overhead = "memory of Python and PyTorch's libraries" if device == "cpu" else "the device's context"
        notes.append(f"The limit covers the training step only: add {overhead}.")
    return tuple(notes)


# --- the largest batch that fits, and ways to free memory: pure -------------------------------------------------------

# Two sizes determine the model, a third gives its error. Further sizes are measured until one is near the limit: a line
# through small batches may be wrong by a factor of two (studies/memory_fit).
MIN_MEASURED, MAX_MEASURED = 3, 6
NEAR_SHARE = 0.9  # share of the limit from which on a size is near it
MAX_EXTRAPOLATION = 4  # the next size over the largest measured one, at most
_UNLIMITED = 2**40  # batch size larger than any memory holds


def next_batch_size(
    measured: Mapping[int, int | None], first: int, limit_bytes: int, available_bytes: int, num_samples: int | None
) -> int | None:
    """Return the batch size to measure next, None if enough is known or no further size can be measured.

    `measured` maps each size to its memory in bytes, None if it ran out of memory. `first` is the requested size,
    `num_samples` the size of the dataset. Sizes that the model predicts above `available_bytes` are not tried.
    """
    bytes_by_size = {size: num_bytes for size, num_bytes in measured.items() if num_bytes is not None}
    failed = min((size for size, num_bytes in measured.items() if num_bytes is None), default=None)
    if not measured:
        return first
    if not bytes_by_size:
        return min(measured) // 2 or None
    smallest, largest = min(bytes_by_size), max(bytes_by_size)
    if bytes_by_size[smallest] > limit_bytes:  # the model says nothing about sizes below all measured ones
        return min(smallest // 2, smallest * limit_bytes // bytes_by_size[smallest]) or (None if smallest == 1 else 1)
    target_bytes = min(limit_bytes, available_bytes)
    highest = min(num_samples or _UNLIMITED, MAX_EXTRAPOLATION * largest, failed - 1 if failed else _UNLIMITED)
    model = _memory_model(bytes_by_size, limit_bytes)
    if model is None:
        has_room = 2 * largest <= highest and 2 * bytes_by_size[largest] <= available_bytes
        return 2 * largest if has_room else largest // 2 or None
    is_near = any(NEAR_SHARE * target_bytes <= num_bytes <= target_bytes for num_bytes in bytes_by_size.values())
    is_enough = len(bytes_by_size) >= MIN_MEASURED
    if is_enough and (is_near or failed or len(bytes_by_size) >= MAX_MEASURED):
        return None
    largest_predicted = largest_fitting_size(
        model, target_bytes, min(highest, math.isqrt(largest * failed)) if failed else highest
    )
    other_sizes = (
        ()
        if is_enough
        else (2 * largest if 2 * largest <= largest_predicted else 0, smallest // 2, (smallest + largest) // 2)
    )
    return next((size for size in (largest_predicted, *other_sizes) if size >= 1 and size not in measured), None)


def largest_fitting_size(model: Callable[[float], float], limit_bytes: float, max_size: int) -> int:
    """Return the largest batch size up to `max_size` for which a non-decreasing `model` is within the limit, else 0."""
    low, high = 0, max_size + 1
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if model(middle) <= limit_bytes else (low, middle)
    return low


def largest_batch(
    measured: Mapping[int, int | None], limit_bytes: int, available_bytes: int, num_samples: int | None
) -> LargestBatch | None:
    """Return the largest batch size that fits, by the memory model; None if fewer than two sizes were measured.

    It is below the sizes that ran out of memory, unless the limit is above `available_bytes`, the memory that this
    device has free. See `next_batch_size` for the arguments.
    """
    bytes_by_size = {size: num_bytes for size, num_bytes in sorted(measured.items()) if num_bytes is not None}
    model = _memory_model(bytes_by_size, limit_bytes)
    if model is None:
        return None
    checked = min(bytes_by_size, key=lambda size: abs(bytes_by_size[size] - limit_bytes))
    model_of_others = _memory_model(
        {size: num_bytes for size, num_bytes in bytes_by_size.items() if size != checked}, limit_bytes
    )
    error = None if model_of_others is None else model_of_others(checked) / bytes_by_size[checked] - 1
    largest_measured_fit = max(
        (size for size, num_bytes in bytes_by_size.items() if num_bytes <= limit_bytes), default=0
    )
    failed = [size for size, num_bytes in measured.items() if num_bytes is None and limit_bytes <= available_bytes]
    max_size = min([num_samples or _UNLIMITED, *(size - 1 for size in failed)])

    def largest_size(factor: float) -> int:
        return max(
            largest_measured_fit,
            largest_fitting_size(lambda size: factor * model(size), limit_bytes, max_size),
        )

    by_model = largest_size(1.0)
    is_constant = by_model == _UNLIMITED
    largest_measured = max(bytes_by_size)
    return LargestBatch(
        batch_size=None if is_constant else by_model,
        cautious_batch_size=None if is_constant or error is None else largest_size(1 + abs(error)),
        model_error=error,
        checked_batch_size=None if error is None else checked,
        bytes_per_sample=(model(2 * largest_measured) - model(largest_measured)) / largest_measured,
        measured=tuple(bytes_by_size.items()),
        is_all_data=by_model == num_samples,
    )


def _memory_model(bytes_by_size: Mapping[int, int], limit_bytes: int) -> Callable[[float], float] | None:
    """Return the memory model fitted to the sizes within the limit and the smallest size above it."""
    points = sorted(bytes_by_size.items())
    num_fitting = next((number for number, (_, num_bytes) in enumerate(points) if num_bytes > limit_bytes), len(points))
    return fit_memory(points[: max(2, num_fitting + 1)])


def savings(
    setting: Setting, breakdowns: Mapping[Setting, MemoryBreakdown], largest: LargestBatch | None
) -> tuple[Saving, ...]:
    """Return ways to free memory of a step in `setting`, the largest first.

    For another precision or argument the saving is measured. For half the batch it is the slope of the memory model or,
    without a model, half of the activations and the batch. Otherwise it is the size of the part that disappears.
    """
    breakdown, batch_size = breakdowns[setting], setting.batch_size
    ways = []
    for other, measured in breakdowns.items():
        num_bytes = breakdown.taken_bytes - measured.taken_bytes
        if other.arguments == setting.arguments:
            name = other.precision
            what = f"{name}, as measured (to check its accuracy: autotune-amp fidelity --precision {name})"
            ways.append(Saving(kind="precision", num_bytes=num_bytes, what=what))
        elif other.precision == setting.precision:
            what = f"{arguments_label(other.arguments) or 'the arguments in use'}, as measured"
            ways.append(Saving(kind="argument", num_bytes=num_bytes, what=what))
    if breakdown.checkpointable_modules:
        blocks = breakdown.checkpointable_modules
        saved = [_bytes_inside(breakdown, block) for block in blocks]
        # One block at a time is recomputed.
        what = f"activation checkpointing of {count(len(blocks), 'block')} ({blocks[0]} ... {blocks[-1]})"
        ways.append(Saving(kind="activation_checkpointing", num_bytes=sum(saved) - max(saved), what=what))
    kinds = " and ".join(dict.fromkeys(breakdown.optimizers)) or "the optimizer"
    what = f"an optimizer without state instead of {kinds}; 8-bit state frees about three quarters of it"
    ways.append(Saving(kind="optimizer_state", num_bytes=breakdown.optimizer_state_bytes, what=what))
    if batch_size > 1:
        samples_bytes = breakdown.activations_bytes + breakdown.batch_bytes
        half_bytes = (
            samples_bytes // 2 if largest is None else round(largest.bytes_per_sample * (batch_size - batch_size // 2))
        )
        what = f"batch {batch_size // 2} with twice the accumulation steps"
        ways.append(Saving(kind="batch_size", num_bytes=half_bytes, what=what))
    return tuple(sorted((s for s in ways if s.num_bytes > 0), key=lambda saving: -saving.num_bytes))


def _bytes_inside(breakdown: MemoryBreakdown, block: str) -> int:
    return sum(m.num_bytes for m in breakdown.modules if m.name == block or m.name.startswith(f"{block}."))
