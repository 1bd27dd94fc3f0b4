"""Whole searches on scripted hosts: what is answered where a process is cheap or dear, forked or not, and dies.

Usage: hosts.py [play NAME|table]; without a step, play "after" and make the tables. Raw outcomes:
results/hosts/NAME.jsonl, a line for each search.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import fmean, median
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before numpy

import paths
from closed_form import NOISES, SHAPES, ClosedForm
from host import Host, HostedForm, search_on
from measured import measured_shapes
from search_replay import setting_of
from tables import head, put, row

from autotune_amp.core.hardware import Hardware
from autotune_amp.core.outcome import Failure, Measurement, Record
from autotune_amp.core.precisions import Precision
from autotune_amp.search.options import SearchOptions
from autotune_amp.search.ranking import PLATEAU

RESULTS = paths.RESULTS / "hosts"
BEFORE, AFTER = "before", "after"
CHECK_FIRST = "check first"  # by the rules of commit e9d667d, which checked the fastest before other batch sizes
HARMFUL = "harmful"  # ends the name of searches that find bf16 and fp16 unfaithful
FACTORS: dict[str, tuple[Any, ...]] = {
    "start": (0.1, 5.0, 20.0, 60.0),
    "build": (0.0, 8.0),
    "processes": ("forked", "kept", "command"),  # a command's runs are its own, whether or not a fork is possible
    "cores": (2, 16),
    "budget": (75.0, 110.0, None),  # None is the default
    "noise": NOISES,
    "deaths": (0.0, 0.05),
}
NUM_SAMPLED = 60  # combinations to choose the next from
MAX_REGRET, MAX_WORST_REGRET, MAX_SECONDS, MAX_OVERRUN = 1.0, 4.0, 60.0, 0.05
Line = dict[str, Any]


@dataclass(frozen=True)
class Case:
    """One search: a landscape, a host, a budget (None for the default) and a seed."""

    form: ClosedForm
    host: Host
    budget_seconds: float | None
    seed: int

    @property
    def name(self) -> str:
        """Return the landscape's name, which says whether further dimensions are in its space."""
        is_more = self.form.with_variants and self.form.shape in SHAPES
        return f"{self.form.shape.name}, further dimensions" if is_more else self.form.shape.name


def cases(harmful: tuple[Precision, ...] = ()) -> Iterator[Case]:
    """Yield searches that cover every pair of levels of two factors on every landscape, with `harmful` precisions."""
    shapes = [*itertools.product(SHAPES, (False, True)), *((shape, True) for shape in measured_shapes())]
    for shape, with_variants in shapes:
        for seed, levels in enumerate(covering(FACTORS, random.Random(f"{shape.name} {with_variants}"))):
            host = Host(
                start_seconds=levels["start"],
                build_seconds=levels["build"],
                can_fork=levels["processes"] == "forked",
                num_cores=levels["cores"],
                is_command=levels["processes"] == "command",
                death_share=levels["deaths"],
                harmful=harmful,
            )
            yield Case(ClosedForm(shape, levels["noise"], with_variants=with_variants), host, levels["budget"], seed)


def covering(factors: dict[str, tuple[Any, ...]], chance: random.Random) -> Iterator[dict[str, Any]]:
    """Yield combinations until every pair of levels of two factors has occurred, each time the one with most new."""
    combinations = list(itertools.product(*(enumerate(levels) for levels in factors.values())))

    def pairs(chosen: Sequence[tuple[int, Any]]) -> set[Any]:
        return set(itertools.combinations([(place, level) for place, (level, _) in enumerate(chosen)], 2))

    missing = set().union(*map(pairs, combinations))
    while missing:
        best = max(chance.sample(combinations, NUM_SAMPLED), key=lambda chosen: len(pairs(chosen) & missing))
        if pairs(best) & missing:
            missing -= pairs(best)
            yield dict(zip(factors, (value for _, value in best), strict=True))


def searched(case: Case) -> Line:
    """Return what the search of a case answered, and what that is worth by the true rates."""
    host, form = case.host, HostedForm(case.form, case.host)
    default = SearchOptions().budget_seconds
    replayed = search_on(case.form, host, case.seed, case.budget_seconds or default)
    decision = None if replayed is None else replayed.decision
    baseline = form.space().baseline
    precisions = {candidate.precision for candidate in form.space().candidates}
    answer = baseline if decision is None else setting_of(decision)
    evidence = None if decision is None else decision.evidence
    records = [] if replayed is None else [record for _, record in replayed.records]
    has_failed = any(isinstance(r.outcome, Failure) for r in records if r.candidate == baseline)
    return {
        "landscape": case.name,
        "start": host.start_seconds,
        "build": host.build_seconds,
        "processes": "command" if host.is_command else "forked" if host.can_fork else "kept",
        "cores": host.num_cores,
        "budget": case.budget_seconds,
        "noise": form.noise,
        "deaths": host.death_share,
        "seed": case.seed,
        "answer": None if decision is None else str(answer),
        "regret": round(form.regret(answer), 4),
        "gain": round(form.rate(answer) / form.rate(baseline), 3) if form.rate(baseline) else None,
        # None where the baseline is the answer, or has failed, even if by no fault of its own.
        "measured_gain": round(evidence.speedup, 3)
        if evidence and evidence.speedup and answer != baseline and not has_failed
        else None,
        "confirmed": bool(evidence and evidence.is_confirmed),
        "seconds": round(replayed.records[-1][0], 1) if replayed is not None and records else None,
        "compared": len(compared(records, form.header.hardware) & precisions),
        "precisions": len(precisions),
    }


def compared(records: Sequence[Record], hardware: Hardware) -> set[str]:
    """Return the precisions that the search knows: measured, or failed, of an emulated one also for want of time."""

    def is_known(record: Record) -> bool:
        emulated = hardware.precisions[record.candidate.precision].level == "emulated"
        failure = record.outcome
        return isinstance(failure, Measurement) or (
            isinstance(failure, Failure) and (failure.kind != "timeout" or (emulated and not failure.is_loading))
        )

    return {r.candidate.precision for r in records if r.purpose == "search" and is_known(r)}


def starts_fit(line: Line) -> bool:
    """Whether three starts fit into the budget that was given.

    Of a command, whose every run is a start, two for describing it and one for each precision have to.
    """
    num_starts = 2 + line["precisions"] if line["processes"] == "command" else 3
    return line["budget"] is not None and num_starts * (line["start"] + line["build"]) <= line["budget"]


def _file(name: str) -> Path:
    return RESULTS / f"{name.replace(' ', '_')}.jsonl"


def play(name: str, harmful: tuple[Precision, ...] = ()) -> None:
    """Play every case and write a line for each. Checks find the `harmful` precisions unfaithful."""
    RESULTS.mkdir(parents=True, exist_ok=True)
    began = time.monotonic()
    with _file(name).open("w") as file:
        lines = [json.dumps(searched(case), separators=(",", ":")) + "\n" for case in cases(harmful)]
        file.writelines(lines)
    print(f"{len(lines)} searches in {time.monotonic() - began:.0f} s", file=sys.stderr)


# -- tables ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Goal:
    """A number over all searches; `limit` is the most it may be (the least, where it is a share that is to be high)."""

    name: str
    value: Callable[[list[Line]], float]
    unit: str = "%"
    limit: float | None = None
    is_least: bool = False

    def cells(self, by_name: dict[str, list[Line]]) -> list[str]:
        """Return the table's row: the goal, the number of each set of searches, whether the last set reaches it."""
        found = [self.value(lines) for lines in by_name.values()]
        wanted = "" if self.limit is None else f"{'≥' if self.is_least else '≤'} {self.limit:g} {self.unit}".rstrip()
        is_reached = self.limit is None or (found[-1] >= self.limit if self.is_least else found[-1] <= self.limit)
        reached = "" if self.limit is None else "yes" if is_reached else "no"
        return [self.name, wanted, *(f"{value:.1f} {self.unit}".rstrip() for value in found), reached]


def by_default(lines: Sequence[Line]) -> list[Line]:
    """Return the searches with the default budget."""
    return [line for line in lines if line["budget"] is None]


def beyond(lines: Sequence[Line]) -> list[float]:
    """Return the regret of each search beyond the plateau, in percent."""
    return [100 * max(0.0, line["regret"] - PLATEAU) for line in lines]


def share(flags: Sequence[bool]) -> float:
    """Return the percentage that is true; 100 where there is none."""
    return 100 * fmean(flags) if flags else 100.0


def regret_where(factor: str, level: Any, lines: Sequence[Line]) -> float:
    """Return the mean regret beyond the plateau of the default budget's searches at one level of a factor."""
    return fmean(beyond([line for line in by_default(lines) if line[factor] == level]))


def worst_landscape(lines: Sequence[Line]) -> float:
    """Return the mean regret beyond the plateau on the landscape where it is the largest, in percent."""
    names = {line["landscape"] for line in lines}
    return max(fmean(beyond([line for line in lines if line["landscape"] == name])) for name in names)


def seconds_beyond_starts(lines: Sequence[Line], *, are_commands: bool) -> float:
    """Return the median of the seconds that searches took beyond three starts."""
    ours = [line for line in lines if (line["processes"] == "command") == are_commands and line["seconds"] is not None]
    return float(median(line["seconds"] - 3 * (line["start"] + line["build"]) for line in ours))


def is_slower(line: Line) -> bool:
    """Whether the answer was measured to be slower than the baseline."""
    return line["measured_gain"] is not None and line["measured_gain"] < 1


def has_all(line: Line) -> bool:
    """Whether every legal precision was tried."""
    return bool(line["compared"] == line["precisions"])


def goals() -> list[Goal]:
    """Return the rows of the table of goals."""
    parts = [
        ("noise", NOISES[0], "without noise"),
        *(("noise", noise, f"at {100 * noise:.0f} % noise") for noise in NOISES[1:]),
        *(("processes", processes, processes) for processes in FACTORS["processes"]),
        *(("deaths", level, f"{100 * level:.0f} % of processes killed") for level in FACTORS["deaths"]),
    ]
    by_part = [Goal(f"… {name}", partial(regret_where, factor, level)) for factor, level, name in parts]
    return [
        Goal("default budget: mean regret beyond the plateau", lambda x: fmean(beyond(by_default(x))), "%", MAX_REGRET),
        *by_part,
        Goal("… worst landscape", lambda x: worst_landscape(by_default(x)), "%", MAX_WORST_REGRET),
        Goal("… worst search", lambda x: max(beyond(by_default(x)))),
        Goal("… confirmed", lambda x: share([line["confirmed"] for line in by_default(x)]), "%", 100.0, is_least=True),
        Goal("… every precision compared", lambda x: share([has_all(line) for line in by_default(x)])),
        Goal(
            "… median seconds beyond three starts, Workloads",
            lambda x: seconds_beyond_starts(by_default(x), are_commands=False),
            "s",
            MAX_SECONDS,
        ),
        Goal("… the same, commands", lambda x: seconds_beyond_starts(by_default(x), are_commands=True), "s"),
        Goal(
            "given budgets: every precision compared where three starts fit",
            lambda x: share([has_all(line) for line in x if starts_fit(line)]),
            "%",
            100.0,
            is_least=True,
        ),
        Goal("… mean regret beyond the plateau", lambda x: fmean(beyond([y for y in x if y["budget"] is not None]))),
        Goal(
            "… more than 5 % over the budget",
            lambda x: sum(
                (line["seconds"] or 0.0) > (1 + MAX_OVERRUN) * line["budget"]
                for line in x
                if line["budget"] is not None
            ),
            "searches",
            0.0,
        ),
        Goal(
            "all: answer slower than the measured baseline, which never failed",
            lambda x: sum(map(is_slower, x)),
            "searches",
            0.0,
        ),
        Goal(
            "… answer more than 3 % slower than the baseline in truth",
            lambda x: sum(line["gain"] is not None and line["gain"] < 1 - PLATEAU for line in x),
            "searches",
        ),
        Goal("… without an answer", lambda x: sum(line["answer"] is None for line in x), "searches"),
    ]


def goal_table(by_name: dict[str, list[Line]]) -> list[str]:
    """Return the goals, and what searches by the rules of each name reach."""
    names = [f"{name} ({len(lines)} searches)" for name, lines in by_name.items()]
    return [*head(["", "goal", *names, "reached"]), *(row(goal.cells(by_name)) for goal in goals())]


def host_table(by_name: dict[str, list[Line]]) -> list[str]:
    """Return by kind of process and seconds of a start: regret, precisions compared, confirmed, seconds."""
    numbers = ["regret beyond the plateau, default", "every precision compared", "confirmed", "median seconds, default"]
    table = head(["processes", "start, s", *(f"{name}: {number}" for name in by_name for number in numbers)])
    for processes, start in itertools.product(FACTORS["processes"], FACTORS["start"]):
        cells = [processes, f"{start:g}"]
        for lines in by_name.values():
            ours = [line for line in lines if (line["processes"], line["start"]) == (processes, start)]
            default = by_default(ours)
            seconds = [line["seconds"] for line in default if line["seconds"] is not None]
            cells += [f"{fmean(beyond(default)):.1f} %", f"{share([has_all(line) for line in ours]):.0f} %"]
            cells += [
                f"{share([line['confirmed'] for line in ours]):.0f} %",
                f"{median(seconds):.0f}" if seconds else "",
            ]
        table.append(row(cells))
    return table


def landscape_table(by_name: dict[str, list[Line]]) -> list[str]:
    """Return by landscape the mean regret beyond the plateau with the default budget, and the mean gain."""
    numbers = ["regret beyond the plateau", "gain over today's"]
    table = head(["landscape, default budget", *(f"{name}: {number}" for name in by_name for number in numbers)])
    for landscape in dict.fromkeys(line["landscape"] for lines in by_name.values() for line in lines):
        cells = [landscape]
        for lines in by_name.values():
            ours = [line for line in by_default(lines) if line["landscape"] == landscape]
            gains = [line["gain"] for line in ours if line["gain"] is not None]
            cells += [f"{fmean(beyond(ours)):.1f} %", f"{fmean(gains):.2f}" if gains else ""]
        table.append(row(cells))
    return table


def order_table(by_name: dict[str, list[Line]]) -> list[str]:
    """Return what searches of both orders of stages answer, with healthy and with harmful precisions."""
    table = head(["searches", "gain over today's, default", "… given budgets", "confirmed, default", "median seconds"])
    for name, lines in by_name.items():
        default, given = by_default(lines), [line for line in lines if line["budget"] is not None]
        gains = [fmean([line["gain"] for line in x if line["gain"] is not None]) for x in (default, given)]
        seconds = median(line["seconds"] for line in default if line["seconds"] is not None)
        confirmed = share([line["confirmed"] for line in default])
        table.append(row([name, *(f"{gain:.2f}" for gain in gains), f"{confirmed:.0f} %", f"{seconds:.0f}"]))
    return table


def write() -> None:
    """Put the tables of what was played into the README."""

    def played(*names: str) -> dict[str, list[Line]]:
        return {name: list(map(json.loads, _file(name).read_text().splitlines())) for name in names}

    compared = played(BEFORE, AFTER)
    orders = played(CHECK_FIRST, AFTER, f"{CHECK_FIRST} {HARMFUL}", f"{AFTER} {HARMFUL}")
    tables = {"hosts": goal_table, "hosts by host": host_table, "hosts by landscape": landscape_table}
    found = {name: make(compared) for name, make in tables.items()}
    put(paths.HERE / "README.md", {**found, "hosts by order": order_table(orders)})


def main() -> None:
    parser = argparse.ArgumentParser(usage=__doc__)
    parser.add_argument("step", nargs="?", choices=("play", "table"))
    parser.add_argument("name", nargs="?", default=AFTER)
    options = parser.parse_args()
    if options.step != "table":
        play(options.name, ("bf16", "fp16") if options.name.endswith(HARMFUL) else ())
    if options.step != "play":
        write()


if __name__ == "__main__":
    main()
