"""The README's tables from the raw traces.

Shares are of the seconds of five fresh processes a cell, where they do not say forked.
"""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import fmean, stdev
from typing import Any, NamedTuple

import provenance
from others import OTHERS
from ours import VARIANTS

from autotune_amp.core.intervals import t_quantile

SHARES = (0.01, 0.02, 0.05, 0.10, 0.20)
GOAL_REGRET, GOAL_SHARE = 0.02, 0.10
CONSTANT = {
    "today": "what the user runs today",
    "oracle": "oracle: the searching processes' best cell",
    "best of all": "the best cell of all processes",
}
OURS, TPE, FORKED = "ours", "TPE", "grid, one forked trial a cell"
BEFORE = "before: climbs, looks round the best, repeats the best 3"
NEVER = float("inf")


class Play(NamedTuple):
    """One seed of a strategy on a landscape; `trace` has (seconds, cell, regret), `facts` what it has beside it."""

    trace: list[tuple[float, str, float]]
    facts: dict[str, Any]

    def regret_at(self, seconds: float) -> float:
        return self.trace[bisect_right(self.trace, seconds, key=lambda row: row[0]) - 1][2]


class Results(NamedTuple):
    """One landscape: seconds of its exhaustive grids, the plays of each strategy by seed, and in `code` the digest of
    what each variant of ours was played with.
    """

    name: str
    grid_seconds: float
    forked_grid_seconds: float
    plays: dict[str, list[Play]]
    code: dict[str, str]

    def regrets(self, strategy: str, seconds: float) -> list[float]:
        return [play.regret_at(seconds) for play in self.plays[strategy]]

    def at_end(self, strategy: str) -> list[float]:
        return [play.trace[-1][2] for play in self.plays[strategy]]

    def mean_seconds(self, strategy: str) -> float:
        """Of all that the strategy does, where it ends by itself."""
        return fmean(play.facts["seconds"] for play in self.plays[strategy])

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
        seconds = header["grid_seconds"], header["forked_grid_seconds"]
        found.append(Results(header["workload"], *seconds, plays, header["code"]))
    return found


def write(readme: Path, folder: Path) -> None:
    """Every table of the recorded landscapes."""
    every = results(folder)
    put(readme, {name: make(every) for name, make in TABLES.items()})


def put(readme: Path, tables: Mapping[str, Sequence[str]]) -> None:
    """Put each table between its markers: ``<!-- table NAME -->`` and ``<!-- end NAME -->``."""
    text = readme.read_text()
    for name, lines in tables.items():
        begin, end = f"<!-- table {name} -->\n", f"<!-- end {name} -->"
        before, rest = text.split(begin)
        text = before + begin + "\n".join(lines) + "\n" + end + rest.split(end)[1]
    readme.write_text(text)


def regret_table(every: Sequence[Results]) -> list[str]:
    """Mean regret at each share of the grid's seconds, over all landscapes, and the worst landscape's at the goal's."""
    rows = head(["strategy", *(f"at {share:.0%}" for share in SHARES), f"worst landscape at {GOAL_SHARE:.0%}"])
    for strategy in _played(every, (*CONSTANT, *OTHERS, OURS, BEFORE)):
        means = [_means(every, strategy, share) for share in SHARES]
        worst = max(_means(every, strategy, GOAL_SHARE))
        rows.append(row([CONSTANT.get(strategy, strategy), *map(_percent, means), _percent([worst])]))
    ratios = [fmean(_means(every, OURS, share)) / fmean(_means(every, TPE, share)) for share in SHARES]
    rows.append(row(["ours / TPE", *(f"{ratio:.2f}" for ratio in ratios), ""]))
    for strategy in (TPE, FORKED):
        found = [[_pairs(r, strategy, share * r.grid_seconds) for r in every] for share in SHARES]
        rows.append(row([f"{strategy}, less ours", *map(_difference, found), ""]))
    return rows


def _pairs(r: Results, strategy: str, seconds: float) -> list[float]:
    return paired(r.regrets(strategy, seconds), r.regrets(OURS, seconds))


def _means(every: Sequence[Results], strategy: str, share: float) -> list[float]:
    return [fmean(r.regrets(strategy, share * r.grid_seconds)) for r in every]


def landscape_table(every: Sequence[Results]) -> list[str]:
    """The same by landscape, four shares in one cell."""
    rows = head(["strategy", *(r.name for r in every)])
    for strategy in _played(every, (*CONSTANT, *OTHERS, OURS, BEFORE)):
        cells = []
        for r in every:
            numbers = [100 * fmean(r.regrets(strategy, share * r.grid_seconds)) for share in SHARES[1:]]
            cells.append(f"{numbers[0]:.1f}" if strategy in CONSTANT else " / ".join(f"{n:.1f}" for n in numbers))
        rows.append(row([CONSTANT.get(strategy, strategy), *cells]))
    return rows


def seconds_table(every: Sequence[Results]) -> list[str]:
    """Seconds from which the mean regret stays at 2 % or below, with their share of the grid's."""
    rows = head(["strategy", *(r.name for r in every)])
    for strategy in _played(every, (*OTHERS, OURS, BEFORE)):
        cells = []
        for r in every:
            seconds = r.seconds_to(strategy, GOAL_REGRET)
            cells.append("-" if seconds == NEVER else f"{seconds:.1f} ({seconds / r.grid_seconds:.1%})")
        rows.append(row([strategy, *cells]))
    return rows


def goals_table(every: Sequence[Results]) -> list[str]:
    """Ours against the goals, by landscape."""
    rows = head(
        ["landscape", "regret at 10 %", "oracle", "search s / confirmation s", "after the search: ours, fastest found, "
         "TPE", "at the end: ours, fastest found, TPE", "whole search s", "in % of the grid, fresh / forked"]
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
            row(
                [
                    r.name,
                    _percent(r.regrets(OURS, GOAL_SHARE * r.grid_seconds), 2),
                    _percent(r.regrets("oracle", 0.0)),
                    f"{fmean(ends):.1f} / {fmean(confirmed):.1f} = {fmean(ends) / fmean(confirmed):.2f}",
                    f"{_percent(searched)}, {_percent(fastest[0])}, {_percent(tpe)}",
                    f"{_percent(final)}, {_percent(fastest[1])}, {_percent(tpe_final)}",
                    f"{r.mean_seconds(OURS):.1f}",
                    f"{_share(r, OURS, r.grid_seconds)} / {_share(r, OURS, r.forked_grid_seconds)}",
                ]
            )
        )
    return rows


def variant_table(every: Sequence[Results]) -> list[str]:
    """Every variant of ours over all landscapes: means, and the difference to ours, paired by landscape and seed, with
    its standard error by landscape; a star where the 95 % interval leaves 0 out.
    """
    rows = head(
        ["variant", "seeds", "search s", "trials", "all s", "regret after the search", "at the end",
         "fastest found at the end", "against ours at the end", "mean over the first 5 % of the grid"]
    )  # fmt: skip
    for variant in of_one_code(every, _played(every, VARIANTS)):
        pairs = [(r, play, ours) for r in every for play, ours in zip(r.plays[variant], r.plays[OURS], strict=False)]
        facts = [play.facts for _, play, _ in pairs]
        early = [mean_regret(play, 0.05 * r.grid_seconds) for r, play, _ in pairs]
        rows.append(
            row(
                [
                    variant,
                    f"{len(pairs) / len(every):.0f}",
                    f"{fmean(f['search_seconds'] for f in facts):.1f}",
                    f"{fmean(f['num_trials'] for f in facts):.1f}",
                    f"{fmean(f['seconds'] for f in facts):.1f}",
                    _percent([play.regret_at(play.facts["search_seconds"]) for _, play, _ in pairs], 2),
                    _percent([play.trace[-1][2] for _, play, _ in pairs], 2),
                    _percent([f["fastest_confirmed"] for f in facts], 2),
                    "" if variant == OURS else _difference([paired(r.at_end(variant), r.at_end(OURS)) for r in every]),
                    _percent(early, 2),
                ]
            )
        )
    return rows


def grids_table(every: Sequence[Results]) -> list[str]:
    """Both exhaustive grids, ours and TPE against the cheaper one, and the cheapest grid there is."""
    rows = head(["", *(r.name for r in every), "mean"])

    def add(title: str, numbers: Sequence[float], mean: str | None = None, digits: int = 1) -> None:
        rows.append(row([title, *(f"{n:.{digits}f}" for n in numbers), mean or f"{fmean(numbers):.{digits}f}"]))

    add("five fresh processes a cell, s", [r.grid_seconds for r in every], digits=0)
    add("five forked processes a cell, s", [r.forked_grid_seconds for r in every], digits=0)
    for strategy in (OURS, FORKED):
        add(f"{strategy}: all of it, s", [r.mean_seconds(strategy) for r in every])
        add("in % of the fresh grid", [100 * r.mean_seconds(strategy) / r.grid_seconds for r in every])
        add("in % of the forked grid", [100 * r.mean_seconds(strategy) / r.forked_grid_seconds for r in every])
    for strategy in (OURS, TPE, FORKED):
        regrets = [fmean(r.regrets(strategy, GOAL_SHARE * r.forked_grid_seconds)) for r in every]
        add(
            f"{strategy}: regret at {GOAL_SHARE:.0%} of the forked grid, %",
            [100 * regret for regret in regrets],
            digits=2,
        )
    for strategy in (OURS, FORKED):
        add(f"{strategy}: regret at its end, %", [100 * fmean(r.at_end(strategy)) for r in every])
    ends = [[play.facts["seconds"] for play in r.plays[OURS]] for r in every]
    tpe = [[p.regret_at(end) for p, end in zip(r.plays[TPE], e, strict=True)] for r, e in zip(every, ends, strict=True)]
    add(f"{TPE}: regret when ours ends, %", [100 * fmean(regrets) for regrets in tpe])
    differences = [paired(r.at_end(FORKED), r.at_end(OURS)) for r in every]
    add("the grid's less ours, at their ends", [100 * fmean(group) for group in differences], _difference(differences))
    return rows


def code_line(every: Sequence[Results]) -> list[str]:
    """Whether the searches in the tables are those of the package's code as it stands."""
    now, variants = provenance.digest(), _played(every, VARIANTS)
    return [provenance.said(provenance.outdated([r.code for r in every], variants, now), len(variants), now)]


def of_one_code(every: Sequence[Results], variants: Iterable[str]) -> list[str]:
    """Those that were played with the code that ours was, without which a difference says nothing of the variant."""
    return [variant for variant in variants if all(r.code.get(variant) == r.code.get(OURS) for r in every)]


def paired(ones: Sequence[float], others: Sequence[float]) -> list[float]:
    """The differences by seed, as far as both go."""
    return [one - other for one, other in zip(ones, others, strict=False)]


def clustered(groups: Sequence[Sequence[float]]) -> tuple[float, float]:
    """The mean of the groups' means and its standard error: seeds deal out the same few processes again and again, so
    that landscapes are what is independent.
    """
    means = [fmean(group) for group in groups]
    return fmean(means), stdev(means) / len(means) ** 0.5


def is_beyond_noise(groups: Sequence[Sequence[float]]) -> bool:
    """Whether the 95 % t-interval over the groups leaves 0 out."""
    mean, error = clustered(groups)
    return abs(mean) > t_quantile(len(groups) - 1) * error


def _difference(groups: Sequence[Sequence[float]]) -> str:
    mean, error = clustered(groups)
    return f"{100 * mean:+.2f} ± {100 * error:.2f}" + (" *" if is_beyond_noise(groups) else "")


def _share(r: Results, strategy: str, seconds: float) -> str:
    return f"{100 * r.mean_seconds(strategy) / seconds:.1f}"


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
    "grids": grids_table,
    "variants": variant_table,
    "code": code_line,
}


def _percent(shares: Iterable[float], digits: int = 1) -> str:
    return f"{100 * fmean(shares):.{digits}f}"


def head(titles: Sequence[str]) -> list[str]:
    return [row(titles), "|" + "---|" * len(titles)]


def row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"
