"""RankedBackend: trials that several processes of this host train together, one a rank."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Sequence
from typing import Any

from msgspec.structs import replace

from autotune_amp.core.errors import WorkloadError
from autotune_amp.core.job import Job
from autotune_amp.core.outcome import Description, Failure, Measurement
from autotune_amp.distributed import free_port
from autotune_amp.isolation.local import Ability, Opened, Slot, WorkloadBackend
from autotune_amp.isolation.process import ENDED, Watcher
from autotune_amp.isolation.slots import WorkloadSlots
from autotune_amp.trial.jobs import Describe, Trial

GRACE_SECONDS = 3.0  # between the end of one rank and that of rank 0, which hears of it as a lost connection
# What a rank says whose peer is gone: the reason is the peer's.
_OF_A_PEER = re.compile(r"gloo|nccl|connection (closed|reset|refused)|broken pipe|store|process group|peer", re.I)
NOTE = (
    "Trials ran on {0} ranks of this host under DistributedDataParallel: speeds are those of all together, batch sizes "
    "and memory those of each. Precision, loss scale and accumulation were checked on one."
)


class RankedBackend(WorkloadBackend):
    """A `WorkloadBackend` whose trials run on as many `slots` as they have ranks; anything else runs on the first.

    `make` starts the backend of a rank. On a CPU, where they share the memory, each may take its part of a trial's.
    """

    def __init__(
        self, slots: Sequence[Slot], make: Callable[[Slot, Watcher], WorkloadBackend], watcher: Watcher
    ) -> None:
        self.ranks = WorkloadSlots(slots, make, [watcher, *(Watcher() for _ in slots[1:])])  # rank 0's is heard
        self._device = slots[0].device

    @property
    def abilities(self) -> frozenset[Ability]:
        """Without what one rank alone says nothing of: where the time of a step goes, and what all of them draw."""
        return self.ranks.abilities - {"profile", "energy"}

    @property
    def slots(self) -> Sequence[Slot]:
        """One: all ranks together."""
        return (Slot(self._device),)

    @property
    def is_build_shared(self) -> bool:  # noqa: D102 - see Backend
        return self.ranks.is_build_shared

    def load(self, deadline_seconds: float) -> dict[str, Any]:  # noqa: D102 - see WorkloadBackend
        return self.ranks.load(deadline_seconds)

    def open(self, device: str, num_threads: int | None, deadline_seconds: float) -> Opened:
        """See `WorkloadBackend`; on every rank."""
        until = time.monotonic() + deadline_seconds
        opened = self.ranks.open(device, num_threads, deadline_seconds)
        self.ranks.open_others(device, num_threads, until - time.monotonic())
        return opened

    def submit(self, job: Job[Any], slot: Slot | None = None) -> Any:  # noqa: ARG002 - there is one
        """Start a job: a trial on all of its ranks."""
        if isinstance(job, Describe):
            return _Described(self.ranks.submit(job), len(self.ranks.slots))
        if not isinstance(job, Trial):
            return self.ranks.submit(job)
        if job.num_ranks == 1:
            return self.ranks.submit(job, self.ranks.slots[0])
        meeting = f"127.0.0.1:{free_port()}"
        return _OnRanks(self.ranks, [self._of_rank(job, rank, meeting) for rank in range(job.num_ranks)])

    def _of_rank(self, job: Trial, rank: int, meeting: str) -> Trial:
        limit_bytes, device = job.memory_limit_bytes, self.ranks.slots[rank].device
        if limit_bytes is not None and device == "cpu":
            limit_bytes //= job.num_ranks
        job = replace(job, rank=rank, meeting=meeting, memory_limit_bytes=limit_bytes, device=device)
        # Rank 0's steps are everybody's.
        return job if rank == 0 else replace(job, first_step_deadline_seconds=None, step_deadline_seconds=None)

    def share_build(self, job: Any, deadline_seconds: float) -> str | None:  # noqa: D102 - see Backend
        return self.ranks.share_build(job, deadline_seconds)

    def keep(self) -> None:  # noqa: D102 - see Backend
        self.ranks.keep()

    def close(self) -> None:  # noqa: D102 - see Backend
        self.ranks.close()


class _Described:
    """What the workload is on so many ranks."""

    def __init__(self, handle: Any, num_ranks: int) -> None:
        self._handle, self._num_ranks = handle, num_ranks
        self.start_seconds: float | None = None

    def result(self) -> Description | Failure:
        """Raises `WorkloadError` for a loop of the user's own, whose exchange is its own too."""
        found = self._handle.result()
        if isinstance(found, Failure):
            return found
        if found.is_loop or found.trainer is not None:
            raise WorkloadError(
                "--ranks trains a model, a loss and an optimizer; a loop of its own exchanges gradients itself.",
                "Search the command that trains on several ranks: autotune-amp search -- torchrun ...",
            )
        notes = (*found.notes, NOTE.format(self._num_ranks))
        described: Description = replace(found, num_ranks=self._num_ranks, is_ranked=True, notes=notes)
        return described


class _OnRanks:
    """A trial on its ranks."""

    def __init__(self, ranks: WorkloadSlots, jobs: Sequence[Trial]) -> None:
        self._ranks, self._over = ranks, ranks.over[: len(jobs)]
        self._handles = [ranks.submit(job, slot) for job, slot in zip(jobs, ranks.slots, strict=False)]

    @property
    def start_seconds(self) -> float | None:
        """Rank 0's."""
        return self._handles[0].start_seconds

    def result(self) -> Measurement | Failure:
        """What rank 0 measured, or the failure that it comes from; then none of them runs any more."""
        first = self._handles[0]
        try:
            if self._ranks.wait(self._handles) is not first:
                self._ranks.wait_seconds(first.future, GRACE_SECONDS)
        finally:
            for over in self._over:
                over.set()
        outcomes = [handle.result() for handle in self._handles]
        for over in self._over:
            over.clear()
        return outcomes[0] if isinstance(outcomes[0], Measurement) else culprit(outcomes)


def culprit(outcomes: Sequence[Any]) -> Failure:
    """Of ranks that failed the lowest whose failure is its own, or else that came to no end; rank 0's where all only
    lost a peer."""
    failures = [(rank, found) for rank, found in enumerate(outcomes) if isinstance(found, Failure)]
    # A minimum is the first of several, which is the lowest rank.
    rank, found = min(failures, key=lambda failed: _is_of_a_peer(failed[1]) + 2 * (failed[1].message == ENDED))
    return replace(found, message=f"rank {rank}: {found.message}") if rank else found


def _is_of_a_peer(found: Failure) -> float:
    if found.kind == "timeout":
        return 0.5
    return float(found.kind in ("workload_error", "crash") and _OF_A_PEER.search(found.message) is not None)
