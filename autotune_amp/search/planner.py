"""The planner: what jobs cost on this host, and how much of the time that is left each stage may spend.

A start of a process costs from 0.07 to 60 s, a compilation from 2 to 60, so that no share of a budget is right
everywhere. Costs are what the records show, and before that what the description of the workload foretells. Comparing
comes first: the confirmation's time is kept back only once every precision was measured. After that a job is run where
it may bring enough for its seconds (`Planner.least_gain`).
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from statistics import fmean, median
from typing import Any

from msgspec.structs import replace

from autotune_amp.core.errors import BudgetTooSmallError
from autotune_amp.core.outcome import Failure, Measurement, Record
from autotune_amp.core.setting import Setting
from autotune_amp.core.text import count, duration
from autotune_amp.search import ranking
from autotune_amp.search.conditions import Conditions, is_hopeless
from autotune_amp.search.ledger import Ledger
from autotune_amp.trial.jobs import (
    MAX_TIMED_MICRO_BATCHES,
    Check,
    CheckKind,
    Trial,
    measure_seconds,
    num_warmup_steps,
)

MIN_ROUNDS = 3  # of a confirmation
SAFETY = 1.1  # an estimate of a process's seconds that turns out short must not break the budget
FORESEEN_SECONDS = 2.0  # of a trial, from its first step on, while nothing was measured
NUM_STEPS_FORESEEN = 6, 8  # of a trial: a first step as long as three, and the warm-up; the fewest that are measured
CONFIRM_SECONDS, MAX_CONFIRM_STEPS = 2.0, 400  # what a confirming run measures
# Of the first compilation's seconds, for one that the compiler's cache knows: 1.7 of 6.5 s for a convnet of six blocks.
CACHED_SHARE = 0.3
# Of what the search has taken so far, for each thing that decides nothing: trained weights, other effective batches.
EXTRA_SHARE = 0.15
# What a job has to be expected to bring of the throughput, and for each of its seconds: half and twice as much change
# little (studies/search_efficiency, hosts).
LEAST_GAIN, GAIN_PER_SECOND = 0.002, 5e-4
COMPILE_SECONDS = 5.0  # the first time, at the least: 6.5 s a convnet of six blocks, on 2 cores without AVX-512
# Of the seconds of a start: 2.5 on a CPU, 1.5 to 2 of a Llama on an H200's host (studies/real_card).
COMPILE_STARTS = 2.0
NUM_CHECK_PASSES = 42  # of a check of bf16 against fp32, in real searches
IN_TIME = 0.7  # of a job's deadline, in which it ends by itself, with less looked at
CHECK_SECONDS = 12.0  # that one check aims to take
CHECK_PATIENCE, CHECK_PATIENCE_SECONDS = 10.0, 30.0  # times what a check is foreseen to take, and seconds beyond that

CUT_RATIO = 1.25  # median of five steps against the best: cuts equals 4 % of the time (studies/README.md)
HOPELESS_TIMES = 2.0  # the longest trial so far, for a precision whose matrix products are hopeless
MIN_TRIAL_SECONDS = 0.5
DEADLINE_RATIO = 20.0  # a step so many times longer than the best throughput foretells is not waited for
MIN_STEP_DEADLINE_SECONDS = 2.0  # a busy machine stalls a step for hundreds of milliseconds
# The first step of EfficientNet took 0.7 s in fp32, 7.9 in fp16, 11.9 in channels_last: cuDNN chooses its algorithms.
MIN_FIRST_STEP_DEADLINE_SECONDS = 30.0
METERED_SECONDS, MAX_METERED_STEPS = 1.0, 1000  # an energy counter is updated every 100 ms at worst
WORKER_START_SECONDS = 10.0  # a worker that is not forked imports torch first


class Budget:
    """The seconds that a search may take from the moment it was asked for, on each of `num_slots`."""

    def __init__(self, seconds: float, num_slots: int = 1) -> None:
        self.seconds = seconds
        self.num_slots = num_slots
        self._started = time.monotonic()

    def elapsed(self) -> float:
        """Seconds used."""
        return time.monotonic() - self._started

    def left(self) -> float:
        """Seconds left."""
        return self.seconds - self.elapsed()

    def too_small(self, last_step_seconds: float | None, failure: Failure | None = None) -> BudgetTooSmallError:
        """The error of a budget that ended before anything was measured, with the words of the failure that it ended
        with; twice the shortest trial there is must fit."""
        used_seconds = self.elapsed()
        needed = 2 * used_seconds + 12 * (last_step_seconds or 0.0)
        spent = f"{used_seconds:.0f} s had gone into loading, probing and building the workload and its first trials"
        return BudgetTooSmallError(
            f"The budget of {self.seconds:g} s ended before anything was measured: "
            f"{spent if failure is None else failure.message}.",
            f"Give --budget {math.ceil(needed / 10) * 10} or more.",
        )


class Planner:
    """Says what jobs cost and may take, given the ledger of what was seen; `budget` is the clock.

    How many rounds of a confirmation can be afforded is settled when it is first asked for: after the comparison of
    all precisions.
    """

    def __init__(self, conditions: Conditions, budget: Budget) -> None:
        self.conditions = conditions
        self.budget = budget
        self._num_rounds: int | None = None

    # -- what things cost ----------------------------------------------------------------------------------------------

    def start_seconds(self, ledger: Ledger) -> float:
        """Seconds that a fresh process takes before its first step: as seen in the confirmation, else as foreseen."""
        found = [r for r in ledger.records if r.round is not None and r.start_seconds]
        seen = [_start_seconds(r) for r in found if isinstance(r.outcome, Measurement)]
        of_all = max if self.conditions.loads_together else fmean  # the first waited for what the others take
        return of_all(seen) if seen else self.conditions.start_seconds

    def setup_seconds(self, ledger: Ledger) -> float:
        """Seconds that a trial takes beside its steps: the median of what was seen, else as foreseen."""
        if self.conditions.are_trials_fresh:
            return self.start_seconds(ledger)
        found = []
        for record in ledger.actual.records:
            measured, setting = record.outcome, record.candidate
            if record.purpose == "search" and isinstance(measured, Measurement):
                step_seconds = measured.step_seconds * num_timed_passes(setting) / setting.accumulation_steps
                num_steps = num_warmup_steps(measured) - 1 + measured.num_steps
                found.append(record.seconds - measured.first_step_seconds - num_steps * step_seconds)
        return max(0.0, median(found)) if found else self.conditions.setup_seconds

    @property
    def measure_seconds(self) -> float:
        """Seconds that a trial measures at most."""
        return measure_seconds(self.budget.seconds)

    def trial_seconds(self, ledger: Ledger, step_seconds: float) -> float:
        """Seconds of a trial whose steps take so long."""
        num_unmeasured, num_measured = NUM_STEPS_FORESEEN
        measuring = min(num_measured * step_seconds, self.measure_seconds + step_seconds)
        return self.setup_seconds(ledger) + num_unmeasured * step_seconds + measuring

    def waiting_seconds(self, ledger: Ledger) -> float:
        """Seconds until a process is there for a trial: a failure has ended the one that was kept."""
        records = ledger.actual.records
        is_kept = any(r.start_seconds is not None for r in records)
        has_failed = bool(records) and isinstance(records[-1].outcome, Failure)
        return self.conditions.start_seconds if is_kept and has_failed else 0.0

    def run_seconds(self, ledger: Ledger, setting: Setting) -> float:
        """Seconds of a confirming run from its first step to its ending: as seen, else as the trial foretells."""
        ours = [r for r in ledger.records if r.candidate == setting and r.round is not None]
        # What describing a command has measured already took no time for its record.
        took = [r for r in ours if r.seconds > _start_seconds(r)]
        seen = [r.seconds - _start_seconds(r) - (ending_seconds(r) or 0.0) for r in took]
        if seen:
            return fmean(seen)
        outcome = ledger.outcomes.get(setting)
        if not isinstance(outcome, Measurement):
            return 0.0
        first_step_seconds = outcome.first_step_seconds * (CACHED_SHARE if setting.is_compiled else 1.0)
        if self.conditions.are_trials_fresh:  # whose start ends with it
            first_step_seconds = 0.0
        warm_up = first_step_seconds + num_warmup_steps(outcome) * outcome.step_seconds
        measuring = min(MAX_CONFIRM_STEPS * outcome.step_seconds, CONFIRM_SECONDS + outcome.step_seconds)
        return warm_up + measuring

    def runs_seconds(self, ledger: Ledger, settings: Sequence[Setting], num_starts: int) -> float:
        """Seconds of confirming runs of these settings, with so many starts of a process among them."""
        running = sum(self.run_seconds(ledger, setting) for setting in settings)
        return SAFETY * (num_starts * self.start_seconds(ledger) + running)

    def check_seconds(self, ledger: Ledger) -> float:
        """Seconds of a check against fp32: the longest that was seen, else as many passes as one takes."""
        seen = [r.seconds for r in ledger.actual.records if r.purpose == "fidelity"]
        today = ledger.actual.outcomes.get(ledger.space.baseline)
        if seen:
            return max(seen)
        if not isinstance(today, Measurement):
            return self.conditions.setup_seconds
        passes = NUM_CHECK_PASSES * ledger.space.check_batch_size / today.samples_per_second
        num_processes = 2 if self.conditions.are_trials_fresh else 1  # one in each precision
        return num_processes * self.setup_seconds(ledger) + passes

    def compile_seconds(self, ledger: Ledger) -> float:
        """Seconds of a compilation: the longest that was seen, else some times those of a start."""
        compiled = [m for c, ours in ledger.actual.measurements.items() if c.is_compiled for m in ours]
        foreseen = max(COMPILE_SECONDS, COMPILE_STARTS * self.conditions.start_seconds)
        return max((m.first_step_seconds for m in compiled), default=foreseen)

    def confirmation_seconds(self, ledger: Ledger) -> float:
        """Seconds of the rounds that confirm what would win and what runs today, as far as they can be afforded: all,
        or one, or none."""
        chosen = ledger.actual.shortlist
        if chosen is not None and chosen.winner == chosen.baseline:  # more rounds of it bring nothing
            return min(self._rounds_seconds(ledger, 1), self.budget.left())
        return self._rounds_seconds(ledger, self.num_rounds(ledger))

    def num_rounds(self, ledger: Ledger) -> int:
        """Rounds of a confirmation: all, or one, or none, as could be afforded when it was first asked."""
        num_slots, left = self.budget.num_slots, self.budget.left()
        num_needed = math.ceil(MIN_ROUNDS / num_slots) + (num_slots > 1)
        if self._num_rounds is None and ledger.actual.shortlist is not None:
            shares = (num_needed, 1.0), (1, 0.5)
            affordable = (n for n, share in shares if self._rounds_seconds(ledger, n) <= share * left)
            self._num_rounds = next(affordable, 0)
        found, chosen = self._num_rounds or 0, ledger.actual.shortlist
        return min(found, 1) if chosen is not None and chosen.winner == chosen.baseline else found

    def _rounds_seconds(self, ledger: Ledger, num_rounds: int) -> float:
        """Seconds of so many rounds, without what was run of them."""
        chosen, conditions = ledger.actual.shortlist, self.conditions
        if chosen is None:
            return 0.0
        runs: list[Setting] = []
        num_starts = 0
        for setting, environment in ((chosen.baseline, {}), (chosen.winner, conditions.environment)):
            if setting in runs:  # its recommended variables alone are worth what time is left
                continue
            done = ranking.confirm_runs(ledger.actual.records, setting, environment).num_confirming
            missing = max(0, num_rounds - done)
            runs += [setting] * missing
            num_starts = max(num_starts, missing) if conditions.shares_processes else len(runs)
        return self.runs_seconds(ledger.actual, runs, min(1, num_starts) if conditions.loads_together else num_starts)

    def forecast(self, ledger: Ledger, *, may_fork: bool) -> str:
        """Say what a start costs here, what comparing the precisions and confirming the best will take, in a line.

        `may_fork`: trials are forked, and build their own model.
        """
        conditions, space = self.conditions, ledger.space
        start = conditions.start_seconds
        precisions = {c.precision for c in (*space.candidates, space.baseline)}
        per_trial = start if conditions.are_trials_fresh else conditions.setup_seconds if may_fork else 0.0
        comparing = len(precisions) * (per_trial + FORESEEN_SECONDS)
        num_starts = 1 if conditions.loads_together else MIN_ROUNDS * (1 if conditions.shares_processes else 2)
        confirming = num_starts * start + MIN_ROUNDS * 2 * (CONFIRM_SECONDS + 1)
        return (
            f"A process takes {duration(start)} to start here. Comparing {count(len(precisions), 'precision')} at "
            f"batch {space.baseline.batch_size}: about {duration(comparing)}; then batch sizes and other settings, as "
            f"far as they are worth it; confirming the best: about {duration(confirming)}."
        )

    # -- what each may take --------------------------------------------------------------------------------------------

    def before_confirmation(self, ledger: Ledger) -> float:
        """Seconds left before the confirmation has to begin."""
        return self.budget.left() - self.confirmation_seconds(ledger)

    def to_explore(self, ledger: Ledger) -> float:
        """Seconds left for settings that may lead, which then have to be checked; all while nothing has run."""
        space = ledger.space
        if not any(isinstance(outcome, Measurement) for outcome in ledger.outcomes.values()):
            return self.budget.left()
        is_checked = any(ranking.needs_check(c, space) for c in (*space.candidates, space.baseline))
        return self.before_confirmation(ledger) - (self.check_seconds(ledger) if is_checked else 0.0)

    def least_gain(self, seconds: float) -> float:
        """Return the share of the throughput that a job has to be expected to bring to be worth so many seconds."""
        return max(LEAST_GAIN, GAIN_PER_SECOND * seconds / self.budget.num_slots)

    def extra_seconds(self, left_seconds: float, used_seconds: float) -> float:
        """Seconds of what is left for one thing that decides nothing, which has used so many."""
        return max(0.0, min(left_seconds, EXTRA_SHARE * self.budget.elapsed() - used_seconds))

    def may_try(self, ledger: Ledger, left_seconds: float) -> bool:
        """Say whether the time that is left and the number of trials allow another one before the confirmation."""
        most = self.conditions.max_trials
        if ledger.num_awaited and most is not None:  # they are not for trying the baseline once more
            return False
        num_tried = ledger.num_awaited + sum(r.purpose in ranking.BEFORE_CONFIRMATION for r in ledger.records)
        needed = self.waiting_seconds(ledger) + max(MIN_TRIAL_SECONDS, self.setup_seconds(ledger))
        return left_seconds > needed and (most is None or num_tried < most)

    # -- jobs with their limits ----------------------------------------------------------------------------------------

    def trial(self, ledger: Ledger, setting: Setting, seconds: float) -> Trial:
        """Make a trial with its limits: what the best so far says a step may take, and the `seconds` left."""
        conditions, best = self.conditions, ledger.best
        seconds -= self.waiting_seconds(ledger)  # a job's clock starts when its process is ready
        if best is None:
            # Nothing is known of the step: two thirds of what is left, so that one that hangs leaves time for another.
            seconds = (2 * seconds + min(conditions.setup_seconds, seconds)) / 3
        elif is_hopeless(conditions.hardware, setting.precision):
            spent = sum(r.seconds for r in ledger.records if r.candidate.precision == setting.precision)
            longest = max(r.seconds for r in ledger.records if isinstance(r.outcome, Measurement))
            seconds = min(seconds, HOPELESS_TIMES * longest - spent)
        if setting.is_compiled:  # whose seconds nobody knows
            seconds = min(seconds, self.budget.left() / 2)
        limits: dict[str, Any] = {"measure_seconds": self.measure_seconds}
        needs_energy = ledger.objective == "energy"
        if needs_energy:  # as long as a counter needs, however steady or slow the steps are
            limits["measure_seconds"] = min(METERED_SECONDS, limits["measure_seconds"])
            limits["num_steps"] = (MAX_METERED_STEPS, MAX_METERED_STEPS)
        if conditions.are_trials_fresh:
            limits["round"] = sum(r.candidate == setting and r.round is not None for r in ledger.records)
        trial = conditions.trial(ledger, setting, deadline_seconds=max(MIN_TRIAL_SECONDS, seconds), **limits)
        if best is None:
            return trial
        assert isinstance(best.outcome, Measurement)
        rate = best.outcome.samples_per_second / conditions.description.num_ranks
        first_step_seconds = best.outcome.first_step_seconds
        reported = setting.batch_size * trial.num_timed_micro_batches * trial.num_steps_per_report
        step_deadline = max(MIN_STEP_DEADLINE_SECONDS, DEADLINE_RATIO * reported / rate)
        if setting.num_workers or conditions.description.num_workers:  # unless they persist, every epoch starts anew
            step_deadline += first_step_seconds + (WORKER_START_SECONDS if setting.num_workers else 0.0)
        growth = max(1.0, setting.batch_size / best.candidate.batch_size)
        return replace(
            trial,
            cut_step_seconds=None if needs_energy else CUT_RATIO * setting.effective_batch_size / rate,
            step_deadline_seconds=step_deadline,
            first_step_deadline_seconds=max(
                MIN_FIRST_STEP_DEADLINE_SECONDS, step_deadline + 3 * growth * first_step_seconds
            ),
        )

    def check(self, ledger: Ledger, what: CheckKind, setting: Setting) -> Check:
        """Make a check of `setting`, which may never end: within some times what it is foreseen to take, and half of
        what is left at the most, or all that the confirmation leaves."""
        most = max(self.before_confirmation(ledger), self.budget.left() / 2) - self.waiting_seconds(ledger)
        patience = CHECK_PATIENCE * self.check_seconds(ledger) + CHECK_PATIENCE_SECONDS
        seconds = max(MIN_TRIAL_SECONDS, min(most, patience))
        return replace(self.conditions.check(what, setting, seconds), aim_seconds=min(CHECK_SECONDS, IN_TIME * seconds))

    def accumulation_check(self, ledger: Ledger) -> Check:
        """Make the check of whether accumulated gradients equal those of the whole batch."""
        batch_size = min(ledger.space.check_batch_size, ledger.space.baseline.effective_batch_size)
        return self.check(ledger, "accumulation", Setting(precision="fp32", batch_size=batch_size))


def num_timed_passes(setting: Setting) -> int:
    """Return the forward and backward passes that a trial of the search times for a step."""
    return min(setting.accumulation_steps, MAX_TIMED_MICRO_BATCHES)


def ending_seconds(record: Record) -> float | None:
    """Return what evaluation and checkpoint took, None where the process did not come as far."""
    return record.outcome.ending_seconds if isinstance(record.outcome, Measurement) else None


def _start_seconds(record: Record) -> float:
    """Return the seconds that a record's process took before its first step; a kept one took none for this record."""
    found = record.outcome
    is_kept = record.start_seconds == 0.0
    own = found.build_seconds + found.context_seconds if isinstance(found, Measurement) and not is_kept else 0.0
    return (record.start_seconds or 0.0) + own
