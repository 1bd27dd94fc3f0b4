"""Implementation of profile_memory(): measures a step of each precision in child processes, and fits batch sizes."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from msgspec.structs import replace

from autotune_amp.core.config import LossScale
from autotune_amp.core.dimensions import Precision
from autotune_amp.core.errors import InvalidRequestError, WorkloadError
from autotune_amp.core.hardware import Hardware
from autotune_amp.core.outcome import Failure
from autotune_amp.core.recommendation import Exclusion, NothingWorksError
from autotune_amp.core.setting import Setting
from autotune_amp.core.text import A_SIZE, parse_size
from autotune_amp.hardware import identify
from autotune_amp.memory.fit import largest_batch, next_batch_size
from autotune_amp.memory.job import MemoryBreakdown, MemoryJob
from autotune_amp.memory.results import MemoryProfile, MemoryRow
from autotune_amp.memory.savings import savings
from autotune_amp.precision.modes import MODES
from autotune_amp.profile.gap import LOW
from autotune_amp.search.job_defaults import is_hopeless
from autotune_amp.search.options import SearchOptions, is_count
from autotune_amp.search.planner import Budget
from autotune_amp.search.profile_amp import refused_in, space_at
from autotune_amp.search.progress import Progress
from autotune_amp.search.run import ProgressWatcher
from autotune_amp.search.source import OpenedWorkload, Source, loaded, message_of, open_workload
from autotune_amp.search.space import ASSUMED_BATCH_SIZE
from autotune_amp.trial.jobs import Trial

DEADLINE_SECONDS = 600.0  # per process

Taken = MemoryBreakdown | Failure


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
    with loaded(source, watcher, clock.left(), hidden=hidden, next_step=instead) as backend:
        opened = open_workload(backend, source, device, watcher, baseline_batch_size=batch_size or ASSUMED_BATCH_SIZE)
        progress.found_hardware(opened.hardware)
        asked = precisions or ("fp32", *LOW)
        space = space_at(batch_size, opened, asked)
        refused = refused_in(space) | ({} if precisions else _hopeless(opened.hardware, asked))
        first = space.baseline

        def measure(setting: Setting, snapshot_file: Path | None) -> Taken:
            watcher.phase(f"measuring the memory of {setting.precision}, batch size {setting.batch_size}")
            found: Taken = backend.submit(memory_job(setting, opened, snapshot_file)).result()
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
        raise _nothing_works(refused, runs)
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

    first: Taken
    taken_bytes: dict[int, int | None]
    problem: str | None = None


def measure_precision(
    setting: Setting,
    measure: Callable[[Setting, Path | None], Taken],
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
        raise WorkloadError(*message_of(first))
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


def _nothing_works(refused: Mapping[Precision, str], runs: Mapping[Precision, PrecisionMemory]) -> NothingWorksError:
    failures = {name: run.first for name, run in runs.items() if isinstance(run.first, Failure)}
    reasons = {**refused, **{name: f"{failure.kind}: {failure.message}" for name, failure in failures.items()}}
    return NothingWorksError(
        "No precision could be measured.",
        "Fix what the reasons name, or give a smaller --batch-size.",
        tuple(Exclusion(precision=name, batch_size=None, reason=why) for name, why in reasons.items()),
    )


def _notes(batch_size: int | None, opened: OpenedWorkload, limit_bytes: int | None) -> tuple[str, ...]:
    notes = []
    description, device = opened.description, opened.hardware.device
    if description.batch_size is None and batch_size is None:
        notes.append(
            f"The data has no batch size of its own: {ASSUMED_BATCH_SIZE} is assumed. --batch-size says yours."
        )
    if description.sample_sizes is not None or description.has_worst_batch:
        notes.append("Samples differ in size: what was measured is the batch that takes the most.")
    if limit_bytes is not None:
        beside = "what Python and PyTorch's libraries take" if device == "cpu" else "the device's context"
        notes.append(f"The limit is for the training alone: {beside} comes on top.")
    return tuple(notes)
