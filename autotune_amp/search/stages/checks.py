"""What has to be known before the confirmation: whether gradients accumulate, whether contenders learn what fp32
learns, and which loss scales are safe for fp16.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, NamedTuple

import msgspec

from autotune_amp.core.outcome import Failure
from autotune_amp.core.setting import Setting
from autotune_amp.precision.modes import MODES
from autotune_amp.search import loss_scales, ranking
from autotune_amp.search.budget import Budget
from autotune_amp.search.ledger import RIVAL, Ledger
from autotune_amp.search.ranking import check_key, rank
from autotune_amp.search.space import HOPELESS
from autotune_amp.search.stages.trials import Conditions
from autotune_amp.trial.jobs import Check, Trial

if TYPE_CHECKING:
    from autotune_amp.search.study import Study

NUM_PAIRS = 24  # of (init_scale, growth_interval) for one contender, the seeds among them
MIN_CHECK_SECONDS = 0.5
EARLY_SHARE = 0.3  # of the budget, for the checks that the rest of the search waits for: one may never end


class Todo(NamedTuple):
    """Check a setting against fp32, with its pins where it has some; calibrate its loss scale; or measure it."""

    purpose: Literal["fidelity", "calibration", "search"]
    setting: Setting


class AccumulationCheck:
    """One check on the user's own workload before anything accumulates."""

    def __init__(self, conditions: Conditions) -> None:
        self._conditions = conditions

    def next(self, ledger: Ledger, budget: Budget) -> Check | None:
        """The check, where something accumulates and nobody has made it."""
        if not ledger.space.accumulates or ledger.accumulation is not None:
            return None
        return self._conditions.accumulation_check(ledger, budget)


class Checks:
    """Holds contenders against fp32 and calibrates fp16, until they are judged or the search's share is used.

    All checks together take no more than `share` of the budget.
    """

    def __init__(self, conditions: Conditions, study: Study, share: float = 1.0) -> None:
        self._conditions = conditions
        self._study = study
        self._share = share

    def next(self, ledger: Ledger, budget: Budget) -> Trial | Check | None:
        """The check, calibration or trial that the choice of contenders waits for."""
        self._study.catch_up(ledger)
        used_seconds = sum(r.seconds for r in ledger.records if r.purpose in ("fidelity", "calibration"))
        seconds = min(budget.left_for_search(), self._share * budget.seconds - used_seconds)
        todo = next_todo(ledger)
        if todo is None or seconds <= MIN_CHECK_SECONDS:
            return None
        if todo.purpose == "search":
            return self._conditions.search_trial(ledger, budget, todo.setting, seconds)
        return self._conditions.check(todo.purpose, todo.setting, seconds)


class LossScales:
    """Lets the sampler suggest loss scales for the contenders: they are answered by replay, without a job."""

    def __init__(self, study: Study) -> None:
        self._study = study

    def next(self, ledger: Ledger, budget: Budget) -> None:
        """No job at all."""
        for contender in filter(None, (ledger.finalists or ())[:2]):
            self._study.suggest_pairs(contender.with_own_workers, NUM_PAIRS, budget)


def next_todo(ledger: Ledger) -> Todo | None:
    """What is still to be found out before the contenders can be confirmed; None where all are judged. Pure.

    Every answer adds a record that changes the next one: what is unfaithful leaves the shortlist to others.
    """
    healing = _healing(ledger)
    if healing is not None:
        return healing
    chosen = ledger.shortlist
    speeds = {c: found.samples_per_second for c, found in ledger.measured.items()}
    fastest = max((speeds[c] for c in (chosen or ())[:2] if c is not None), default=0.0)
    for setting in _contenders(ledger):
        is_rival = (
            ledger.objective != "speed"  # then what is slower may win
            or speeds[setting] >= (1 - RIVAL) * fastest
            or (chosen is not None and setting == chosen.winner)
        )
        takes_scaler = MODES[setting.precision].takes_scaler
        if takes_scaler and is_rival and loss_scales.key_of(setting) not in ledger.scales:
            return Todo("calibration", setting.with_own_workers)  # no check depends on their number
        if _is_unchecked(ledger, setting):
            return _compare(setting, check_key(setting))
    healable = _healable(ledger, fastest)
    return None if healable is None else _compare(healable, check_key(healable))


def _is_unchecked(ledger: Ledger, setting: Setting) -> bool:
    return ranking.can_check(setting, ledger.space) and check_key(setting) not in ledger.fidelity


def _contenders(ledger: Ledger) -> list[Setting]:
    """What may be recommended, the winner first: a runner-up that is hopelessly slow is not confirmed either.

    The baseline is one: it may be kept.
    """
    chosen, measured = ledger.shortlist, ledger.measured
    if chosen is None:
        return []
    least_speed = measured[chosen.winner].samples_per_second / HOPELESS
    runner_up = [c for c in (chosen.runner_up,) if c is not None and measured[c].samples_per_second >= least_speed]
    return list(dict.fromkeys([chosen.winner, *runner_up, *(c for c in (chosen.baseline,) if c in measured)]))


def _healing(ledger: Ledger) -> Todo | None:
    """The next step for a precision that some pinned modules make faithful: check it with the pins, then measure it."""
    tried = {r.candidate for r in ledger.records if r.purpose in ranking.BEFORE_CONFIRMATION}
    for key, found in ledger.fidelity.items():
        ours = [c for c in tried if check_key(c) == key and not c.as_found]
        if found.verdict != "unfaithful" or not found.healing_pins or not ours:
            continue
        # Where nothing of the precision ran, the smallest: it may have been the numbers that failed it.
        ran = {c: ledger.measured[c].samples_per_second for c in ours if c in ledger.measured}
        like = rank(ran)[0] if ran else min(ours, key=lambda c: c.batch_size)
        healed = msgspec.structs.replace(like.with_own_workers, pinned_modules=found.healing_pins)
        verdict = ledger.fidelity.get(check_key(healed))
        if verdict is None:
            return _compare(healed, check_key(healed))
        if verdict.verdict != "unfaithful" and healed not in tried:
            return Todo("search", healed)
    return None


def _healable(ledger: Ledger, fastest: float) -> Setting | None:
    """A setting whose numbers alone keep it from being a contender: pins may heal its precision.

    That is fp16 that was refused though fast enough, or a precision whose every trial was not finite.
    """
    if fastest == 0.0:
        return None  # nothing works: it is not precision's fault
    for setting, found in ledger.measured.items():
        is_refused = loss_scales.refusal(ledger.scales, setting) is not None and not setting.pinned_modules
        is_fast = found.samples_per_second >= (1 - RIVAL) * fastest
        if is_refused and is_fast and check_key(setting) not in ledger.fidelity:
            return setting
    tried = [r for r in ledger.records if r.purpose == "search" and not r.candidate.pinned_modules]
    for precision in dict.fromkeys(r.candidate.precision for r in tried):
        ours = [r for r in tried if r.candidate.precision == precision]
        smallest = min((r.candidate for r in ours), key=lambda c: c.batch_size)
        are_nonfinite = all(isinstance(r.outcome, Failure) and r.outcome.kind == "nonfinite" for r in ours)
        if are_nonfinite and _is_unchecked(ledger, smallest):
            return smallest
    return None


def _compare(like: Setting, key: Setting) -> Todo:
    size = min(ranking.MAX_BATCH_SIZE, like.batch_size)
    return Todo("fidelity", msgspec.structs.replace(key, batch_size=size))
