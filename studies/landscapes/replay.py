"""Play a recorded landscape back: the runner's interface, on a clock that moves by virtual seconds only. No torch."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Mapping, Sequence
from statistics import fmean
from types import TracebackType
from typing import Any, NamedTuple, Protocol

import msgspec
from landscape import Header, Process

from autotune_amp.core.intervals import trimmed_interval
from autotune_amp.core.outcome import Accumulation, Calibration, CheckOutcome, Failure, Fidelity, Measurement, Outcome
from autotune_amp.core.precisions import Precision
from autotune_amp.core.setting import Setting
from autotune_amp.processes.local import Ability, Slot
from autotune_amp.search.planner import Budget
from autotune_amp.search.space import Space
from autotune_amp.trial.jobs import Check, Trial, is_hopeless, should_continue_warmup, stop_reason

# Of a check of bf16 and of a calibration in real searches (num_passes in their outcomes.jsonl): of a check half are in
# fp32, of a calibration those of its histograms.
NUM_CHECK_PASSES = 42
NUM_CALIBRATION_PASSES, NUM_HISTOGRAM_PASSES, NUM_ACCUMULATION_PASSES = 20, 3, 7


class ReplayBudget(Budget):
    """Moves only when told to."""

    def __init__(self, seconds: float = math.inf, num_slots: int = 1) -> None:
        super().__init__(seconds, num_slots)
        self.now = 0.0

    def elapsed(self) -> float:
        return self.now


class Played(NamedTuple):
    """What a process would have done under a spec, and the seconds that it would have cost."""

    outcome: Outcome
    seconds: float


class _OverdueError(Exception):
    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.seconds = seconds


class _Watch:
    """Adds up what passes, until a deadline does."""

    def __init__(self, setup_seconds: float, deadline_seconds: float | None) -> None:
        self.deadline_seconds = math.inf if deadline_seconds is None else deadline_seconds
        self.seconds = 0.0
        self.take(setup_seconds, None)

    def take(self, seconds: float, limit_seconds: float | None) -> None:
        allowed = math.inf if limit_seconds is None else limit_seconds
        self.seconds += min(seconds, allowed)
        if self.seconds > self.deadline_seconds:
            raise _OverdueError(self.deadline_seconds)
        if seconds > allowed:
            raise _OverdueError(self.seconds)


def play(process: Process, spec: Trial, header: Header, chance: random.Random, *, is_started: bool = False) -> Played:
    """A recorded process as it would have gone under `spec`, whose rules for warm-ups, number of steps, interval, cut,
    measuring time, deadlines and memory it obeys as the real timing does.

    A confirming process takes the header's `start_seconds` to its first step, nothing where another run has started it
    (`is_started`); another one takes what the recorded one took.
    The warm-up is the recorded one, and as many of the recorded steps as go on falling. Measured steps are the next
    ones in their order; where more are asked for than were recorded, they are drawn from these. A recorded failure is
    that failure again; what a process that was killed at its deadline would have done later nobody knows: it is a
    timeout once more, at the earliest of the deadlines that it met then and those that it would meet now.
    """
    setup_seconds = (0.0 if is_started else header.start_seconds) if spec.is_confirmation else process.setup_seconds
    try:
        watch = _Watch(setup_seconds, spec.deadline_seconds)
        if isinstance(process.outcome, Failure):
            return _fail(process, process.outcome, spec, watch)
        return _measure(process, process.outcome, spec, watch, chance)
    except _OverdueError as overdue:
        return Played(Failure(kind="timeout", message="its time was up"), overdue.seconds)


def _fail(process: Process, failure: Failure, spec: Trial, watch: _Watch) -> Played:
    limits = _limits(spec)
    for seconds in (*process.warmup_step_seconds, *process.heard_step_seconds):
        watch.take(seconds, next(limits))
    if failure.kind == "timeout":
        left = process.deadline_seconds - watch.seconds
        watch.take(max(0.0, left), next(limits))
    return Played(failure, watch.seconds)


def _measure(process: Process, recorded: Measurement, spec: Trial, watch: _Watch, chance: random.Random) -> Played:
    started, limits = watch.seconds, _limits(spec)
    first, *recorded_warmup = process.warmup_step_seconds
    watch.take(first, next(limits))
    if spec.memory_limit_bytes is not None and recorded.reserved_memory_bytes > spec.memory_limit_bytes:
        return Played(Failure(kind="oom", message="it took more than its limit"), watch.seconds)
    warming = watch.seconds
    num_together = spec.num_steps_per_report
    known = iter(recorded.raw_step_seconds)

    def take_group() -> float:
        seconds = next(known, None) or chance.choice(recorded.raw_step_seconds)
        watch.take(num_together * seconds, next(limits))
        return seconds

    warmup: list[float] = []
    num_taken = 1
    while should_continue_warmup(
        warmup, num_steps=num_taken, warming_seconds=watch.seconds - warming, limits=spec.num_warmup_steps
    ) and not (num_taken >= spec.num_warmup_steps[0] and is_hopeless(spec, warmup)):
        if recorded_warmup:
            warmup.append(recorded_warmup.pop(0))
            watch.take(warmup[-1], next(limits))
            num_taken += 1
        else:
            warmup.append(take_group())
            num_taken += num_together
    if is_hopeless(spec, warmup):
        return Played(_measurement(recorded, spec, warmup, 1, was_cut=True), watch.seconds)
    fewest, most = (math.ceil(num_steps / num_together) for num_steps in spec.num_steps)
    limit_seconds = math.inf if spec.measure_seconds is None else spec.measure_seconds
    warmed_up = watch.seconds
    groups: list[float] = []
    reason = None
    while reason is None:
        groups.append(take_group())
        reason = stop_reason(
            spec,
            groups,
            is_whole=len(groups) >= fewest,
            is_most=len(groups) >= most,
            measure_seconds=limit_seconds,
            measuring_seconds=watch.seconds - warmed_up,
            training_seconds=watch.seconds - started,
            num_steps=len(groups) * num_together,
        )
    found = _measurement(recorded, spec, groups, num_together, was_cut=reason == "cut")
    num_taken += num_together * len(groups)
    return Played(msgspec.structs.replace(found, num_steps_taken=num_taken), watch.seconds)


def _limits(spec: Trial) -> Iterator[float | None]:
    yield spec.deadlines.compiling_seconds if spec.candidate.is_compiled else spec.first_step_deadline_seconds
    while True:
        yield spec.step_deadline_seconds


def _measurement(
    recorded: Measurement, spec: Trial, steps: list[float], num_together: int, *, was_cut: bool
) -> Measurement:
    step_seconds = fmean(steps)
    return msgspec.structs.replace(
        recorded,
        step_seconds=step_seconds,
        step_seconds_interval=trimmed_interval(steps),
        samples_per_second=spec.candidate.effective_batch_size / step_seconds,
        raw_step_seconds=tuple(steps),
        num_steps_together=num_together,
        was_cut=was_cut,
    )


class Done:
    """A job whose outcome is known, and is over at a time to come."""

    def __init__(self, found: Any, start_seconds: float | None, budget: ReplayBudget, ends_at: float) -> None:
        self.start_seconds = start_seconds
        self.ends_at = ends_at
        self._found, self._budget = found, budget

    def result(self) -> Any:
        """Move the clock to its end."""
        self._budget.now = max(self._budget.now, self.ends_at)
        return self._found


def first(handles: Sequence[Done]) -> Done:
    """The one that is over first."""
    return min(handles, key=lambda handle: handle.ends_at)


_CHECKS: frozenset[Ability] = frozenset({"fidelity", "calibration", "accumulation"})


class Ground(Protocol):
    """What a search can be played on: a recorded landscape, or one in closed form."""

    header: Header

    def draw(self, setting: Setting, chance: random.Random) -> Process:
        """A process of the setting; raises `KeyError` where there is none."""

    def step_seconds(self, precision: Precision, batch_size: int) -> float:
        """The mean step at a batch size, or in proportion at the nearest that ran; inf where none did."""

    def setup_seconds(self) -> float:
        """What a process takes before its first step."""

    def space(self) -> Space:
        """What a search has of it."""


class ReplayBackend:
    """A `Backend` that plays back whole processes of a setting."""

    def __init__(self, landscape: Ground, budget: ReplayBudget, seed: int) -> None:
        self.landscape = landscape
        self.abilities: frozenset[Ability] = _CHECKS  # it builds nothing, so that it has nothing to share
        self.slots = (Slot(landscape.header.hardware.device),)
        self.is_build_shared = False
        self.start_seconds: float | None = None
        self.is_started = False  # by a run of this round, which the next ones share a process with
        self._budget = budget
        self._chance = random.Random(seed)

    def submit(self, job: Any, slot: Slot | None = None) -> Done:
        """Play it back: the clock moves once somebody waits for it."""
        found, seconds = self._run(job) if isinstance(job, Trial) else self._check(job)
        return Done(found, self.start_seconds, self._budget, self._budget.now + seconds)

    def wait(self, handles: Sequence[Any]) -> Any:
        """See `Backend`."""
        return first(handles)

    def _run(self, spec: Trial) -> tuple[Outcome, float]:
        """Raises `KeyError` for what the landscape has not."""
        process = self.landscape.draw(spec.candidate, self._chance)
        played = play(process, spec, self.landscape.header, self._chance, is_started=self.is_started)
        if spec.is_confirmation and isinstance(played.outcome, Measurement):  # fresh: the rest is its outcome's
            own_seconds = played.outcome.build_seconds + played.outcome.context_seconds
            self.start_seconds = 0.0 if self.is_started else self.landscape.header.start_seconds - own_seconds
            self.is_started = True
        return played.outcome, played.seconds

    def _check(self, spec: Check) -> tuple[CheckOutcome, float]:
        """Every precision is faithful, a loss scale of 2^14 is safe and gradients accumulate: landscapes are of time
        and memory.
        """
        seconds = check_seconds(self.landscape, spec)
        if spec.deadline_seconds is not None and seconds > spec.deadline_seconds:
            return Failure(kind="timeout", message="its time was up"), spec.deadline_seconds
        return well(spec), seconds

    def keep(self) -> None:
        """Nothing is kept from job to job."""

    def share_build(self, job: Any, deadline_seconds: float) -> str | None:
        """A replay builds nothing, so that it has nothing to share."""
        return "it is a replay"

    def close(self) -> None:
        """The next confirming process is a fresh one."""
        self.is_started = False

    def __enter__(self) -> ReplayBackend:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class SlotBackends:
    """Backends beside one another, one for each slot, on one clock."""

    def __init__(self, backends: Mapping[Slot, Any]) -> None:
        self._backends = backends
        self.slots = tuple(backends)
        self.abilities: frozenset[Ability] = frozenset()  # none that goes beyond jobs

    def submit(self, job: Any, slot: Slot) -> Done:
        """Play it back on the slot."""
        played: Done = self._backends[slot].submit(job)
        return played

    def wait(self, handles: Sequence[Any]) -> Any:
        """See `Backend`."""
        return first(handles)

    def close(self) -> None:
        """The next confirming process is a fresh one."""
        for backend in self._backends.values():
            backend.close()


def check_seconds(landscape: Ground, spec: Check) -> float:
    """What a check costs: setting up, and its passes as steps of their precision; inf where one never ran."""
    if spec.what == "accumulation":
        return (
            NUM_ACCUMULATION_PASSES * landscape.step_seconds("fp32", spec.candidate.batch_size)
            + landscape.setup_seconds()
        )
    num_fp32 = NUM_HISTOGRAM_PASSES if spec.what == "calibration" else NUM_CHECK_PASSES / 2
    num_passes = NUM_CALIBRATION_PASSES if spec.what == "calibration" else NUM_CHECK_PASSES
    return (
        num_fp32 * landscape.step_seconds("fp32", spec.candidate.batch_size)
        + (num_passes - num_fp32) * landscape.step_seconds(spec.candidate.precision, spec.candidate.batch_size)
        + landscape.setup_seconds()
    )


def well(spec: Check) -> CheckOutcome:
    """Return the outcome of a check that finds nothing wrong."""
    said: dict[str, Any] = {"reason": "It was replayed.", "next_step": "Check a real workload."}
    if spec.what == "accumulation":
        return Accumulation(verdict="mean", num_micro_batches=4, batch_size=spec.candidate.batch_size, **said)
    if spec.what == "fidelity":
        return Fidelity(
            precision=spec.candidate.precision,
            batch_size=spec.candidate.batch_size,
            verdict="faithful",
            pinned_modules=spec.candidate.pinned_modules,
            num_passes=NUM_CHECK_PASSES,
            **said,
        )
    return Calibration(
        batch_size=spec.candidate.batch_size,
        log2_scales=(14.5,) * 12,
        gradient_histogram=((-11, 500), (-10, 1000)),
        init_scale=2.0**13,
        forward_max=3.0,
        pinned_modules=spec.candidate.pinned_modules,
    )
