"""The README's tables from the recorded files."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean, stdev

from landscape import PROCESSES_A_CELL, Landscape, Process, forked_grid_seconds
from parts import PARTS

from autotune_amp.core.outcome import Failure, Measurement
from autotune_amp.core.precisions import Precision
from autotune_amp.core.setting import Setting

BEGIN, END = "<!-- table: record.py table -->", "<!-- end of table -->"


def write_table(readme: Path, results: Path) -> None:
    found = [(path.stem, Landscape.load(path)) for path in results.glob("*.jsonl")]
    names = list(PARTS)
    found.sort(key=lambda pair: (pair[0].removeprefix(pair[1].header.workload), names.index(pair[1].header.workload)))
    lines = [*cells_table(found), "", *grids_table(found)]
    head, rest = readme.read_text().split(BEGIN)
    readme.write_text(f"{head}{BEGIN}\n" + "\n".join(lines) + f"\n{END}{rest.split(END)[1]}")


def cells_table(found: Sequence[tuple[str, Landscape]]) -> list[str]:
    rows = [
        "| landscape | precision | best batch | samples/s | CV over processes there | median CV of all cells "
        "| slowest process over its cell's mean | cells that failed |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for stem, landscape in found:
        for precision in landscape.header.precisions:
            rows.append(f"| {stem} | {precision} | " + " | ".join(_of_precision(landscape, precision)) + " |")
    return rows


def _of_precision(landscape: Landscape, precision: Precision) -> list[str]:
    ours = {c: processes for c, processes in landscape.cells.items() if c.precision == precision}
    rates = {c: _rates(processes) for c, processes in ours.items() if landscape.samples_per_second(c) > 0}
    failures = Counter(_failure(processes) for processes in ours.values())
    said = ", ".join(f"{number} {kind}" for kind, number in failures.items() if kind) or "-"
    if not rates:
        return ["-", "-", "-", "-", "-", said]
    best = max(rates, key=lambda c: fmean(rates[c]))
    spreads = sorted(_cv(values) for values in rates.values() if len(values) > 2)
    slowest = max(fmean(values) / min(values) for values in rates.values())
    middle = f"{100 * spreads[len(spreads) // 2]:.1f} %" if spreads else "-"
    return [
        f"{best.batch_size}",
        f"{fmean(rates[best]):.1f}",
        f"{100 * _cv(rates[best]):.1f} %",
        middle,
        f"{slowest:.2f} x",
        said,
    ]


def grids_table(found: Sequence[tuple[str, Landscape]]) -> list[str]:
    rows = [
        "| landscape | today | exec'd / forked there | fastest | exec'd / forked there | start of a fresh process "
        f"| whole grid, {PROCESSES_A_CELL} forked processes a cell |",
        "|---|---|---|---|---|---|---|",
    ]
    for stem, landscape in found:
        today, best = landscape.baseline, landscape.best()
        rows.append(
            f"| {stem} | {today} | {_pairs(landscape, today)} | {best} | {_pairs(landscape, best)} "
            f"| {landscape.header.start_seconds:.1f} s | {forked_grid_seconds(landscape):.0f} s |"
        )
    return rows


def _pairs(landscape: Landscape, candidate: Setting) -> str:
    """The geometric mean of an exec'd process's throughput over that of the forked one beside it, and its range."""
    logs = []
    pairs: dict[int, dict[str, Process]] = {}
    for process in landscape.processes:
        if process.cell.stage == "pair" and process.cell.candidate == candidate:
            pairs.setdefault(process.cell.repetition, {})[process.cell.isolation] = process
    for pair in pairs.values():
        rates = [_rates([pair[way]]) for way in ("fresh", "fork") if way in pair]
        if len(rates) == 2 and all(rates):
            logs.append(math.log(rates[0][0] / rates[1][0]))
    if not logs:
        return "-"
    return f"{math.exp(fmean(logs)):.3f} ({math.exp(min(logs)):.2f} to {math.exp(max(logs)):.2f})"


def _rates(processes: Sequence[Process]) -> list[float]:
    return [p.outcome.samples_per_second for p in processes if isinstance(p.outcome, Measurement)]


def _failure(processes: Sequence[Process]) -> str | None:
    return next((p.outcome.kind for p in processes if isinstance(p.outcome, Failure)), None)


def _cv(values: Sequence[float]) -> float:
    return stdev(values) / fmean(values) if len(values) > 1 else 0.0
