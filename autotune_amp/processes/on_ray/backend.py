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

# Failures that other nodes may not have: this one had loaded the workload before, or its disk is full.
_NODE_FAILURES = (CANNOT_BE_LOADED, "No space left on device")
_SHARED_MEMORY_FILE = "</torch_"  # no space is left for this file: a loader's workers filled shared memory, no disk


class NodeBackend(WorkloadBackend):
    """Backend that forwards its calls to a process on a node."""

    def __init__(
        self, cluster: Cluster, slot: Slot, isolation: Isolation | None, environment: dict[str, str], watcher: Watcher
    ) -> None:
        self._cluster = cluster
        self._slot = slot
        self._make_arguments = isolation, environment
        self._watcher = watcher
        self._has_backend = False
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

    def submit(self, job: Job[Any], slot: Slot | None = None) -> _NodeHandle:  # noqa: ARG002 - there is one
        """Start a job."""
        return _NodeHandle(self, job)

    def share_build(self, job: Job[Any], deadline_seconds: float) -> str | None:  # noqa: D102 - see Backend
        reason: str | None = self.call("share_build", job.kind(), msgspec.to_builtins(job), deadline_seconds).answer
        return reason

    def keep(self) -> None:  # noqa: D102 - see Backend
        self.call("keep")

    def close(self) -> None:  # noqa: D102 - see Backend
        if not self._has_backend:
            return
        watcher, self._watcher = self._watcher, Watcher()  # the search does not watch this call
        try:
            self._ask("stop")
            self.call("close")
        except (SlotLostError, ClusterLostError):
            pass  # its processes are gone too
        self._watcher, self._has_backend = watcher, False

    def call(self, method: str, *arguments: Any) -> CallProgress:
        """Run a method in the node's process and pass its progress on to the watcher.

        Raises `SlotLostError` if the process has ended or cannot run jobs any more.
        """
        if not self._has_backend:
            self._has_backend = True
            self.call("make", *self._make_arguments, self._slot.device)
        self._ask("start_call", pack((method, arguments)))
        while True:
            progress = msgspec.msgpack.decode(self._ask("take_progress"), type=CallProgress)
            for number, seconds in progress.steps:
                self._watcher.step(number, seconds)
            if progress.output:
                self._watcher.output(progress.output)
            if progress.is_over:
                break
        self._abilities, self._is_build_shared = (
            cast(frozenset[Ability], frozenset(progress.abilities)),
            progress.is_build_shared,
        )
        if progress.error is None:
            return progress
        error = progress.error.exception()
        if isinstance(error, RunnerError):  # the node cannot start processes
            raise self.lost(error.message)
        raise error

    def lost(self, reason: str) -> SlotLostError:
        """End the process on the node and return the error for its loss."""
        self._cluster.end(str(self._slot.name))
        return SlotLostError(self._slot, reason)

    def _ask(self, method: str, *arguments: bytes) -> bytes:
        future = self._cluster.call(str(self._slot.name), method, *arguments)
        try:
            return self._cluster.wait_for(future, self._watcher.tick, SILENT_SECONDS)
        except (NodeProcessLostError, RunnerError) as error:
            raise self.lost(str(error)) from error


class _NodeHandle:
    """Handle of a job on a node."""

    def __init__(self, backend: NodeBackend, job: Job[Any]) -> None:
        self._backend, self._job = backend, job
        self.start_seconds: float | None = None

    def result(self) -> Any:
        """See `Handle`. A node is lost if its disk is full or it cannot load the workload again."""
        progress = self._backend.call("run", self._job.kind(), msgspec.to_builtins(self._job))
        self.start_seconds = progress.start_seconds
        result = convert_result(self._job, progress.answer)
        if isinstance(result, Failure):
            text = f"{result.message}{result.details}"
            if any(message in text for message in _NODE_FAILURES) and _SHARED_MEMORY_FILE not in text:
                raise self._backend.lost(result.message.splitlines()[0])
        return result
