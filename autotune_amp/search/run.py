"""Runner of a search's stages: it asks them for a job for every free slot, runs it, and appends its record."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from msgspec.structs import replace

from autotune_amp.core.outcome import Failure, Purpose, Record, after_steps
from autotune_amp.dimensions import NUMERIC
from autotune_amp.hardware.machine_load import LoadMeter
from autotune_amp.processes.local import CompletedHandle, Handle, LoadingBackend, Slot, SlotLostError
from autotune_amp.processes.process import Watcher
from autotune_amp.search.ledger import Ledger
from autotune_amp.search.planner import Budget, Planner
from autotune_amp.search.progress import Progress
from autotune_amp.search.stages import SearchJob, Stage
from autotune_amp.search.stages.pending import foreseen_trials, ledger_with_predicted
from autotune_amp.trial.jobs import Check, Trial


class JobBackend(Protocol):
    """Interface of the backend that runs the jobs of a search."""

    @property
    def slots(self) -> Sequence[Slot]:
        """Return the slots that can run jobs at the same time."""

    def submit(self, job: Any, slot: Slot, /) -> Handle[Any]:
        """Start a job on a free slot and return its handle."""

    def wait(self, handles: Sequence[Handle[Any]], /) -> Handle[Any]:
        """Wait until one of the jobs ends and return its handle."""


@dataclass(eq=False)
class ProgressWatcher(Watcher):
    """Watcher that forwards events of a backend to the progress display and the load meter.

    With several slots, each has a watcher of its own, whose `slot` is the slot's name and which tells its steps to the
    one of the `whole` search.
    """

    progress: Progress
    budget: Budget
    meter: LoadMeter | None = None
    slot: str | None = None
    whole: ProgressWatcher | None = None
    last_step_seconds: float | None = None  # of any slot
    _phase: str = ""
    _of_slots: dict[str, ProgressWatcher] = field(default_factory=dict)

    def for_slot(self, slot: Slot) -> ProgressWatcher:
        """Return the watcher of one of several slots, created at the first call, else this one. Load by others is
        measured only on this host.
        """
        if slot.name is None:
            return self
        if slot.name not in self._of_slots:
            meter = LoadMeter(slot.uuid) if slot.is_here else None
            self._of_slots[slot.name] = ProgressWatcher(self.progress, self.budget, meter, slot.name, self)
        return self._of_slots[slot.name]

    def phase(self, text: str) -> None:
        """Show a new phase, unless it is already shown."""
        if text != self._phase:
            self._phase = text
            self.progress.phase(text)

    def tick(self) -> None:  # noqa: D102 - see Watcher
        self.progress.tick(self.budget.elapsed())

    def step(self, num_steps: int, step_seconds: float) -> None:  # noqa: D102 - see Watcher
        (self.whole or self).last_step_seconds = step_seconds
        if self.meter is not None:
            if num_steps:
                self.meter.step()
            else:
                self.meter.warm_up()
        self.progress.step(num_steps, step_seconds, self.slot)

    def activity(self, text: str) -> None:  # noqa: D102 - see Watcher
        self.progress.activity(text, self.slot)

    def output(self, text: str) -> None:  # noqa: D102 - see Watcher
        self.progress.output(text)

    def ending(self) -> None:  # noqa: D102 - see Watcher
        if self.meter is not None:
            self.meter.hold()


@dataclass(eq=False)
class _RunningJob:
    """Running job and the fields of its record other than the outcome."""

    job: SearchJob
    slot: Slot
    number: int
    handle: Handle[Any]
    started: float
    meter: LoadMeter | None
    num_beside: int = 0


class Runner:
    """Runner of jobs on a backend's slots, which appends their records to the ledger.

    `lost` holds jobs whose slot was lost, to be run once more. A job lost a second time has failed.
    """

    def __init__(self, backend: JobBackend, ledger: Ledger, planner: Planner, watcher: ProgressWatcher) -> None:
        self.ledger = ledger
        self.planner = planner
        self._backend = backend
        self._watcher = watcher
        self._running: list[_RunningJob] = []
        self.lost: list[SearchJob] = []
        self._lost_once: list[SearchJob] = []

    @property
    def pending(self) -> list[SearchJob]:
        """Return the running jobs."""
        return [running.job for running in self._running]

    @property
    def slots(self) -> Sequence[Slot]:
        """Return the slots that can run jobs now."""
        return self._backend.slots

    @property
    def free_slots(self) -> list[Slot]:
        """Return the slots without a running job."""
        busy_slots = [running.slot.name for running in self._running]
        return [slot for slot in self.slots if slot.name not in busy_slots]

    def start(self, job: SearchJob, slot: Slot, foreseen: Sequence[Trial] = ()) -> None:
        """Start a job on a free slot. The processes of the `foreseen` trials that follow it load at the same time."""
        watcher = self._watcher.for_slot(slot)
        meter = watcher.meter if isinstance(job, Trial) else None
        if watcher.slot is None:  # phases overlap on several slots
            watcher.phase(_phase(job))
        numbers = (*(r.number for r in self.ledger.records), *(running.number for running in self._running))
        number = 1 + max(numbers, default=0)
        watcher.progress.trial_started(number, job.candidate, _purpose(job), watcher.slot)
        started = self.planner.budget.elapsed()
        if foreseen:
            job = self._loaded(job, foreseen)
        left_seconds = max(0.0, self.planner.budget.left())
        if meter is not None:
            meter.start()
        handle = self._backend.submit(replace(job, loading_seconds=left_seconds), slot)
        if meter is not None and not isinstance(handle, CompletedHandle):
            meter.start()  # the slot's previous process, whose end was noted, has ended by now
        self._running.append(_RunningJob(job, slot, number, handle, started, meter))
        for running in self._running:
            running.num_beside = max(running.num_beside, len(self._running) - 1)

    def finish(self) -> Record | None:
        """Wait for a job to end, append its record and return it; None if its slot was lost and it runs again."""
        handle = self._backend.wait([running.handle for running in self._running])
        finished = next(running for running in self._running if running.handle is handle)
        job, watcher = finished.job, self._watcher.for_slot(finished.slot)
        self._running.remove(finished)
        try:
            outcome = handle.result()
        except SlotLostError as lost:
            watcher.progress.trial_lost(finished.number, finished.slot.name)
            if not any(job is other for other in self._lost_once):
                self._lost_once.append(job)
                self.lost.append(job)
                return None
            outcome = Failure(kind="crash", message=f"the slot that it ran on was lost twice: {lost.reason}")
        record = Record(
            search_id=self.ledger.search_id,
            number=finished.number,
            candidate=job.candidate,
            purpose=_purpose(job),
            outcome=outcome,
            seconds=self.planner.budget.elapsed() - finished.started,
            load=None if finished.meter is None else finished.meter.stop(),
            slot=watcher.slot,
            num_beside=finished.num_beside,
            session=self.ledger.session,
        )
        if isinstance(job, Trial):
            record = replace(
                record,
                round=job.round,
                environment=job.environment,
                loss_scale=job.loss_scale,
                start_seconds=handle.start_seconds,
            )
        self.ledger.append(record)
        watcher.progress.trial_ended(record, self.ledger.best)
        return record

    def update_planner(self) -> None:
        """Tell the planner how many processes can load at the same time, which may be fewer than before."""
        job_defaults = self.planner.job_defaults
        if job_defaults.num_together > 1 and isinstance(self._backend, LoadingBackend):
            self.planner.job_defaults = replace(job_defaults, num_together=self._backend.num_together)

    def end_loaded(self) -> None:
        """End the processes of trials that were foreseen and have not run."""
        if self.planner.job_defaults.num_together > 1 and isinstance(self._backend, LoadingBackend):
            self._backend.load_together([], math.inf)

    def _loaded(self, job: SearchJob, foreseen: Sequence[Trial]) -> SearchJob:
        """Load the processes of a trial and of those that follow it; return it with the deadline left after that."""
        if not isinstance(job, Trial) or not isinstance(self._backend, LoadingBackend):
            return job
        began = self.planner.budget.elapsed()
        limit_seconds = min(self.planner.budget.left(), job.deadline_seconds or math.inf)
        self._backend.load_together([job, *foreseen], max(0.0, limit_seconds))
        if job.deadline_seconds is None:
            return job
        loading_seconds = self.planner.budget.elapsed() - began
        return replace(job, deadline_seconds=max(0.0, job.deadline_seconds - loading_seconds))


def run_stages(stages: Sequence[Stage], runner: Runner) -> Iterator[Record]:
    """Run the jobs of the stages in order, and yield every record once it is in the ledger.

    On several slots, stages decide as if the running jobs had ended as expected. If a stage has no job while others
    run, the next stage is asked; it is finished once it has no job while nothing runs.
    """
    stages_left = list(stages)
    try:
        while stages_left or runner.pending:
            runner.update_planner()
            while free_slots := runner.free_slots:
                job = runner.lost.pop(0) if runner.lost else _next_job(stages_left, runner)
                if job is None:
                    break
                runner.start(job, free_slots[0], foreseen_trials(stages_left, runner.ledger, runner.planner, job))
            if runner.pending:
                record = runner.finish()
                if record is not None:
                    yield record
            else:
                del stages_left[:1]
    finally:
        runner.end_loaded()


def _next_job(stages: Sequence[Stage], runner: Runner) -> SearchJob | None:
    """Return the job of the first stage or, while jobs run, of the first that has one; None if there is none."""
    pending = runner.pending
    expected = ledger_with_predicted(runner.ledger, pending)
    for stage in stages:
        if expected is None or (pending and stage.is_exclusive):
            return None
        job = stage.next(expected, runner.planner)
        if job is not None or not pending:
            return job
    return None


def _purpose(job: SearchJob) -> Purpose:
    return job.purpose if isinstance(job, Trial) else job.what


_PHASES = {
    "accumulation": "checking whether gradients accumulate",
    "calibration": "calibrating the loss scale",
    "profile": "profiling a step of the best setting",
    "fallback": "measuring fallbacks",
    "one_rank": "measuring one rank alone",
    "outlook": "measuring larger effective batch sizes",
    "confirm": "confirming in fresh processes",
    "plain": "confirming in fresh processes",
}


def _phase(job: SearchJob) -> str:
    """Return the text of the phase that the progress display shows during a job."""
    setting, purpose = job.candidate, _purpose(job)
    if isinstance(job, Check) and purpose == "fidelity":
        return f"checking {setting.labelled(NUMERIC)} against fp32{after_steps(job.num_steps_before)}"
    is_ordinary = replace(setting, as_found=False).is_ordinary
    return _PHASES.get(purpose) or ("searching" if is_ordinary else f"trying {setting}")
