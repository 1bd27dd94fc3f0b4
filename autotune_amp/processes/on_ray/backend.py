"""Backend that forwards its calls to a process on a Ray node."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import msgspec

from autotune_amp.core.errors import ClusterLostError, RunnerError
from autotune_amp.core.job import Job
from autotune_amp.core.outcome import Failure
from autotune_amp.processes.local import (
    CANNOT_BE_LOADED,
    Ability,
    Isolation,
    OpenResult,
    Slot,
    SlotLostError,
    WorkloadBackend,
    convert_result,
)
from autotune_amp.processes.on_ray.cluster import SILENT_SECONDS, Cluster, NodeProcessLostError
from autotune_amp.processes.on_ray.messages import CallProgress, pack
from autotune_amp.processes.process import Watcher

# Failures of the node rather than the job: it had loaded the workload before, and other nodes have room.
_OF_THE_NODE = (CANNOT_BE_LOADED, "No space left on device")
_OF_SHARED_MEMORY = "</torch_"  # shared memory filled by a loader's workers is no full disk


class NodeBackend(WorkloadBackend):
    """Backend that forwards its calls to a process on a node."""

    def __init__(
        self, cluster: Cluster, slot: Slot, isolation: Isolation | None, environment: dict[str, str], watcher: Watcher
    ) -> None:
        self._cluster = cluster
        self._slot = slot
        self._how = isolation, environment
        self._watcher = watcher
        self._is_made = False
        self._is_build_shared = False
        self._abilities: frozenset[Ability] = frozenset()

    @property
    def abilities(self) -> frozenset[Ability]:  # noqa: D102 - see Backend
        return self._abilities

    @property
    def slots(self) -> Sequence[Slot]:  # noqa: D102 - see Backend
        return (self._slot,)

    @property
    def is_build_shared(self) -> bool:  # noqa: D102 - see Backend
        return self._is_build_shared

    def load(self, deadline_seconds: float) -> dict[str, Any]:  # noqa: D102 - see WorkloadBackend
        state: dict[str, Any] = self.call("load", deadline_seconds).answer
        return state

    def open(self, device: str, num_threads: int | None, deadline_seconds: float) -> OpenResult:  # noqa: D102 - see WorkloadBackend
        return OpenResult(*self.call("open", device, num_threads, deadline_seconds).answer)

    def submit(self, job: Job[Any], slot: Slot | None = None) -> _OnNode:  # noqa: ARG002 - there is one
        """Start a job."""
        return _OnNode(self, job)

    def share_build(self, job: Job[Any], deadline_seconds: float) -> str | None:  # noqa: D102 - see Backend
        reason: str | None = self.call("share_build", job.kind(), msgspec.to_builtins(job), deadline_seconds).answer
        return reason

    def keep(self) -> None:  # noqa: D102 - see Backend
        self.call("keep")

    def close(self) -> None:  # noqa: D102 - see Backend
        if not self._is_made:
            return
        heard, self._watcher = self._watcher, Watcher()  # nobody watches any more
        try:
            self._ask("stop")
            self.call("close")
        except (SlotLostError, ClusterLostError):
            pass  # its processes are gone too
        self._watcher, self._is_made = heard, False

    def call(self, method: str, *arguments: Any) -> CallProgress:
        """Run a method in the node's process and pass its progress on to the watcher.

        Raises `SlotLostError` if the process is gone or cannot work any more.
        """
        if not self._is_made:
            self._is_made = True
            self.call("make", *self._how, self._slot.device)
        self._ask("begin", pack((method, arguments)))
        while True:
            told = msgspec.msgpack.decode(self._ask("hear"), type=CallProgress)
            for number, seconds in told.steps:
                self._watcher.step(number, seconds)
            if told.output:
                self._watcher.output(told.output)
            if told.is_over:
                break
        self._abilities, self._is_build_shared = (
            cast(frozenset[Ability], frozenset(told.abilities)),
            told.is_build_shared,
        )
        if told.error is None:
            return told
        error = told.error.opened()
        if isinstance(error, RunnerError):  # the node cannot start processes
            raise self.lost(error.message)
        raise error

    def lost(self, reason: str) -> SlotLostError:
        """End the place and return the error for its loss."""
        self._cluster.end(str(self._slot.name))
        return SlotLostError(self._slot, reason)

    def _ask(self, method: str, *arguments: bytes) -> bytes:
        asked = self._cluster.call(str(self._slot.name), method, *arguments)
        try:
            return self._cluster.answer(asked, self._watcher.tick, SILENT_SECONDS)
        except (NodeProcessLostError, RunnerError) as error:
            raise self.lost(str(error)) from error


class _OnNode:
    """Job on a node."""

    def __init__(self, backend: NodeBackend, job: Job[Any]) -> None:
        self._backend, self._job = backend, job
        self.start_seconds: float | None = None

    def result(self) -> Any:
        """See `Handle`. A node whose disk is full, or that cannot load the workload again, is given up."""
        told = self._backend.call("run", self._job.kind(), msgspec.to_builtins(self._job))
        self.start_seconds = told.start_seconds
        found = told.answer
        if not (isinstance(found, dict) and found.get("outcome") == "failure"):
            try:
                return convert_result(self._job, found)
            except msgspec.ValidationError as error:
                return Failure(kind="crash", message=f"it gave a result that cannot be read: {error}")
        failure = msgspec.convert(found, Failure)
        said = f"{failure.message}{failure.details}"
        if any(text in said for text in _OF_THE_NODE) and _OF_SHARED_MEMORY not in said:
            raise self._backend.lost(failure.message.splitlines()[0])
        return failure
