"""In fresh processes: winner, runner-up and baseline again, interleaved; then what lies beyond, as an outlook."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any, ClassVar, NamedTuple

from msgspec.structs import replace

from autotune_amp.core.outcome import Measurement, Purpose, Record
from autotune_amp.core.setting import Setting
from autotune_amp.isolation.local import Slot
from autotune_amp.search.ledger import Ledger, Shortlist
from autotune_amp.search.ranking import PLATEAU, beside, counted
from autotune_amp.search.run import CONFIRM_SHARE, Budget
from autotune_amp.search.space import HOPELESS, SEARCH_UP
from autotune_amp.search.stages.trials import Conditions
from autotune_amp.trial.jobs import NUM_WARMUP_STEPS, Trial

NUM_ROUNDS, MIN_ROUNDS = 5, 3
ALONE = -1  # the number of the round in which the baseline runs alone, before others beside one another
NUM_ROUNDS_BESIDE = 4  # at the least, beside one another on several slots
# Long enough to meet what a long run meets: a collection of garbage, a stall of the machine. Short steps fill the
# time, long ones are fewer: it is the spread between processes that counts.
MEASURE_SECONDS = 2.0
MAX_STEPS = 400
RUN_SECONDS = MEASURE_SECONDS + 0.5  # with the warm-up of a small model
ENDING_SHARE = 0.25  # of the confirmation's time, for evaluations and checkpoints
MAX_SHARE = 0.5  # of the budget
SAFETY = 1.1  # an estimate of a process's seconds that turns out short must not break the budget
# Of the first compilation's seconds, for one that the compiler's cache knows: 1.7 of 6.5 s for a convnet of six blocks.
CACHED_SHARE = 0.3
NUM_STEPS_FORESEEN = 14  # of an outlook's trial: a first step as long as three, the warm-up, the fewest measured


class Run(NamedTuple):
    """One measurement of a round; an empty environment is the user's own."""

    setting: Setting
    purpose: Purpose
    environment: dict[str, str]


class Confirm:
    """Runs the `rounds`, which have their share of the budget: until no more than `until_seconds` of it are left, None
    for those that the share begins with now. As many rounds run at the same time as there are slots in `num_beside`.

    What the search left over of its own goes to the winner and the baseline, until both are confirmed. A resumed search
    runs only the rounds that are missing; what failed is not run again, and costs no other run more than the start of
    another process. The workload's evaluation and checkpoint are run once for each setting in its environment.
    All runs of a round are on one slot, of several on that named `slot`: what it ran of one elsewhere does not count.
    """

    is_exclusive: ClassVar[bool] = True

    def __init__(
        self,
        conditions: Conditions,
        shortlist: Shortlist,
        rounds: Iterable[int] = range(NUM_ROUNDS),
        until_seconds: float | None = None,
        num_beside: int = 1,
        slot: str | None = None,
    ) -> None:
        self._slot = slot
        self._conditions = conditions
        self._contenders = shortlist
        self._rounds = list(rounds)  # to come
        self._num_beside = num_beside
        self._until = until_seconds
        self._is_begun = False
        self._is_borrowing = False
        self._round = 0
        self._to_run: list[Run] = []  # of this round
        self._is_started = False  # the process that the next run of the round shares

    def next(self, ledger: Ledger, budget: Budget) -> Trial | None:
        """The next run of the round, or the first of another, None where the time or the rounds are over."""
        if not self._is_begun:
            self._is_begun = True
            self._until = confirmed_until(budget) if self._until is None else self._until
            self._contenders = _runnable(ledger, self._contenders)
        elif self._conditions.shares_processes:
            of_round = [r for r in ledger.records if (r.round, r.slot) == (self._round, self._slot)]
            self._is_started = bool(of_round) and isinstance(of_round[-1].outcome, Measurement)
        while not self._to_run:
            if not self._rounds or (self._is_borrowing and self._rounds[0] >= MIN_ROUNDS):
                return None
            self._round, self._is_started = self._rounds.pop(0), False
            counting = [r for r in counted(ledger.records) if r.round == self._round]
            done = [(r.candidate, r.purpose, r.environment) for r in counting]
            planned = [run for run in self._plan(ledger, budget) if run.setting not in ledger.failures]
            if any(run not in done for run in planned):  # else it is whole, wherever it ran
                here = [run for run, r in zip(done, counting, strict=True) if r.slot == self._slot]
                self._to_run = [run for run in planned if run not in here]
        run = self._to_run.pop(0)
        needed = self._cost(ledger, [run], 0 if self._is_started else 1)
        if self._left(budget) < needed and run.setting in self._essential:  # those before it took longer than foreseen
            self._borrow()
        left = self._left(budget)
        if left < needed:
            self._to_run, self._rounds = [], []
            return None
        ours = [_ending_seconds(r) for r in ledger.records if (r.candidate, r.purpose, r.environment) == run]
        needs_ending = self._conditions.description.has_ending and run.purpose == "confirm" and set(ours) <= {None}
        return _confirming_trial(
            self._conditions,
            ledger,
            run.setting,
            run.environment,
            purpose=run.purpose,
            round=self._round,
            num_steps=(MAX_STEPS, MAX_STEPS),
            deadline_seconds=left,
            ending_seconds=min(self._ending_left(ledger, budget), left - needed) if needs_ending else None,
        )

    def move(self, slot: Slot) -> None:
        """Go on on another slot, with the round that was not over."""
        if self._is_begun:
            self._rounds.insert(0, self._round)
        self._to_run, self._slot = [], slot.name

    def _plan(self, ledger: Ledger, budget: Budget) -> list[Run]:
        ending_seconds = self._ending_left(ledger, budget) if self._round == 0 else 0.0

        def seconds_of(runs: Sequence[Run]) -> float:
            return self._cost(ledger, runs, min(1, len(runs)) if self._conditions.shares_processes else len(runs))

        def planned() -> list[Run]:
            left = self._left(budget) - ending_seconds
            num_needed = max(1, math.ceil((MIN_ROUNDS - self._round) / self._num_beside))
            return plan_round(self._contenders, self._conditions.environment, seconds_of, left, self._round, num_needed)

        runs = planned()
        if not self._essential <= {run.setting for run in runs}:
            self._borrow()
            runs = planned()
        return runs

    @property
    def _essential(self) -> set[Setting]:
        """What this round must not be without."""
        return {self._contenders.winner, self._contenders.baseline} if self._round < MIN_ROUNDS else set()

    def _borrow(self) -> None:
        """Go on in what the search left over, with what is essential."""
        self._contenders, self._until, self._is_borrowing = self._contenders._replace(runner_up=None), 0.0, True
        self._to_run = [run for run in self._to_run if run.setting in self._essential]

    def _left(self, budget: Budget) -> float:
        return budget.left() - (self._until or 0.0)

    def _cost(self, ledger: Ledger, runs: Sequence[Run], num_starts: int) -> float:
        starting = num_starts * start_seconds(ledger.records, self._conditions.start_seconds)
        return SAFETY * (starting + sum(run_seconds(ledger, run.setting) for run in runs))

    def _ending_left(self, ledger: Ledger, budget: Budget) -> float:
        share = ENDING_SHARE * budget.confirm_seconds if self._conditions.description.has_ending else 0.0
        return max(0.0, share - sum(_ending_seconds(r) or 0.0 for r in ledger.records))


def confirmation(
    conditions: Conditions, shortlist: Shortlist, slots: Sequence[Slot], ledger: Ledger, budget: Budget
) -> Iterator[Mapping[Slot, Confirm]]:
    """The rounds of a confirmation, as what is to run on the slots at the same time: on one slot all of them.

    On several the baseline runs alone, then as many rounds at once as there are slots. Where that turns out to make a
    difference, rounds are run alone, for as long as it does.
    """
    until_seconds, alone = confirmed_until(budget), slots[0]
    if len(slots) == 1:
        yield {alone: Confirm(conditions, shortlist, range(NUM_ROUNDS), until_seconds, slot=alone.name)}
        return
    only_baseline = Shortlist(shortlist.baseline, None, shortlist.baseline)
    found = beside(ledger.records)
    if found is not None and found.is_different:  # known from before
        yield {alone: Confirm(conditions, shortlist, range(NUM_ROUNDS), until_seconds, slot=alone.name)}
        return
    yield {alone: Confirm(replace(conditions, environment={}), only_baseline, [ALONE], until_seconds, slot=alone.name)}
    num_rounds = len(slots) * math.ceil(NUM_ROUNDS_BESIDE / len(slots))
    yield {
        slot: Confirm(conditions, shortlist, range(place, num_rounds, len(slots)), until_seconds, len(slots), slot.name)
        for place, slot in enumerate(slots)
    }
    for number in range(NUM_ROUNDS):
        found = beside(ledger.records)
        if found is not None and not found.is_different:
            return
        yield {alone: Confirm(conditions, shortlist, [number], until_seconds, slot=alone.name)}


def plan_round(
    shortlist: Shortlist,
    environment: dict[str, str],
    seconds_of: Callable[[Sequence[Run]], float],
    left_seconds: float,
    number: int,
    num_needed: int,
) -> list[Run]:
    """The runs of round `number` (from 0) that the time left allows, none where not even the winner fits.

    `seconds_of` says what runs of one round cost together. The runner-up gives way where `num_needed` rounds could not
    be run with it, one after the other, and a baseline that does not fit at all. The order alternates, so that a drift
    of the machine falls on all alike. In the first round the winner runs once in the user's own environment too, unless
    it is the baseline, which always does.
    """
    winner, baseline = Run(shortlist.winner, "confirm", environment), Run(shortlist.baseline, "confirm", {})
    essential = [winner] if winner == baseline else [winner, baseline]
    full = essential
    if shortlist.runner_up is not None:
        rival = Run(shortlist.runner_up, "confirm", environment)
        full = [winner, rival, *(run for run in essential if run not in (winner, rival))]
    once = []
    if number == 0 and environment and shortlist.winner != shortlist.baseline:
        once = [Run(shortlist.winner, "plain", {})]
    for runs, repeats in ((full, num_needed), (essential, num_needed), (essential, 1)):
        if repeats * seconds_of(runs) + seconds_of(once) <= left_seconds:
            return (runs if number % 2 == 0 else runs[::-1]) + once
    return next((runs for runs in (essential, [winner]) if seconds_of(runs) <= left_seconds), [])


def confirmed_until(budget: Budget) -> float:
    """What is left of the budget when a confirmation that begins now has used its share."""
    return budget.left() - min(budget.confirm_seconds, budget.left())


def reserved_seconds(budget_seconds: float, start_seconds: float) -> float:
    """What is the confirmation's of a budget, where its processes are shared and take `start_seconds` to start.

    That is its usual share, or more, up to half, where winner and baseline can be confirmed in that alone.
    """
    usual_seconds = CONFIRM_SHARE * budget_seconds
    needed_seconds = SAFETY * MIN_ROUNDS * (start_seconds + 2 * RUN_SECONDS)
    return needed_seconds if usual_seconds < needed_seconds <= MAX_SHARE * budget_seconds else usual_seconds


def _ending_seconds(record: Record) -> float | None:
    """What evaluation and checkpoint took, None where the process did not come as far."""
    return record.outcome.ending_seconds if isinstance(record.outcome, Measurement) else None


def _confirming_trial(
    conditions: Conditions, ledger: Ledger, setting: Setting, environment: dict[str, str], **fields: Any
) -> Trial:
    """A trial in a process that starts with these variables, trained as it would be with the recommendation."""
    return conditions.trial(
        ledger,
        setting,
        environment=environment,
        loss_scale=ledger.loss_scale(setting),
        hold_heap=False,  # the process starts with the variables, or is meant to run without them
        measure_seconds=MEASURE_SECONDS,
        **fields,
    )


def _runnable(ledger: Ledger, shortlist: Shortlist) -> Shortlist:
    """The shortlist without a runner-up that a fresh process need not spend time on: one with no chance to win."""
    if not ledger.measured.keys() >= {c for c in shortlist[:2] if c is not None}:  # one has failed since
        return shortlist
    speeds = {c: ledger.measured[c].samples_per_second for c in shortlist[:2] if c is not None}
    is_hopeless = min(speeds.values()) * HOPELESS < speeds[shortlist.winner]
    return shortlist._replace(runner_up=None) if is_hopeless else shortlist


def start_seconds(records: Sequence[Record], foreseen_seconds: float) -> float:
    """What a process takes before its first step: as seen in the confirmation, else as foreseen."""
    found = [r for r in records if r.round is not None and r.start_seconds and isinstance(r.outcome, Measurement)]
    seen = [_start_seconds(r) for r in found]
    return fmean(seen) if seen else foreseen_seconds


def run_seconds(ledger: Ledger, setting: Setting) -> float:
    """What a run takes from its first step to its ending: as seen, else as the search's trial foretells."""
    ours = [r for r in ledger.records if r.candidate == setting and r.round is not None]
    seen = [r.seconds - _start_seconds(r) - (_ending_seconds(r) or 0.0) for r in ours]
    if seen:
        return fmean(seen)
    outcome = ledger.outcomes.get(setting)
    if not isinstance(outcome, Measurement):
        return 0.0
    first_step_seconds = outcome.first_step_seconds * (CACHED_SHARE if setting.is_compiled else 1.0)
    warm_up = first_step_seconds + max(NUM_WARMUP_STEPS, outcome.num_unmeasured_steps) * outcome.step_seconds
    measuring = min(MAX_STEPS * outcome.step_seconds, MEASURE_SECONDS + outcome.step_seconds)
    return warm_up + measuring


def _start_seconds(record: Record) -> float:
    """What came before the first step: starting the process, building, the accelerator. None of it in a kept one."""
    found = record.outcome
    is_kept = record.start_seconds == 0.0
    own = found.build_seconds + found.context_seconds if isinstance(found, Measurement) and not is_kept else 0.0
    return (record.start_seconds or 0.0) + own


@dataclass
class OneRank:
    """Runs what won once more on one rank, so that it is known what exchanging gradients costs.

    There has to be time for `num_others` such processes besides.
    """

    is_exclusive: ClassVar[bool] = True
    conditions: Conditions
    num_others: int

    def next(self, ledger: Ledger, budget: Budget) -> Trial | None:
        """The trial, as a process of the confirmation would run it, where there is time for it."""
        chosen, left = ledger.finalists, budget.left()
        if chosen is None or any(record.purpose == "one_rank" for record in ledger.records):
            return None
        seconds = start_seconds(ledger.records, self.conditions.start_seconds) + run_seconds(ledger, chosen.winner)
        if left < SAFETY * (1 + self.num_others) * seconds:
            return None
        return _confirming_trial(
            self.conditions,
            ledger,
            chosen.winner,
            self.conditions.environment,
            purpose="one_rank",
            num_ranks=1,
            num_steps=(MAX_STEPS, MAX_STEPS),
            deadline_seconds=left,
        )


@dataclass
class LargerBatches:
    """Doubles the effective batch size, without accumulation, until memory, speed or the budget ends it.

    What it measures is neither recommended nor stepped down to: it would ask for another learning rate.
    """

    is_exclusive: ClassVar[bool] = True
    conditions: Conditions

    def next(self, ledger: Ledger, budget: Budget) -> Trial | None:
        """A trial of the next larger batch, as a process of the confirmation would run it."""
        setting, left = next_larger(ledger, self.conditions.description.num_samples), budget.left()
        if setting is None:
            return None
        seconds = MEASURE_SECONDS + NUM_STEPS_FORESEEN * setting.batch_size / max(ledger.speeds.values())
        if left < SAFETY * (start_seconds(ledger.records, self.conditions.start_seconds) + seconds):
            return None
        return _confirming_trial(
            self.conditions,
            ledger,
            setting,
            self.conditions.environment,
            purpose="outlook",
            deadline_seconds=left,
        )


def next_larger(ledger: Ledger, num_samples: int | None = None) -> Setting | None:
    """Twice the largest effective batch size tried in the fastest sound precision, None where none would pay. Pure."""
    kept = ledger.space.effective_batch_size
    sound = {c: speed for c, speed in ledger.speeds.items() if ledger.tiers[c] == 0 and not c.as_found}
    if kept is None or not sound or ledger.objective != "speed":
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
