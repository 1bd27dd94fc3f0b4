"""Stages that measure winner, runner-up and baseline again, interleaved, in fresh processes, and then larger effective
batch sizes as an outlook.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

from msgspec.structs import replace

from autotune_amp.core.outcome import Measurement, Purpose
from autotune_amp.core.setting import Setting
from autotune_amp.search.gains import gain_and_rounds_to_settle
from autotune_amp.search.job_defaults import JobDefaults
from autotune_amp.search.ledger import Ledger, Shortlist
from autotune_amp.search.planner import (
    CONFIRM_SECONDS,
    MAX_CONFIRM_STEPS,
    MIN_ROUNDS,
    SAFETY,
    Planner,
    ending_seconds,
)
from autotune_amp.search.ranking import PLATEAU, UNDECIDED_TIER, is_confirming
from autotune_amp.search.space import SEARCH_UP
from autotune_amp.trial.jobs import Trial

MAX_ROUNDS = 20  # more than `MIN_ROUNDS` only while it is unsure whether a contender is faster than the baseline
ENDING_SHARE = 0.1  # share of the budget for running the workload's evaluation and checkpoint
NUM_STEPS_FORESEEN = 14  # steps of an outlook's trial: a first step as long as three, the warm-up, the fewest measured


class ConfirmationRun(NamedTuple):
    """Measurement of one setting within a confirmation round. An empty `environment` is the user's own."""

    setting: Setting
    purpose: Purpose
    environment: dict[str, str]


class Confirm:
    """Stage that runs the confirmation rounds, one run at a time: at least `MIN_ROUNDS`, more while it is unsettled who
    is faster.

    The contenders run in the recommended `environment`, the baseline in the user's own. A resumed search runs only the
    missing rounds. A failed setting is not run again; it costs the others one more process start. The workload's
    evaluation and checkpoint are run once for each setting in its environment. If the slot of a round is lost, the
    whole round runs on another one.
    """

    is_exclusive: ClassVar[bool] = True

    def __init__(self, shortlist: Shortlist, environment: dict[str, str]) -> None:
        self._contenders = shortlist
        self._environment = environment
        self._rounds_left = list(range(MAX_ROUNDS))  # to come
        self._num_begun = 0
        self._round = 0
        self._planned: list[ConfirmationRun] = []  # of this round
        self._is_started = False  # whether the process that the runs of this round share is running

    def next(self, ledger: Ledger, planner: Planner) -> Trial | None:
        """Return the next run of this round or of the next, or None when the time or the rounds are used up."""
        job_defaults = planner.job_defaults
        if not self._num_begun:
            if not self._is_environment_worth(ledger, planner):
                self._environment = {}
            if not is_runner_up_worth(ledger, planner, self._contenders):
                self._contenders = self._contenders._replace(runner_up=None)
        elif job_defaults.shares_processes:
            of_round = [r for r in ledger.records if r.round == self._round]
            self._is_started = bool(of_round) and isinstance(of_round[-1].outcome, Measurement)
        while not (to_run := self._missing_runs(ledger)):
            if not self._rounds_left or (self._rounds_left[0] >= MIN_ROUNDS and self._should_stop(ledger, planner)):
                return None
            self._round, self._is_started = self._rounds_left.pop(0), False
            self._planned = [run for run in self._plan_next_round(ledger, planner) if run.setting not in ledger.failures]
            self._num_begun += bool(self._missing_runs(ledger))
        run = to_run[0]
        is_loaded = self._num_begun > 1 and self._is_loaded_together(ledger, planner, self._num_begun)
        num_starts = 0 if self._is_started or is_loaded else 1
        left, needed = planner.budget.left(), planner.runs_seconds(ledger, [run.setting], num_starts)
        if left < needed:
            self._planned, self._rounds_left = [], []
            return None
        ours = [ending_seconds(r) for r in ledger.records if (r.candidate, r.purpose, r.environment) == run]
        needs_ending = job_defaults.description.has_ending and run.purpose == "confirm" and set(ours) <= {None}
        return _confirming_trial(
            job_defaults,
            ledger,
            run.setting,
            run.environment,
            purpose=run.purpose,
            round=self._round,
            num_steps=(MAX_CONFIRM_STEPS, MAX_CONFIRM_STEPS),
            # A command's deadline starts with its process, that of another job once its process is ready.
            deadline_seconds=left
            - planner.runs_seconds(ledger, [], 0 if job_defaults.are_trials_fresh else num_starts),
            ending_seconds=min(self._ending_left(ledger, planner), left - needed) if needs_ending else None,
        )

    def _missing_runs(self, ledger: Ledger) -> list[ConfirmationRun]:
        """Return the planned runs of this round that are missing on the slot where the round was last run."""
        of_round = [r for r in ledger.records if r.round == self._round]
        here = [r for r in of_round if r.slot == of_round[-1].slot]
        done = [(r.candidate, "confirm" if is_confirming(r) else r.purpose, r.environment) for r in here]
        return [run for run in self._planned if run not in done]

    def _is_environment_worth(self, ledger: Ledger, planner: Planner) -> bool:
        """Whether the recommended environment variables alone may gain enough to justify confirming them."""
        winner, _, baseline = self._contenders
        if winner != baseline or ledger.objective != "speed":
            return True
        return planner.least_gain(MIN_ROUNDS * planner.runs_seconds(ledger, [winner], 1)) < PLATEAU

    def _should_stop(self, ledger: Ledger, planner: Planner) -> bool:
        """Whether more rounds would settle nothing, or would take longer than the possible gain justifies."""
        found = gain_and_rounds_to_settle(ledger, self._contenders, self._environment)
        if found is None:
            return True
        gain, num_rounds = found
        runs = [
            ConfirmationRun(self._contenders.winner, "confirm", {}),
            ConfirmationRun(self._contenders.baseline, "confirm", {}),
        ]
        seconds = num_rounds * self._round_seconds(runs, ledger, planner)
        return num_rounds > len(self._rounds_left) or gain < planner.least_gain(seconds)

    def _is_loaded_together(self, ledger: Ledger, planner: Planner, number: int) -> bool:
        """Whether the process of the confirmation round `number`, counted from 1 in the order of starting, is loaded at
        the same time as those of the other rounds.
        """
        return planner.job_defaults.loads_together and number <= planner.num_rounds(ledger)

    def _round_seconds(self, runs: Sequence[ConfirmationRun], ledger: Ledger, planner: Planner) -> float:
        num_starts = min(1, len(runs)) if planner.job_defaults.shares_processes else len(runs)
        return planner.runs_seconds(ledger, [run.setting for run in runs], num_starts)

    def _plan_next_round(self, ledger: Ledger, planner: Planner) -> list[ConfirmationRun]:
        is_loaded_together = self._is_loaded_together(ledger, planner, self._num_begun + 1)

        def seconds_of(runs: Sequence[ConfirmationRun]) -> float:
            if is_loaded_together:
                return planner.runs_seconds(ledger, [run.setting for run in runs], 0)
            return self._round_seconds(runs, ledger, planner)

        left = planner.budget.left() - (self._ending_left(ledger, planner) if self._round == 0 else 0.0)
        if is_loaded_together and not self._num_begun:
            left -= planner.runs_seconds(ledger, [], 1)
        num_needed = max(1, MIN_ROUNDS - self._round)
        return plan_round(self._contenders, self._environment, seconds_of, left, self._round, num_needed)

    def _ending_left(self, ledger: Ledger, planner: Planner) -> float:
        share = ENDING_SHARE * planner.budget.seconds if planner.job_defaults.description.has_ending else 0.0
        return max(0.0, share - sum(ending_seconds(r) or 0.0 for r in ledger.records))


def is_runner_up_worth(ledger: Ledger, planner: Planner, chosen: Shortlist) -> bool:
    """Whether the runner-up may overtake the winner by enough to justify the seconds of its confirmation runs."""
    winner, runner_up, _ = chosen
    if runner_up is None or runner_up not in ledger.possible_winners(chosen):
        return False
    if ledger.objective != "speed":
        return True
    speeds = {c: found.samples_per_second for c, found in ledger.measured_merits.items()}
    lead = speeds[runner_up] / speeds[winner] - 1 + PLATEAU if winner in speeds else math.inf
    num_starts = 0 if planner.job_defaults.shares_processes else 1
    return lead > planner.least_gain(MIN_ROUNDS * planner.runs_seconds(ledger, [runner_up], num_starts))


def plan_round(
    shortlist: Shortlist,
    environment: dict[str, str],
    seconds_of: Callable[[Sequence[ConfirmationRun]], float],
    left_seconds: float,
    number: int,
    num_needed: int,
) -> list[ConfirmationRun]:
    """Return the runs of round `number` (from 0) that fit in `left_seconds`; an empty list if not even the winner fits.

    `seconds_of` returns the seconds that the runs of one round take together. The runner-up is left out if `num_needed`
    rounds would not fit with it, and the baseline if it does not fit at all. The order alternates between rounds, so
    that a drift of the machine affects all settings alike. In the first round the winner runs once in the user's own
    environment too, unless it is the baseline, which always does.
    """
    winner, baseline = (
        ConfirmationRun(shortlist.winner, "confirm", environment),
        ConfirmationRun(shortlist.baseline, "confirm", {}),
    )
    essential = [winner] if winner == baseline else [winner, baseline]
    full = essential
    if shortlist.runner_up is not None:
        rival = ConfirmationRun(shortlist.runner_up, "confirm", environment)
        full = [winner, rival, *(run for run in essential if run not in (winner, rival))]
    once = []
    if number == 0 and environment and shortlist.winner != shortlist.baseline:
        once = [ConfirmationRun(shortlist.winner, "plain", {})]
    for runs, repeats in ((full, num_needed), (essential, num_needed), (essential, 1)):
        if repeats * seconds_of(runs) + seconds_of(once) <= left_seconds:
            return (runs if number % 2 == 0 else runs[::-1]) + once
    return next((runs for runs in (essential, [winner]) if seconds_of(runs) <= left_seconds), [])


def _confirming_trial(
    job_defaults: JobDefaults, ledger: Ledger, setting: Setting, environment: dict[str, str], **fields: Any
) -> Trial:
    """Return a trial in a process started with `environment`, using the loss scale that would be recommended."""
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
class OneRank:
    """Stage that measures the winner on a single rank, to show the cost of exchanging gradients.

    It runs only if `num_others` such processes fit in the remaining time as well.
    """

    is_exclusive: ClassVar[bool] = True
    num_others: int

    def next(self, ledger: Ledger, planner: Planner) -> Trial | None:
        """Return the trial on one rank, run like a confirmation; None if it was run or does not fit in the time."""
        chosen, left = ledger.final_shortlist, planner.budget.left()
        if chosen is None or any(record.purpose == "one_rank" for record in ledger.records):
            return None
        if left < (1 + self.num_others) * planner.runs_seconds(ledger, [chosen.winner], 1):
            return None
        return _confirming_trial(
            planner.job_defaults,
            ledger,
            chosen.winner,
            planner.job_defaults.environment,
            purpose="one_rank",
            num_ranks=1,
            num_steps=(MAX_CONFIRM_STEPS, MAX_CONFIRM_STEPS),
            deadline_seconds=left,
        )


class LargerBatches:
    """Stage that doubles the effective batch size, without accumulation, until memory, speed or the time for extras
    runs out.

    Its measurements are an outlook: never recommended nor used as a fallback, since another effective batch size needs
    another learning rate.
    """

    is_exclusive: ClassVar[bool] = True

    def next(self, ledger: Ledger, planner: Planner) -> Trial | None:
        """Return a trial of the next larger batch size, set up like a confirmation run, or None."""
        setting = next_larger_batch(ledger, planner.job_defaults.description.num_samples)
        used_seconds = sum(record.seconds for record in ledger.records if record.purpose == "outlook")
        if setting is None:
            return None
        left = planner.extra_seconds(planner.budget.left(), used_seconds)
        seconds = CONFIRM_SECONDS + NUM_STEPS_FORESEEN * setting.batch_size / max(ledger.speeds.values())
        if left < SAFETY * (planner.start_seconds(ledger) + seconds):
            return None
        return _confirming_trial(
            planner.job_defaults,
            ledger,
            setting,
            planner.job_defaults.environment,
            purpose="outlook",
            deadline_seconds=left,
        )


def next_larger_batch(ledger: Ledger, num_samples: int | None = None) -> Setting | None:
    """Return twice the largest effective batch tried in the fastest sound precision; None if it cannot pay. Pure."""
    kept = ledger.space.effective_batch_size
    sound = {c: speed for c, speed in ledger.speeds.items() if ledger.tiers[c] <= UNDECIDED_TIER and not c.as_found}
    is_own = ledger.space.keeps_effective_batch_size
    if kept is None or is_own or not sound or ledger.objective != "speed":
        return None
    fastest = max(sound, key=lambda c: sound[c])
    largest = replace(fastest, batch_size=kept, accumulation_steps=1)
    rate = sound.get(largest, sound[fastest])
    if rate < (1 - PLATEAU) * sound[fastest]:
        return None
    for record in ledger.records:
        if record.purpose == "outlook":
            found = record.outcome
            if not isinstance(found, Measurement) or found.samples_per_second < (1 + PLATEAU) * rate:
                return None
            largest, rate = record.candidate, found.samples_per_second
    larger = replace(largest, batch_size=2 * largest.batch_size)
    ran_out = any(
        c.precision == larger.precision and c.batch_size <= larger.batch_size and failure.kind == "oom"
        for c, failure in ledger.failures.items()
    )
    is_too_large = larger.batch_size > min(SEARCH_UP * kept, num_samples or SEARCH_UP * kept)
    return None if ran_out or is_too_large else larger
