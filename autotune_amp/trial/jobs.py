"""Jobs of a search: trials, three kinds of check, a probe and a description; and the rules that end a trial's steps.

Imports no torch, since the parent process creates them.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import Any, ClassVar, Literal, TypeAlias

import msgspec

from autotune_amp.core.config import LossScale
from autotune_amp.core.errors import AutotuneAmpError
from autotune_amp.core.hardware import DeviceIdentity, Hardware
from autotune_amp.core.intervals import trimmed_interval
from autotune_amp.core.job import Deadlines, Job, Tell
from autotune_amp.core.outcome import (
    MIN_ACCUMULATION_SAMPLES,
    PRECISION_FAILURE_KINDS,
    Accumulation,
    Calibration,
    CheckOutcome,
    Description,
    Failure,
    Fidelity,
    Measurement,
    Purpose,
    Verdict,
    after_steps,
)
from autotune_amp.core.recommendation import Fingerprint
from autotune_amp.core.setting import Setting
from autotune_amp.trial.failures import suggested_fix

CheckKind: TypeAlias = Literal["fidelity", "calibration", "accumulation"]

# Number of micro-batches timed for a longer accumulation window. The window's time is composed from them, since windows
# of hundreds of passes would take longer than the search.
MAX_TIMED_MICRO_BATCHES = 4
# An accelerator runs ahead of the host, so steps between two synchronisations are timed together.
STEPS_PER_SYNC = 4
NUM_WARMUP_STEPS, MAX_WARMUP_STEPS = 3, 40
COMPILING_SHARE = 0.85  # share of a compiling trial's seconds for compilation
MEASURE_SECONDS, NUM_TRIALS_FORESEEN = 2.0, 16  # a trial measures this long at most, or a part of a small budget


class Trial(Job[Measurement], frozen=True, kw_only=True):
    """One isolated run of one candidate setting.

    `num_warmup_steps` [low, high] bounds the number of steps before the measured ones; between the bounds
    `should_continue_warmup` decides. `num_steps` [low, high] bounds the measured optimizer steps: between the bounds
    measuring stops once the trimmed 95 % interval of the step time is within `interval_share` of it, or after
    `measure_seconds`. After five steps a median above `cut_step_seconds` ends the trial early. The parent enforces
    `first_step_deadline_seconds`, which includes compilation, and `step_deadline_seconds`, by killing the process.
    `worst_samples` are the indices of the largest samples found in the dataset, in order; empty if samples are alike or
    the workload names its worst batch. `is_loss_sum`: the loss is a sum over its samples, so it is not divided by the
    accumulation steps. `num_ranks` processes train together, of which this is `rank`; they meet at `meeting`,
    "address:port"; `has_unused_parameters`: some parameters of the model get no gradient. `ending_seconds` is the time
    for the workload's evaluation and checkpoint after measuring, enforced by the parent; with None they are not run.
    `environment` holds variables that its process gets in addition to the caller's, `round` is the number of its
    confirmation round. `hold_heap`: keep freed memory in the process's heap (see `memory.hold_heap`).
    """

    answer: ClassVar[Any] = Measurement
    work: ClassVar[str] = "autotune_amp.trial.worker:run"
    builds_first: ClassVar[bool] = True

    candidate: Setting
    purpose: Purpose = "search"
    loss_scale: LossScale | None = None
    seed: int = 0
    num_warmup_steps: tuple[int, int] = (NUM_WARMUP_STEPS, MAX_WARMUP_STEPS)
    num_steps: tuple[int, int] = (8, 40)
    interval_share: float = 0.05
    measure_seconds: float | None = None
    cut_step_seconds: float | None = None
    first_step_deadline_seconds: float | None = None
    step_deadline_seconds: float | None = None
    memory_limit_bytes: int | None = None
    hold_heap: bool = False
    worst_samples: tuple[int, ...] = ()
    is_loss_sum: bool = False
    ending_seconds: float | None = None
    environment: dict[str, str] = msgspec.field(default_factory=dict)
    round: int | None = None
    rank: int = 0
    num_ranks: int = 1
    meeting: str = ""
    has_unused_parameters: bool = False

    @property
    def deadlines(self) -> Deadlines:
        """Return the deadlines of the job and of its steps."""
        whole_seconds, is_compiled = self.deadline_seconds, self.candidate.is_compiled
        return Deadlines(
            compiling_seconds=COMPILING_SHARE * whole_seconds if is_compiled and whole_seconds is not None else None,
            whole_seconds=whole_seconds,
            first_step_seconds=self.first_step_deadline_seconds,
            step_seconds=self.step_deadline_seconds,
        )

    def after(
        self, problem: Failure | AutotuneAmpError, so_far: Measurement | None
    ) -> Measurement | Failure | Job[Measurement]:
        """Return the measurement so far if the evaluation ran out of time; the failure if the process died."""
        failure = as_failure(problem)
        return so_far if so_far is not None and failure.kind == "timeout" else failure

    @property
    def is_confirmation(self) -> bool:
        """Whether the trial represents a whole run: whole accumulation windows, the worst batch first and last."""
        return self.purpose in ("confirm", "plain", "one_rank")

    @property
    def num_timed_micro_batches(self) -> int:
        """Return the number of forward and backward passes in a timed step: the whole window only in a confirmation."""
        window = self.candidate.accumulation_steps
        return window if self.is_confirmation else min(window, MAX_TIMED_MICRO_BATCHES)

    @property
    def num_steps_per_report(self) -> int:
        """Return the number of steps that are timed and reported together."""
        return 1 if self.device == "cpu" else STEPS_PER_SYNC


class FollowerMemory(msgspec.Struct, frozen=True, kw_only=True):
    """Memory of a trial's further rank; fields as in `Measurement`. `has_flushed`: its allocator had to flush its cache
    to make room.
    """

    peak_memory_bytes: int
    reserved_memory_bytes: int
    has_flushed: bool


class FollowerTrial(Trial, frozen=True, kw_only=True):
    """Trial on a rank other than 0: it takes steps until rank 0 has measured enough, and returns its memory."""

    answer: ClassVar[Any] = FollowerMemory
    work: ClassVar[str] = "autotune_amp.trial.worker:follow"


class Check(Job[Fidelity | Calibration | Accumulation], frozen=True, kw_only=True):
    """One check of `candidate`, of the kind `what`: fidelity to fp32, calibration of the loss scale, or whether
    accumulated gradients equal those of the whole batch (in fp32).

    It uses `num_batches` different batches of the candidate's size, or fewer samples if they do not fit into memory.
    `find_pins`: search for modules that make the precision faithful if they run in fp32. Fidelity is checked after
    training the weights in fp32 for `num_steps_before` optimizer steps. The check aims to end within `aim_seconds`,
    with fewer batches if need be.
    """

    answer: ClassVar[Any] = Fidelity | Calibration | Accumulation
    work: ClassVar[str] = "autotune_amp.trial.checks:check"
    builds_first: ClassVar[bool] = True

    what: CheckKind
    candidate: Setting
    find_pins: bool = True
    num_steps_before: int = 0
    aim_seconds: float | None = None
    seed: int = 0
    num_batches: int = 12
    memory_limit_bytes: int | None = None
    hold_heap: bool = False

    def after(
        self, problem: Failure | AutotuneAmpError, so_far: Fidelity | Calibration | Accumulation | None
    ) -> CheckOutcome | Job[Fidelity | Calibration | Accumulation]:
        """Return a check with half the batch size after OOM, else the outcome for the problem.

        If even the smallest batch does not fit, fidelity is unchecked and the other kinds fail. On trained weights
        every failure becomes a verdict, since the verdict on the initial weights exists already.
        """
        if so_far is not None:
            return so_far
        failure = as_failure(problem)
        if failure.kind != "oom":
            if not self.num_steps_before or failure.is_loading:
                return failure
            if failure.kind in PRECISION_FAILURE_KINDS:
                next_step = suggested_fix(failure) or "Use another precision."
                return self._judged("unfaithful", f"{failure.kind}: {failure.message}", next_step)
            return self.unchecked(failure)
        smaller = self.candidate.batch_size // 2
        if smaller >= (MIN_ACCUMULATION_SAMPLES if self.what == "accumulation" else 1):
            return msgspec.structs.replace(self, candidate=msgspec.structs.replace(self.candidate, batch_size=smaller))
        return self.unchecked(failure) if self.what == "fidelity" else failure

    def unchecked(
        self,
        why: Failure | str,
        next_step: str = "Fix the error that the reason names, give more time or memory, or use fp32.",
    ) -> Fidelity:
        """Return the *unchecked* verdict for a check that could not be made, with the reason."""
        if isinstance(why, Failure):
            return self._judged("unchecked", f"{why.kind}: {why.message}", suggested_fix(why) or next_step)
        return self._judged("unchecked", why, next_step)

    def _judged(self, verdict: Verdict, reason: str, next_step: str) -> Fidelity:
        when = after_steps(self.num_steps_before)
        return Fidelity(
            precision=self.candidate.precision,
            batch_size=self.candidate.batch_size,
            verdict=verdict,
            reason=f"{self.candidate.labelled(('precision', 'arguments'))} is {verdict}{when}: {reason.rstrip('.')}.",
            next_step=next_step,
            pinned_modules=self.candidate.pinned_modules,
            num_steps_before=self.num_steps_before,
        )


class ProbeJob(Job[Hardware], frozen=True, kw_only=True):
    """Job that measures the capabilities of the device."""

    answer: ClassVar[Any] = Hardware
    work: ClassVar[str] = "autotune_amp.trial.worker:probe"


class Describe(Job[Description], frozen=True, kw_only=True):
    """Job that builds the workload once and describes it.

    Its data is read if a `baseline_batch_size` is given; a batch size of the data itself takes precedence. `has_tf32`:
    the device has TF32. `is_ranked`: several ranks will train together. `is_batch_free`: other batch sizes will be
    tried even if nothing accumulates.
    """

    answer: ClassVar[Any] = Description
    work: ClassVar[str] = "autotune_amp.trial.worker:describe"

    has_tf32: bool = False
    is_ranked: bool = False
    baseline_batch_size: int | None = None
    is_batch_free: bool = True


class FingerprintJob(Job[Fingerprint], frozen=True, kw_only=True):
    """Job that fingerprints the loaded workload without calling any of its functions."""

    answer: ClassVar[Any] = Fingerprint

    options: dict[str, Any]
    identity: DeviceIdentity

    def run(self, context: Any, tell: Tell) -> Fingerprint:  # noqa: ARG002 - it has no progress to send
        """Return the fingerprint; see `fingerprint.compute`."""
        from autotune_amp.fingerprint import compute_fingerprint

        return compute_fingerprint(context.source, self.options, self.identity, self.torch_state)


def as_failure(problem: Failure | AutotuneAmpError) -> Failure:
    """Return the failure for the problem that ended a job, including a process that could not load the workload."""
    if isinstance(problem, Failure):
        return problem
    return Failure(kind="workload_error", message=problem.message, details=problem.next_step)


# Limits of the warm-up after its first step, set on ten training runs on an H200 and compared with CPUs
# (studies/real_card).
NUM_STEADY_GROUPS, MIN_FALL, MAX_FALLING_SECONDS = 2, 0.02, 0.5
NUM_STEPS_BEFORE_CUT = 5
DEADLINE_SHARE = 0.6
# A trial whose warm-up steps all take this many times `cut_step_seconds` ends at once, as with emulated bf16 or fp16.
HOPELESS_RATIO = 1.6
# A fast GPU takes the least number of steps in tens of ms, too short for its clocks to settle.
MIN_ACCELERATOR_SECONDS = 0.25


def measurement_limit_seconds(budget_seconds: float) -> float:
    """Return the most seconds that a trial may measure in a search with a budget of `budget_seconds`."""
    return min(MEASURE_SECONDS, budget_seconds / NUM_TRIALS_FORESEEN)


def num_warmup_steps(measured: Measurement) -> int:
    """Return the number of warm-up steps of a measured trial, `NUM_WARMUP_STEPS` if it was not recorded."""
    return measured.num_unmeasured_steps or NUM_WARMUP_STEPS


def is_hopeless(spec: Trial, warmup_step_seconds: Sequence[float]) -> bool:
    """Whether the warm-up steps, without the first, are so slow that the trial can be cut."""
    return spec.cut_step_seconds is not None and min(warmup_step_seconds) > HOPELESS_RATIO * spec.cut_step_seconds


def should_continue_warmup(
    group_seconds: Sequence[float],
    *,
    num_steps: int,
    warming_seconds: float,
    limits: tuple[int, int] = (NUM_WARMUP_STEPS, MAX_WARMUP_STEPS),
) -> bool:
    """Return whether to take another warm-up step: until the least number is reached, then while step times fall.

    `group_seconds` are the step seconds of each step after the first, then the mean step seconds of each group of
    steps; `num_steps` counts all steps and `limits` bounds it. Step times fall as long as one of the last
    `NUM_STEADY_GROUPS` groups is faster than all before by more than `MIN_FALL`. `warming_seconds` is the time of all
    steps after the first: from `MAX_FALLING_SECONDS` on the warm-up ends even if times fall, since long steps are
    steady from the third on at the latest. Noise alone costs few groups: the chance that one of the last two of n is
    the fastest is 2 / n.
    """
    before, last = group_seconds[:-NUM_STEADY_GROUPS], group_seconds[-NUM_STEADY_GROUPS:]
    if num_steps < limits[0]:
        return True
    if num_steps >= limits[1] or warming_seconds >= MAX_FALLING_SECONDS:
        return False
    return not before or min(last) < (1 - MIN_FALL) * min(before)


def stop_reason(
    spec: Trial,
    group_seconds: Sequence[float],
    *,
    is_whole: bool,
    is_most: bool,
    measure_seconds: float,
    measuring_seconds: float,
    training_seconds: float,
    num_steps: int,
) -> Literal["cut", "enough"] | None:
    """Return why measuring ends now, or None to measure on.

    `group_seconds` are the mean step seconds of each group of the `num_steps` steps timed so far; `is_whole`: their
    number has reached the minimum, `is_most`: the maximum. Measuring may take `measure_seconds` and took
    `measuring_seconds` so far; `training_seconds` have passed since the first step began.
    """
    # End before the parent's deadline, which would discard all steps.
    is_late = spec.deadline_seconds is not None and training_seconds > DEADLINE_SHARE * spec.deadline_seconds
    is_overdue = is_late or measuring_seconds > measure_seconds
    if spec.device != "cpu" and measuring_seconds < MIN_ACCELERATOR_SECONDS and not is_overdue:
        return None
    cut = spec.cut_step_seconds
    if cut is not None and num_steps >= NUM_STEPS_BEFORE_CUT and median(group_seconds) > cut:
        return "cut"
    return "enough" if is_overdue or is_most or (is_whole and _is_narrow(group_seconds, spec.interval_share)) else None


def _is_narrow(steps: Sequence[float], share: float) -> bool:
    if len(steps) < 2:
        return False
    low, high = trimmed_interval(steps)
    return (high - low) / 2 <= share * (high + low) / 2
