"""Whole searches on landscapes in closed form, whose best setting is known: by how much each strategy misses it.

Usage: closed_forms.py [play|table] [--jobs 2]; without a step both. Raw outcomes: results/closed_forms/outcomes.jsonl,
a line for each landscape and strategy: its regrets by seed, and the seconds that they took.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from itertools import takewhile
from statistics import fmean
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before numpy, and torch, which the GP sampler uses

import optuna
import paths
from closed_form import NOISES, SHAPES, ClosedForm, landscapes
from others import OTHERS, Meter
from replay import ReplayBackend, ReplayBudget
from search_replay import search_replay, setting_of
from tables import head, put, row

from autotune_amp.search.ranking import PLATEAU

RESULTS = paths.RESULTS / "closed_forms" / "outcomes.jsonl"
OURS, AT_ITS_END = "ours", "grid, one forked trial a cell"
# A GP takes 25 ms and more for each suggestion, and the samplers go on for as long as ours took.
NUM_SEEDS = {OURS: 100, AT_ITS_END: 100, "random": 100, "TPE": 10, "GP": 5}
BUDGET_SECONDS = {False: 110.0, True: 300.0}  # the default; with further dimensions, each of which takes trials


def main() -> None:
    parser = argparse.ArgumentParser(usage=__doc__)
    parser.add_argument("step", nargs="?", choices=("play", "table"))
    parser.add_argument("--jobs", type=int, default=2)
    options = parser.parse_args()
    if options.step != "table":
        play(options.jobs)
    if options.step != "play":
        lines = [json.loads(line) for line in RESULTS.read_text().splitlines()]
        put(paths.HERE / "README.md", {"closed forms": rows(lines), "closed forms by strategy": summary(lines)})


def play(num_jobs: int) -> None:
    RESULTS.parent.mkdir(parents=True, exist_ok=True)
    tasks = [(name, with_variants) for with_variants in (False, True) for name in landscapes()]
    with ProcessPoolExecutor(num_jobs) as pool, RESULTS.open("w") as file:
        for (name, with_variants), lines in zip(tasks, pool.map(played, *zip(*tasks, strict=True)), strict=True):
            file.writelines(json.dumps(line) + "\n" for line in lines)
            file.flush()
            print(name, "with variants" if with_variants else "", file=sys.stderr, flush=True)


def played(name: str, with_variants: bool) -> list[dict[str, Any]]:
    """Ours, then every other for as many seconds as ours took in the mean."""
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    landscape = landscapes(with_variants=with_variants)[name]
    ours = searched(landscape, BUDGET_SECONDS[with_variants])
    grid = {"grid_seconds": round(fmean(grid_seconds(landscape)), 1)}
    about = {"landscape": name, "with_variants": with_variants}
    lines = [about | {"strategy": OURS} | ours | grid]
    for strategy in list(NUM_SEEDS)[1:]:
        ends = [fmean(ours["searched_seconds"]), fmean(ours["seconds"])]
        found = [others(landscape, strategy, seed, ends) for seed in range(NUM_SEEDS[strategy])]
        lines.append(
            about | {"strategy": strategy, "searched": [at[0] for at in found], "ended": [at[1] for at in found]}
        )
    return lines


def searched(landscape: ClosedForm, budget_seconds: float) -> dict[str, list[float]]:
    """Regrets after the search and after the confirmation, and the seconds until then, by seed."""
    found: dict[str, list[float]] = {"searched": [], "ended": [], "searched_seconds": [], "seconds": []}
    for seed in range(NUM_SEEDS[OURS]):
        replayed = search_replay(landscape, seed, budget_seconds)
        assert replayed.searched is not None
        assert replayed.decision is not None
        found["searched"].append(round(landscape.regret(setting_of(replayed.searched)), 4))
        found["ended"].append(round(landscape.regret(setting_of(replayed.decision)), 4))
        found["searched_seconds"].append(round(replayed.searched_seconds, 1))
        found["seconds"].append(round(replayed.records[-1][0], 1))
    return found


def others(landscape: ClosedForm, strategy: str, seed: int, ends: list[float]) -> list[float]:
    """The regret of what a strategy would recommend at each of these seconds; what the user runs today until it has
    something."""
    clock = ReplayBudget()
    meter = Meter(ReplayBackend(landscape, clock, seed), list(landscape.rates))
    moments = ((clock.elapsed(), cell) for cell in OTHERS[strategy](meter, seed))
    trace = list(takewhile(lambda moment: moment[0] <= max(ends), moments))
    chosen = [[cell for seconds, cell in trace if seconds <= end and cell is not None] for end in ends]
    return [round(landscape.regret(cells[-1] if cells else landscape.space().baseline), 4) for cells in chosen]


def grid_seconds(landscape: ClosedForm) -> Iterator[float]:
    """What one forked trial of every cell takes, in three orders."""
    for seed in range(3):
        clock = ReplayBudget()
        meter = Meter(ReplayBackend(landscape, clock, seed), list(landscape.rates))
        for _ in OTHERS[AT_ITS_END](meter, seed):
            pass
        yield clock.elapsed()


# -- tables ------------------------------------------------------------------------------------------------------------


def beyond(regrets: list[float]) -> float:
    """The mean of what lies beyond the plateau, in %."""
    return 100 * fmean(max(0.0, regret - PLATEAU) for regret in regrets)


def rows(lines: list[dict[str, Any]]) -> list[str]:
    """By shape: regrets of ours at each noise, and its share of the grid's seconds."""
    ours = {(line["landscape"], line["with_variants"]): line for line in lines if line["strategy"] == OURS}
    names = [f"{100 * noise:.0f} % noise" for noise in NOISES] + ["of the grid's seconds"]
    table = head(["landscape", *names, *(f"further dimensions: {name}" for name in names)])
    for shape in SHAPES:
        cells = [shape.name]
        for with_variants in (False, True):
            found = [ours[f"{shape.name}, {100 * noise:.0f} %", with_variants] for noise in NOISES]
            cells += [f"{beyond(line['searched']):.1f} / {beyond(line['ended']):.1f}" for line in found]
            shares = [fmean(line["searched_seconds"]) / line["grid_seconds"] for line in found]
            cells.append(f"{100 * fmean(shares):.0f} %")
        table.append(row(cells))
    return table


def summary(lines: list[dict[str, Any]]) -> list[str]:
    """By strategy: the mean over landscapes, and the worst of them."""
    noises = [f", {100 * noise:.0f} %" for noise in NOISES]
    names = [f"{noise[2:]} noise" for noise in noises]
    table = head(["strategy", "seeds", "further dimensions", "when", *names, "all", "worst landscape"])
    for with_variants in (False, True):
        for strategy, num_seeds in NUM_SEEDS.items():
            ours = [x for x in lines if (x["strategy"], x["with_variants"]) == (strategy, with_variants)]
            for moment, when in (("searched", "when our search ended"), ("ended", "when our confirmation ended")):
                found = {line["landscape"]: beyond(line[moment]) for line in ours}
                means = [fmean(found[name] for name in found if name.endswith(noise)) for noise in noises]
                worst = max(found, key=lambda name: found[name])
                cells = [strategy, str(num_seeds), "yes" if with_variants else "no", when]
                cells += [f"{mean:.2f}" for mean in (*means, fmean(means))]
                table.append(row([*cells, f"{found[worst]:.1f} ({worst})"]))
    return table


if __name__ == "__main__":
    main()
