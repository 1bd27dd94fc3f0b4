"""Measures the load by other processes, and derives warnings and factors for intervals from it. No torch."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean, median
from typing import Any, NamedTuple

import msgspec
import psutil

from autotune_amp.core.hardware import BusyProcess, GpuProcess, LoadEvidence, MachineLoad
from autotune_amp.hardware import nvml

# Shortest period over which a load is computed: CPU times are counted in hundredths of a second.
MIN_SECONDS = 0.25
_SLOWDOWN_POLL_SECONDS = 1.0  # between two reads of the GPU's slowdown reasons
_NUM_BUSIEST, _MIN_BUSY_CORES = 3, 0.05
# Least CPU time, as a share of the CPUs' time, that stolen time is divided by: on an idle machine a single stolen tick
# would be a large share.
_MIN_DEMANDED_SHARE = 0.05


class ProcessTimes(NamedTuple):
    """CPU seconds of a process: its own, and those of its children that have ended and were waited for."""

    parent: int
    name: str
    own_seconds: float
    children_seconds: float


class Reading(NamedTuple):
    """CPU time counters of the machine at one moment, in CPU seconds since boot; None if the system hides them."""

    at_seconds: float
    num_cpus: int
    busy_seconds: float | None
    stolen_seconds: float | None
    processes: dict[int, ProcessTimes] | None


def load_between(before: Reading, after: Reading, own_pid: int) -> MachineLoad:
    """Return the load between two readings. The process `own_pid` and its descendants do not count as others.

    A process that ends leaves its CPU time to the parent that waits for it (times(2), tms_cutime), so the sum over the
    processes of a tree includes the time of ended ones. The rest of the machine's busy time is the load by others.
    """
    seconds = after.at_seconds - before.at_seconds
    if seconds < MIN_SECONDS or before.busy_seconds is None or after.busy_seconds is None:
        return MachineLoad(seconds=seconds, num_cpus=after.num_cpus)
    measurements: dict[str, Any] = {}
    busy = max(0.0, after.busy_seconds - before.busy_seconds)
    if before.stolen_seconds is not None and after.stolen_seconds is not None:
        stolen = max(0.0, after.stolen_seconds - before.stolen_seconds)
        wanted = max(stolen + busy, _MIN_DEMANDED_SHARE * after.num_cpus * seconds)
        measurements["stolen_share"] = stolen / wanted
    if before.processes is not None and after.processes is not None:
        own = max(0.0, _tree_seconds(after.processes, own_pid) - _tree_seconds(before.processes, own_pid))
        if busy >= 0.5 * own:  # some sandboxes count CPU time per process, but not for the machine
            measurements["others_num_cores"] = min(float(after.num_cpus), max(0.0, busy - own) / seconds)
            measurements["own_num_cores"] = own / seconds
            measurements["busiest"] = _busiest(before.processes, after.processes, own_pid, seconds)
    return MachineLoad(seconds=seconds, num_cpus=after.num_cpus, **measurements)


def process_tree(processes: dict[int, ProcessTimes], own_pid: int) -> set[int]:
    """Return the process ids of `own_pid` and its descendants."""
    children: dict[int, list[int]] = {}
    for pid, process in processes.items():
        children.setdefault(process.parent, []).append(pid)
    pids, new_pids = {own_pid}, [own_pid]
    while new_pids:
        new_pids = [child for pid in new_pids for child in children.get(pid, ()) if child not in pids]
        pids.update(new_pids)
    return pids


def _tree_seconds(processes: dict[int, ProcessTimes], own_pid: int) -> float:
    tree_processes = (processes[pid] for pid in process_tree(processes, own_pid) if pid in processes)
    return sum(process.own_seconds + process.children_seconds for process in tree_processes)


def _busiest(
    before: dict[int, ProcessTimes], after: dict[int, ProcessTimes], own_pid: int, seconds: float
) -> tuple[BusyProcess, ...]:
    others = []
    for pid in after.keys() - process_tree(before, own_pid) - process_tree(after, own_pid):
        seconds_before = before[pid].own_seconds if pid in before else 0.0
        others.append(
            BusyProcess(pid=pid, name=after[pid].name, num_cores=(after[pid].own_seconds - seconds_before) / seconds)
        )
    busiest = sorted(others, key=lambda process: (-process.num_cores, process.pid))[:_NUM_BUSIEST]
    return tuple(process for process in busiest if process.num_cores >= _MIN_BUSY_CORES)


def read_counters(root: Path = Path("/proc")) -> Reading:
    """Read the counters of the CPUs that this process may run on. Takes milliseconds."""
    try:
        times = psutil.cpu_times(percpu=True)
    except (OSError, RuntimeError, ValueError):  # a sandbox may hide them
        times = []
    own_cpus = times
    # If CPUs are switched off, their numbers are not indices into this list.
    if hasattr(os, "sched_getaffinity") and len(times) == os.sysconf("SC_NPROCESSORS_CONF"):
        own_cpus = [times[cpu] for cpu in os.sched_getaffinity(0)]
    return Reading(
        at_seconds=time.monotonic(),
        num_cpus=len(own_cpus) or os.cpu_count() or 1,
        # Leaves out interrupts, which this search's transfers cause too, and guests, which "user" includes already.
        busy_seconds=sum(cpu.user + cpu.system + getattr(cpu, "nice", 0.0) for cpu in own_cpus) if own_cpus else None,
        stolen_seconds=sum(cpu.steal for cpu in own_cpus) if own_cpus and hasattr(own_cpus[0], "steal") else None,
        processes=_processes(root),
    )


def _processes(root: Path) -> dict[int, ProcessTimes] | None:
    """Return all processes from Linux's /proc; None on other systems, which do not count ended children.

    One file per process is read: psutil opens five, which takes 10 ms for a hundred processes.
    """
    if not (root / "self" / "stat").exists():
        return None
    ticks_per_second = os.sysconf("SC_CLK_TCK")
    processes: dict[int, ProcessTimes] = {}
    for folder in root.iterdir():
        if folder.name.isdigit():
            with contextlib.suppress(OSError):  # it has just ended, after its parent was read: rare
                text = (folder / "stat").read_text(errors="replace")
                name, _, rest = text.partition("(")[2].rpartition(")")
                fields = rest.split()  # from "state", which proc_pid_stat(5) numbers 3
                own, children = ((int(fields[k]) + int(fields[k + 1])) / ticks_per_second for k in (11, 13))
                processes[int(folder.name)] = ProcessTimes(int(fields[1]), name, own, children)
    return processes


class LoadMeter:
    """Measures the load by other processes during a trial, from its last warm-up step on, or from its start."""

    def __init__(self, uuid: str | None = None) -> None:  # the GPU's UUID
        self._uuid = uuid
        self.start()

    def start(self) -> None:
        """Restart the measurement."""
        self._before = read_counters()
        self._after: Reading | None = None
        self._is_stepping = False
        self._last_poll = -_SLOWDOWN_POLL_SECONDS
        self._slowdowns: dict[str, None] | None = None

    def warm_up(self) -> None:
        """Note a warm-up step: the measurement restarts here, except after a measured step of the same process.

        Measured steps are reported at their end. Starting at the first of them would miss a single long step. Steps
        that follow the end of a process are those of a second one, which repeats the trial.
        """
        if self._after is not None:
            self.start()
        elif not self._is_stepping and time.monotonic() - self._before.at_seconds >= MIN_SECONDS:
            self._before = read_counters()

    def step(self) -> None:
        """Note a measured step, and read the GPU's slowdown reasons at most once a second."""
        now, self._is_stepping = time.monotonic(), True
        if self._uuid is not None and now - self._last_poll >= _SLOWDOWN_POLL_SECONDS:
            self._last_poll = now
            names = nvml.slowdown_names(self._uuid)
            if names is not None:
                self._slowdowns = {**(self._slowdowns or {}), **dict.fromkeys(names)}

    def hold(self) -> None:
        """Read the final counters now: the trial's processes are about to be killed, and their CPU time may be lost."""
        self._after = self._after or read_counters()

    def stop(self) -> MachineLoad:
        """Return the load by others since `start`, or since the last warm-up step."""
        after = self._after or read_counters()
        return msgspec.structs.replace(
            load_between(self._before, after, os.getpid()),
            gpu_processes=self._gpu_processes(after),
            gpu_slowdowns=None if self._slowdowns is None else tuple(self._slowdowns),
        )

    def _gpu_processes(self, reading: Reading) -> tuple[GpuProcess, ...] | None:
        gpu_processes = None if self._uuid is None else nvml.processes(self._uuid)
        if gpu_processes is None:
            return None
        processes = reading.processes or {}
        own_pids = process_tree(processes, os.getpid()) | nvml.ancestors()
        # Inside a container NVML may list ids of invisible processes, which may belong to this search.
        return tuple(
            GpuProcess(pid=pid, name=processes[pid].name, memory_bytes=memory_bytes)
            for pid, memory_bytes in gpu_processes
            if pid in processes and pid not in own_pids
        )


# Thresholds for a warning: a share of the CPUs, within these numbers of cores. Smaller loads come from daemons and from
# counting CPU time in ticks. One process that keeps a core busy matters on any number of cores: the step waits for the
# thread that shares this core.
MIN_WARNING_CORES, WARNING_SHARE_OF_CPUS, MAX_WARNING_CORES = 0.25, 0.05, 0.75
WARNING_STOLEN_SHARE = 0.03


def warning_threshold_cores(num_cpus: int) -> float:
    """Return the number of cores that others must use for a warning."""
    return max(MIN_WARNING_CORES, min(WARNING_SHARE_OF_CPUS * num_cpus, MAX_WARNING_CORES))


def is_busy(loads: Sequence[MachineLoad]) -> bool:
    """Return whether others used enough CPU time for a warning: on average, or twice as much during one measurement."""
    num_cores = [load.others_num_cores for load in loads if load.others_num_cores is not None]
    if not num_cores:
        return False
    threshold = warning_threshold_cores(loads[0].num_cpus)
    return fmean(num_cores) >= threshold or max(num_cores) >= 2 * threshold


def is_stolen(loads: Sequence[MachineLoad]) -> bool:
    """Return whether the hypervisor gave away enough CPU time on average for a warning."""
    shares = [load.stolen_share for load in loads if load.stolen_share is not None]
    return bool(shares) and fmean(shares) >= WARNING_STOLEN_SHARE


def others_slowdown(load: MachineLoad) -> float:
    """Return the estimated factor by which other processes on the CPUs slowed the steps.

    The factor is 1 for loads below `warning_threshold_cores`, and if a core was idle. Otherwise the step is as slow as
    its slowest thread, the one whose core others used most. They used no more of that core than they used in total,
    and, since a scheduler gives equal shares, no more than half of it, unless there are several of them per core. For
    one busy process beside two threads on two cores the factor is 2; measured were 68 ms instead of 32
    (studies/README.md). A GPU is fed by one thread: others took at most the rest of that thread's core.
    """
    others, num_cpus, own = load.others_num_cores or 0.0, load.num_cpus, load.own_num_cores or 0.0
    if others < warning_threshold_cores(num_cpus) or num_cpus - others - own >= 1:
        return 1.0
    core_share = min(others, max(0.5, others / num_cpus), 0.95)
    if load.gpu_processes is not None:
        core_share = min(core_share, max(0.0, 1 - own))
    return 1 / (1 - core_share)


def interval_factors(loads: Sequence[MachineLoad]) -> tuple[float, float]:
    """Return factors for the ends of a throughput's interval, to include the range of observed loads.

    The interval was measured under the median load. With s the slowdown of each process the factors are median(s) /
    max(s), for the worst load observed, and median(s), for no load: a steady load keeps the lower end, an intermittent
    one widens both. (1, 1) if no load mattered. Processes with unknown load are ignored.
    """
    known_loads = [load for load in loads if load.others_num_cores is not None or load.stolen_share is not None]
    slowdowns = [1.0] * max(1, len(known_loads))
    if is_busy(known_loads):
        slowdowns = [others_slowdown(load) for load in known_loads]
    if is_stolen(known_loads):
        slowdowns = [s / (1 - (load.stolen_share or 0.0)) for s, load in zip(slowdowns, known_loads, strict=True)]
    return median(slowdowns) / max(slowdowns), median(slowdowns)


def evidence(loads: Sequence[MachineLoad]) -> LoadEvidence | None:
    """Summarize the loads while a throughput was measured; return None for an empty sequence."""
    if not loads:
        return None
    num_cores = [load.others_num_cores for load in loads if load.others_num_cores is not None]
    stolen = [load.stolen_share for load in loads if load.stolen_share is not None]
    gpu_processes = {process.pid: process for load in loads for process in load.gpu_processes or ()}
    return LoadEvidence(
        num_cpus=loads[0].num_cpus,
        others_num_cores=fmean(num_cores) if num_cores else None,
        busiest=max(loads, key=lambda load: load.others_num_cores or 0.0).busiest,
        stolen_share=fmean(stolen) if stolen else None,
        gpu_processes=tuple(gpu_processes.values()),
        gpu_slowdowns=tuple(dict.fromkeys(name for load in loads for name in load.gpu_slowdowns or ())),
        is_busy=is_busy(loads),
        is_stolen=is_stolen(loads),
        interval_factors=interval_factors(loads),
    )


def load_warnings(load: LoadEvidence | None, remedy: str = "search again with --fresh") -> list[str]:
    """Return warnings about the load, each with a way to a more reliable result; `remedy` completes the advice."""
    if load is None:
        return []
    warnings = []
    if load.is_busy:
        busiest = "; ".join(f"{p.name}, pid {p.pid}: {p.num_cores:.2f}" for p in load.busiest)
        whose, advice = (busiest, "Stop them and") if busiest else ("hidden from this user", "When it is quiet,")
        warnings.append(
            f"The machine was busy: other processes used {load.others_num_cores or 0.0:.2f} of {load.num_cpus} cores "
            f"({whose}). {advice} {remedy} for a more reliable result; without them training may be faster."
        )
    if load.is_stolen:
        warnings.append(f"The hypervisor gave {100 * (load.stolen_share or 0.0):.0f} % of the CPU time to others.")
    if load.gpu_processes:
        names = "; ".join(f"{p.name}, pid {p.pid}" for p in load.gpu_processes)
        warnings.append(f"Other processes used the GPU: {names}.")
    if load.gpu_slowdowns:
        warnings.append(f"The GPU lowered its clocks: {'; '.join(load.gpu_slowdowns)}.")
    return warnings
