"""Places where a search's jobs run: one device, slots of this host, or the nodes of a Ray cluster."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

from msgspec.structs import replace

from autotune_amp.core.hardware import DeviceIdentity
from autotune_amp.hardware import identify
from autotune_amp.processes.local import Backend, Handle, Isolation, Slot, WorkloadBackend
from autotune_amp.processes.process import Watcher
from autotune_amp.processes.ranks import RankedBackend
from autotune_amp.processes.slots import AvailableSlots, Slots, WorkloadSlots, of_ranks
from autotune_amp.processes.standby import Standby
from autotune_amp.trial.jobs import Trial

if TYPE_CHECKING:
    from typing_extensions import Self

# Function that starts a backend of the workload. Its arguments: the watcher, the isolation, variables added to the
# caller's, the slot, and the standby for its next process.
Start: TypeAlias = Callable[
    [Watcher, Isolation | None, dict[str, str] | None, Slot | None, Standby | None], WorkloadBackend
]
WatcherOf: TypeAlias = Callable[[Slot], Watcher]


class ConfirmingProcesses:
    """Processes for the confirmation's trials: one for each trial, or with `are_shared` one for each round.

    `make` starts a backend with these variables whose processes are kept.
    """

    def __init__(self, make: Callable[[dict[str, str]], Backend], slot: Slot, *, are_shared: bool) -> None:
        self._make = make
        self.slots = (slot,)
        self._are_shared = are_shared
        self._round: int | None = None
        self._current: Backend | None = None

    def submit(self, job: Trial, slot: Slot | None = None) -> Handle[Any]:  # noqa: ARG002 - there is one
        """Start a trial."""
        is_of_round = job.round == self._round or job.purpose == "outlook"  # an outlook confirms nothing
        if self._current is None or not self._are_shared or not is_of_round:
            self.close()
            self._current = self._make(job.environment)
            self._round = job.round
        return self._current.submit(replace(job, is_alone=not self._are_shared))

    def wait(self, handles: Sequence[Handle[Any]]) -> Handle[Any]:
        """Return the running job, whose `result` waits."""
        return handles[0]

    def close(self) -> None:
        """End the open process."""
        if self._current is not None:
            self._current.close()


class Places(Protocol):
    """Interface of the places where a search's jobs run. As a context manager it closes them."""

    device: str  # named in a job before the probe has found which it is
    num_slots: int
    notes: Sequence[str]  # to be shown to the user
    is_here: bool  # whether the jobs run on this host

    def identity(self) -> DeviceIdentity:
        """Return the identity of the device to probe."""

    def backend(self) -> WorkloadBackend:
        """Return the backend for the jobs before the confirmation."""

    def confirming(
        self, device: str, *, are_shared: bool, num_rounds: int
    ) -> ConfirmingProcesses | Slots[ConfirmingProcesses]:
        """Return the backend for the confirmation, on the device that the probe found; `num_rounds` are planned."""

    def close(self) -> None:
        """Release all held resources."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        self.close()


class OneDevice(Places):
    """Place with one device of this host, or all `num_ranks` of a training together."""

    num_slots, notes, is_here = 1, (), True

    def __init__(self, device: str, start: Start, watcher_of: WatcherOf, num_ranks: int = 1) -> None:
        self.device = device
        self._start = start
        self._watcher = watcher_of(Slot(device))
        self._ranks = of_ranks(num_ranks, self.identity().type) if num_ranks > 1 else ()
        self._standby = None if self._ranks else Standby()

    def identity(self) -> DeviceIdentity:  # noqa: D102 - see Places
        return identify(self.device)

    def backend(self) -> WorkloadBackend:  # noqa: D102 - see Places
        return self._begin(None if self._ranks else isolation_on(self.identity().type), None)

    def confirming(self, device: str, *, are_shared: bool, num_rounds: int) -> ConfirmingProcesses:  # noqa: D102 - see Places
        if self._standby is not None and are_shared:
            self._standby.num_wanted = max(0, num_rounds - 1)
        return ConfirmingProcesses(partial(self._begin, "kept"), Slot(device), are_shared=are_shared)

    def close(self) -> None:
        """End the standby process."""
        if self._standby is not None:
            self._standby.close()

    def _begin(self, isolation: Isolation | None, environment: dict[str, str] | None) -> WorkloadBackend:
        return on_ranks(self._ranks, self._start, self._watcher, isolation, environment, self._standby)


def on_ranks(
    ranks: Sequence[Slot],
    start: Start,
    watcher: Watcher,
    isolation: Isolation | None,
    environment: dict[str, str] | None,
    standby: Standby | None = None,
) -> WorkloadBackend:
    """Return a backend on all these ranks; without ranks one on the device, with its next process in `standby`."""
    if not ranks:
        return start(watcher, isolation, environment, None, standby)
    return RankedBackend(ranks, lambda rank, heard: start(heard, isolation, environment, rank, None), watcher)


def isolation_on(device_type: str) -> Isolation | None:
    """Return the isolation of jobs on a device type.

    On a GPU one process is kept, since each fork would start the driver, import and build anew; on a CPU jobs are
    forked if that is sound.
    """
    return None if device_type == "cpu" else "kept"


class OnSlots(Places):
    """Place with several slots of this host. `device` is the first slot's, or the device that it is a share of."""

    is_here = True

    def __init__(self, found: AvailableSlots, device: str, start: Start, watcher_of: WatcherOf) -> None:
        self._slots, self.notes = found
        self._first = device
        self.device = self._slots[0].device
        self.num_slots = len(self._slots)
        self._start = start
        self._watcher_of = watcher_of

    def identity(self) -> DeviceIdentity:  # noqa: D102 - see Places
        return identify(self._first)

    def backend(self) -> WorkloadBackend:  # noqa: D102 - see Places
        return WorkloadSlots(
            self._slots,
            lambda slot, heard: self._start(
                heard, isolation_on("cpu" if slot.uuid is None else "cuda"), None, slot, None
            ),
            self._watcher_of,
        )

    def confirming(
        self, device: str, *, are_shared: bool, num_rounds: int
    ) -> ConfirmingProcesses | Slots[ConfirmingProcesses]:
        """Return the confirmation's backend: on every GPU, or with the whole CPU, as in the user's own run."""

        def make(slot: Slot, heard: Watcher) -> ConfirmingProcesses:
            start = partial(self._start, heard, "kept")
            return ConfirmingProcesses(lambda variables: start(variables, slot, None), slot, are_shared=are_shared)

        if device == "cpu":
            whole = OneDevice(device, self._start, self._watcher_of)
            return whole.confirming(device, are_shared=are_shared, num_rounds=num_rounds)
        return Slots(self._slots, make, self._watcher_of)

    def close(self) -> None:
        """Do nothing: nothing is held."""
