"""Trials on several ranks, each a process of this host; and when to end all ranks of a run after one has failed."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from msgspec.structs import asdict, replace

from autotune_amp.core.errors import WorkloadError
from autotune_amp.core.job import Job
from autotune_amp.core.outcome import Description, Failure, Measurement
from autotune_amp.distributed import free_port
from autotune_amp.processes.local import Ability, CompletedHandle, OpenResult, Slot, WorkloadBackend
from autotune_amp.processes.process import ENDED, TICK_SECONDS, Watcher
from autotune_amp.processes.slots import WorkloadSlots
from autotune_amp.trial.jobs import Describe, FollowerMemory, FollowerTrial, Trial
from autotune_amp.trial.judge import causing_failure, failure_from_memory

GRACE_SECONDS = 3.0
MAX_START_ATTEMPTS = 3  # another process may take the free port first
_PORT_IN_USE = "EADDRINUSE"
NOTE = (
    "Trials ran on {0} ranks of this host under DistributedDataParallel: speeds are those of all ranks together, batch "
    "sizes those of each rank, memory that of the rank with the most. Precision, loss scale and accumulation were "
    "checked on one rank."
)
NOTE_UNUSED = (
    "Some parameters get no gradient: trials ran with find_unused_parameters=True, and so must the training, as "
    "DistributedDataParallel(model, find_unused_parameters=True)."
)


class RankGrace:
    """Time that the ranks of a run get after one of them has failed or hangs, before all of them are ended.

    Ranks that lost their connection to the failed one may report first, and ranks that hang still have to print their
    stacks.
    """

    def __init__(self) -> None:
        self._since: float | None = None

    def is_over(self, failure: Failure | None, now: float) -> bool:
        """Whether to end all ranks at the time `now`, in seconds. `failure` is the likely cause so far, None while
        there is none. It may become None again, if a rank that seemed to hang goes on.

        An OOM is the cause whatever other ranks report, so it ends the grace at once.
        """
        if failure is None:
            self._since = None
            return False
        self._since = now if self._since is None else self._since
        return failure.kind == "oom" or now - self._since >= GRACE_SECONDS


def failure_of_rank(failure: Failure, rank: int, num_ranks: int) -> Failure:
    """Return the failure with the rank in its message, if there are several ranks."""
    return replace(failure, message=f"rank {rank}: {failure.message}") if num_ranks > 1 else failure


# Failure of the ranks that still run after rank 0 has ended with a measurement.
_LATE_RANK_FAILURE = Failure(kind="timeout", message=ENDED)


class RankedBackend(WorkloadBackend):
    """`WorkloadBackend` whose trials run on as many `slots` as they have ranks; other jobs run on the first.

    `make` starts the backend of one rank.
    """

    def __init__(
        self, slots: Sequence[Slot], make: Callable[[Slot, Watcher], WorkloadBackend], watcher: Watcher
    ) -> None:
        self.ranks = WorkloadSlots(slots, make, lambda slot: watcher if slot == slots[0] else Watcher())
        self._device = slots[0].device

    @property
    def abilities(self) -> frozenset[Ability]:
        """Return the abilities of a rank without profile and energy, which one rank cannot measure for all."""
        return self.ranks.abilities - {"profile", "energy"}

    @property
    def slots(self) -> Sequence[Slot]:
        """Return a single slot, which stands for all ranks together."""
        return (Slot(self._device),)

    @property
    def is_build_shared(self) -> bool:  # noqa: D102 - see Backend
        return self.ranks.is_build_shared

    def load(self, deadline_seconds: float) -> dict[str, Any]:  # noqa: D102 - see WorkloadBackend
        return self.ranks.load(deadline_seconds)

    def open(self, device: str, num_threads: int | None, deadline_seconds: float) -> OpenResult:
        """See `WorkloadBackend`. Opens the workload on every rank."""
        until = time.monotonic() + deadline_seconds
        opened = self.ranks.open(device, num_threads, deadline_seconds)
        self.ranks.open_others(until - time.monotonic())
        return opened

    def submit(self, job: Job[Any], slot: Slot | None = None) -> Any:  # noqa: ARG002 - there is one
        """Start a job; a trial starts on all of its ranks."""
        if isinstance(job, Describe):
            return CompletedHandle(self._describe(job))
        if not isinstance(job, Trial):
            return self.ranks.submit(job)
        if job.num_ranks == 1:
            return self.ranks.submit(job, self.ranks.slots[0])
        return _RankedHandle(self.ranks, job)

    def _describe(self, job: Describe) -> Description | Failure:
        """Return the description of the workload for its ranks. Raises `WorkloadError` for a loop that exchanges
        gradients itself.
        """
        description: Description | Failure = self.ranks.submit(replace(job, is_ranked=True)).result()
        if isinstance(description, Failure):
            return description
        if description.is_loop or description.trainer is not None:
            raise WorkloadError(
                "--ranks is for a workload of model, loss and optimizer; your own loop exchanges gradients itself.",
                "Search the command that trains on several ranks: autotune-amp search -- torchrun ...",
            )
        num_ranks = len(self.ranks.slots)
        notes = (
            *description.notes,
            NOTE.format(num_ranks),
            *([NOTE_UNUSED] if description.has_unused_parameters else []),
        )
        return replace(description, num_ranks=num_ranks, is_ranked=True, notes=notes)

    def share_build(self, job: Any, deadline_seconds: float) -> str | None:  # noqa: D102 - see Backend
        return self.ranks.share_build(job, deadline_seconds)

    def keep(self) -> None:  # noqa: D102 - see Backend
        self.ranks.keep()

    def close(self) -> None:  # noqa: D102 - see Backend
        self.ranks.close()


class _RankedHandle:
    """Handle of a trial that runs on several ranks."""

    def __init__(self, ranks: WorkloadSlots, job: Trial) -> None:
        self._ranks, self._job = ranks, job
        self._end_events = [ranks.end_event(slot) for slot in ranks.slots[: job.num_ranks]]
        self._start()

    def _start(self) -> None:
        job, address = self._job, f"127.0.0.1:{free_port()}"
        if job.candidate.is_compiled:  # rank 0 waits for other ranks' compilers, which its parent does not hear of
            job = replace(job, step_deadline_seconds=None)
        # Rank 0's step deadlines cover all ranks.
        follower_fields = {**asdict(job), "first_step_deadline_seconds": None, "step_deadline_seconds": None}
        slots = self._ranks.slots[: job.num_ranks]
        jobs = [replace(job, meeting=address, device=slots[0].device)]
        for rank, slot in enumerate(slots[1:], 1):
            jobs.append(FollowerTrial(**{**follower_fields, "meeting": address, "rank": rank, "device": slot.device}))
        self._handles = [self._ranks.submit(rank_job, slot) for rank_job, slot in zip(jobs, slots, strict=True)]

    @property
    def start_seconds(self) -> float | None:
        """Return the start seconds of the rank that took longest."""
        seconds = [handle.start_seconds for handle in self._handles]
        return max((rank_seconds for rank_seconds in seconds if rank_seconds is not None), default=None)

    def result(self) -> Measurement | Failure:
        """Return rank 0's measurement with the highest memory of any rank, or the failure that caused the others."""
        outcomes = self._outcomes()
        for _ in range(MAX_START_ATTEMPTS - 1):
            if not any(isinstance(outcome, Failure) and _PORT_IN_USE in outcome.message for outcome in outcomes):
                break
            self._start()
            outcomes = self._outcomes()
        measurement, *others = outcomes
        follower_memories = [outcome for outcome in others if isinstance(outcome, FollowerMemory)]
        if not isinstance(measurement, Measurement) or len(follower_memories) < len(others):
            return _causing_failure_of_ranks(outcomes)
        for rank, outcome in enumerate(follower_memories, 1):
            failure = failure_from_memory(
                outcome.reserved_memory_bytes, self._job.memory_limit_bytes, has_flushed=outcome.has_flushed
            )
            if failure is not None:
                return failure_of_rank(failure, rank, len(outcomes))
        return replace(
            measurement,
            peak_memory_bytes=max(
                measurement.peak_memory_bytes, *(outcome.peak_memory_bytes for outcome in follower_memories)
            ),
            reserved_memory_bytes=max(
                measurement.reserved_memory_bytes, *(outcome.reserved_memory_bytes for outcome in follower_memories)
            ),
            joules_per_sample=None,  # a counter covers one rank, or everything on its host
        )

    def _outcomes(self) -> list[Any]:
        """Wait until all ranks have ended, or end them, and return their outcomes."""
        grace = RankGrace()
        try:
            while running := [handle for handle in self._handles if not handle.future.done()]:
                if grace.is_over(self._failure_so_far(running), time.monotonic()):
                    break
                self._ranks.wait_seconds(running[0].future, TICK_SECONDS)
        finally:
            for end_event in self._end_events:
                end_event.set()
        outcomes = [handle.result() for handle in self._handles]
        for end_event in self._end_events:
            end_event.clear()
        return outcomes

    def _failure_so_far(self, running: Sequence[Any]) -> Failure | None:
        outcomes = [handle.result() for handle in self._handles if handle not in running]
        failures = [outcome for outcome in outcomes if isinstance(outcome, Failure)]
        if failures:
            return causing_failure(failures)
        return None if self._handles[0] in running else _LATE_RANK_FAILURE


def _causing_failure_of_ranks(outcomes: Sequence[Any]) -> Failure:
    """Return the failure that caused those of the other ranks, with its rank in the message."""
    failures = [(rank, failure) for rank, failure in enumerate(outcomes) if isinstance(failure, Failure)]
    not_ended_here = [(rank, failure) for rank, failure in failures if failure.message != ENDED] or failures
    cause = causing_failure(failure for _, failure in not_ended_here)
    rank = next(rank for rank, failure in not_ended_here if failure is cause)
    if rank:
        return failure_of_rank(cause, rank, len(outcomes))
    if cause.kind == "timeout":
        return replace(cause, message=f"{cause.message}; any of the {len(outcomes)} ranks may have held it up")
    return cause
