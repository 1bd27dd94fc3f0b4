"""How every stage of a search is run: ask it for a job, run that, write the record down; and the time that it has."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from typing import Any, Protocol

from msgspec.structs import replace

from autotune_amp.core.errors import BudgetTooSmallError
from autotune_amp.core.outcome import Record, after_steps
from autotune_amp.core.setting import NUMERIC
from autotune_amp.hardware.machine_load import LoadMeter
from autotune_amp.isolation.local import Handle
from autotune_amp.isolation.process import Watcher
from autotune_amp.profile.gap import Profile
from autotune_amp.search.ledger import Ledger
from autotune_amp.search.progress import Progress
from autotune_amp.trial.jobs import Check, Trial

# The confirmation takes at most this share of the budget, unless the device asks for more (`confirm.reserved_seconds`).
CONFIRM_SHARE = 0.4
CHECK_SHARE = 0.1  # kept back for the checks that follow the trials, where there is something to check


class Budget:
    """The seconds that a search may take from the moment it was asked for; `confirm_seconds` are the confirmation's."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.confirm_seconds = CONFIRM_SHARE * seconds
        self._started = time.monotonic()

    def elapsed(self) -> float:
        """Seconds used."""
        return time.monotonic() - self._started

    def left(self) -> float:
        """Seconds left for everything."""
        return self.seconds - self.elapsed()

    def left_for_search(self) -> float:
        """Seconds left before the confirmation's share begins."""
        return self.left() - self.confirm_seconds

    def too_small(self, last_step_seconds: float | None) -> BudgetTooSmallError:
        """The error of a budget that ended before anything was measured.

        Twice the shortest trial there is, with what came before it, must fit in the search's share.
        """
        used_seconds = self.elapsed()
        share = 1 - self.confirm_seconds / self.seconds - CHECK_SHARE
        needed = (2 * used_seconds + 12 * (last_step_seconds or 0.0)) / share
        return BudgetTooSmallError(
            f"The budget of {self.seconds:g} s ended before anything was measured; "
            f"{used_seconds:.0f} s had gone into loading, probing and building the workload and its first trials.",
            f"Give --budget {math.ceil(needed / 10) * 10} or more.",
        )


class Stage(Protocol):
    """One phase of a search. Its share of the time it asks the budget for; jobs run one at a time, each alone."""

    def next(self, ledger: Ledger, budget: Budget) -> Trial | Check | Profile | None:
        """What the records and the budget ask for next, None where the stage is over."""


class RunsJobs(Protocol):
    """What a stage needs of a backend."""

    def submit(self, job: Any, /) -> Handle[Any]:
        """Start a job."""


class ProgressWatcher(Watcher):
    """Passes what a backend says while it waits on to the progress, and to the meter what bears on it."""

    def __init__(self, progress: Progress, budget: Budget, meter: LoadMeter | None = None) -> None:
        self.progress = progress
        self.meter = meter
        self.last_step_seconds: float | None = None
        self.budget = budget
        self._phase = ""

    def phase(self, text: str) -> None:
        """Say what is done now, where that is something else than before."""
        if text != self._phase:
            self._phase = text
            self.progress.phase(text)

    def tick(self) -> None:  # noqa: D102 - see Watcher
        self.progress.tick(self.budget.elapsed())

    def step(self, num_steps: int, step_seconds: float) -> None:  # noqa: D102 - see Watcher
        self.last_step_seconds = step_seconds
        if self.meter is not None:
            if num_steps:
                self.meter.step()
            else:
                self.meter.warm_up()
        self.progress.step(num_steps, step_seconds)

    def output(self, text: str) -> None:  # noqa: D102 - see Watcher
        self.progress.output(text)

    def ending(self) -> None:  # noqa: D102 - see Watcher
        if self.meter is not None:
            self.meter.hold()


def run(stage: Stage, backend: RunsJobs, ledger: Ledger, budget: Budget, watcher: ProgressWatcher) -> Iterator[Record]:
    """Run what the stage asks for, one job after the other, until it asks for none; every record is in the ledger."""
    while (job := stage.next(ledger, budget)) is not None:
        trial = job if isinstance(job, Trial) else None
        meter = watcher.meter if trial else None
        purpose = job.purpose if isinstance(job, Trial) else job.what
        watcher.phase(_phase(job))
        number = 1 + max((r.number for r in ledger.records), default=0)
        watcher.progress.trial_started(number, job.candidate, purpose)
        if meter is not None:
            meter.start()
        started = budget.elapsed()
        handle = backend.submit(job)
        outcome = handle.result()
        record = Record(
            search_id=ledger.search_id,
            number=number,
            candidate=job.candidate,
            purpose=purpose,
            outcome=outcome,
            seconds=budget.elapsed() - started,
            load=None if meter is None else meter.stop(),
        )
        if trial is not None:
            record = replace(
                record,
                round=trial.round,
                environment=trial.environment,
                loss_scale=trial.loss_scale,
                start_seconds=handle.start_seconds,
            )
        ledger.append(record)
        watcher.progress.trial_ended(record, ledger.best)
        yield record


_PHASES = {
    "accumulation": "checking whether gradients accumulate",
    "calibration": "calibrating the loss scale",
    "profile": "taking a step of the best apart",
    "fallback": "measuring fallbacks",
    "outlook": "looking beyond the effective batch size",
    "confirm": "confirming in fresh processes",
    "plain": "confirming in fresh processes",
}


def _phase(job: Trial | Check | Profile) -> str:
    setting, purpose = job.candidate, job.purpose if isinstance(job, Trial) else job.what
    if isinstance(job, Check) and purpose == "fidelity":
        return f"checking {setting.labelled(NUMERIC)} against fp32{after_steps(job.num_steps_before)}"
    is_ordinary = replace(setting, as_found=False).is_ordinary
    return _PHASES.get(purpose) or ("searching" if is_ordinary else f"trying {setting}")
