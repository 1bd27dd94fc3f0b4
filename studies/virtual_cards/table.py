"""The README's tables, from what was recorded, searched and rehearsed."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import paths
from landscape import Landscape
from named_cards import CARDS
from run import WORKLOADS
from searches import best_rate, grid_seconds, landscape_of, low, profiled, true_speedup

from autotune_amp.core.precisions import Precision
from autotune_amp.core.setting import Setting

Row = Sequence[str]


def write_tables(readme: Path) -> None:
    searches, rehearsals = _lines("searches.jsonl"), _lines("rehearsals.jsonl")
    cells = [(card, workload, landscape_of(card, workload)) for card in CARDS for workload in WORKLOADS]
    tables = {
        "cards": _table(
            ["card", "fp32 TFLOP/s", "tf32", "bf16", "fp16", "memory", "GB/s", "multiprocessors", "source"], _cards()
        ),
        "landscapes": _table(
            [
                "card",
                "workload",
                "today",
                "fp32: best batch",
                "tf32",
                "bf16",
                "fp16",
                "largest batch fp32 / 16-bit",
            ],
            [_landscape(*cell) for cell in cells],
        ),
        "searches": _table(
            [
                "card",
                "workload",
                "fastest cell",
                "recommended",
                "regret: median",
                "largest",
                "trials",
                "checks",
                "search s",
                "all s",
                "rounds",
                "grid s",
            ],
            [_searches(*cell, _of(searches, *cell[:2])) for cell in cells],
        ),
        "profiles": _table(
            [
                "card",
                "workload",
                "today's batch",
                "profile there",
                "verdict",
                "at its best batch, over fp32's",
                "of that",
            ],
            [_profile(*cell) for cell in cells],
        ),
        "rehearsals": _table(
            ["card", "workload", "recommended", "regret", "profile", "replayed profile", "seconds of this machine"],
            [_rehearsal(line) for line in rehearsals],
        ),
        "summary": _summary(searches, [landscape for _, _, landscape in cells]),
    }
    text = readme.read_text()
    for name, lines in tables.items():
        begin, end = f"<!-- {name}: run.py table -->", "<!-- end of table -->"
        head, rest = text.split(begin)
        text = f"{head}{begin}\n" + "\n".join(lines) + f"\n{end}{rest.split(end, 1)[1]}"
    readme.write_text(text)


def _lines(name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (paths.RESULTS / name).read_text().splitlines()]


def _table(names: Sequence[str], rows: Iterable[Row]) -> list[str]:
    return [_row(names), "|---" * len(names) + "|", *map(_row, rows)]


def _row(cells: Row) -> str:
    return f"| {' | '.join(cells)} |"


def _of(lines: Sequence[dict[str, Any]], card: str, workload: str) -> list[dict[str, Any]]:
    return [line for line in lines if (line["card"], line["workload"]) == (card, workload)]


def _cards() -> list[Row]:
    def tera(rate: float | None) -> str:
        return "-" if rate is None else f"{rate / 1e12:g}"

    return [
        [
            key,
            *map(tera, (card.fp32, card.tf32, card.bf16, card.fp16)),
            f"{card.memory_mib >> 10} GiB",
            f"{card.memory / 1e9:g}",
            f"{card.num_multiprocessors}",
            card.source,
        ]
        for key, card in CARDS.items()
    ]


def _landscape(card: str, workload: str, landscape: Landscape) -> Row:
    fp32 = best_rate(landscape, "fp32")

    def best(precision: Precision) -> str:
        if precision not in landscape.header.precisions:
            return "-"
        cell = max(_cells(landscape, precision), key=landscape.samples_per_second)
        return f"{landscape.samples_per_second(cell) / fp32:.1f} x ({cell.batch_size})"

    def largest(*precisions: Precision) -> int:
        cells = [cell for p in precisions for cell in _cells(landscape, p)]
        return max(cell.batch_size for cell in cells if landscape.samples_per_second(cell) > 0)

    top = max(_cells(landscape, "fp32"), key=landscape.samples_per_second)
    return [
        card,
        workload,
        f"{_rate(landscape.samples_per_second(landscape.baseline))} ({landscape.baseline.batch_size})",
        f"{_rate(fp32)} ({top.batch_size})",
        best("tf32"),
        best("bf16"),
        best("fp16"),
        f"{largest('fp32')} / {largest(*low(landscape))}",
    ]


def _cells(landscape: Landscape, precision: Precision) -> list[Setting]:
    return [cell for cell in landscape.cells if cell.precision == precision]


def _rate(samples_per_second: float) -> str:
    return f"{samples_per_second:,.0f}" if samples_per_second >= 100 else f"{samples_per_second:.1f}"


def _searches(card: str, workload: str, landscape: Landscape, lines: Sequence[dict[str, Any]]) -> Row:
    picks = dict.fromkeys(f"{line['precision']} {line['batch_size']}" for line in lines)
    best = landscape.best()
    return [
        card,
        workload,
        f"{best.precision} {best.batch_size}",
        ", ".join(picks),
        _percent(median(_field(lines, "regret"))),
        _percent(max(_field(lines, "regret"))),
        *(f"{median(_field(lines, name)):.0f}" for name in ("num_trials", "num_checks", "searched_seconds", "seconds")),
        f"{min(_field(lines, 'num_rounds')):.0f}",
        f"{grid_seconds(landscape):.0f}",
    ]


def _field(lines: Iterable[dict[str, Any]], name: str) -> list[float]:
    return [line[name] for line in lines]


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def _profile(card: str, workload: str, landscape: Landscape) -> Row:
    found = profiled(landscape)
    assert found.speedup is not None
    truth = true_speedup(landscape, *low(landscape))
    return [
        card,
        workload,
        f"{found.batch_size}",
        f"{found.best_precision} {found.speedup:.2f} x",
        f"{found.verdict}",
        f"{truth:.2f} x",
        _percent(found.speedup / truth),
    ]


def _rehearsal(line: dict[str, Any]) -> Row:
    landscape = landscape_of(line["card"], line["workload"])
    chosen = Setting(precision=line["precision"], batch_size=line["batch_size"])
    replayed = profiled(landscape)

    def speedups(of: Callable[[Precision], float | None]) -> str:
        return ", ".join(f"{p} {of(p) or 0.0:.2f} x" for p in landscape.header.precisions if p != "fp32")

    return [
        line["card"],
        line["workload"],
        f"{chosen.precision} {chosen.batch_size}",
        _percent(1 - landscape.samples_per_second(chosen) / best_rate(landscape)),
        speedups(lambda p: line["profile"][p]["speedup"]),
        speedups(lambda p: replayed.row(p).speedup),
        f"{line['seconds']}",
    ]


def _summary(searches: Sequence[dict[str, Any]], landscapes: Sequence[Landscape]) -> list[str]:
    regrets = sorted(_field(searches, "regret"))
    todays = [1 - one.samples_per_second(one.baseline) / best_rate(one) for one in landscapes]
    num_near = sum(regret <= 0.03 for regret in regrets)
    num_confirmed = sum(line["num_rounds"] >= 3 for line in searches)
    grid = median(map(grid_seconds, landscapes))
    return [
        f"- Searches within 3 % of the fastest cell: {num_near} of {len(regrets)}; regret {_percent(median(regrets))} "
        f"in the median, {_percent(max(regrets))} at most. Of what runs today: {_percent(median(todays))} in the "
        f"median, {_percent(max(todays))} at most.",
        f"- Confirmed in three rounds: {num_confirmed} of {len(regrets)}.",
        f"- Seconds of the search phase: {median(_field(searches, 'searched_seconds')):.0f} in the median, "
        f"{median(_field(searches, 'seconds')):.0f} with the confirmation; one trial of every cell takes {grid:.0f}.",
    ]
