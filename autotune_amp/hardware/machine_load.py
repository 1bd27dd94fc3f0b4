"""What others do on this machine while we measure: on its CPUs, in the hypervisor and on the card. No torch."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from pathlib import Path
from typing import NamedTuple

import msgspec
import psutil

from autotune_amp.core.hardware import BusyProcess, CardProcess, MachineLoad
from autotune_amp.hardware import nvml

# CPU times come in hundredths of a second for each process: shorter than this they say nothing.
MIN_SECONDS = 0.25
_LOOK_SECONDS = 1.0
_NUM_BUSIEST, _BUSIEST_NUM_CORES = 3, 0.05
_MIN_WANTED_SHARE = 0.05  # of the CPUs' time: on a machine that hardly works a stolen tick would be a large share
_NUM_SCANS = 3


class ProcessTimes(NamedTuple):
    """A process and its CPU seconds: its own, and those of its children that have ended and were waited for."""

    parent: int
    name: str
    started: int
    own_seconds: float
    children_seconds: float


class Reading(msgspec.Struct, frozen=True, kw_only=True):
    """The machine's counters at one moment; the seconds are CPU seconds since it was started.

    `busy_seconds` are those of processes, None where the system hides them. `processes` is None where ended children
    are not counted anywhere.
    """

    at_seconds: float
    num_cpus: int
    busy_seconds: float | None
    stolen_seconds: float | None
    processes: dict[int, ProcessTimes] | None


def load_between(before: Reading, after: Reading, own_pid: int) -> MachineLoad:
    """What happened between two readings; the process `own_pid` and all that came of it are not others.

    A process that ends leaves its CPU time to the parent that waits for it (times(2), tms_cutime), so that the sum
    over the processes of a tree holds what its ended ones used. What is left of the machine's busy time is others'.
    """
    seconds = after.at_seconds - before.at_seconds
    found = MachineLoad(seconds=seconds, num_cpus=after.num_cpus)
    if seconds < MIN_SECONDS or before.busy_seconds is None or after.busy_seconds is None:
        return found
    busy = max(0.0, after.busy_seconds - before.busy_seconds)
    if before.stolen_seconds is not None and after.stolen_seconds is not None:
        stolen = max(0.0, after.stolen_seconds - before.stolen_seconds)
        wanted = max(stolen + busy, _MIN_WANTED_SHARE * after.num_cpus * seconds)
        found = msgspec.structs.replace(found, stolen_share=stolen / wanted)
    if before.processes is None or after.processes is None:
        return found
    own = max(0.0, _tree_seconds(after.processes, own_pid) - _tree_seconds(before.processes, own_pid))
    if busy < 0.5 * own:  # some sandboxes count for each process, but not for the machine
        return found
    others = max(0.0, busy - own)
    return msgspec.structs.replace(
        found,
        others_num_cores=min(float(after.num_cpus), others / seconds),
        own_num_cores=own / seconds,
        busiest=_busiest(before.processes, after.processes, own_pid, seconds),
    )


def tree(processes: dict[int, ProcessTimes], own_pid: int) -> set[int]:
    """The process `own_pid` and its descendants."""
    children: dict[int, list[int]] = {}
    for pid, process in processes.items():
        children.setdefault(process.parent, []).append(pid)
    found, new = {own_pid}, [own_pid]
    while new:
        new = [child for pid in new for child in children.get(pid, ()) if child not in found]
        found.update(new)
    return found


def _ancestors(processes: dict[int, ProcessTimes], pid: int) -> set[int]:
    found: set[int] = set()
    while (process := processes.get(pid)) is not None and process.parent not in found:
        pid = process.parent
        found.add(pid)
    return found


def _tree_seconds(processes: dict[int, ProcessTimes], own_pid: int) -> float:
    ours = (processes[pid] for pid in tree(processes, own_pid) if pid in processes)
    return sum(process.own_seconds + process.children_seconds for process in ours)


def _busiest(
    before: dict[int, ProcessTimes], after: dict[int, ProcessTimes], own_pid: int, seconds: float
) -> tuple[BusyProcess, ...]:
    ours = tree(before, own_pid) | tree(after, own_pid)
    used = {}
    for pid, process in after.items():
        if pid not in ours:
            known = before.get(pid)
            is_same = known is not None and known.started == process.started
            used[pid] = process.own_seconds - (known.own_seconds if known is not None and is_same else 0.0)
    most = sorted(used, key=lambda pid: used[pid], reverse=True)[:_NUM_BUSIEST]
    return tuple(
        BusyProcess(pid=pid, name=after[pid].name, num_cores=used[pid] / seconds)
        for pid in most
        if used[pid] >= _BUSIEST_NUM_CORES * seconds
    )


def read(root: Path = Path("/proc")) -> Reading:
    """The counters now, in milliseconds; those of the CPUs that this process may run on."""
    try:
        times = psutil.cpu_times(percpu=True)
    except (OSError, RuntimeError, ValueError):  # a sandbox may hide them
        times = []
    ours = times
    # Where CPUs are switched off, their numbers are no places in this list.
    if hasattr(os, "sched_getaffinity") and len(times) == os.sysconf("SC_NPROCESSORS_CONF"):
        ours = [times[cpu] for cpu in os.sched_getaffinity(0)]
    return Reading(
        at_seconds=time.monotonic(),
        num_cpus=len(ours) or os.cpu_count() or 1,
        # Neither interrupts, which our own transfers raise, nor guests, which "user" holds already.
        busy_seconds=sum(cpu.user + cpu.system + getattr(cpu, "nice", 0.0) for cpu in ours) if ours else None,
        stolen_seconds=sum(cpu.steal for cpu in ours) if ours and hasattr(ours[0], "steal") else None,
        processes=_processes(root),
    )


def _processes(root: Path) -> dict[int, ProcessTimes] | None:
    """All processes, from Linux's /proc; None elsewhere, where no system counts ended children.

    Read at one go: psutil opens five files for each process, which takes 10 ms for a hundred of them.
    """
    if not (root / "self" / "stat").exists():
        return None
    ticks_per_second = os.sysconf("SC_CLK_TCK")
    found: dict[int, ProcessTimes] = {}
    for _ in range(_NUM_SCANS):
        found, is_whole = {}, True
        for folder in root.iterdir():
            if not folder.name.isdigit():
                continue
            try:
                text = (folder / "stat").read_text(errors="replace")
            except OSError:  # it ended, and its time went to a parent that may have been read already
                is_whole = False
                continue
            name, _, rest = text.partition("(")[2].rpartition(")")
            fields = rest.split()  # from "state", which proc_pid_stat(5) numbers 3
            own, children = int(fields[11]) + int(fields[12]), int(fields[13]) + int(fields[14])
            found[int(folder.name)] = ProcessTimes(
                int(fields[1]), name, int(fields[19]), own / ticks_per_second, children / ticks_per_second
            )
        if is_whole:
            break
    return found


def clock_share() -> float | None:
    """The clock of the fastest CPU against the highest it has, None where the system does not say both."""
    with contextlib.suppress(OSError, RuntimeError, AttributeError):
        clocks = psutil.cpu_freq(percpu=True)
        highest = max((clock.max for clock in clocks), default=0.0)
        if highest > 0:
            return min(1.0, max(clock.current for clock in clocks) / highest)
    return None


class LoadMeter:
    """Tells what others did while a trial ran: from its last warm-up step on, or in all of it where it took none.

    `uuid` is the card's, None without one. Made before our children's first context on it: what is there now is
    others', or this process's own where it has used CUDA.
    """

    def __init__(self, uuid: str | None = None) -> None:
        self._uuid = uuid
        self._utilization = None if uuid is None else nvml.utilization(uuid)
        processes = None if uuid is None or _has_used_cuda() else nvml.processes(uuid)
        self._first_card_pids = frozenset(pid for pid, _ in processes or ())
        self.start()

    def start(self) -> None:
        """Begin anew."""
        self._before = read()
        self._after: Reading | None = None
        self._is_stepping = False
        self._last_look = -_LOOK_SECONDS
        self._clock_share: float | None = None
        self._slowdowns: dict[str, None] | None = None

    def warm_up(self) -> None:
        """The trial took a step to warm up: what was before does not count.

        The measured steps are told of when they end. Begun only then, a single long one would have been missed.
        """
        if not self._is_stepping and time.monotonic() - self._before.at_seconds >= MIN_SECONDS:
            self._before = read()

    def step(self) -> None:
        """The trial took a measured step: clocks are worth a look."""
        now, self._is_stepping = time.monotonic(), True
        if now - self._last_look < _LOOK_SECONDS:
            return
        self._last_look = now
        self._clock_share = clock_share()
        names = None if self._uuid is None else nvml.slowdown_names(self._uuid)
        if names is not None:
            self._slowdowns = {**(self._slowdowns or {}), **dict.fromkeys(names)}

    def hold(self) -> None:
        """Our processes are about to be killed: nobody may be there to take over their CPU time."""
        self._after = self._after or read()

    def stop(self) -> MachineLoad:
        """What others did since `start`, or since the last step to warm up."""
        after = self._after or read()
        return msgspec.structs.replace(
            load_between(self._before, after, os.getpid()),
            clock_share=self._clock_share,
            card_utilization=self._utilization,
            card_processes=self._card_processes(after),
            card_slowdowns=None if self._slowdowns is None else tuple(self._slowdowns),
        )

    def _card_processes(self, reading: Reading) -> tuple[CardProcess, ...] | None:
        listed = None if self._uuid is None else nvml.processes(self._uuid)
        if listed is None:
            return None
        seen = reading.processes or {}
        ours = tree(seen, os.getpid()) | _ancestors(seen, os.getpid())
        # From a container NVML's numbers may be of processes that cannot be seen: new ones among them may be our own.
        return tuple(
            CardProcess(pid=pid, name=seen[pid].name if pid in seen else None, memory_bytes=memory_bytes)
            for pid, memory_bytes in listed
            if pid not in ours and (pid in seen or pid in self._first_card_pids)
        )


def _has_used_cuda() -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and torch.cuda.is_initialized()
