"""The README's tables from the raw traces."""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import fmean, stdev
from typing import Any, NamedTuple

from others import OTHERS
from ours import VARIANTS

SHARES = (0.01, 0.02, 0.05, 0.10, 0.20)  # of the exhaustive grid's seconds
GOAL_REGRET, GOAL_SHARE = 0.02, 0.10
CONSTANT = {
    "today": "what the user runs today",
    "oracle": "oracle: the searching processes' best cell",
    "best of all": "the best cell of all processes",
}
OURS, TPE = "ours", "TPE"
BEFORE = "before: neither looks round nor repeats"
NEVER = float("inf")


class Play(NamedTuple):
    """One seed of a strategy on a landscape; `trace` has (seconds, cell, regret), `facts` what ours has beside it."""

    trace: list[tuple[float, str, float]]
    facts: dict[str, Any]

    def regret_at(self, seconds: float) -> float:
        return self.trace[bisect_right(self.trace, seconds, key=lambda row: row[0]) - 1][2]


class Results(NamedTuple):
    """One landscape: seconds of its exhaustive grid, and the plays of each strategy by seed."""

    name: str
    grid_seconds: float
    plays: dict[str, list[Play]]

    def regrets(self, strategy: str, seconds: float) -> list[float]:
        return [play.regret_at(seconds) for play in self.plays[strategy]]

    def seconds_to(self, strategy: str, goal: float) -> float:
        """The first moment from which the mean regret stays at `goal` or below."""
        plays = self.plays[strategy]
        times = sorted({row[0] for play in plays for row in play.trace})
        reached = NEVER
        for seconds in reversed(times):
            if fmean(play.regret_at(seconds) for play in plays) > goal:
                break
            reached = seconds
        return reached


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def results(folder: Path) -> list[Results]:
    found = []
    for path in sorted(folder.glob("*.jsonl")):
        header, *lines = read(path)
        plays: dict[str, list[Play]] = {}
        for line in lines:
            facts = {key: value for key, value in line.items() if key not in ("strategy", "seed", "trace")}
            plays.setdefault(line["strategy"], []).append(Play(line["trace"], facts))
        found.append(Results(header["workload"], header["grid_seconds"], plays))
    return found


def write(readme: Path, folder: Path) -> None:
    """Put each table between its markers: ``<!-- table NAME -->`` and ``<!-- end NAME -->``."""
    every, text = results(folder), readme.read_text()
    for name, make in TABLES.items():
        begin, end = f"<!-- table {name} -->\n", f"<!-- end {name} -->"
        before, rest = text.split(begin)
        text = before + begin + "\n".join(make(every)) + "\n" + end + rest.split(end)[1]
    readme.write_text(text)


def regret_table(every: Sequence[Results]) -> list[str]:
    """Mean regret at each share of the grid's seconds, over all landscapes, and the worst landscape's at the goal's."""
    rows = _head(["strategy", *(f"at {share:.0%}" for share in SHARES), f"worst landscape at {GOAL_SHARE:.0%}"])
    for strategy in _played(every, (*CONSTANT, *OTHERS, OURS, BEFORE)):
        means = [_means(every, strategy, share) for share in SHARES]
        worst = max(_means(every, strategy, GOAL_SHARE))
        rows.append(_row([CONSTANT.get(strategy, strategy), *map(_percent, means), _percent([worst])]))
    ratios = [fmean(_means(every, OURS, share)) / fmean(_means(every, TPE, share)) for share in SHARES]
    return [*rows, _row(["ours / TPE", *(f"{ratio:.2f}" for ratio in ratios), ""])]


def _means(every: Sequence[Results], strategy: str, share: float) -> list[float]:
    return [fmean(r.regrets(strategy, share * r.grid_seconds)) for r in every]


def landscape_table(every: Sequence[Results]) -> list[str]:
    """The same by landscape, four shares in one cell."""
    rows = _head(["strategy", *(r.name for r in every)])
    rows.append(_row(["seconds of the exhaustive grid", *(f"{r.grid_seconds:.0f}" for r in every)]))
    for strategy in _played(every, (*CONSTANT, *OTHERS, OURS, BEFORE)):
        cells = []
        for r in every:
            numbers = [100 * fmean(r.regrets(strategy, share * r.grid_seconds)) for share in SHARES[1:]]
            cells.append(f"{numbers[0]:.1f}" if strategy in CONSTANT else " / ".join(f"{n:.1f}" for n in numbers))
        rows.append(_row([CONSTANT.get(strategy, strategy), *cells]))
    return rows


def seconds_table(every: Sequence[Results]) -> list[str]:
    """Seconds from which the mean regret stays at 2 % or below, with their share of the grid's."""
    rows = _head(["strategy", *(r.name for r in every)])
    for strategy in _played(every, (*OTHERS, OURS, BEFORE)):
        cells = []
        for r in every:
            seconds = r.seconds_to(strategy, GOAL_REGRET)
            cells.append("-" if seconds == NEVER else f"{seconds:.1f} ({seconds / r.grid_seconds:.1%})")
        rows.append(_row([strategy, *cells]))
    return rows


def goals_table(every: Sequence[Results]) -> list[str]:
    """Ours against the goals, by landscape."""
    rows = _head(
        ["landscape", "regret at 10 %", "oracle", "search s / confirmation s", "after the search: ours, fastest found, "
         "TPE", "at the end: ours, fastest found, TPE", "whole search in % of the grid"]
    )  # fmt: skip
    for r in every:
        plays = r.plays[OURS]
        ends = [play.facts["search_seconds"] for play in plays]
        confirmed = [play.facts["seconds"] - play.facts["search_seconds"] for play in plays]
        searched = [play.regret_at(end) for play, end in zip(plays, ends, strict=True)]
        tpe = [play.regret_at(end) for play, end in zip(r.plays[TPE], ends, strict=True)]
        final = [play.trace[-1][2] for play in plays]
        tpe_final = [p.regret_at(o.facts["seconds"]) for p, o in zip(r.plays[TPE], plays, strict=True)]
        fastest = [[play.facts[key] for play in plays] for key in ("fastest_searched", "fastest_confirmed")]
        rows.append(
            _row(
                [
                    r.name,
                    _percent(r.regrets(OURS, GOAL_SHARE * r.grid_seconds)),
                    _percent(r.regrets("oracle", 0.0)),
                    f"{fmean(ends):.1f} / {fmean(confirmed):.1f} = {fmean(ends) / fmean(confirmed):.2f}",
                    f"{_percent(searched)}, {_percent(fastest[0])}, {_percent(tpe)}",
                    f"{_percent(final)}, {_percent(fastest[1])}, {_percent(tpe_final)}",
                    f"{100 * fmean(play.facts['seconds'] for play in plays) / r.grid_seconds:.0f}",
                ]
            )
        )
    return rows


def variant_table(every: Sequence[Results]) -> list[str]:
    """Every variant of ours over all landscapes: means, and the difference to ours with its standard error, paired by
    landscape and seed.
    """
    rows = _head(
        ["variant", "seeds", "search s", "trials", "all s", "regret after the search", "at the end",
         "fastest found at the end", "against ours at the end", "mean over the first 5 % of the grid"]
    )  # fmt: skip
    for variant in _played(every, VARIANTS):
        pairs = [(r, play, ours) for r in every for play, ours in zip(r.plays[variant], r.plays[OURS], strict=False)]
        facts = [play.facts for _, play, _ in pairs]
        differences = [play.trace[-1][2] - ours.trace[-1][2] for _, play, ours in pairs]
        error = stdev(differences) / len(differences) ** 0.5
        early = [mean_regret(play, 0.05 * r.grid_seconds) for r, play, _ in pairs]
        rows.append(
            _row(
                [
                    variant,
                    f"{len(pairs) / len(every):.0f}",
                    f"{fmean(f['search_seconds'] for f in facts):.1f}",
                    f"{fmean(f['num_trials'] for f in facts):.1f}",
                    f"{fmean(f['seconds'] for f in facts):.1f}",
                    _percent([play.regret_at(play.facts["search_seconds"]) for _, play, _ in pairs], 2),
                    _percent([play.trace[-1][2] for _, play, _ in pairs], 2),
                    _percent([f["fastest_confirmed"] for f in facts], 2),
                    "" if variant == OURS else f"{100 * fmean(differences):+.2f} ± {100 * error:.2f}",
                    _percent(early, 2),
                ]
            )
        )
    return rows


def _played(every: Sequence[Results], strategies: Iterable[str]) -> list[str]:
    return [name for name in strategies if all(name in r.plays for r in every)]


def mean_regret(play: Play, seconds: float) -> float:
    """The regret averaged over the time from 0 to `seconds`."""
    ends = [min(row[0], seconds) for row in play.trace[1:]] + [seconds]
    return sum((end - min(row[0], seconds)) * row[2] for row, end in zip(play.trace, ends, strict=True)) / seconds


TABLES = {
    "regret": regret_table,
    "landscapes": landscape_table,
    "seconds": seconds_table,
    "goals": goals_table,
    "variants": variant_table,
}


def _percent(shares: Iterable[float], digits: int = 1) -> str:
    return f"{100 * fmean(shares):.{digits}f}"


def _head(titles: Sequence[str]) -> list[str]:
    return [_row(titles), "|" + "---|" * len(titles)]


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"
