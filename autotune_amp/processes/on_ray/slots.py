"""Slots of a search on the nodes of a Ray cluster. Nodes may join and leave while it runs, and have to be alike."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any

from msgspec.structs import replace

from autotune_amp.core.errors import AutotuneAmpError, InvalidRequestError, WorkloadError
from autotune_amp.core.hardware import DeviceIdentity
from autotune_amp.core.outcome import Failure
from autotune_amp.core.recommendation import Fingerprint
from autotune_amp.interruption import heed
from autotune_amp.processes.devices import ConfirmationBackend, WatcherFactory
from autotune_amp.processes.local import Isolation, OpenResult, Payload, Slot, SlotLostError, WorkloadBackend
from autotune_amp.processes.on_ray.backend import NodeBackend
from autotune_amp.processes.on_ray.cluster import Cluster
from autotune_amp.processes.on_ray.fleet import Fleet
from autotune_amp.processes.process import TICK_SECONDS, Watcher
from autotune_amp.processes.slots import Slots, WorkloadSlots
from autotune_amp.trial.jobs import FingerprintJob

START_SECONDS = 60.0  # wait for the first process on a node, and for another one after the last was lost
GATHER_SECONDS = 10.0  # wait for further nodes after the first, before the search begins
MAX_LOAD_FAILURES = 2  # nodes on which loading may fail before the workload itself counts as faulty
_FINGERPRINT_SECONDS = 60.0
GIB = 2**30


class RaySlots(WorkloadSlots):
    """`WorkloadBackend` of several slots, each a process on a node of the cluster.

    A slot that starts later joins once it has loaded the workload with the same fingerprint as the first; a lost slot
    is removed.
    """

    def __init__(
        self,
        fleet: Fleet,
        slots: Sequence[Slot],
        make: Callable[[Slot, Watcher], NodeBackend],
        watcher_of: WatcherFactory,
    ) -> None:
        super().__init__(slots, make, watcher_of)
        self._fleet = fleet
        self._opening_seconds: float | None = None  # None until the first slot has opened the workload
        self._fingerprint: Fingerprint | None = None
        self._preparing: dict[Slot, Future[Any]] = {}
        self._ready = {slots[0]}
        self._shared: Any = None
        self._is_kept = False

    @property
    def slots(self) -> tuple[Slot, ...]:
        """Return the slots that are ready."""
        return tuple(slot for slot in super().slots if slot in self._ready)

    def load(self, deadline_seconds: float) -> dict[str, Any]:
        """See `WorkloadBackend`. Loads the workload on the first slot that can."""
        problems: list[WorkloadError] = []
        self._began = time.monotonic()
        while True:
            slot = super().slots[0]
            self._ready = {slot}
            runner = self._runner_at(slot)
            try:
                state = self.wait_for(self._run_in_thread(runner, partial(runner.backend.load, deadline_seconds)))
                make_fingerprint = partial(self._fingerprint_on, runner.backend, slot, state)
                self._fingerprint = self.wait_for(self._run_in_thread(runner, make_fingerprint))
            except SlotLostError:
                continue  # with the next slot
            except WorkloadError as error:
                problems.append(error)
                if len(problems) == MAX_LOAD_FAILURES or len(self._runners) == 1:
                    raise problems[0] from None
                self._remove(slot, error.message.splitlines()[0])
            else:
                return state

    def open(self, device: str, num_threads: int | None, deadline_seconds: float) -> OpenResult:  # noqa: D102 - see WorkloadBackend
        opened = super().open(device, num_threads, deadline_seconds)
        self._first_seconds = time.monotonic() - self._began
        return opened

    def open_others(self, deadline_seconds: float) -> None:
        """See `WorkloadBackend`. Slots that fail, or load other code or data, are left out; slots that take much longer
        than the first join later.
        """
        self._opening_seconds = deadline_seconds
        if not self._can_fork:
            self.keep()
        self._prepare_new()
        until = time.monotonic() + min(deadline_seconds, GATHER_SECONDS + 2 * self._first_seconds)
        while self._preparing and time.monotonic() < until:
            self._handle_calls()

    def share_build(self, job: Any, deadline_seconds: float) -> str | None:  # noqa: D102 - see Backend
        reason = super().share_build(job, deadline_seconds)
        self._shared = (job, deadline_seconds) if reason is None else None
        return reason

    def keep(self) -> None:  # noqa: D102 - see Backend
        self._is_kept, self._shared = True, None
        super().keep()

    def _handle_calls(self) -> None:
        super()._handle_calls()
        if self._opening_seconds is not None:
            self._runners += [self._make_runner(slot) for slot in self._fleet.take_started_slots()]
            self._prepare_new()

    def _prepare_new(self) -> None:
        """Start preparing new slots, and add or remove those whose preparation has ended."""
        preparation = self._is_kept, self._shared
        for runner in self._runners:
            if runner.slot not in self._ready and runner.slot not in self._preparing:
                joining = self._run_in_thread(
                    runner, partial(self._prepare_slot, runner.backend, runner.slot, preparation)
                )
                self._preparing[runner.slot] = joining
        for slot in [slot for slot, future in self._preparing.items() if future.done()]:
            try:
                future = self._preparing.pop(slot, None)
                if future is None:  # handled while another future was waited for
                    continue
                problem, preparation = future.result()
            except SlotLostError as lost:
                problem = f"it is lost: {lost.reason}"
            except AutotuneAmpError as error:
                problem = error.message.splitlines()[0]
            if problem is not None:
                self._remove(slot, problem)
            elif preparation == (self._is_kept, self._shared):
                self._ready.add(slot)  # else prepare it again, since the other slots have changed meanwhile

    def _prepare_slot(
        self, backend: WorkloadBackend, slot: Slot, preparation: tuple[bool, Any]
    ) -> tuple[str | None, tuple[bool, Any]]:
        """Prepare a slot, in its thread: load the workload, compare it with the first slot's, and set it up like
        others.

        Return why the slot cannot be used, or None, and the `preparation` (`_is_kept` and `_shared`) that was applied.
        """
        backend.close()
        return self._reason_against(backend, slot, *preparation), preparation

    def _reason_against(self, backend: WorkloadBackend, slot: Slot, is_kept: bool, shared: Any) -> str | None:
        assert self._opening_seconds is not None
        assert self._fingerprint is not None
        state = backend.load(self._opening_seconds)
        fingerprint = self._fingerprint_on(backend, slot, state)
        if differences := self._fingerprint.differences(fingerprint):
            return f"it loaded something else than the first node: {differences[0]}"
        opened = backend.open(*self._open_arguments, self._opening_seconds)
        if is_kept and opened.why_not_forked is None:
            backend.keep()
        if opened.why_not_forked is not None and not is_kept:
            return f"trials can be forked on the first node, but not there: {opened.why_not_forked}"
        return None if shared is None else backend.share_build(*shared)

    def _fingerprint_on(self, backend: WorkloadBackend, slot: Slot, state: dict[str, Any]) -> Fingerprint:
        """Return the fingerprint of the workload on a slot, without the device's own UUID and index."""
        assert self._fleet.first is not None
        job = FingerprintJob(
            device=slot.device,
            options={},
            identity=self._fleet.first.identity,
            torch_state=state,
            deadline_seconds=_FINGERPRINT_SECONDS,
        )
        fingerprint = backend.submit(job).result()
        if isinstance(fingerprint, Failure):
            raise WorkloadError(f"The workload cannot be fingerprinted: {fingerprint.message}", "Fix that error.")
        return replace(fingerprint, unknown=())  # unknown parts cannot be compared

    def _remove(self, slot: Slot, problem: str) -> None:
        self._fleet.leave_out(str(slot.name), problem)
        self._ready.discard(slot)
        super()._remove(slot, problem)

    def _raise_if_no_slot(self, problem: str) -> None:
        """Raise `ClusterLostError` if no slot is left.

        After the first slot has opened the workload, wait `START_SECONDS` for another one to be ready.
        """
        until = time.monotonic() + START_SECONDS
        while self._opening_seconds is not None and not self._ready and time.monotonic() < until:
            self._handle_calls()
        if self._opening_seconds is not None or not self._runners:
            super()._raise_if_no_slot(problem)


class RayDevices:
    """Devices of the nodes of a Ray cluster that a search runs on, with the interface of `Devices`."""

    is_here = False

    def __init__(
        self,
        cluster: Cluster,
        device: str,
        num_ranks: int,
        payload: Payload,
        watcher_of: WatcherFactory,
        note: Callable[[str], None],
    ) -> None:
        self.device = "cpu" if device == "cpu" else "auto"
        self.num_slots = 1
        self.notes: tuple[str, ...] = ()
        self._cluster = cluster
        self._num_ranks = num_ranks
        self._fleet = Fleet(cluster, device, num_ranks, note)
        self._payload = payload
        self._watcher_of = watcher_of
        self._backend: RaySlots | None = None

    def identity(self) -> DeviceIdentity:
        """Return the first slot's device without what differs between nodes that are compared: results hold for all
        devices of its model, and those of a GPU whatever the CPUs beside it.
        """
        assert self._fleet.first is not None
        identity = self._fleet.first.identity
        memory_bytes = round(identity.total_memory_bytes / GIB) * GIB
        if identity.type != "cpu":
            identity = replace(identity, num_cpus=1, allowed_cpus=None)
        return replace(identity, index=None, uuid=None, total_memory_bytes=memory_bytes)

    def backend(self) -> WorkloadBackend:
        """Connect, and return a backend of the slots that start soon. Raises `InvalidRequestError` if none does."""
        tick = self._watcher_of(Slot(self.device)).tick
        self._cluster.connect(self._payload.target, self._payload.packed, self._num_ranks, tick)
        until = time.monotonic() + START_SECONDS
        while time.monotonic() < until and not (self._fleet.is_up and self._fleet.is_settled):
            self._fleet.take_started_slots()
            if self._fleet.is_up:
                until = min(until, time.monotonic() + GATHER_SECONDS)
            heed()
            tick()
            time.sleep(TICK_SECONDS)
        if not self._fleet.is_up:
            device_name = "CPU" if self.device == "cpu" else "GPU"
            raise InvalidRequestError(
                f"--ray: no node of the cluster at {self._cluster.address!r} provided {self._num_ranks} {device_name}s "
                f"within {START_SECONDS:.0f} s.",
                "Check its free resources with `ray status`.",
            )
        slots = self._fleet.begin()
        self.num_slots = len(slots)
        self.device = slots[0].device
        self._backend = RaySlots(
            self._fleet, slots, lambda slot, watcher: self._make_node_backend(slot, watcher, None, {}), self._watcher_of
        )
        return self._backend

    def confirmation_backend(
        self,
        device: str,  # noqa: ARG002 - each slot has its own
        *,
        shares_processes: bool,
        num_rounds: int,  # noqa: ARG002 - no process stands by on a node
    ) -> Slots[ConfirmationBackend]:
        """Return the backend of the confirmation, on the slots that the search used last. If one is lost, another one
        replaces it.
        """
        assert self._backend is not None

        def make(slot: Slot, watcher: Watcher) -> ConfirmationBackend:
            return ConfirmationBackend(
                lambda variables: self._make_node_backend(slot, watcher, "kept", variables),
                slot,
                shares_processes=shares_processes,
            )

        return Slots(self._backend.slots, make, self._watcher_of)

    def close(self) -> None:
        """End the processes on the nodes and the connection."""
        self._cluster.close()

    def _make_node_backend(
        self, slot: Slot, watcher: Watcher, isolation: Isolation | None, environment: dict[str, str]
    ) -> NodeBackend:
        return NodeBackend(self._cluster, slot, isolation, environment, watcher)
