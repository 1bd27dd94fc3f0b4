"""Implementation of check_workload(): runs the check in a child process, and reports crashes of that process."""

from __future__ import annotations

import math

import msgspec

from autotune_amp.core.errors import InvalidRequestError, RunnerError, WorkloadError
from autotune_amp.core.outcome import Failure
from autotune_amp.diagnostics.check.findings import CheckReport, WorkloadCheckJob
from autotune_amp.precision.rules import AUTOCAST_DEVICES
from autotune_amp.search.options import is_count
from autotune_amp.search.planner import Budget
from autotune_amp.search.progress import Progress
from autotune_amp.search.run import ProgressWatcher
from autotune_amp.search.source import Source, failure_message, loaded_backend

DEADLINE_SECONDS = 600.0  # for loading the workload, and for each job; far above the time that any step needs


def run_workload_check(
    source: Source, progress: Progress, device: str, batch_size: int | None, seed: int
) -> CheckReport:
    """Check the workload in a child process; see `autotune_amp.check_workload` for the arguments."""
    if device not in AUTOCAST_DEVICES:
        device_types = ", ".join(AUTOCAST_DEVICES)
        raise InvalidRequestError(
            f"--for is {device!r}; it must be one of {device_types}.", "Give --for cuda, for example."
        )
    if not is_count(batch_size):
        raise InvalidRequestError(
            f"batch_size is {batch_size!r}; it must be a whole number from 1 up.", "Leave it out, or pass 8."
        )
    watcher = ProgressWatcher(progress, Budget(math.inf))
    progress.work_started(None)
    command = source.command_template
    if command is not None and batch_size is not None and "batch_size" not in command.placeholders:
        raise InvalidRequestError(
            f"batch_size is {batch_size}, but the command has no {{batch_size}}.",
            "Write {batch_size=N} where the command takes it, or leave --batch-size out.",
        )
    with loaded_backend(source, watcher, DEADLINE_SECONDS) as backend:
        opened = backend.open("cpu", source.num_threads(), DEADLINE_SECONDS)
        watcher.phase(f"recording one fp32 step for {device}")
        job = WorkloadCheckJob(
            device="cpu",
            autocast_device=device,
            batch_size=batch_size,
            seed=seed,
            torch_state=source.torch_state(opened.torch_state),
            deadline_seconds=DEADLINE_SECONDS,
        )
        report = backend.submit(job).result()
        if isinstance(report, Failure) and report.kind == "crash" and command is None:
            watcher.phase("running the step without recording it")
            unrecorded = backend.submit(msgspec.structs.replace(job, is_recorded=False)).result()
            if not isinstance(unrecorded, Failure):
                raise RunnerError(
                    f"The recording of the step failed: {report.message}. Without recording the step works.",
                    "Please report this bug of autotune_amp, with the step. Meanwhile `autotune-amp fidelity` checks a "
                    "precision without recording.",
                )
            report = unrecorded
        leftovers = source.leftovers()
    if isinstance(report, Failure) and command is not None:
        raise WorkloadError(
            f"The command fails: {report.kind}: {report.message}.\n{report.details or ''}".rstrip(),
            "Run the command by itself, and fix what it raises.",
        )
    if isinstance(report, Failure):
        if report.kind == "workload_error":
            raise WorkloadError(*failure_message(report))
        raise WorkloadError(
            f"One step of the workload fails on the CPU: {report.kind}: {report.message}.",
            "Run one fp32 step on the CPU by itself, with a smaller batch if need be, and fix what it raises.",
        )
    if command is None:
        return report
    return msgspec.structs.replace(report, workload=source.name, notes=(*report.notes, *leftovers))
