"""Planner: predicted seconds of jobs on this host, and the time that each stage of a search may use.

A process start takes from 0.07 to 60 s, a compilation from 2 to 60, so no fixed share of a budget is right everywhere.
Costs are taken from the records or, before there are any, from the description of the workload. Precisions are
compared first: time for the confirmation is reserved only once every precision was measured. After that a job runs if
its expected gain justifies its seconds (`Planner.min_gain`).
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from statistics import fmean, median
from typing import Any

import msgspec
from msgspec.structs import replace

from autotune_amp.core.errors import BudgetTooSmallError
from autotune_amp.core.hardware import Hardware
from autotune_amp.core.outcome import Description, Failure, Measurement, Record
from autotune_amp.core.setting import Setting
from autotune_amp.core.text import count, duration
from autotune_amp.dimensions import DIMENSIONS
from autotune_amp.precision.modes import MODES
from autotune_amp.search import ranking
from autotune_amp.search.ledger import LOSS_SCALE, Ledger, Shortlist
from autotune_amp.search.space import Space, is_hopelessly_slow
from autotune_amp.trial.jobs import (
    MAX_TIMED_MICRO_BATCHES,
    Check,
    CheckKind,
    Trial,
    measurement_limit_seconds,
    num_warmup_steps,
)

MIN_ROUNDS = 3  # fewest rounds of a confirmation that is not short of time
SAFETY = 1.1  # factor on the predicted seconds of processes, since too low an estimate would break the budget
FORESEEN_SECONDS = 2.0  # predicted seconds of a trial from its first step on, before anything was measured
# Predicted steps of a trial: unmeasured ones (a first step as long as three, and the warm-up), and the fewest measured.
NUM_STEPS_FORESEEN = 6, 8
CONFIRM_SECONDS, MAX_CONFIRM_STEPS = 2.0, 400  # limits of the measurement of a confirmation run
# Share of the first compilation's seconds when the compiler's cache is warm: 1.7 of 6.5 s for a convnet of six blocks.
CACHED_SHARE = 0.3
# Share of the elapsed time for each job that does not change the recommendation: checks on trained weights, other
# effective batch sizes.
EXTRA_SHARE = 0.15
# Least expected relative gain in throughput of a job: in total, and per second of it. Halving or doubling them changes
# little (studies/search_efficiency, hosts).
MIN_JOB_GAIN, MIN_GAIN_PER_SECOND = 0.002, 5e-4
# Seconds of a compilation as a multiple of a process start: 2.5 on a CPU, 1.5 to 2 for a Llama on an H200's host
# (studies/real_card).
COMPILE_STARTS = 2.0
NUM_CHECK_PASSES = 42  # forward and backward passes of a check of bf16 against fp32, counted in real searches
IN_TIME = 0.7  # share of its deadline after which a job ends by itself, with fewer samples
CHECK_SECONDS = 12.0  # target duration of one check
CHECK_PATIENCE, CHECK_PATIENCE_SECONDS = 10.0, 30.0  # deadline of a check: factor on its predicted seconds, plus this

# A trial is cut short if the median of five steps is this many times the best: equally fast settings are cut 4 % of the
# time (studies/README.md).
CUT_RATIO = 1.25
HOPELESS_TIMES = 2.0  # limit for a precision with hopelessly slow matrix products, in longest trials so far
MIN_TRIAL_SECONDS = 0.5
DEADLINE_RATIO = 20.0  # deadline of a step, as a multiple of the time that the best throughput predicts
MIN_STEP_DEADLINE_SECONDS = 2.0  # a busy machine stalls a step for hundreds of milliseconds
# The first step of EfficientNet took 0.7 s in fp32, 7.9 in fp16, 11.9 in channels_last: cuDNN chooses its algorithms.
MIN_FIRST_STEP_DEADLINE_SECONDS = 30.0
METERED_SECONDS, MAX_METERED_STEPS = 1.0, 1000  # an energy counter is updated every 100 ms at worst
WORKER_START_SECONDS = 10.0  # a worker that is not forked imports torch first


class Budget:
    """Clock of a search: the seconds that it may take from the moment it was requested, on each of `num_slots`."""

    def __init__(self, seconds: float, num_slots: int = 1) -> None:
        self.seconds = seconds
        self.num_slots = num_slots
        self._started = time.monotonic()

    def elapsed(self) -> float:
        """Return the seconds used."""
        return time.monotonic() - self._started

    def left(self) -> float:
        """Return the seconds left, negative once the budget is exceeded."""
        return self.seconds - self.elapsed()

    def too_small_error(self, last_step_seconds: float | None, failure: Failure | None = None) -> BudgetTooSmallError:
        """Return the error for a budget that ended before anything was measured.

        It contains the message of the `failure` that ended the search, and suggests twice the time of the shortest
        possible search.
        """
        used_seconds = self.elapsed()
        needed = 2 * used_seconds + 12 * (last_step_seconds or 0.0)
        reason = f"loading, probing and building the workload and its first trials took {used_seconds:.0f} s"
        return BudgetTooSmallError(
            f"The budget of {self.seconds:g} s ended before anything was measured: "
            f"{reason if failure is None else failure.message}.",
            f"Give --budget {math.ceil(needed / 10) * 10} or more.",
        )


class JobDefaults(msgspec.Struct, frozen=True, kw_only=True):
    """Constants of one search: the fields that its trials and checks have in common, and facts to plan them with.

    `description` describes the workload. `memory_limit_bytes` limits each process's use of the device's memory.
    `torch_state` is the caller's global state of torch, such as its flags, which each job restores. `environment` holds
    the environment variables that are recommended for the training run; there are some only for a CPU, where they make
    malloc keep freed memory. `ready_seconds` is the time from starting a process until it has imported the workload.

    `max_trials` limits the whole search, None for no limit. `similar_best` is the best setting of an earlier search for
    the same code with other options, or None. `are_trials_fresh`: each trial starts a process of its own, since the
    workload is a training command; so it counts as one of the runs that confirm the winner against the baseline in
    rounds. `loads_together`: the processes for these rounds are started together and load at the same time.
    `num_together`: how many processes of fresh trials may load at the same time.
    """

    hardware: Hardware
    description: Description
    memory_limit_bytes: int
    torch_state: dict[str, Any] = {}
    environment: dict[str, str] = {}
    seed: int = 0
    ready_seconds: float = 0.0
    max_trials: int | None = None
    similar_best: Setting | None = None
    are_trials_fresh: bool = False
    loads_together: bool = False
    num_together: int = 1

    @property
    def setup_seconds(self) -> float:
        """Return the seconds in which a trial starts the accelerator and builds model, data and optimizer."""
        return self.description.build_seconds + self.description.context_seconds

    @property
    def start_seconds(self) -> float:
        """Return the predicted seconds from starting a fresh process to its first step."""
        return self.ready_seconds + self.setup_seconds

    @property
    def shares_processes(self) -> bool:
        """Whether the runs of a confirmation round share a process.

        Runs of a training command do not, nor runs on a CPU, where memory freed by earlier runs affects the
        measurement. On an accelerator the allocator's cache is emptied between runs, and there is no `environment` that
        only a new process could get.
        """
        return self.hardware.device != "cpu" and not self.are_trials_fresh

    def num_starts(self, num_runs: int) -> float:
        """Return the number of process starts that runs of one confirmation round take.

        Runs that load together share one, so it may be a fraction.
        """
        return min(1, num_runs) if self.shares_processes else num_runs / self.num_together

    @property
    def num_cpus(self) -> int:
        """Return the number of CPU cores for each rank, at least one."""
        return max(1, self.hardware.identity.num_cpus // self.description.num_ranks)

    def trial(self, ledger: Ledger, setting: Setting, **fields: Any) -> Trial:
        """Return a trial of `setting`; `fields` are further fields of `Trial`.

        They may override `hold_heap`, `num_ranks`, `has_unused_parameters` and `loss_scale`, but no other field that is
        set here. fp16 has the default loss scale, unless `fields` has a calibrated one. `ledger` knows whether the loss
        is a sum over samples. The largest samples make up the worst batch, whose memory is measured.
        """
        sizes = self.description.sample_sizes
        values: dict[str, Any] = {
            "hold_heap": bool(self.environment),
            "num_ranks": self.description.num_ranks,
            "has_unused_parameters": self.description.has_unused_parameters,
            "loss_scale": LOSS_SCALE if MODES[setting.precision].takes_scaler else None,
        }
        return Trial(
            candidate=setting,
            device=self.hardware.device,
            seed=self.seed,
            memory_limit_bytes=self.memory_limit_bytes,
            torch_state=self.torch_state,
            worst_samples=() if sizes is None else sizes.largest[: setting.batch_size],
            is_loss_sum=ledger.is_loss_sum,
            **(values | fields),
        )

    def check(self, what: CheckKind, setting: Setting, seconds: float) -> Check:
        """Return a check of the kind `what` for `setting`, with a deadline of `seconds`, 0 if they are negative.

        It runs with the setting's pinned modules in fp32. If there are none, a fidelity check that finds harm searches
        for modules to pin.
        """
        return Check(
            what=what,
            candidate=setting,
            device=self.hardware.device,
            find_pins=not setting.pinned_modules,
            seed=self.seed,
            deadline_seconds=max(0.0, seconds),
            memory_limit_bytes=self.memory_limit_bytes,
            torch_state=self.torch_state,
            hold_heap=bool(self.environment),
        )


class Planner:
    """Planner of jobs: predicts their seconds from the ledger and limits them to the `budget`.

    The number of affordable confirmation rounds is fixed at the first call, after all precisions were compared, and so
    is the environment of the confirmation.
    """

    def __init__(self, job_defaults: JobDefaults, budget: Budget) -> None:
        self.job_defaults = job_defaults
        self.budget = budget
        self._num_rounds: int | None = None
        self._confirming_environment: dict[str, str] | None = None

    # -- costs of jobs -------------------------------------------------------------------------------------------------

    def start_seconds(self, ledger: Ledger) -> float:
        """Return the seconds from a process start to its first step: measured in the confirmation, else predicted."""
        records = [r for r in ledger.records if r.round is not None and r.start_seconds]
        measured_seconds = [_start_seconds(r) for r in records if isinstance(r.outcome, Measurement)]
        combine = max if self.job_defaults.loads_together else fmean  # the first one waits for the others
        return combine(measured_seconds) if measured_seconds else self.job_defaults.start_seconds

    def setup_seconds(self, ledger: Ledger) -> float:
        """Return the seconds that a trial takes in addition to its steps: the measured median, else predicted."""
        if self.job_defaults.are_trials_fresh:
            return self.start_seconds(ledger)
        seconds = []
        for record in ledger.actual.records:
            measured, setting = record.outcome, record.candidate
            if record.purpose == "search" and isinstance(measured, Measurement):
                step_seconds = measured.step_seconds * num_timed_passes(setting) / setting.accumulation_steps
                num_steps = num_warmup_steps(measured) - 1 + measured.num_steps
                seconds.append(record.seconds - measured.first_step_seconds - num_steps * step_seconds)
        return max(0.0, median(seconds)) if seconds else self.job_defaults.setup_seconds

    def trial_seconds(self, ledger: Ledger, setting: Setting, step_seconds: float) -> float:
        """Return the predicted seconds of a trial of `setting`, whose steps take `step_seconds`, with compilation."""
        compiling = 0.0
        if setting.is_compiled:
            compile_times = [m.first_step_seconds for m in ledger.measurements.get(setting, ())]
            compiling = max(compile_times, default=self.compile_seconds(ledger))
        num_unmeasured, num_measured = NUM_STEPS_FORESEEN
        measuring = min(num_measured * step_seconds, measurement_limit_seconds(self.budget.seconds) + step_seconds)
        return compiling + (self.setup_seconds(ledger) + num_unmeasured * step_seconds + measuring)

    def waiting_seconds(self, ledger: Ledger) -> float:
        """Return the seconds to start a process for a trial if a failure ended the one kept for trials; else 0."""
        records = ledger.actual.records
        is_kept = any(r.start_seconds is not None for r in records)
        has_failed = bool(records) and isinstance(records[-1].outcome, Failure)
        return self.job_defaults.start_seconds if is_kept and has_failed else 0.0

    def run_seconds(self, ledger: Ledger, setting: Setting) -> float:
        """Return the seconds of a confirmation run from its first step on: measured, else predicted from the trial."""
        records = [r for r in ledger.records if r.candidate == setting and r.round is not None]
        # A run that was measured already while describing a command has a record without time.
        timed_records = [r for r in records if r.seconds > _start_seconds(r)]
        seconds = [r.seconds - _start_seconds(r) - (ending_seconds(r) or 0.0) for r in timed_records]
        if self.job_defaults.num_together > 1:  # the seconds of one record may have the start of several in them
            outcomes = [r.outcome for r in records if isinstance(r.outcome, Measurement)]
            seconds = [m.num_steps_taken * m.step_seconds for m in outcomes if m.num_steps_taken]
        if seconds:
            return fmean(seconds)
        outcome = ledger.outcomes.get(setting)
        if not isinstance(outcome, Measurement):
            return 0.0
        first_step_seconds = outcome.first_step_seconds * (CACHED_SHARE if setting.is_compiled else 1.0)
        if self.job_defaults.are_trials_fresh:  # the start of a command includes its first step
            first_step_seconds = 0.0
        warm_up = first_step_seconds + num_warmup_steps(outcome) * outcome.step_seconds
        measuring = min(MAX_CONFIRM_STEPS * outcome.step_seconds, CONFIRM_SECONDS + outcome.step_seconds)
        return warm_up + measuring

    def runs_seconds(self, ledger: Ledger, settings: Sequence[Setting], num_starts: float) -> float:
        """Return the seconds of confirmation runs of these settings, including `num_starts` process starts."""
        running = sum(self.run_seconds(ledger, setting) for setting in settings)
        return SAFETY * (num_starts * self.start_seconds(ledger) + running)

    def check_seconds(self, ledger: Ledger) -> float:
        """Return the seconds of a check against fp32: the longest so far, else predicted from its number of passes."""
        seconds = [r.seconds for r in ledger.actual.records if r.purpose == "fidelity"]
        baseline_outcome = ledger.actual.outcomes.get(ledger.space.baseline)
        if seconds:
            return max(seconds)
        if not isinstance(baseline_outcome, Measurement):
            return self.job_defaults.setup_seconds
        # One rank checks, and samples per second are those of all.
        seconds_per_sample = baseline_outcome.step_seconds / ledger.space.baseline.effective_batch_size
        passes = NUM_CHECK_PASSES * ledger.space.check_batch_size * seconds_per_sample
        num_starts = 2 if self.job_defaults.are_trials_fresh and self.job_defaults.num_together == 1 else 1
        return num_starts * self.setup_seconds(ledger) + passes

    def compile_seconds(self, ledger: Ledger) -> float:
        """Return the seconds of a compilation: the longest so far, else a multiple of a process start."""
        measurements = [m for c, outcomes in ledger.actual.measurements.items() if c.is_compiled for m in outcomes]
        min_seconds = max(dimension.extra_seconds for dimension in DIMENSIONS)
        predicted_seconds = max(min_seconds, COMPILE_STARTS * self.job_defaults.start_seconds)
        return max((m.first_step_seconds for m in measurements), default=predicted_seconds)

    def confirmation_seconds(self, ledger: Ledger) -> float:
        """Return the seconds of the confirmation rounds of winner and baseline that fit in the budget."""
        shortlist = ledger.actual.shortlist
        if shortlist is not None and shortlist.winner == shortlist.baseline:  # more rounds of it alone decide nothing
            return min(self._rounds_seconds(ledger, 1), self.budget.left())
        return self._rounds_seconds(ledger, self.num_rounds(ledger))

    def confirming_environment(self, ledger: Ledger) -> dict[str, str]:
        """Return the environment variables for the confirmation's contenders: the recommended ones where they are worth
        their runs. Once the confirmation has run, its environment stays.
        """
        shortlist = ledger.final_shortlist
        if shortlist is None:
            return self.job_defaults.environment
        if self._confirming_environment is None:
            is_worth = self._is_environment_worth(ledger, shortlist)
            self._confirming_environment = self.job_defaults.environment if is_worth else {}
        return self._confirming_environment

    def _is_environment_worth(self, ledger: Ledger, shortlist: Shortlist) -> bool:
        """Whether to confirm the contenders in the recommended environment variables.

        If the winner is the baseline, the variables must be able to gain what their runs cost. A command's trials have
        measured the contenders in the user's own environment already, and count as confirmation runs there: unless
        `MIN_ROUNDS` runs in the recommended one fit, the runs that do are added to those.
        """
        winner, recommended = shortlist.winner, self.job_defaults.environment
        confirmed_in = [r.environment for r in ledger.records if r.purpose == "confirm" and r.candidate == winner]
        if winner == shortlist.baseline:
            if recommended in confirmed_in or not ledger.is_by_throughput:
                return True
            seconds = self.runs_seconds(ledger, [winner], self.job_defaults.num_starts(1))
            return self.min_gain(MIN_ROUNDS * seconds) < ranking.MIN_GAIN
        if not self.job_defaults.are_trials_fresh:
            return True
        if confirmed_in:
            return confirmed_in[-1] == recommended
        return self._rounds_seconds(ledger, MIN_ROUNDS) <= self.budget.left()

    def num_rounds(self, ledger: Ledger) -> int:
        """Return the number of confirmation rounds that fitted in half of the time at the first call: `MIN_ROUNDS`, 1
        or 0. The other half is for the search: what it finds is worth more than a third run of what it knows.
        """
        if self._num_rounds is None and ledger.actual.shortlist is not None:
            half_seconds = self.budget.left() / 2
            affordable = (n for n in (MIN_ROUNDS, 1) if self._rounds_seconds(ledger, n) <= half_seconds)
            self._num_rounds = next(affordable, 0)
        num_rounds, shortlist = self._num_rounds or 0, ledger.actual.shortlist
        return min(num_rounds, 1) if shortlist is not None and shortlist.winner == shortlist.baseline else num_rounds

    def _rounds_seconds(self, ledger: Ledger, num_rounds: int) -> float:
        """Return the seconds of `num_rounds` confirmation rounds, less the runs that are in the ledger already."""
        shortlist, job_defaults = ledger.actual.shortlist, self.job_defaults
        if shortlist is None:
            return 0.0
        runs: list[Setting] = []
        num_starts = 0
        for setting, environment in ((shortlist.baseline, {}), (shortlist.winner, job_defaults.environment)):
            if setting in runs:  # the winner is the baseline: its run with the recommended variables is optional
                continue
            num_done = ranking.confirm_runs(ledger.actual.records, setting, environment).num_confirming
            num_missing = max(0, num_rounds - num_done)
            runs += [setting] * num_missing
            num_starts = max(num_starts, num_missing) if job_defaults.shares_processes else len(runs)
        if job_defaults.loads_together:
            num_starts = min(1, num_starts)
        return self.runs_seconds(ledger.actual, runs, math.ceil(num_starts / job_defaults.num_together))

    def forecast(self, ledger: Ledger, *, may_fork: bool) -> str:
        """Return sentences that predict the time of a process start, of comparing precisions, and of confirming, and
        the number of starts of a command.

        `may_fork`: trials run in forked processes, each of which builds its own model.
        """
        job_defaults, space = self.job_defaults, ledger.space
        start = job_defaults.start_seconds
        precisions = {c.precision for c in (*space.candidates, space.baseline)}
        num_together = job_defaults.num_together
        num_starts = math.ceil(len(precisions) / num_together)
        starting = num_starts * start if job_defaults.are_trials_fresh else 0.0
        building = len(precisions) * job_defaults.setup_seconds if may_fork and not starting else 0.0
        comparing = starting + building + len(precisions) * FORESEEN_SECONDS
        num_starts = 1 if job_defaults.loads_together else MIN_ROUNDS * (1 if job_defaults.shares_processes else 2)
        confirming = math.ceil(num_starts / num_together) * start + MIN_ROUNDS * 2 * (CONFIRM_SECONDS + 1)
        forecast = (
            f"A process takes {duration(start)} to start here. Comparing {count(len(precisions), 'precision')} at "
            f"batch {space.baseline.batch_size}: about {duration(comparing)}; then batch sizes and other settings, as "
            f"far as they are worth it; confirming the best: about {duration(confirming)}."
        )
        if not job_defaults.are_trials_fresh:
            return forecast
        num_values = sum(map(len, space.variants.values()))
        num_checking = 2 * _has_checks(space)  # in each precision
        num_starts = len(precisions) + num_values + num_checking + 2 * (MIN_ROUNDS - 1)  # a trial counts as a round
        seconds = num_starts * (start / num_together + FORESEEN_SECONDS)
        at_a_time = "" if num_together == 1 else f", of which up to {num_together} load at the same time"
        return (
            f"{forecast} That is {count(num_starts, 'start')} of the command{at_a_time}, about {duration(seconds)}, "
            "and one for each other batch size."
        )

    # -- shares of the time --------------------------------------------------------------------------------------------

    def seconds_before_confirmation(self, ledger: Ledger) -> float:
        """Return the seconds left before the confirmation has to begin, negative if it should have begun."""
        return self.budget.left() - self.confirmation_seconds(ledger)

    def exploration_seconds(self, ledger: Ledger) -> float:
        """Return the seconds left for trials before the winner's check; all that is left before any measurement."""
        space = ledger.space
        if not any(isinstance(outcome, Measurement) for outcome in ledger.outcomes.values()):
            return self.budget.left()
        return self.seconds_before_confirmation(ledger) - (self.check_seconds(ledger) if _has_checks(space) else 0.0)

    def min_gain(self, seconds: float) -> float:
        """Return the least expected relative gain in throughput that justifies a job of `seconds`."""
        return max(MIN_JOB_GAIN, MIN_GAIN_PER_SECOND * seconds / self.budget.num_slots)

    def extra_seconds(self, left_seconds: float, used_seconds: float) -> float:
        """Return the seconds left for a kind of job that does not change the recommendation, after `used_seconds`."""
        return max(0.0, min(left_seconds, EXTRA_SHARE * self.budget.elapsed() - used_seconds))

    def has_time_for_trial(self, ledger: Ledger, left_seconds: float) -> bool:
        """Whether the remaining time and `max_trials` allow another trial before the confirmation."""
        max_trials = self.job_defaults.max_trials
        if ledger.num_awaited and max_trials is not None:  # do not repeat the baseline with limited trials
            return False
        num_tried = ledger.num_awaited + sum(r.purpose in ranking.BEFORE_CONFIRMATION for r in ledger.records)
        needed = self.waiting_seconds(ledger) + max(MIN_TRIAL_SECONDS, self.setup_seconds(ledger))
        return left_seconds > needed and (max_trials is None or num_tried < max_trials)

    # -- jobs with their limits ----------------------------------------------------------------------------------------

    def trial(self, ledger: Ledger, setting: Setting, seconds: float) -> Trial:
        """Return a trial that ends within `seconds`, with a step deadline from the best throughput so far."""
        job_defaults, best = self.job_defaults, ledger.best
        seconds -= self.waiting_seconds(ledger)  # a job's clock starts when its process is ready
        if best is None:
            # The step time is unknown: use two thirds of the rest, so that a trial that hangs leaves time for another.
            seconds = (2 * seconds + min(job_defaults.setup_seconds, seconds)) / 3
        elif is_hopelessly_slow(job_defaults.hardware, setting.precision) and not any(
            r.candidate.precision == setting.precision and isinstance(r.outcome, Measurement) for r in ledger.records
        ):  # once its speed is measured, that counts and no longer what its matrix products let expect
            used_seconds = sum(r.seconds for r in ledger.records if r.candidate.precision == setting.precision)
            measured = [(r.seconds, r.outcome) for r in ledger.records if isinstance(r.outcome, Measurement)]
            # The steps that described a command are a record too, but were taken before it began.
            longest_seconds = max(
                max(seconds, m.first_step_seconds + m.num_steps_taken * m.step_seconds) for seconds, m in measured
            )
            seconds = min(seconds, HOPELESS_TIMES * longest_seconds - used_seconds)
        if setting.is_compiled:  # compilation time is unknown
            seconds = min(seconds, self.budget.left() / 2)
        limits: dict[str, Any] = {"measure_seconds": measurement_limit_seconds(self.budget.seconds)}
        needs_energy = ledger.objective == "energy"
        if needs_energy:  # measure as long as a counter needs, however steady or slow the steps are
            limits["measure_seconds"] = min(METERED_SECONDS, limits["measure_seconds"])
            limits["num_steps"] = (MAX_METERED_STEPS, MAX_METERED_STEPS)
        if job_defaults.are_trials_fresh:
            limits["round"] = sum(r.candidate == setting and r.round is not None for r in ledger.records)
        trial = job_defaults.trial(ledger, setting, deadline_seconds=max(MIN_TRIAL_SECONDS, seconds), **limits)
        if best is None:
            return trial
        assert isinstance(best.outcome, Measurement)
        samples_per_second = best.outcome.samples_per_second / job_defaults.description.num_batches
        first_step_seconds = best.outcome.first_step_seconds
        num_reported_samples = setting.batch_size * trial.num_timed_micro_batches * trial.num_steps_per_report
        step_deadline = max(MIN_STEP_DEADLINE_SECONDS, DEADLINE_RATIO * num_reported_samples / samples_per_second)
        if setting.num_workers or job_defaults.description.num_workers:  # workers may start anew every epoch
            step_deadline += first_step_seconds + (WORKER_START_SECONDS if setting.num_workers else 0.0)
        growth = max(1.0, setting.batch_size / best.candidate.batch_size)
        return replace(
            trial,
            # A sample may hold more tokens in another setting, and then its step is longer but not slower.
            cut_step_seconds=None
            if ledger.objective in ("energy", "tokens") or setting.arguments
            else CUT_RATIO * setting.effective_batch_size / samples_per_second,
            step_deadline_seconds=step_deadline,
            first_step_deadline_seconds=max(
                MIN_FIRST_STEP_DEADLINE_SECONDS, step_deadline + 3 * growth * first_step_seconds
            ),
        )

    def check(self, ledger: Ledger, what: CheckKind, setting: Setting) -> Check:
        """Return a check of `setting` with a deadline, since a check may hang.

        The deadline is `CHECK_PATIENCE` times the predicted seconds plus `CHECK_PATIENCE_SECONDS`, but no more than the
        time before the confirmation or half of the remaining budget, whichever is longer.
        """
        left_seconds = max(self.seconds_before_confirmation(ledger), self.budget.left() / 2)
        patient_seconds = CHECK_PATIENCE * self.check_seconds(ledger) + CHECK_PATIENCE_SECONDS
        seconds = max(MIN_TRIAL_SECONDS, min(left_seconds - self.waiting_seconds(ledger), patient_seconds))
        check = self.job_defaults.check(what, setting, seconds)
        return replace(check, aim_seconds=min(CHECK_SECONDS, IN_TIME * seconds))

    def accumulation_check(self, ledger: Ledger) -> Check:
        """Return the check of whether accumulated gradients equal those of the whole batch."""
        batch_size = min(ledger.space.check_batch_size, ledger.space.baseline.effective_batch_size)
        return self.check(ledger, "accumulation", Setting(precision="fp32", batch_size=batch_size))


def _has_checks(space: Space) -> bool:
    """Whether any setting to try needs a fidelity check, with arguments of a command or without."""
    affects_numerics = any(not name.startswith("!") and space.variants.get(name) for name in space.argument_values)
    return affects_numerics or any(ranking.needs_check(c, space) for c in (*space.candidates, space.baseline))


def num_timed_passes(setting: Setting) -> int:
    """Return the number of forward and backward passes of a step that a search's trial times."""
    return min(setting.accumulation_steps, MAX_TIMED_MICRO_BATCHES)


def ending_seconds(record: Record) -> float | None:
    """Return the seconds of the evaluation and checkpoint, or None if the process did not run them."""
    return record.outcome.ending_seconds if isinstance(record.outcome, Measurement) else None


def _start_seconds(record: Record) -> float:
    """Return the seconds from a record's process start to its first step; 0 for a process kept from an earlier job."""
    outcome, seconds = record.outcome, record.start_seconds or 0.0
    if record.start_seconds == 0.0 or not isinstance(outcome, Measurement):
        return seconds
    return seconds + outcome.build_seconds + outcome.context_seconds
