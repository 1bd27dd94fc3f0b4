"""Play every strategy on every recorded landscape and write the tables.

Usage: run.py [play|table] [LANDSCAPE ...] [--seeds 50] [--strategies NAME ...] [--jobs 2]; without a step both. A
strategy named alone replaces its own lines. Raw traces: results/LANDSCAPE.jsonl.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from itertools import takewhile
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch, which the GP sampler uses

import optuna
import paths
import provenance
import tables
from landscape import Landscape, forked_grid_seconds
from others import OTHERS, Meter
from ours import VARIANTS, play_ours
from replay import ReplayBackend, ReplayBudget
from truth import grid_seconds, halves, rates, regret

from autotune_amp.core.setting import Setting

NUM_SEEDS = 50
LARGEST_SHARE = 0.2  # of the grid's seconds: as far as the table looks
REPLAYING = 1000  # added to the seed of a split, so that what is drawn on it is drawn apart


def main() -> None:
    parser = argparse.ArgumentParser(usage=__doc__)
    parser.add_argument("words", nargs="*")
    parser.add_argument("--seeds", type=int, default=NUM_SEEDS)
    parser.add_argument("--strategies", nargs="*", default=[*tables.CONSTANT, *OTHERS, *VARIANTS])
    parser.add_argument("--jobs", type=int, default=2)
    options = parser.parse_args()
    step = options.words[0] if options.words[:1] in (["play"], ["table"]) else None
    names = options.words[1:] if step else options.words
    files = [path for path in sorted(paths.LANDSCAPES.glob("results/*.jsonl")) if not names or path.stem in names]
    if step != "table":
        play(files, options.strategies, range(options.seeds), options.jobs)
    if step != "play":
        tables.write(paths.HERE / "README.md", paths.RESULTS)


def play(files: list[Path], strategies: list[str], seeds: range, num_jobs: int) -> None:
    paths.RESULTS.mkdir(exist_ok=True)
    digest = provenance.digest()  # of what is loaded now
    tasks = [(file, strategy) for strategy in strategies for file in files]
    with ProcessPoolExecutor(num_jobs) as pool:
        done = pool.map(partial(lines_of, seeds=seeds), *zip(*tasks, strict=True))
        found: dict[Path, list[dict[str, Any]]] = {file: [] for file in files}
        for (file, strategy), lines in zip(tasks, done, strict=True):
            found[file] += lines
            print(f"{strategy} on {file.stem}", file=sys.stderr, flush=True)
    for file, lines in found.items():
        path = paths.RESULTS / file.name
        header, *before = tables.read(path) if path.exists() else [{}]
        kept = [line for line in before if line["strategy"] not in strategies]
        played = {strategy: digest for strategy in strategies if strategy in VARIANTS}
        landscape = Landscape.load(file)
        header = {
            "workload": landscape.header.workload,
            "grid_seconds": round(grid_seconds(landscape), 1),
            "forked_grid_seconds": round(forked_grid_seconds(landscape), 1),
            "code": header.get("code", {}) | played,
        }
        path.write_text("".join(json.dumps(line) + "\n" for line in (header, *kept, *lines)))


def lines_of(file: Path, strategy: str, seeds: range) -> list[dict[str, Any]]:
    """One line for each seed: the trace as [seconds, cell, regret] wherever the recommendation changes."""
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    landscape = Landscape.load(file)
    limit_seconds = LARGEST_SHARE * grid_seconds(landscape)
    return [{"strategy": strategy, "seed": seed} | line_of(landscape, strategy, seed, limit_seconds) for seed in seeds]


def line_of(landscape: Landscape, strategy: str, seed: int, limit_seconds: float) -> dict[str, Any]:
    searching, scoring = halves(landscape, seed)
    truth = rates(scoring)
    if strategy in VARIANTS:
        found = play_ours(searching, REPLAYING + seed, strategy)
        trace, extra = found.trace, found.as_json(truth)
    elif strategy in tables.CONSTANT:
        seen = rates(searching if strategy == "oracle" else landscape)
        cell = landscape.baseline if strategy == "today" else max(seen, key=lambda c: seen[c])
        trace, extra = [(0.0, cell)], {}
    else:
        trace = trace_of(searching, strategy, seed, limit_seconds)
        extra = {"seconds": round(trace[-1][0], 2)}
    rows: list[list[Any]] = []
    for seconds, cell in [(0.0, landscape.baseline), *trace]:
        if cell is not None and (not rows or rows[-1][1] != named(cell)):
            rows.append([round(seconds, 2), named(cell), round(regret(cell, truth), 4)])
    return {"trace": rows, **extra}


def trace_of(
    searching: Landscape, strategy: str, seed: int, limit_seconds: float
) -> list[tuple[float, Setting | None]]:
    clock = ReplayBudget(limit_seconds)
    meter = Meter(ReplayBackend(searching, clock, REPLAYING + seed), list(searching.cells))
    found = ((clock.elapsed(), cell) for cell in OTHERS[strategy](meter, seed))
    return list(takewhile(lambda moment: moment[0] <= limit_seconds, found))


def named(cell: Setting) -> str:
    return f"{cell.precision} {cell.batch_size}"


if __name__ == "__main__":
    main()
