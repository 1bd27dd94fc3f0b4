"""Check of a workload, in a child process: the step is recorded there, or taken alone if the recording crashes it."""

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

DEADLINE_SECONDS = 600.0


def run_workload_check(
    source: Source, progress: Progress, device: str, batch_size: int | None, seed: int
) -> CheckReport:
    """Check the workload in a child process; see `autotune_amp.check_workload` for the arguments."""
    autocast_device = next((known for known in AUTOCAST_DEVICES if known == device), None)
    if autocast_device is None:
        known = ", ".join(AUTOCAST_DEVICES)
        raise InvalidRequestError(f"--for is {device!r}; it must be one of {known}.", "Give --for cuda, for example.")
    if not is_count(batch_size):
        raise InvalidRequestError(
            f"batch_size is {batch_size!r}; it must be a whole number from 1 up.", "Leave it out, or pass 8."
        )
    watcher = ProgressWatcher(progress, Budget(math.inf))
    progress.work_started(None)
    hidden = "steps cannot be recorded from outside"
    instead = "Give a Workload, or search the command: its trials show what breaks."
    with loaded_backend(source, watcher, DEADLINE_SECONDS, hidden=hidden, next_step=instead) as backend:
        opened = backend.open("cpu", source.num_threads(), DEADLINE_SECONDS)
        watcher.phase(f"recording one fp32 step for {autocast_device}")
        job = WorkloadCheckJob(
            device="cpu",
            autocast_device=autocast_device,
            batch_size=batch_size,
            seed=seed,
            torch_state=source.torch_state(opened.torch_state),
            deadline_seconds=DEADLINE_SECONDS,
        )
        found = backend.submit(job).result()
        if isinstance(found, Failure) and found.kind == "crash":
            watcher.phase("taking the step without recording it")
            alone = backend.submit(msgspec.structs.replace(job, is_recorded=False)).result()
            if not isinstance(alone, Failure):
                raise RunnerError(
                    f"The recording of the step failed: {found.message}. The step alone works: it is not at fault.",
                    "Please report this with the step, as a fault of autotune_amp's. `autotune-amp fidelity` says how "
                    "the workload trains in a precision, without a recording.",
                )
            found = alone
    if isinstance(found, Failure):
        if found.kind == "workload_error":
            raise WorkloadError(*failure_message(found))
        raise WorkloadError(
            f"One step of the workload does not work on the CPU: {found.kind}: {found.message}.",
            "Run one fp32 step on the CPU by itself, with a smaller batch if need be, and fix what it raises.",
        )
    return found
