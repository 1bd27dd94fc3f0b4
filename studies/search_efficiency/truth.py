"""What a landscape says is true: each cell's speed, a choice's regret, and what measuring every cell costs. Pure."""

from __future__ import annotations

import random
from collections.abc import Mapping
from statistics import fmean

import paths  # noqa: F401 - finds landscape
from landscape import PROCESSES_A_CELL, Landscape, Process
from replay import play

from autotune_amp.core.setting import Setting
from autotune_amp.search.planner import CONFIRM_SECONDS, MAX_CONFIRM_STEPS
from autotune_amp.trial.jobs import Trial

Rates = Mapping[Setting, float]


def halves(landscape: Landscape, seed: int) -> tuple[Landscape, Landscape]:
    """One half to search and one to score: the repetitions are dealt out, the odd one to either.

    Whole repetitions, so that cells are scored by processes of the same minutes: the machine's drift from one of them
    to the next falls on all alike. A cell without a process in a half has all of its own there.
    """
    chance = random.Random(seed)
    repetitions = sorted({p.cell.repetition for processes in landscape.cells.values() for p in processes})
    chance.shuffle(repetitions)
    half = (len(repetitions) + chance.randrange(2)) // 2
    return _only(landscape, set(repetitions[:half])), _only(landscape, set(repetitions[half:]))


def _only(landscape: Landscape, repetitions: set[int]) -> Landscape:
    kept: list[Process] = []
    for processes in landscape.cells.values():
        kept += [p for p in processes if p.cell.repetition in repetitions] or processes
    return Landscape(landscape.header, kept)


def rates(landscape: Landscape) -> Rates:
    """Mean samples per second over a cell's processes; 0 where one of them failed."""
    return {cell: landscape.samples_per_second(cell) for cell in landscape.cells}


def regret(cell: Setting, truth: Rates) -> float:
    """The share of the best cell's samples per second that `cell` does not reach; 1 for a cell that fails."""
    return 1 - truth.get(cell, 0.0) / max(truth.values())


def confirming_spec(cell: Setting) -> Trial:
    """A process as the package's confirmation runs it."""
    return Trial(
        candidate=cell,
        device="cpu",
        purpose="confirm",
        num_steps=(MAX_CONFIRM_STEPS, MAX_CONFIRM_STEPS),
        measure_seconds=CONFIRM_SECONDS,
    )


def grid_seconds(landscape: Landscape) -> float:
    """Seconds of the exhaustive grid of fresh processes: five of every cell, each as the confirmation runs them.

    One that failed costs its start and what it ran for; a timeout, which is five times slower than fp32, its deadline.
    """
    chance = random.Random(0)
    return sum(
        PROCESSES_A_CELL * fmean(play(p, confirming_spec(cell), landscape.header, chance).seconds for p in processes)
        for cell, processes in landscape.cells.items()
    )
