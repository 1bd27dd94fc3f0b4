"""Where the jobs of a search run: on one device, on slots of this host, or on the nodes of a Ray cluster."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

from msgspec.structs import replace

from autotune_amp.core.hardware import DeviceIdentity
from autotune_amp.hardware import identify
from autotune_amp.isolation.local import Backend, Handle, Isolation, Slot, WorkloadBackend
from autotune_amp.isolation.process import Watcher
from autotune_amp.isolation.ranks import RankedBackend
from autotune_amp.isolation.slots import Found, Slots, WorkloadSlots, of_ranks
from autotune_amp.isolation.standby import Standby
from autotune_amp.trial.jobs import Trial

if TYPE_CHECKING:
    from typing_extensions import Self

# Starts a backend of the workload's: who hears it, how it isolates jobs, variables beyond the caller's, its slot, and
# where its next process stands by.
Start: TypeAlias = Callable[
    [Watcher, Isolation | None, dict[str, str] | None, Slot | None, Standby | None], WorkloadBackend
]
WatcherOf: TypeAlias = Callable[[Slot], Watcher]


class ConfirmingProcesses:
    """Where the confirmation's trials run: each in a process of its own, or those of a round in one (`are_shared`).

    `make` starts a backend whose processes are kept, with such variables.
    """

    def __init__(self, make: Callable[[dict[str, str]], Backend], slot: Slot, *, are_shared: bool) -> None:
        self._make = make
        self.slots = (slot,)
        self._are_shared = are_shared
        self._round: int | None = None
        self._current: Backend | None = None

    def submit(self, job: Trial, slot: Slot | None = None) -> Handle[Any]:  # noqa: ARG002 - there is one
        """Start a trial."""
        is_of_round = job.round == self._round or job.purpose == "outlook"  # which confirms nothing
        if self._current is None or not self._are_shared or not is_of_round:
            self.close()
            self._current = self._make(job.environment)
            self._round = job.round
        return self._current.submit(replace(job, is_alone=not self._are_shared))

    def wait(self, handles: Sequence[Handle[Any]]) -> Handle[Any]:
        """The one that runs: its `result` waits."""
        return handles[0]

    def close(self) -> None:
        """End the process that is open."""
        if self._current is not None:
            self._current.close()


class Places(Protocol):
    """Where a search's jobs run; as a context manager it ends what it holds of it."""

    device: str  # which a job is asked for before the probe has said which it is
    num_slots: int
    notes: Sequence[str]  # what is to be said of it
    is_here: bool  # on this host

    def identity(self) -> DeviceIdentity:
        """The device that is probed."""

    def backend(self) -> WorkloadBackend:
        """Where the jobs of a search run."""

    def confirming(
        self, device: str, *, are_shared: bool, num_rounds: int
    ) -> ConfirmingProcesses | Slots[ConfirmingProcesses]:
        """Where those of its confirmation run, on the device that the probe found: so many rounds are foreseen."""

    def close(self) -> None:
        """End what it holds."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        self.close()


class OneDevice(Places):
    """One device of this host, or all `num_ranks` of a training together."""

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
        """End the process that stands by."""
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
    """A backend on these ranks together; without any on the device as it is, with its next process in `standby`."""
    if not ranks:
        return start(watcher, isolation, environment, None, standby)
    return RankedBackend(ranks, lambda rank, heard: start(heard, isolation, environment, rank, None), watcher)


def isolation_on(device_type: str) -> Isolation | None:
    """How jobs are isolated: on a card in one process that is kept, since each fork would start the card, and import
    and build the model, anew; on a CPU as forks where that is sound."""
    return None if device_type == "cpu" else "kept"


class OnSlots(Places):
    """Several slots of this host, of which `device` is the first or has it."""

    is_here = True

    def __init__(self, found: Found, device: str, start: Start, watcher_of: WatcherOf) -> None:
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
        """On every card; on a CPU with all of it, since the run to come has no less."""

        def make(slot: Slot, heard: Watcher) -> ConfirmingProcesses:
            start = partial(self._start, heard, "kept")
            return ConfirmingProcesses(lambda variables: start(variables, slot, None), slot, are_shared=are_shared)

        if device == "cpu":
            whole = OneDevice(device, self._start, self._watcher_of)
            return whole.confirming(device, are_shared=are_shared, num_rounds=num_rounds)
        return Slots(self._slots, make, self._watcher_of)

    def close(self) -> None:
        """There is nothing."""
