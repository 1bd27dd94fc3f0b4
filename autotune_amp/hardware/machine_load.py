"""What others do on this machine while we measure, what of it is worth a word, and how far it widens what is promised.
No torch."""

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

from autotune_amp.core.hardware import BusyProcess, CardProcess, LoadEvidence, MachineLoad
from autotune_amp.hardware import nvml

# CPU times come in hundredths of a second for each process: shorter than this they say nothing.
MIN_SECONDS = 0.25
_LOOK_SECONDS = 1.0
_NUM_BUSIEST, _BUSIEST_NUM_CORES = 3, 0.05
_MIN_WANTED_SHARE = 0.05  # of the CPUs' time: on a machine that hardly works a stolen tick would be a large share


class ProcessTimes(NamedTuple):
    """A process and its CPU seconds: its own, and those of its children that have ended and were waited for."""

    parent: int
    name: str
    own_seconds: float
    children_seconds: float


class Reading(NamedTuple):
    """The machine's counters at one moment, None where the system hides them; in CPU seconds since it was started."""

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
    if seconds < MIN_SECONDS or before.busy_seconds is None or after.busy_seconds is None:
        return MachineLoad(seconds=seconds, num_cpus=after.num_cpus)
    found: dict[str, Any] = {}
    busy = max(0.0, after.busy_seconds - before.busy_seconds)
    if before.stolen_seconds is not None and after.stolen_seconds is not None:
        stolen = max(0.0, after.stolen_seconds - before.stolen_seconds)
        wanted = max(stolen + busy, _MIN_WANTED_SHARE * after.num_cpus * seconds)
        found["stolen_share"] = stolen / wanted
    if before.processes is not None and after.processes is not None:
        own = max(0.0, _tree_seconds(after.processes, own_pid) - _tree_seconds(before.processes, own_pid))
        if busy >= 0.5 * own:  # some sandboxes count for each process, but not for the machine
            found["others_num_cores"] = min(float(after.num_cpus), max(0.0, busy - own) / seconds)
            found["own_num_cores"] = own / seconds
            found["busiest"] = _busiest(before.processes, after.processes, own_pid, seconds)
    return MachineLoad(seconds=seconds, num_cpus=after.num_cpus, **found)


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


def _tree_seconds(processes: dict[int, ProcessTimes], own_pid: int) -> float:
    ours = (processes[pid] for pid in tree(processes, own_pid) if pid in processes)
    return sum(process.own_seconds + process.children_seconds for process in ours)


def _busiest(
    before: dict[int, ProcessTimes], after: dict[int, ProcessTimes], own_pid: int, seconds: float
) -> tuple[BusyProcess, ...]:
    used = []
    for pid in after.keys() - tree(before, own_pid) - tree(after, own_pid):
        begun = before[pid].own_seconds if pid in before else 0.0
        used.append(BusyProcess(pid=pid, name=after[pid].name, num_cores=(after[pid].own_seconds - begun) / seconds))
    most = sorted(used, key=lambda process: (-process.num_cores, process.pid))[:_NUM_BUSIEST]
    return tuple(process for process in most if process.num_cores >= _BUSIEST_NUM_CORES)


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
    for folder in root.iterdir():
        if folder.name.isdigit():
            with contextlib.suppress(OSError):  # it ended; its parent, which has its time now, was read before: rare
                text = (folder / "stat").read_text(errors="replace")
                name, _, rest = text.partition("(")[2].rpartition(")")
                fields = rest.split()  # from "state", which proc_pid_stat(5) numbers 3
                own, children = ((int(fields[k]) + int(fields[k + 1])) / ticks_per_second for k in (11, 13))
                found[int(folder.name)] = ProcessTimes(int(fields[1]), name, own, children)
    return found


class LoadMeter:
    """Tells what others did while a trial ran: from its last warm-up step on, or in all of it where it took none."""

    def __init__(self, uuid: str | None = None) -> None:  # the card's
        self._uuid = uuid
        self.start()

    def start(self) -> None:
        """Begin anew."""
        self._before = read()
        self._after: Reading | None = None
        self._is_stepping = False
        self._last_look = -_LOOK_SECONDS
        self._slowdowns: dict[str, None] | None = None

    def warm_up(self) -> None:
        """The trial took a step to warm up: what was before does not count.

        The measured steps are told of when they end. Begun only then, a single long one would have been missed.
        """
        if not self._is_stepping and time.monotonic() - self._before.at_seconds >= MIN_SECONDS:
            self._before = read()

    def step(self) -> None:
        """The trial took a measured step: the card's clocks are worth a look."""
        now, self._is_stepping = time.monotonic(), True
        if self._uuid is not None and now - self._last_look >= _LOOK_SECONDS:
            self._last_look = now
            names = nvml.slowdown_names(self._uuid)
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
            card_processes=self._card_processes(after),
            card_slowdowns=None if self._slowdowns is None else tuple(self._slowdowns),
        )

    def _card_processes(self, reading: Reading) -> tuple[CardProcess, ...] | None:
        listed = None if self._uuid is None else nvml.processes(self._uuid)
        if listed is None:
            return None
        seen = reading.processes or {}
        ours = tree(seen, os.getpid()) | nvml.ancestors()
        # From a container NVML's numbers may be of processes that cannot be seen, and those may be our own.
        return tuple(
            CardProcess(pid=pid, name=seen[pid].name, memory_bytes=memory_bytes)
            for pid, memory_bytes in listed
            if pid in seen and pid not in ours
        )


# Less is what daemons use, and what counting CPU time in ticks gets wrong. One process that keeps a core busy is worth
# a word however many cores there are: the step waits for the thread that shares it.
WORTH_CORES, WORTH_SHARE_OF_CPUS, SURELY_WORTH_CORES = 0.25, 0.05, 0.75
WORTH_STOLEN_SHARE = 0.03


def worth_cores(num_cpus: int) -> float:
    """The cores from which on others' use is worth a word."""
    return max(WORTH_CORES, min(WORTH_SHARE_OF_CPUS * num_cpus, SURELY_WORTH_CORES))


def is_busy(loads: Sequence[MachineLoad]) -> bool:
    """Whether others used enough of the CPUs for a word: on the mean, or twice that at some time."""
    used = [load.others_num_cores for load in loads if load.others_num_cores is not None]
    if not used:
        return False
    enough = worth_cores(loads[0].num_cpus)
    return fmean(used) >= enough or max(used) >= 2 * enough


def is_stolen(loads: Sequence[MachineLoad]) -> bool:
    """Whether the hypervisor gave enough away for a word, on the mean."""
    stolen = [load.stolen_share for load in loads if load.stolen_share is not None]
    return bool(stolen) and fmean(stolen) >= WORTH_STOLEN_SHARE


def others_slowdown(load: MachineLoad) -> float:
    """How many times slower others on the CPUs made the steps, by what they took of them.

    Others that are not worth a word count for nothing, and while a core was idle nobody waited for one. Else the step
    is as slow as the slowest thread: the one on the core of which others had most. They had no more of it than they
    used in all, and, as a scheduler gives equal shares, no more than half of it, unless there are several of them to
    each core. One busy process beside two threads on two cores: 2 by this rule, 68 ms in place of 32 as measured
    (studies/README.md). On a card one thread feeds it: what others may have taken is the rest of that thread's core.
    """
    others, num_cpus, own = load.others_num_cores or 0.0, load.num_cpus, load.own_num_cores or 0.0
    if others < worth_cores(num_cpus) or num_cpus - others - own >= 1:
        return 1.0
    taken = min(others, max(0.5, others / num_cpus), 0.95)
    if load.card_processes is not None:
        taken = min(taken, max(0.0, 1 - own))
    return 1 / (1 - taken)


def interval_factors(loads: Sequence[MachineLoad]) -> tuple[float, float]:
    """What to multiply the ends of a throughput's interval by, so that it holds whatever others do of what was seen.

    The interval was measured under the median load. With s the slowdown of each process the factors are
    median(s) / max(s), the worst load that was seen, and median(s), none: a steady load leaves the lower end, one that
    came and went widens both. (1, 1) where nothing was worth a word. A process whose load is not known is left out.
    """
    known = [load for load in loads if load.others_num_cores is not None or load.stolen_share is not None]
    slowdowns = [1.0] * max(1, len(known))
    if is_busy(known):
        slowdowns = [others_slowdown(load) for load in known]
    if is_stolen(known):
        slowdowns = [s / (1 - (load.stolen_share or 0.0)) for s, load in zip(slowdowns, known, strict=True)]
    return median(slowdowns) / max(slowdowns), median(slowdowns)


def evidence(loads: Sequence[MachineLoad]) -> LoadEvidence | None:
    """What others did while the processes behind a throughput's interval ran; None where nobody looked."""
    if not loads:
        return None
    used = [load.others_num_cores for load in loads if load.others_num_cores is not None]
    stolen = [load.stolen_share for load in loads if load.stolen_share is not None]
    on_card = {process.pid: process for load in loads for process in load.card_processes or ()}
    return LoadEvidence(
        num_cpus=loads[0].num_cpus,
        others_num_cores=fmean(used) if used else None,
        busiest=max(loads, key=lambda load: load.others_num_cores or 0.0).busiest,
        stolen_share=fmean(stolen) if stolen else None,
        card_processes=tuple(on_card.values()),
        card_slowdowns=tuple(dict.fromkeys(name for load in loads for name in load.card_slowdowns or ())),
        is_busy=is_busy(loads),
        is_stolen=is_stolen(loads),
        interval_factors=interval_factors(loads),
    )


def doubts(found: LoadEvidence | None, remedy: str = "search again with --fresh") -> list[str]:
    """What is said of `evidence`, and what would give a surer answer."""
    if found is None:
        return []
    said = []
    if found.is_busy:
        busiest = "; ".join(f"{p.name}, pid {p.pid}: {p.num_cores:.2f}" for p in found.busiest)
        said.append(
            f"The machine was busy: other processes used {found.others_num_cores or 0.0:.2f} of {found.num_cpus} cores "
            f"({busiest}). Stop them and {remedy} for a surer answer; without them a run may be faster."
        )
    if found.is_stolen:
        said.append(f"The hypervisor gave {100 * (found.stolen_share or 0.0):.0f} % of the CPU time to others.")
    if found.card_processes:
        said.append(f"Others were on the card: {'; '.join(f'{p.name}, pid {p.pid}' for p in found.card_processes)}.")
    if found.card_slowdowns:
        said.append(f"The card lowered its clocks: {'; '.join(found.card_slowdowns)}.")
    return said
