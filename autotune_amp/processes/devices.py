"""Devices of this host that a search runs on, and the backends that run its jobs on them.

A backend starts the processes of jobs and returns their results; a slot is a device, or a share of the CPU, for one job
at a time. After the search, the confirmation measures the best settings again in fresh processes, in several rounds.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeAlias

from msgspec.structs import replace

from autotune_amp.core.errors import InvalidRequestError
from autotune_amp.core.hardware import DeviceIdentity
from autotune_amp.hardware import identify, nvml
from autotune_amp.processes.local import Backend, Handle, Isolation, LoadingBackend, Slot, WorkloadBackend
from autotune_amp.processes.process import Watcher
from autotune_amp.processes.ranks import RankedBackend
from autotune_amp.processes.slots import WorkloadSlots
from autotune_amp.processes.standby import Standby
from autotune_amp.trial.jobs import Trial

# Function that makes a backend of the workload. Its arguments: the watcher, which receives the events of running jobs;
# the isolation, "kept" for one process that runs all jobs, "forked" for one per job, None for forked where possible;
# environment variables added to the caller's; the slot; and the holder of standby processes, which load in advance.
BackendFactory: TypeAlias = Callable[
    [Watcher, Isolation | None, dict[str, str] | None, Slot | None, Standby | None], WorkloadBackend
]
WatcherFactory: TypeAlias = Callable[[Slot], Watcher]


class Devices:
    """Devices of this host that a search runs on: a single one, several GPUs, or one for each rank of a training run.

    `device` is the name of the first one, or "auto"; `start` makes the backends, `watcher_of` the watcher of a slot.
    With several `gpus`, trials run on all of them at the same time, and the confirmation on the first.
    """

    is_here = True  # the devices are on this host, rather than in a Ray cluster

    def __init__(
        self,
        device: str,
        start: BackendFactory,
        watcher_of: WatcherFactory,
        gpus: GpuSlots | None = None,
        num_ranks: int = 1,
    ) -> None:
        self._slots, self.notes = gpus or GpuSlots(())
        self._first_device = device
        # The name of the device in jobs until the probe, the job that inspects the device, has found its index.
        self.device = self._slots[0].device if self._slots else device
        self.num_slots = max(1, len(self._slots))
        self._start = start
        self._watcher_of = watcher_of
        self._ranks = rank_slots(num_ranks, self.identity().type) if num_ranks > 1 else ()
        if self._ranks and device == "auto":  # the probe would also find GPUs that only their own runtime sees
            self.device = self.identity().type
        is_single = not self._ranks and self.num_slots == 1  # loading in advance would slow the other trials
        self._standby = Standby() if is_single else None

    def identity(self) -> DeviceIdentity:
        """Return the name, type and memory of the first device, without starting it."""
        return identify(self._first_device)

    def backend(self) -> WorkloadBackend:
        """Return the backend for the jobs before the confirmation.

        On a GPU one process is kept, since a new one would start the driver and load the workload again; on a CPU and
        for several ranks jobs are forked where possible.
        """
        if self.num_slots > 1:
            return WorkloadSlots(
                self._slots, lambda slot, watcher: self._start(watcher, "kept", None, slot, None), self._watcher_of
            )
        return self._make_backend(None if self._ranks or self.identity().type == "cpu" else "kept", None)

    def confirmation_backend(self, device: str, *, shares_processes: bool, num_rounds: int) -> ConfirmationBackend:
        """Return the backend for the confirmation, on `device`, or on the first of several GPUs.

        With `shares_processes` the trials of a round share a process, and those of all `num_rounds` are loaded in
        advance where memory allows it.
        """
        if self._standby is not None and shares_processes:
            self._standby.num_wanted = max(0, num_rounds - 1)
        slot = self._slots[0] if self.num_slots > 1 else Slot(device)
        return ConfirmationBackend(partial(self._make_backend, "kept"), slot, shares_processes=shares_processes)

    def close(self) -> None:
        """End the standby processes."""
        if self._standby is not None:
            self._standby.close()

    def _make_backend(self, isolation: Isolation | None, environment: dict[str, str] | None) -> WorkloadBackend:
        watcher = self._watcher_of(self._slots[0] if self.num_slots > 1 else Slot(self.device))
        if self._ranks:
            return RankedBackend(
                self._ranks, lambda rank, watching: self._start(watching, isolation, environment, rank, None), watcher
            )
        return self._start(watcher, isolation, environment, self._slots[0] if self._slots else None, self._standby)


class ConfirmationBackend:
    """Backend for the confirmation's trials on one slot: a fresh process for each, or with `shares_processes` for each
    round.

    `make` returns a backend that keeps one process, with these environment variables added to the caller's.
    """

    def __init__(self, make: Callable[[dict[str, str]], Backend], slot: Slot, *, shares_processes: bool) -> None:
        self._make = make
        self.slots = (slot,)
        self._are_shared = shares_processes
        self._round: int | None = None
        self._current: Backend | None = None

    def submit(self, job: Trial, slot: Slot | None = None) -> Handle[Any]:  # noqa: ARG002 - there is only one
        """Start a trial. The process of an earlier round, or with processes not shared of any earlier trial, ends."""
        # A trial of a larger effective batch ("outlook") follows the rounds, and may share the process of the last.
        is_of_round = job.round == self._round or job.purpose == "outlook"
        if self._current is None or not self._are_shared or not is_of_round:
            self.close()
            self._current = self._make(job.environment)
            self._round = job.round
        return self._current.submit(replace(job, is_alone=not self._are_shared))

    @property
    def num_together(self) -> int:
        """Return how many processes can load at the same time; see `LoadingBackend`."""
        backend = self._loading_backend
        return backend.num_together if isinstance(backend, LoadingBackend) else 1

    def load_together(self, jobs: Sequence[Trial], limit_seconds: float) -> None:
        """Load the processes of these trials at the same time, if the backend can; see `LoadingBackend`."""
        backend = self._loading_backend
        if isinstance(backend, LoadingBackend):
            backend.load_together(jobs, limit_seconds)

    @cached_property
    def _loading_backend(self) -> Backend:
        """A backend in the user's own environment, which each trial's variables are added to."""
        return self._make({})

    def wait(self, handles: Sequence[Handle[Any]]) -> Handle[Any]:
        """Return the only running job, at once: its `result` waits for the end."""
        return handles[0]

    def close(self) -> None:
        """End the open process."""
        if self._current is not None:
            self._current.close()


class GpuSlots(NamedTuple):
    """Slots of the GPUs that a search uses, with notes on GPUs that are left out or shared with other processes."""

    slots: tuple[Slot, ...]
    notes: tuple[str, ...] = ()


def rank_slots(num_ranks: int, device: str) -> tuple[Slot, ...]:
    """Return a slot for each rank of a training run: for the `device` type "cpu" a share of the CPUs, else a GPU.

    Raises `InvalidRequestError` if there are too few, or if the GPUs are known to be of several models.
    """
    if device == "cpu":
        return cpu_slots(num_ranks)
    num_gpus = len(visible_gpus("--ranks"))
    if num_gpus < num_ranks:
        raise InvalidRequestError(
            f"--ranks is {num_ranks}, and CUDA sees {num_gpus} GPUs here.", f"Give --ranks {num_gpus} or fewer."
        )
    if _is_order_known():
        find_gpus(range(num_ranks), "--ranks")  # compares their models
    # Without the UUID a slot hides no GPU from its process: each rank names its own, cuda:N, and sees the others.
    return tuple(Slot(f"cuda:{rank}", f"cuda:{rank}") for rank in range(num_ranks))


def visible_gpus(option: str) -> tuple[str, ...]:
    """Return the UUIDs of the NVIDIA GPUs that CUDA may use. Raises `InvalidRequestError`, which names the command-line
    `option`, if there are none.
    """
    if uuids := nvml.visible_uuids():
        return uuids
    raise InvalidRequestError(
        f"{option} needs NVIDIA GPUs, and NVML sees none that CUDA may use here.",
        f"Leave {option} out, or check nvidia-smi and CUDA_VISIBLE_DEVICES.",
    )


def find_gpus(devices: Sequence[int] | Literal["all"], option: str = "--devices") -> GpuSlots:
    """Return a slot for each NVIDIA GPU given by its index among the visible ones, or for all that are like the first.

    With "all", GPUs of another model than the first, or on which other processes compute, are left out. Raises
    `InvalidRequestError`, which names the command-line `option`, if there is no GPU, or if one of those given by index
    does not exist or is of another model than the first. Where CUDA's indices are unknown, "all" begins with the GPU of
    the most memory, and none may be given by index, in CUDA_VISIBLE_DEVICES neither.
    """
    uuids = visible_gpus(option)
    numbers = range(len(uuids)) if devices == "all" else devices
    if absent := [number for number in numbers if number >= len(uuids)]:
        raise InvalidRequestError(
            f"{option} asks for GPU {absent[0]}, and CUDA sees {len(uuids)} here, counted from 0.",
            f"Give indices from 0 to {len(uuids) - 1}.",
        )
    if not _is_order_known():
        if devices != "all" or os.environ.get("CUDA_VISIBLE_DEVICES"):
            raise InvalidRequestError(
                f"{option}: the GPUs here are of several models, which CUDA may count in another order than NVML.",
                "Name them by UUID in CUDA_VISIBLE_DEVICES (see nvidia-smi -L), or set CUDA_DEVICE_ORDER=PCI_BUS_ID.",
            )
        identities = {number: nvml.identity(number, uuids[number]) for number in numbers}
        memory = {number: 0 if each is None else each.total_memory_bytes for number, each in identities.items()}
        numbers = sorted(numbers, key=lambda number: -memory[number])
    slots, notes = [], []
    models = {number: _gpu_model(uuids[number]) for number in numbers}
    first = models[numbers[0]]
    if first is None and len(models) > 1:
        raise InvalidRequestError(
            f"{option}: NVML does not return the models of these GPUs, so that their results cannot be compared.",
            "Search on one of them, with --device cuda:N.",
        )
    for number in numbers:
        problem = None
        if models[number] != first:
            problem = f"is a {models[number]} and cuda:{numbers[0]} a {first}, whose results cannot be compared"
            if devices != "all":
                raise InvalidRequestError(
                    f"{option}: cuda:{number} {problem}.", "Give GPUs of one model, or one search for each model."
                )
        others = nvml.process_notes(uuids[number])
        if problem is None and others and devices == "all" and number != numbers[0]:
            problem = f"is in use: {others[0]}"
        if problem is None:
            slots.append(Slot("cuda:0", f"cuda:{number}", uuid=uuids[number]))
            notes += [f"cuda:{number}: {other}" for other in others]
        else:
            notes.append(f"cuda:{number} is left out: it {problem.rstrip('.')}.")
    return GpuSlots(tuple(slots), tuple(notes))


def _is_order_known() -> bool:
    """Return whether the visible GPUs have the same order in CUDA as in NVML.

    CUDA counts all GPUs of the host, the fastest first if not told otherwise; CUDA_VISIBLE_DEVICES selects by that.
    """
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    are_named = bool(visible) and not any(entry.strip()[:1].isdigit() for entry in visible.split(","))
    is_by_bus = os.environ.get("CUDA_DEVICE_ORDER") == "PCI_BUS_ID"
    return are_named or is_by_bus or len({_gpu_model(uuid) for uuid in nvml.host_uuids()}) == 1


def _gpu_model(uuid: str) -> str | None:
    """Return the name of a GPU's model, such as "NVIDIA T4"; None if NVML does not find the GPU."""
    identity = nvml.identity(0, uuid)  # the index is only copied to the result
    return None if identity is None else identity.name


def cpu_slots(num_ranks: int) -> tuple[Slot, ...]:
    """Return slots with equal shares of the CPUs that this process may use, one for each rank.

    Hyper-threads of a core stay together where the shares allow it and the system tells which they are.

    Raises `InvalidRequestError` if there are fewer CPUs than ranks.
    """
    cpus = _cpus_by_core()
    if num_ranks > len(cpus):
        raise InvalidRequestError(
            f"--ranks is {num_ranks}, and this process may use {len(cpus)} CPUs.",
            f"Give --ranks {len(cpus)} or fewer.",
        )
    size = len(cpus) // num_ranks
    shares = [tuple(sorted(cpus[rank * size : (rank + 1) * size])) for rank in range(num_ranks)]
    return tuple(Slot("cpu", f"rank {rank}", cpus=share) for rank, share in enumerate(shares))


def _cpus_by_core() -> list[int]:
    """Return the CPUs that this process may use, with the hyper-threads of a core next to each other."""
    allowed = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)

    def core(cpu: int) -> tuple[int, ...]:
        topology = Path(f"/sys/devices/system/cpu/cpu{cpu}/topology")
        try:
            return (*(int((topology / name).read_text()) for name in ("physical_package_id", "core_id")), cpu)
        except (OSError, ValueError):
            return 0, cpu, cpu

    return sorted(allowed, key=core)
