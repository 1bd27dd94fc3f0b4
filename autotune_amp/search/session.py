"""Session: what one running search shares: its clock, its outcomes, and the running of one trial."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from autotune_amp.core.config import LossScale
from autotune_amp.core.evidence import Objective
from autotune_amp.core.hardware import Hardware
from autotune_amp.core.outcome import Description, Failure, Measurement, Outcome, Purpose, Record
from autotune_amp.core.recommendation import Exclusion
from autotune_amp.core.setting import Setting
from autotune_amp.hardware.machine_load import LoadMeter
from autotune_amp.isolation.backend import Backend
from autotune_amp.isolation.process import Watcher
from autotune_amp.numerics.scaler_replay import Replay
from autotune_amp.search import accumulate, loss_scales, seeding, verdicts
from autotune_amp.search.evidence import failures, is_trial
from autotune_amp.search.folder import StudyFolder
from autotune_amp.search.loss_scales import AllScales, Answer, Key, Pair
from autotune_amp.search.options import DEFAULT_NUM_STEPS
from autotune_amp.search.progress import Progress
from autotune_amp.search.space import Space
from autotune_amp.trial.jobs import Check, CheckKind, Trial

# The confirmation takes at most this share of the budget, unless the device asks for more (`confirm.reserved_seconds`).
CONFIRM_SHARE = 0.4


class Clock:
    """The budget in wall-clock seconds, from the moment the search was asked for.

    `confirm_seconds` of it are the confirmation's.
    """

    def __init__(self, budget_seconds: float) -> None:
        self.budget_seconds = budget_seconds
        self.confirm_seconds = CONFIRM_SHARE * budget_seconds
        self._started = time.monotonic()

    def elapsed(self) -> float:
        """Seconds used."""
        return time.monotonic() - self._started

    def left(self) -> float:
        """Seconds left for everything."""
        return self.budget_seconds - self.elapsed()

    def left_for_search(self) -> float:
        """Seconds left before the confirmation's share begins."""
        return self.left() - self.confirm_seconds


class ProgressWatcher(Watcher):
    """Passes what a runner says while it waits on to the progress, and to the meter what bears on it."""

    def __init__(self, progress: Progress, clock: Clock, meter: LoadMeter | None = None) -> None:
        self._progress = progress
        self._clock = clock
        self._meter = meter
        self.last_step_seconds: float | None = None

    def tick(self) -> None:  # noqa: D102 - see Watcher
        self._progress.tick(self._clock.elapsed())

    def step(self, num_steps: int, step_seconds: float) -> None:  # noqa: D102 - see Watcher
        self.last_step_seconds = step_seconds
        if self._meter is not None:
            if num_steps:
                self._meter.step()
            else:
                self._meter.warm_up()
        self._progress.step(num_steps, step_seconds)

    def output(self, text: str) -> None:  # noqa: D102 - see Watcher
        self._progress.output(text)

    def ending(self) -> None:  # noqa: D102 - see Watcher
        if self._meter is not None:
            self._meter.hold()


class Session:
    """One search as it goes: every outcome is in the folder before anything is decided on it."""

    def __init__(
        self,
        *,
        folder: StudyFolder,
        search_id: str,
        clock: Clock,
        progress: Progress,
        hardware: Hardware,
        torch_state: dict[str, Any],
        memory_limit_bytes: int,
        loss_scale: LossScale,
        holds_heap: bool,
        seed: int,
        num_steps: int = DEFAULT_NUM_STEPS,
        description: Description | None = None,
        objective: Objective = "speed",
        meter: LoadMeter | None = None,
    ) -> None:
        self.clock = clock
        self.progress = progress
        self.hardware = hardware
        self.description = description
        self.objective = objective
        self.memory_limit_bytes = memory_limit_bytes
        self.records = folder.records(search_id)
        self._folder = folder
        self._search_id = search_id
        self._torch_state = torch_state
        self._loss_scale = loss_scale
        self._holds_heap = holds_heap
        self._seed = seed
        self._num_steps = num_steps
        self._meter = meter
        self.scales: dict[Key, Answer] = loss_scales.calibrated(self.records, num_steps)

    @property
    def trials(self) -> list[Record]:
        """The records without the checks."""
        return [r for r in self.records if is_trial(r)]

    @property
    def outcomes(self) -> dict[Setting, Outcome]:
        """What the search phase knows of each candidate."""
        return _outcomes(self.records)

    @property
    def space_outcomes(self) -> dict[Setting, Outcome]:
        """The same of the space's own candidates: one with pins or other workers says nothing of those without."""
        return _space_outcomes(self.records)

    def exclusions(self, space: Space) -> tuple[Exclusion, ...]:
        """What the outcomes and the checks so far rule out, with the reason."""
        return exclusions(self.records, self.scales, space)

    def best(self) -> Record | None:
        """The fastest measured so far, without what the checks rule out."""
        known = verdicts.verdicts(self.records)
        measured = [
            r
            for r in self.records
            if r.purpose == "search"
            and isinstance(r.outcome, Measurement)
            and not verdicts.unfaithful(known, r.candidate)
            and not loss_scales.refusal(self.scales, r.candidate)
        ]
        return max(measured, key=_samples_per_second, default=None)

    def judge(self, candidate: Setting, outcome: Outcome, pair: Pair | None) -> tuple[Outcome, Replay | None]:
        """What the study is told; see `told.Judge`."""
        if isinstance(outcome, Failure) or pair is None:
            return outcome, None
        refusal = loss_scales.refusal(self.scales, candidate)
        if refusal is not None:
            return Failure(kind="nonfinite", message=refusal), None
        scales = loss_scales.scales_of(self.scales, candidate)
        return outcome, None if scales is None else scales.replay(pair)

    def chosen_loss_scale(self, candidate: Setting) -> LossScale | None:
        """What a candidate is confirmed with: the calibrated pair, where there is one."""
        return loss_scales.loss_scale(self.scales, candidate, self._loss_scale)

    def spec(self, candidate: Setting, **fields: Any) -> Trial:
        """A trial of `candidate` under this search's conditions."""
        sizes = None if self.description is None else self.description.sample_sizes
        return Trial(
            candidate=candidate,
            device=self.hardware.device,
            seed=self._seed,
            memory_limit_bytes=self.memory_limit_bytes,
            torch_state=self._torch_state,
            worst_samples=() if sizes is None else sizes.largest[: candidate.batch_size],
            is_loss_sum=accumulate.is_loss_sum(self.records),
            **{
                "hold_heap": self._holds_heap,
                "loss_scale": self._loss_scale if candidate.precision == "fp16" else None,
                **fields,
            },
        )

    def run(
        self,
        runner: Backend,
        spec: Trial,
        *,
        round_number: int | None = None,
        environment: dict[str, str] | None = None,
    ) -> Record:
        """Run one trial, log it, tell the progress."""
        number = self._begin(spec.candidate, spec.purpose)
        if self._meter is not None:
            self._meter.start()
        started = self.clock.elapsed()
        handle = runner.submit(spec)
        outcome = handle.result()
        return self._log(
            Record(
                search_id=self._search_id,
                number=number,
                candidate=spec.candidate,
                purpose=spec.purpose,
                outcome=outcome,
                seconds=self.clock.elapsed() - started,
                round=round_number,
                environment=environment or {},
                loss_scale=spec.loss_scale,
                load=None if self._meter is None else self._meter.stop(),
                start_seconds=handle.start_seconds,
            )
        )

    def check(
        self,
        runner: Backend,
        what: CheckKind,
        candidate: Setting,
        *,
        find_pins: bool = True,
        seconds: float = math.inf,
    ) -> None:
        """Make a check within `seconds` and what is left for the search, and log it as a trial is logged."""
        number = self._begin(candidate, what)
        started = self.clock.elapsed()
        outcome = runner.submit(
            Check(
                what=what,
                precision=candidate.precision,
                batch_size=candidate.batch_size,
                device=self.hardware.device,
                pinned_modules=candidate.pinned_modules,
                find_pins=find_pins,
                seed=self._seed,
                deadline_seconds=max(0.0, min(seconds, self.clock.left_for_search())),
                memory_limit_bytes=self.memory_limit_bytes,
                torch_state=self._torch_state,
                hold_heap=self._holds_heap,
            )
        ).result()
        record = Record(
            search_id=self._search_id,
            number=number,
            candidate=candidate,
            purpose=what,
            outcome=outcome,
            seconds=self.clock.elapsed() - started,
        )
        if what == "calibration":
            self.scales[loss_scales.key_of(candidate)] = loss_scales.answer(
                record, self._num_steps, is_loss_sum=accumulate.is_loss_sum(self.records)
            )
        self._log(record)

    def _begin(self, candidate: Setting, purpose: Purpose) -> int:
        number = 1 + max((r.number for r in self.records), default=0)
        self.progress.trial_started(number, candidate, purpose)
        return number

    def _log(self, record: Record) -> Record:
        self._folder.append(record)
        self.records.append(record)
        self.progress.trial_ended(record, self.best())
        return record


def exclusions(records: Sequence[Record], scales: AllScales, space: Space) -> tuple[Exclusion, ...]:
    """What the outcomes and the checks among the records rule out, with the reason. Pure."""
    by_checks = *verdicts.exclusions(verdicts.verdicts(records)), *loss_scales.exclusions(scales)
    return *by_checks, *seeding.exclusions(space, _space_outcomes(records))


def _outcomes(records: Sequence[Record]) -> dict[Setting, Outcome]:
    """The last measurement of each candidate, or else the failure that speaks against it."""
    known = [r for r in records if r.purpose in ("search", "fallback")]
    measured: dict[Setting, Outcome] = {r.candidate: r.outcome for r in known if isinstance(r.outcome, Measurement)}
    return measured | dict(failures(known))


def _space_outcomes(records: Sequence[Record]) -> dict[Setting, Outcome]:
    return {c: o for c, o in _outcomes(records).items() if not c.pinned_modules and c.num_workers is None}


def outcome_of(record: Record) -> Outcome:
    """What became of a trial."""
    assert isinstance(record.outcome, (Measurement, Failure)), "a check is no trial"
    return record.outcome


def spent_on(records: Iterable[Record], precision: str) -> float:
    """Seconds that trials of one precision have cost."""
    return sum(record.seconds for record in records if record.candidate.precision == precision)


def _samples_per_second(record: Record) -> float:
    assert isinstance(record.outcome, Measurement)
    return record.outcome.samples_per_second


def with_held_memory(hardware: Hardware, held_by_caller: int) -> Hardware:
    """The hardware with what the calling process itself holds on the device."""
    memory = msgspec.structs.replace(hardware.memory, held_by_caller=held_by_caller)
    return msgspec.structs.replace(hardware, memory=memory)
