"""The loop that every stage of a search is run by: ask it for a job, run that, write the record down."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol

from msgspec.structs import replace

from autotune_amp.core.outcome import Purpose, Record
from autotune_amp.core.setting import NUMERIC, Setting
from autotune_amp.hardware.machine_load import LoadMeter
from autotune_amp.isolation.local import Handle
from autotune_amp.isolation.process import Watcher
from autotune_amp.search.budget import Budget
from autotune_amp.search.ledger import Ledger
from autotune_amp.search.progress import Progress
from autotune_amp.trial.jobs import Check, Trial


class Stage(Protocol):
    """One phase of a search. Its share of the time it asks the budget for; jobs run one at a time, each alone."""

    def next(self, ledger: Ledger, budget: Budget) -> Trial | Check | None:
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
        purpose = job.purpose if isinstance(job, Trial) else job.what
        watcher.phase(_phase(job.candidate, purpose))
        number = 1 + max((r.number for r in ledger.records), default=0)
        watcher.progress.trial_started(number, job.candidate, purpose)
        meter = watcher.meter if isinstance(job, Trial) else None
        if meter is not None:
            meter.start()
        started = budget.elapsed()
        handle = backend.submit(job)
        outcome = handle.result()
        of_trial: dict[str, Any] = {}
        if isinstance(job, Trial):
            of_trial = {
                "round": job.round,
                "environment": job.environment,
                "loss_scale": job.loss_scale,
                "start_seconds": handle.start_seconds,
            }
        record = Record(
            search_id=ledger.search_id,
            number=number,
            candidate=job.candidate,
            purpose=purpose,
            outcome=outcome,
            seconds=budget.elapsed() - started,
            load=None if meter is None else meter.stop(),
            **of_trial,
        )
        ledger.append(record)
        watcher.progress.trial_ended(record, ledger.best)
        yield record


_PHASES = {
    "accumulation": "checking whether gradients accumulate",
    "calibration": "calibrating the loss scale",
    "fallback": "measuring fallbacks",
    "outlook": "looking beyond the effective batch size",
    "confirm": "confirming in fresh processes",
    "plain": "confirming in fresh processes",
}


def _phase(setting: Setting, purpose: Purpose) -> str:
    if purpose == "fidelity":
        return f"checking {setting.labelled(NUMERIC)} against fp32"
    if purpose != "search":
        return _PHASES[purpose]
    if setting.pinned_modules:
        return f"measuring {setting}"
    return "searching" if replace(setting, as_found=False).is_ordinary else f"trying {setting}"
