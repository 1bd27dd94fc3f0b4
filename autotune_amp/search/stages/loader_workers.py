"""Where the data loader sets the speed, it is tried which number of workers would do."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from autotune_amp.core.outcome import Failure, Measurement, Outcome
from autotune_amp.core.setting import Setting
from autotune_amp.search.budget import Budget
from autotune_amp.search.ledger import Ledger
from autotune_amp.search.ranking import MAX_DATA_SHARE, PLATEAU, data_share, rank
from autotune_amp.search.stages.checks import Checks
from autotune_amp.search.stages.trials import Conditions, may_try
from autotune_amp.trial.jobs import Check, Trial

SHORT_WAIT = 0.05  # of a step: more workers have little left to gain
HANDOVER_SECONDS = 1e-3  # of a batch from a worker process: a shorter wait is not made shorter by one
WORKER_START_SECONDS = 10.0  # a worker that is not forked imports torch first


class LoaderWorkers:
    """Tries more workers until one number will do or none helps, within `max_trials` of the whole search.

    A precision that comes to lead by them is checked.
    """

    def __init__(self, conditions: Conditions, checks: Checks, max_trials: int | None = None) -> None:
        self._conditions = conditions
        self._checks = checks
        self._max_trials = max_trials

    def next(self, ledger: Ledger, budget: Budget) -> Trial | Check | None:
        """The check that the last trial calls for, else a trial with another number of workers."""
        known, seconds = self._conditions.description, budget.left_for_search()
        if known is None or known.num_workers is None:
            return None
        check = self._checks.next(ledger, budget)
        if check is not None or not may_try(ledger, seconds, self._max_trials):
            return check
        setting = next_to_try(ledger, known.num_workers, self._conditions.hardware.identity.num_cpus)
        if setting is None:
            return None
        trial = self._conditions.search_trial(ledger, budget, setting, seconds)
        first, step = trial.first_step_deadline_seconds, trial.step_deadline_seconds  # an epoch's end starts them anew
        return msgspec.structs.replace(
            trial,
            first_step_deadline_seconds=None if first is None else first + WORKER_START_SECONDS,
            step_deadline_seconds=None if step is None else step + WORKER_START_SECONDS,
        )


def next_to_try(ledger: Ledger, own_num_workers: int, num_cpus: int) -> Setting | None:
    """What to try next with another number of workers, None where there is nothing to gain by one. Pure.

    The ladder of workers is climbed with what would be chosen if no step waited for its data. It ends where the wait is
    short, where more workers failed, and where they are no faster than half as many. The first worker is no test of
    that: it makes loading and training overlap, the second one doubles the loading.
    """
    speeds, tiers, waits = ledger.speeds, ledger.pending_tiers, _waits(ledger)
    unheld = {c: speed / (1 - waits[c]) for c, speed in speeds.items() if c in waits}
    if not unheld:
        return None
    target = rank(unheld, tiers=tiers)[0]
    fastest = max(speed for c, speed in speeds.items() if tiers[c] <= tiers[target])
    if waits[target] <= MAX_DATA_SHARE or unheld[target] <= (1 + PLATEAU) * fastest:
        return None
    tried = {
        r.candidate: r.outcome
        for r in ledger.records
        if r.purpose == "search" and isinstance(r.outcome, (Measurement, Failure))
    }
    seconds_per_batch = target.batch_size / unheld[target] / (1 - waits[target])
    if waits[target] * seconds_per_batch < HANDOVER_SECONDS:
        return None
    num_before, before = own_num_workers, tried[target]
    for num_workers in ladder(own_num_workers, num_cpus):
        setting = msgspec.structs.replace(target, num_workers=num_workers)
        if setting not in tried:
            return setting
        found = tried[setting]
        if not _is_worth_doubling(found, before if num_before else None):
            break
        num_before, before = num_workers, found
    # Where the wait still sets the speed, what has less to go wrong reaches it too.
    leader = rank({c: speed for c, speed in speeds.items() if c.with_own_workers == target})[0]
    held = {c: min(speed, speeds[leader]) for c, speed in unheld.items()}
    safer = msgspec.structs.replace(rank(held, tiers=tiers)[0], num_workers=leader.num_workers)
    return None if safer in tried else safer


def ladder(own_num_workers: int, num_cpus: int) -> Iterator[int]:
    """The numbers of workers to try: today's doubled and doubled again, up to the number of CPUs."""
    number = own_num_workers
    while number < num_cpus:
        number = min(max(1, 2 * number), num_cpus)
        yield number


def _waits(ledger: Ledger) -> dict[Setting, float]:
    """The share of a step spent waiting with the user's own number of workers, of what a config can express."""
    return {
        r.candidate: data_share(r.outcome)
        for r in ledger.records
        if r.purpose == "search"
        and r.candidate.num_workers is None
        and not r.candidate.as_found
        and isinstance(r.outcome, Measurement)
        and not r.outcome.was_cut
    }


def _is_worth_doubling(found: Outcome, before: Outcome | None) -> bool:
    """Whether still more workers may do better, given what these did and what half as many had done."""
    if not isinstance(found, Measurement) or data_share(found) < SHORT_WAIT:
        return False
    return not isinstance(before, Measurement) or found.samples_per_second > (1 + PLATEAU) * before.samples_per_second
