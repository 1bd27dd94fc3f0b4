"""Values of further dimensions, each tried on the setting that would win: one change at a time, the best kept."""

from __future__ import annotations

from msgspec.structs import replace

from autotune_amp.core.setting import DIMENSIONS, Setting
from autotune_amp.search.budget import Budget
from autotune_amp.search.ledger import Ledger
from autotune_amp.search.stages.checks import Checks
from autotune_amp.search.stages.trials import Conditions, may_try
from autotune_amp.trial.jobs import Check, Trial


class Variants:
    """Tries the space's variants, within `max_trials` of the whole search; what comes to lead by one is checked."""

    def __init__(self, conditions: Conditions, checks: Checks, max_trials: int | None = None) -> None:
        self._conditions = conditions
        self._checks = checks
        self._max_trials = max_trials

    def next(self, ledger: Ledger, budget: Budget) -> Trial | Check | None:
        """The check that the last trial calls for, else a trial of another value."""
        if not ledger.space.variants:
            return None
        check, left = self._checks.next(ledger, budget), budget.left_for_search()
        if check is not None or not may_try(ledger, left, self._max_trials):
            return check
        setting = next_to_try(ledger)
        return None if setting is None else self._conditions.search_trial(ledger, budget, setting, left)


def next_to_try(ledger: Ledger) -> Setting | None:
    """The would-be winner with another value of a dimension that bears on the objective; None once all were tried.

    Pure. A config cannot express what is as found.
    """
    chosen = ledger.shortlist
    if chosen is None or chosen.winner.as_found:
        return None
    wanted = "memory" if ledger.objective == "memory" else "speed"
    tried = {record.candidate for record in ledger.trials}
    for dimension in DIMENSIONS:
        if wanted in dimension.affects:
            for value in ledger.space.variants.get(dimension.name, ()):
                setting = replace(chosen.winner, **{dimension.name: value})
                if setting not in tried:
                    return setting
    return None
