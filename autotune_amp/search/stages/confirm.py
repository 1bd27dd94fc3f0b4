"""Stages that measure winner, runner-up and baseline again, interleaved, in fresh processes, and then larger effective
batch sizes, which are only reported.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from msgspec.structs import replace

from autotune_amp.core.outcome import Description, Failure, Measurement, Purpose, Record
from autotune_amp.core.setting import Setting
from autotune_amp.search.gains import gain_and_rounds_to_settle
from autotune_amp.search.ledger import Ledger, Shortlist
from autotune_amp.search.planner import (
    CONFIRM_SECONDS,
    MAX_CONFIRM_STEPS,
    MIN_ROUNDS,
    NUM_STEPS_FORESEEN,
    SAFETY,
    JobDefaults,
    Planner,
    ending_seconds,
)
from autotune_amp.search.ranking import MIN_GAIN, SPEED_ERROR, UNDECIDED_TIER, is_confirming
from autotune_amp.search.space import HOPELESS_SLOWDOWN, SEARCH_UP
from autotune_amp.search.stages import Stage
from autotune_amp.trial.jobs import Trial

MAX_ROUNDS = 20  # more than `MIN_ROUNDS` run only while a contender may or may not be faster than the baseline
ENDING_SHARE = 0.1  # share of the budget for the workload's evaluation and checkpoint, which end a training run


class ConfirmationRun(NamedTuple):
    """Measurement of one setting within a confirmation round. An empty `environment` is the user's own."""

    setting: Setting
    purpose: Purpose
    environment: dict[str, str]


class ConfirmationRounds(Stage):
    """Stage that runs the confirmation rounds, one run at a time.

    It runs at least `MIN_ROUNDS`, and more while it is undecided whether a contender is faster than the baseline. The
    contenders run in the recommended `environment`, the baseline in the user's own. A failed setting is not run again,
    and the next run has to start another process. The workload's evaluation and checkpoint are run once for each
    setting in its environment. If the slot of a round is lost, the whole round runs on another one. A resumed search
    runs those rounds wholly that lack a run, since the machine may be faster or slower by then.
    """

    is_exclusive = True

    def __init__(self, shortlist: Shortlist, environment: dict[str, str]) -> None:
        self._contenders = shortlist
        self._environment = environment
        self._rounds_left = list(range(MAX_ROUNDS))
        self._num_rounds_started = 0
        self._round = 0
        self._planned_runs: list[ConfirmationRun] = []  # of this round
        self._is_process_running = False  # whether the process that the runs of this round share is running
        self._loaded_runs: list[tuple[int, ConfirmationRun]] = []  # with their rounds: processes that wait to train

    def next(self, ledger: Ledger, planner: Planner) -> Trial | None:
        """Return the next confirmation run, or None once the time or the rounds are used up."""
        job_defaults = planner.job_defaults
        has_failed = bool(ledger.records) and isinstance(ledger.records[-1].outcome, Failure)
        if has_failed or job_defaults.num_together < len(self._loaded_runs):
            self._loaded_runs = []  # what waited was ended
        if not self._num_rounds_started:
            if not is_runner_up_worth(ledger, planner, self._contenders):
                self._contenders = self._contenders._replace(runner_up=None)
        elif job_defaults.shares_processes:
            records_of_round = [r for r in ledger.records if (r.round, r.session) == (self._round, ledger.session)]
            self._is_process_running = bool(records_of_round) and isinstance(records_of_round[-1].outcome, Measurement)
        while not (to_run := self._missing_runs(ledger)):
            if not self._rounds_left or (self._rounds_left[0] >= MIN_ROUNDS and self._should_stop(ledger, planner)):
                return None
            self._round, self._is_process_running = self._rounds_left.pop(0), False
            self._planned_runs = [
                run for run in self._plan_next_round(ledger, planner) if run.setting not in ledger.failures
            ]
            self._num_rounds_started += bool(self._missing_runs(ledger))
        run = to_run[0]
        is_loaded = (self._round, run) in self._loaded_runs or (
            self._num_rounds_started > 1 and self._is_loaded_together(ledger, planner, self._num_rounds_started)
        )
        num_starts = 0 if self._is_process_running or is_loaded else 1
        left_seconds, needed_seconds = planner.budget.left(), planner.runs_seconds(ledger, [run.setting], num_starts)
        if left_seconds < needed_seconds:
            self._planned_runs, self._rounds_left = [], []
            return None
        endings = [ending_seconds(r) for r in ledger.records if (r.candidate, r.purpose, r.environment) == run]
        needs_ending = job_defaults.description.has_ending and run.purpose == "confirm" and set(endings) <= {None}
        return _confirming_trial(
            job_defaults,
            ledger,
            run.setting,
            run.environment,
            purpose=run.purpose,
            round=self._round,
            num_steps=(MAX_CONFIRM_STEPS, MAX_CONFIRM_STEPS),
            # A command's deadline starts with its process, that of another job once its process is ready.
            deadline_seconds=left_seconds
            - planner.runs_seconds(ledger, [], 0 if job_defaults.are_trials_fresh else num_starts),
            ending_seconds=min(self._ending_seconds_left(ledger, planner), left_seconds - needed_seconds)
            if needs_ending
            else None,
        )

    def foreseen_trials(self, ledger: Ledger, planner: Planner) -> list[Trial]:
        """Return the trials that probably follow the one that `next` has returned.

        As many as can load together with that one; none if its process is loaded already.
        """
        run, *others = [(self._round, run) for run in self._missing_runs(ledger)]
        if run in self._loaded_runs:
            return []
        contenders = [run for run in self._planned_runs if run.purpose == "confirm"]
        done = [(r.round, ConfirmationRun(r.candidate, _purpose_of(r), r.environment)) for r in ledger.records]
        later = [(number, run) for number in self._rounds_left if number < MIN_ROUNDS for run in contenders]
        others += [each for each in later if each not in done]
        self._loaded_runs = [run, *others][: planner.job_defaults.num_together]
        return [
            _confirming_trial(
                planner.job_defaults, ledger, run.setting, run.environment, purpose=run.purpose, round=number
            )
            for number, run in self._loaded_runs[1:]
        ]

    def _missing_runs(self, ledger: Ledger) -> list[ConfirmationRun]:
        """Return the planned runs of this round that have not run yet on the slot of the round's last run: all of them
        if that was in an earlier session and one is missing.
        """
        records_of_round = [r for r in ledger.records if r.round == self._round]
        if not records_of_round:
            return self._planned_runs
        slot, session = records_of_round[-1].slot, records_of_round[-1].session
        together = [r for r in records_of_round if (r.slot, r.session) == (slot, session)]
        done = [(r.candidate, _purpose_of(r), r.environment) for r in together]
        missing = [run for run in self._planned_runs if run not in done]
        return self._planned_runs if missing and session != ledger.session else missing

    def _should_stop(self, ledger: Ledger, planner: Planner) -> bool:
        """Whether further rounds would decide nothing, or would take more time than the possible gain justifies."""
        num_left = len(self._rounds_left)
        gain_and_rounds = gain_and_rounds_to_settle(ledger, self._contenders, self._environment, num_left)
        if gain_and_rounds is None:
            return True
        gain, num_rounds = gain_and_rounds
        num_starts = math.ceil(planner.job_defaults.num_starts(2))  # a further round loads by itself
        compared = [self._contenders.winner, self._contenders.baseline]
        seconds = num_rounds * planner.runs_seconds(ledger, compared, num_starts)
        return gain < planner.min_gain(seconds)

    def _is_loaded_together(self, ledger: Ledger, planner: Planner, number: int) -> bool:
        """Whether the process of round `number` (from 1) loads at the same time as those of the other rounds."""
        return planner.job_defaults.loads_together and number <= planner.num_rounds(ledger)

    def _plan_next_round(self, ledger: Ledger, planner: Planner) -> list[ConfirmationRun]:
        """Return the runs of the round `self._round` that fit in the remaining time; see `plan_round`."""
        is_loaded_together = self._is_loaded_together(ledger, planner, self._num_rounds_started + 1)

        def seconds_of(runs: Sequence[ConfirmationRun]) -> float:
            num_starts = 0 if is_loaded_together else planner.job_defaults.num_starts(len(runs))
            return planner.runs_seconds(ledger, [run.setting for run in runs], num_starts)

        left_seconds = planner.budget.left() - (self._ending_seconds_left(ledger, planner) if self._round == 0 else 0.0)
        num_together = planner.job_defaults.num_together
        has_loaded = any(number == self._round for number, _ in self._loaded_runs)
        if is_loaded_together and not self._num_rounds_started:
            left_seconds -= planner.runs_seconds(ledger, [], 1)
        elif num_together > 1 and not has_loaded:  # the first run waits for the start of all
            left_seconds -= planner.runs_seconds(ledger, [], 1 - 1 / num_together)
        num_needed = max(1, MIN_ROUNDS - self._round)
        return plan_round(self._contenders, self._environment, seconds_of, left_seconds, self._round, num_needed)

    def _ending_seconds_left(self, ledger: Ledger, planner: Planner) -> float:
        """Return the seconds left for the workload's evaluation and checkpoint, within `ENDING_SHARE` of the budget."""
        share = ENDING_SHARE * planner.budget.seconds if planner.job_defaults.description.has_ending else 0.0
        return max(0.0, share - sum(ending_seconds(r) or 0.0 for r in ledger.records))


def _purpose_of(record: Record) -> Purpose:
    """Return the purpose of a record, "confirm" for a trial of the search that counts as a confirmation run."""
    return "confirm" if is_confirming(record) else record.purpose


def is_runner_up_worth(ledger: Ledger, planner: Planner, shortlist: Shortlist) -> bool:
    """Whether the runner-up may be better than the winner by enough to justify its confirmation runs. For memory and
    energy it may unless it is hopelessly slower.
    """
    winner, runner_up, _ = shortlist
    merits = ledger.measured_merits
    if runner_up is None or winner not in merits:  # a winner without a measurement failed in an earlier confirmation
        return runner_up is not None
    ratio = merits[runner_up].speed / merits[winner].speed
    if not ledger.is_by_throughput:
        return HOPELESS_SLOWDOWN * ratio >= 1
    num_starts = 0 if planner.job_defaults.shares_processes else planner.job_defaults.num_starts(1)
    seconds = MIN_ROUNDS * planner.runs_seconds(ledger, [runner_up], num_starts)
    return ratio - 1 + SPEED_ERROR > planner.min_gain(seconds)


def plan_round(
    shortlist: Shortlist,
    environment: dict[str, str],
    seconds_of: Callable[[Sequence[ConfirmationRun]], float],
    left_seconds: float,
    number: int,
    num_needed: int,
) -> list[ConfirmationRun]:
    """Return the runs of round `number` (from 0) that fit in `left_seconds`, empty if not even the winner's does.

    `seconds_of` returns the predicted seconds of several runs of one round. The runner-up is left out if `num_needed`
    rounds with it do not fit, and the baseline if one round with it does not fit. The order alternates between rounds,
    so that a drift of the machine's speed affects all settings alike. In the first round the winner also runs once in
    the user's own environment, unless it is the baseline, which always does.
    """
    winner = ConfirmationRun(shortlist.winner, "confirm", environment)
    baseline = ConfirmationRun(shortlist.baseline, "confirm", {})
    without_runner_up = [winner] if winner == baseline else [winner, baseline]
    all_runs = without_runner_up
    if shortlist.runner_up is not None:
        rival = ConfirmationRun(shortlist.runner_up, "confirm", environment)
        all_runs = [winner, rival, *(run for run in without_runner_up if run not in (winner, rival))]
    plain_runs = []
    if number == 0 and environment and shortlist.winner != shortlist.baseline:
        plain_runs = [ConfirmationRun(shortlist.winner, "plain", {})]
    for runs, repeats in ((all_runs, num_needed), (without_runner_up, num_needed), (without_runner_up, 1)):
        if repeats * seconds_of(runs) + seconds_of(plain_runs) <= left_seconds:
            return (runs if number % 2 == 0 else runs[::-1]) + plain_runs
    return next((runs for runs in (without_runner_up, [winner]) if seconds_of(runs) <= left_seconds), [])


def _confirming_trial(
    job_defaults: JobDefaults, ledger: Ledger, setting: Setting, environment: dict[str, str], **fields: Any
) -> Trial:
    """Return a trial in a process started with `environment`, with the loss scale that would be recommended."""
    return job_defaults.trial(
        ledger,
        setting,
        environment=environment,
        loss_scale=ledger.loss_scale(setting),
        hold_heap=False,  # the process starts with the variables, or is meant to run without them
        measure_seconds=CONFIRM_SECONDS,
        **fields,
    )


@dataclass
class OneRankTrial(Stage):
    """Stage that measures the winner on a single rank, to show the cost of exchanging gradients.

    It runs only if the remaining time is enough for `num_others` further runs of that length.
    """

    is_exclusive = True
    environment: dict[str, str]
    num_others: int

    def next(self, ledger: Ledger, planner: Planner) -> Trial | None:
        """Return the trial on one rank, set up like a confirmation run; None if it has run or time is short."""
        shortlist, left_seconds = ledger.final_shortlist, planner.budget.left()
        if shortlist is None or any(record.purpose == "one_rank" for record in ledger.records):
            return None
        if left_seconds < (1 + self.num_others) * planner.runs_seconds(ledger, [shortlist.winner], 1):
            return None
        return _confirming_trial(
            planner.job_defaults,
            ledger,
            shortlist.winner,
            self.environment,
            purpose="one_rank",
            num_ranks=1,
            num_steps=(MAX_CONFIRM_STEPS, MAX_CONFIRM_STEPS),
            deadline_seconds=left_seconds,
        )


@dataclass
class LargerBatchTrials(Stage):
    """Stage that doubles the effective batch size, without accumulation unless that of the workload is fixed, until
    memory or time runs out or a batch is no faster.

    Its measurements (purpose "outlook") are reported only: never recommended nor used as a fallback, since another
    effective batch size needs another learning rate.
    """

    is_exclusive = True
    environment: dict[str, str]

    def next(self, ledger: Ledger, planner: Planner) -> Trial | None:
        """Return a trial of the next larger batch size, set up like a confirmation run, or None."""
        description = planner.job_defaults.description
        setting = next_larger_batch(ledger, description)
        used_seconds = sum(record.seconds for record in ledger.records if record.purpose == "outlook")
        if setting is None:
            return None
        left_seconds = planner.extra_seconds(planner.budget.left(), used_seconds)
        num_samples = sum(NUM_STEPS_FORESEEN) * setting.effective_batch_size * description.num_batches
        seconds = CONFIRM_SECONDS + num_samples / max(ledger.speeds.values())
        if left_seconds < SAFETY * (planner.start_seconds(ledger) + seconds):
            return None
        return _confirming_trial(
            planner.job_defaults,
            ledger,
            setting,
            self.environment,
            purpose="outlook",
            deadline_seconds=left_seconds,
        )


def next_larger_batch(ledger: Ledger, description: Description) -> Setting | None:
    """Return the fastest faithful setting at twice the largest effective batch tried; None if it cannot gain, or if the
    batch size cannot be set. Pure.
    """
    effective_batch_size = ledger.space.effective_batch_size
    faithful_speeds = {
        c: speed for c, speed in ledger.speeds.items() if ledger.tiers[c] <= UNDECIDED_TIER and not c.as_found
    }
    is_fixed = description.keeps_effective_batch_size or "batch_size" in description.unsettable
    if effective_batch_size is None or is_fixed or not faithful_speeds or ledger.objective != "speed":
        return None
    num_steps = description.accumulation_steps if "accumulation_steps" in description.unsettable else 1
    fastest = max(faithful_speeds, key=lambda c: faithful_speeds[c])
    largest = replace(fastest, batch_size=effective_batch_size // num_steps, accumulation_steps=num_steps)
    rate = faithful_speeds.get(largest, faithful_speeds[fastest])
    if rate < (1 - MIN_GAIN) * faithful_speeds[fastest]:
        return None
    for record in ledger.records:
        if record.purpose == "outlook":
            outcome = record.outcome
            if not isinstance(outcome, Measurement) or outcome.samples_per_second < (1 + MIN_GAIN) * rate:
                return None
            largest, rate = record.candidate, outcome.samples_per_second
    larger = replace(largest, batch_size=2 * largest.batch_size)
    ran_out = any(
        c.precision == larger.precision and c.batch_size <= larger.batch_size and failure.kind == "oom"
        for c, failure in ledger.failures.items()
    )
    max_size = SEARCH_UP * effective_batch_size
    is_too_large = larger.effective_batch_size > min(max_size, description.num_samples or max_size)
    return None if ran_out or is_too_large else larger
