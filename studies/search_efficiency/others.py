"""What others do, on a replay: random, grid, Optuna's samplers with a fixed number of steps, batch-size finders.

A strategy is a generator: it measures through a `Meter` and yields, after each measurement, the cell that it would
recommend now, None while it has none. Whoever drives it reads the clock and stops it.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from functools import partial
from statistics import fmean
from typing import TypeAlias

import optuna
import paths  # noqa: F401 - finds landscape and replay
from landscape import PROCESSES_A_CELL
from msgspec.structs import replace
from optuna.samplers import BaseSampler, GPSampler, TPESampler
from optuna.trial import TrialState
from replay import ReplayBackend
from truth import confirming_spec

from autotune_amp.core.outcome import Measurement, Outcome
from autotune_amp.core.setting import Setting
from autotune_amp.dimensions import DIMENSIONS
from autotune_amp.trial.jobs import Trial

NUM_STEPS = 8  # of a trial, after three to warm up
# Each has settled long before on a few dozen cells, and samplers slow down; a GP's suggestion takes 25 ms.
MAX_TRIALS, MAX_GP_TRIALS = 100, 25
OF_A_SIZE = ("batch_size", "accumulation_steps")
NUM_FINDER_STEPS = 3  # of a batch-size finder's try, none to warm up (Lightning's steps_per_trial)


class Meter:
    """Measures cells on a replay; every process moves the replay's clock."""

    def __init__(self, runner: ReplayBackend, cells: list[Setting]) -> None:
        self.cells = cells
        self._runner = runner

    def trial(self, cell: Setting) -> Outcome:
        """A forked process of a fixed number of steps."""
        return self._run(Trial(candidate=cell, device="cpu", num_steps=(NUM_STEPS, NUM_STEPS)))

    def process(self, cell: Setting) -> Outcome:
        """A fresh process as the package's confirmation runs it."""
        return self._run(confirming_spec(cell))

    def short(self, cell: Setting) -> Outcome:
        """The few steps of a batch-size finder."""
        steps = NUM_FINDER_STEPS - 1, NUM_FINDER_STEPS - 1
        return self._run(Trial(candidate=cell, device="cpu", num_warmup_steps=(1, 1), num_steps=steps))

    def _run(self, trial: Trial) -> Outcome:
        found: Outcome = self._runner.submit(trial).result()
        return found


Strategy: TypeAlias = Callable[[Meter, int], Iterator[Setting | None]]


def rate(outcome: Outcome) -> float:
    """Samples per second, 0 of a failure."""
    return outcome.samples_per_second if isinstance(outcome, Measurement) else 0.0


def at_random(meter: Meter, seed: int) -> Iterator[Setting | None]:
    """Any cell, again and again; a cell drawn twice is measured twice, and the best single trial wins."""
    draw = random.Random(f"cells {seed}")
    best: tuple[float, Setting | None] = (0.0, None)
    for _ in range(MAX_TRIALS):
        cell = draw.choice(meter.cells)
        best = max(best, (rate(meter.trial(cell)), cell), key=lambda found: found[0])
        yield best[1]


def grid(
    meter: Meter, seed: int, *, num_processes: int, measure: Callable[[Meter, Setting], Outcome] = Meter.process
) -> Iterator[Setting | None]:
    """Every cell in `num_processes` processes, the cells in a shuffled order; the best mean wins."""
    cells = list(meter.cells)
    random.Random(f"order {seed}").shuffle(cells)
    best: tuple[float, Setting | None] = (0.0, None)
    for cell in cells:
        outcomes = []
        for _ in range(num_processes):
            outcomes.append(measure(meter, cell))
            yield best[1]
        best = max(best, (fmean(map(rate, outcomes)), cell), key=lambda found: found[0])
        yield best[1]


def sampled(
    meter: Meter, seed: int, *, make: Callable[[int], BaseSampler], fails: bool = False, max_trials: int = MAX_TRIALS
) -> Iterator[Setting | None]:
    """Optuna's loop as its documentation has it, over whatever the cells differ in: of the batch sizes the number in
    their order, which is log2 where they are doublings, all else categorical.

    What did not run is told as FAIL with `fails`, else as pruned with a violated constraint.
    """
    sizes = sorted({cell.batch_size for cell in meter.cells})
    like = {cell.batch_size: cell for cell in meter.cells}  # of one batch size all accumulate alike
    kinds = {d.name: sorted({getattr(c, d.name) for c in meter.cells}, key=repr) for d in DIMENSIONS}
    categorical = {name: found for name, found in kinds.items() if len(found) > 1 and name not in OF_A_SIZE}
    study = optuna.create_study(direction="maximize", sampler=make(seed))
    best: tuple[float, Setting | None] = (0.0, None)
    for _ in range(max_trials):
        trial = study.ask()
        chosen = {name: trial.suggest_categorical(name, found) for name, found in categorical.items()}
        cell = replace(like[sizes[trial.suggest_int("batch_size", 0, len(sizes) - 1)]], **chosen)
        found = rate(meter.trial(cell))
        if found:
            study.tell(trial, found)
        elif fails:
            study.tell(trial, state=TrialState.FAIL)
        else:
            trial.set_constraint("runs", 1.0)
            study.tell(trial, state=TrialState.PRUNED)
        best = max(best, (found, cell), key=lambda found: found[0])
        yield best[1]


def largest_that_fits(meter: Meter, seed: int, *, precision: str) -> Iterator[Setting | None]:  # noqa: ARG001 - a Strategy
    """A batch-size finder: the batch doubled until it runs out of memory; the last that ran, whatever its speed.

    The bisection that follows has nothing to do where the cells are doublings.
    """
    last = None
    for cell in sorted((c for c in meter.cells if c.precision == precision), key=lambda c: c.batch_size):
        outcome = meter.short(cell)
        if not isinstance(outcome, Measurement) and outcome.kind == "oom":
            return
        last = cell
        yield last


def _tpe(seed: int) -> BaseSampler:
    return TPESampler(seed=seed)


def _gp(seed: int) -> BaseSampler:
    return GPSampler(seed=seed)


OTHERS: dict[str, Strategy] = {
    "random": at_random,
    "grid, five processes a cell": partial(grid, num_processes=PROCESSES_A_CELL),
    "grid, one process a cell": partial(grid, num_processes=1),
    "grid, one forked trial a cell": partial(grid, num_processes=1, measure=Meter.trial),
    "TPE": partial(sampled, make=_tpe),
    "TPE, OOM told as FAIL": partial(sampled, make=_tpe, fails=True),
    "GP": partial(sampled, make=_gp, max_trials=MAX_GP_TRIALS),
    "largest batch that fits, bf16": partial(largest_that_fits, precision="bf16"),
    "largest batch that fits, fp32": partial(largest_that_fits, precision="fp32"),
}
