"""A workload opened in a child for something other than a search: loaded, the device probed, built once."""

from __future__ import annotations

from typing import Any, NamedTuple

from autotune_amp.core.errors import BudgetTooSmallError, WorkloadError
from autotune_amp.core.hardware import Hardware
from autotune_amp.core.job import Found, Job
from autotune_amp.core.outcome import Description, Failure
from autotune_amp.core.recommendation import NothingWorksError
from autotune_amp.isolation.local import LocalBackend
from autotune_amp.search.origin import Origin
from autotune_amp.search.progress import Progress
from autotune_amp.search.session import Clock
from autotune_amp.trial.jobs import Describe, Probe


class Opened(NamedTuple):
    """What was found of the workload and the device, and the torch state that what is run there takes over."""

    hardware: Hardware
    description: Description
    torch_state: dict[str, Any]


def open_workload(runner: LocalBackend, origin: Origin, device: str, clock: Clock, progress: Progress) -> Opened:
    """Load it, probe the device and build it once.

    Raises `WorkloadError` (it cannot be loaded or built), `NothingWorksError` (the probe failed) and
    `BudgetTooSmallError`.
    """
    progress.phase("loading the workload")
    runner.load(clock.left())
    state = origin.torch_state(runner.open(device, origin.num_threads(), clock.left()).torch_state)
    progress.phase("probing the device")
    hardware = _ask(runner, Probe(device=device, torch_state=state, deadline_seconds=_left(clock)), clock)
    describe = Describe(
        device=hardware.device, torch_state=state, has_tf32=hardware.has_tf32, deadline_seconds=_left(clock)
    )
    description = _ask(runner, describe, clock)
    return Opened(hardware, description, state)


def told(failure: Failure) -> tuple[str, str]:
    """Message and next step; the details are one line of advice where the error is ours, else a traceback."""
    details = (failure.details or "").rstrip()
    if details and "\n" not in details:
        return failure.message, details
    return f"{failure.message}\n{details}".rstrip(), "Mend it until one training step in fp32 works on its own."


def _left(clock: Clock) -> float:
    return max(0.0, clock.left())


def _ask(runner: LocalBackend, job: Job[Found], clock: Clock) -> Found:
    answer = runner.submit(job).result()
    if not isinstance(answer, Failure):
        return answer
    if answer.kind == "timeout":
        raise BudgetTooSmallError(
            f"The budget of {clock.budget_seconds:g} s ended before the check began.", "Give a larger budget."
        )
    if isinstance(job, Probe):
        raise NothingWorksError(f"The probe failed: {answer.message.rstrip('.')}.", 'Try device="cpu".', ())
    raise WorkloadError(*told(answer))
