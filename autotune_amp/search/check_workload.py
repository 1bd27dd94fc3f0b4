"""check_workload() behind its arguments: load the workload in a child and have it looked at there, without a search."""

from __future__ import annotations

import math

from autotune_amp.check.findings import CheckReport, Look
from autotune_amp.core.errors import InvalidRequestError, WorkloadError
from autotune_amp.core.outcome import Failure
from autotune_amp.precision.rules import AUTOCAST_DEVICES
from autotune_amp.search.options import is_count
from autotune_amp.search.planner import Budget
from autotune_amp.search.progress import Progress
from autotune_amp.search.run import ProgressWatcher
from autotune_amp.search.source import Source, loaded, message_of

DEADLINE_SECONDS = 600.0


def run_look(source: Source, progress: Progress, device: str, batch_size: int | None, seed: int) -> CheckReport:
    """Check in a child; see `autotune_amp.check_workload`, whose arguments these are."""
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
    with loaded(source, watcher, DEADLINE_SECONDS, hidden=hidden, next_step=instead) as backend:
        opened = backend.open("cpu", source.num_threads(), DEADLINE_SECONDS)
        watcher.phase(f"recording one fp32 step for {autocast_device}")
        job = Look(
            device="cpu",
            autocast_device=autocast_device,
            batch_size=batch_size,
            seed=seed,
            torch_state=source.torch_state(opened.torch_state),
            deadline_seconds=DEADLINE_SECONDS,
        )
        found = backend.submit(job).result()
    if isinstance(found, Failure):
        if found.kind == "workload_error":
            raise WorkloadError(*message_of(found))
        raise WorkloadError(
            f"The step could not be recorded: {found.kind}: {found.message}.",
            "Mend it until one training step in fp32 works on its own on the CPU, with a smaller batch if need be.",
        )
    return found
