"""How busy others kept the machine: what is worth a word, and how far it widens what is promised. Pure."""

from __future__ import annotations

from statistics import fmean, median
from typing import TYPE_CHECKING

from autotune_amp.core.hardware import LoadEvidence

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from autotune_amp.core.hardware import BusyProcess, CardProcess, MachineLoad
    from autotune_amp.core.outcome import Record

# Less is what daemons use, and what counting CPU time in ticks gets wrong. One process that keeps a core busy is worth
# a word however many cores there are: the step waits for the thread that shares it.
WORTH_CORES, WORTH_SHARE_OF_CPUS, SURELY_WORTH_CORES = 0.25, 0.05, 0.75
WORTH_STOLEN_SHARE = 0.03
# All cores at once run well below the highest clock of one; below half of it is no turbo's doing.
WORTH_CLOCK_SHARE = 0.5
WORTH_CARD_UTILIZATION = 0.05


def worth_cores(num_cpus: int) -> float:
    """The cores from which on others' use is worth a word."""
    return max(WORTH_CORES, min(WORTH_SHARE_OF_CPUS * num_cpus, SURELY_WORTH_CORES))


def is_busy(loads: Sequence[MachineLoad]) -> bool:
    """Whether others used enough of the CPUs for a word: on the mean, or twice that at some time."""
    used = _others(loads)
    return bool(used) and (
        fmean(used) >= worth_cores(loads[0].num_cpus) or max(used) >= 2 * worth_cores(loads[0].num_cpus)
    )


def is_stolen(loads: Sequence[MachineLoad]) -> bool:
    """Whether the hypervisor gave enough away for a word, on the mean."""
    stolen = [load.stolen_share for load in loads if load.stolen_share is not None]
    return bool(stolen) and fmean(stolen) >= WORTH_STOLEN_SHARE


def others_slowdown(load: MachineLoad) -> float:
    """How many times slower others on the CPUs made the steps, by what they took of them.

    Others that are not worth a word count for nothing, and while a core was idle nobody waited for one. Else the step
    is as slow as the slowest thread: the one on the core of which others had most. They had no more of it than they
    used in all, and, as a scheduler gives equal shares, no more than half of it, unless there are several of them to
    each core. A thread that is left 1 - x of its core is 1 / (1 - x) times as slow. One busy process beside two threads
    on two cores: 2 by this rule, 68 ms in place of 32 as measured (studies/README.md). Threads
    that spin while they wait for one without a core lose more than this. On a card one thread feeds it: what others
    may have taken is the rest of that thread's core.
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

    The interval was measured under the median load. Without the others a run is faster by that load's slowdown, and
    slower than measured under the worst load that was seen: with s the slowdown of each process the factors are
    median(s) / max(s) and median(s). A steady load leaves the lower end, one that came and went widens both. They are
    (1, 1) where nothing was worth a word: the spread between processes holds such a machine. A process whose load is
    not known was no idle one; it is left out.
    """
    loads = [load for load in loads if load.others_num_cores is not None or load.stolen_share is not None]
    slowdowns = [1.0] * len(loads)
    if is_busy(loads):
        slowdowns = [s * others_slowdown(load) for s, load in zip(slowdowns, loads, strict=True)]
    if is_stolen(loads):
        slowdowns = [s / (1 - (load.stolen_share or 0.0)) for s, load in zip(slowdowns, loads, strict=True)]
    if not slowdowns:
        return 1.0, 1.0
    return median(slowdowns) / max(slowdowns), median(slowdowns)


def evidence(records: Sequence[Record], own: Sequence[MachineLoad]) -> LoadEvidence | None:
    """What others did during the confirmation; `own` are the loads of the processes behind the interval, and all there
    is where nothing was confirmed. None where nobody looked.
    """
    confirming = [r.load for r in records if r.purpose == "confirm" and r.load is not None]
    loads = confirming or list(own)
    if not loads:
        return None
    used = _others(loads)
    searching = _others(r.load for r in records if confirming and r.purpose == "search" and r.load is not None)
    stolen = [load.stolen_share for load in loads if load.stolen_share is not None]
    clocks = [load.clock_share for load in loads if load.clock_share is not None]
    busiest = max(loads, key=lambda load: load.others_num_cores or 0.0)
    on_card = {process.pid: process for load in loads for process in load.card_processes or ()}
    return LoadEvidence(
        num_cpus=loads[0].num_cpus,
        others_num_cores=fmean(used) if used else None,
        others_num_cores_range=(min(used), max(used)) if used else None,
        search_others_num_cores=fmean(searching) if searching else None,
        busiest=busiest.busiest,
        stolen_share=fmean(stolen) if stolen else None,
        clock_share=min(clocks, default=None),
        card_processes=tuple(on_card.values()),
        card_slowdowns=tuple(dict.fromkeys(name for load in loads for name in load.card_slowdowns or ())),
        # What widens the interval is said, also where it was only the winner's processes that met it.
        is_busy=is_busy(loads) or is_busy(own),
        is_stolen=is_stolen(loads) or is_stolen(own),
        interval_factors=interval_factors(own),
    )


def before_first_trial(load: MachineLoad) -> tuple[str, ...]:
    """What is said at once of the machine that a search begins on."""
    said = []
    if is_busy([load]) and load.others_num_cores is not None:
        said.append(
            f"The machine is busy: other processes use {cores(load.others_num_cores, load.num_cpus)}"
            f"{named(load.busiest)}. Timings will be slower and less sure than on an idle machine."
        )
    if is_stolen([load]):
        said.append(
            f"The machine is busy: its hypervisor gives {100 * (load.stolen_share or 0.0):.0f} % of the CPU time to "
            "others. Timings will be slower and less sure than at another hour."
        )
    if load.card_utilization is not None and load.card_utilization >= WORTH_CARD_UTILIZATION:
        share = f"{100 * load.card_utilization:.0f} % of the time"
        said.append(
            f"The card is busy: others keep it at work for {share}{on_card(load.card_processes)}. Timings will be "
            "slower and less sure than on an idle card."
            if load.card_processes
            else f"The card was at work for {share} just before, though no other process is seen on it: by what this "
            "process began, or by what a container hides. Timings may be slower and less sure than on an idle card."
        )
    return tuple(said)


def doubts(found: LoadEvidence | None) -> list[str]:
    """What is said of `evidence`."""
    if found is None:
        return []
    said, used, low_high = [], found.others_num_cores, found.others_num_cores_range
    if found.is_busy and used is not None and low_high is not None:
        least, most = map(_cores, low_high)
        text = f"The machine was busy while this was measured: other processes used {cores(used, found.num_cpus)}"
        text += ("" if least == most else f", {least} to {most} at a time") + f"{named(found.busiest)}."
        if found.interval_factors != (1.0, 1.0):
            text += " The interval is widened by what they took; without them a run may be faster still."
        said.append(f"{text} Stop them and search again with --fresh for a surer answer.")
    before = found.search_others_num_cores
    if used is not None and before is not None and abs(used - before) >= worth_cores(found.num_cpus):
        said.append(
            f"The machine's load changed: other processes used {_cores(before)} cores in the search's trials and "
            f"{_cores(used)} in the confirmation, so that candidates were not compared under one load. "
            "Search again with --fresh on a quiet machine."
        )
    if found.is_stolen:
        said.append(
            f"The hypervisor gave {100 * (found.stolen_share or 0.0):.0f} % of the CPU time to others while this "
            "was measured: at another hour a run may be faster or slower than promised."
        )
    if found.clock_share is not None and found.clock_share < WORTH_CLOCK_SHARE:
        said.append(
            f"The CPU ran at {100 * found.clock_share:.0f} % of its highest clock while this was measured: with power "
            "saving off, or cooler, a run may be faster than promised."
        )
    if found.card_processes:
        said.append(
            f"The card was not ours alone while this was measured{on_card(found.card_processes)}: without other work "
            "on it a run may be faster than promised."
        )
    if found.card_slowdowns:
        said.append(
            f"The card lowered its clocks while this was measured: {'; '.join(found.card_slowdowns)}. A run on a "
            "cooler card may be faster than promised."
        )
    return said


def cores(used: float, num_cpus: int) -> str:
    """``1.0 of 2 cores``."""
    return f"{_cores(used)} of {num_cpus} cores"


def _cores(used: float) -> str:
    return f"{used:.2f}" if used < 1 - 0.005 else f"{used:.1f}"


def named(busiest: Iterable[BusyProcess]) -> str:
    """`` (python, pid 7: 0.98)``, nothing of nobody."""
    each = [f"{p.name}, pid {p.pid}: {_cores(p.num_cores)}" for p in busiest]
    return f" ({'; '.join(each)})" if each else ""


def on_card(processes: Iterable[CardProcess]) -> str:
    """The same of processes on a card, with their memory."""
    each = [
        f"{p.name or 'a process out of sight'}, pid {p.pid}"
        + ("" if p.memory_bytes is None else f": {p.memory_bytes / 2**30:.1f} GiB")
        for p in processes
    ]
    return f" ({'; '.join(each)})" if each else ""


def _others(loads: Iterable[MachineLoad]) -> list[float]:
    return [load.others_num_cores for load in loads if load.others_num_cores is not None]
