"""What lies beyond an effective batch size that is kept: measured with the time that is left, shown as an outlook."""

from __future__ import annotations

import msgspec

from autotune_amp.core.outcome import Measurement
from autotune_amp.core.setting import Setting
from autotune_amp.search.budget import Budget
from autotune_amp.search.ledger import Ledger
from autotune_amp.search.ranking import PLATEAU
from autotune_amp.search.space import SEARCH_UP
from autotune_amp.search.stages.confirm import MEASURE_SECONDS, SAFETY, start_seconds
from autotune_amp.search.stages.trials import Conditions
from autotune_amp.trial.jobs import Trial

NUM_STEPS_FORESEEN = 14  # of a trial: a first step as long as three, the warm-up, the fewest that are measured


class LargerBatches:
    """Doubles the effective batch size, without accumulation, until memory, speed or the budget ends it.

    What it measures is neither recommended nor stepped down to: it would ask for another learning rate.
    """

    def __init__(self, conditions: Conditions, environment: dict[str, str], start_seconds: float) -> None:
        self._conditions = conditions
        self._environment = environment
        self._start_seconds = start_seconds

    def next(self, ledger: Ledger, budget: Budget) -> Trial | None:
        """A trial of the next larger batch, as a process of the confirmation would run it."""
        known = self._conditions.description
        setting = next_larger(ledger, None if known is None else known.num_samples)
        if setting is None:
            return None
        seconds = NUM_STEPS_FORESEEN * setting.batch_size / max(ledger.speeds.values())
        left = budget.left()
        if left < SAFETY * (start_seconds(ledger.records, self._start_seconds) + seconds + MEASURE_SECONDS):
            return None
        return self._conditions.trial(
            ledger,
            setting,
            purpose="outlook",
            environment=self._environment,
            hold_heap=False,
            measure_seconds=MEASURE_SECONDS,
            deadline_seconds=left,
        )


def next_larger(ledger: Ledger, num_samples: int | None = None) -> Setting | None:
    """Twice the largest effective batch size tried in the fastest sound precision, None where none would pay. Pure."""
    kept = ledger.space.effective_batch_size
    sound = {c: speed for c, speed in ledger.speeds.items() if ledger.tiers[c] == 0 and not c.as_found}
    if kept is None or not sound or ledger.objective != "speed":
        return None
    fastest = max(sound, key=lambda c: sound[c])
    whole = msgspec.structs.replace(fastest, batch_size=kept, accumulation_steps=1)
    before, best = sound.get(whole, sound[fastest]), sound[fastest]
    larger = msgspec.structs.replace(whole, batch_size=2 * kept)
    for record in ledger.records:
        if record.purpose == "outlook":
            found = record.outcome
            now = found.samples_per_second if isinstance(found, Measurement) else 0.0
            if now < (1 + PLATEAU) * before:
                return None
            before = best = now
            larger = msgspec.structs.replace(record.candidate, batch_size=2 * record.candidate.batch_size)
    ran_out = any(
        c.precision == larger.precision and c.batch_size <= larger.batch_size and failure.kind == "oom"
        for c, failure in ledger.failures.items()
    )
    is_slowing = before < (1 - PLATEAU) * best
    is_too_large = larger.batch_size > min(SEARCH_UP * kept, num_samples or SEARCH_UP * kept)
    return None if ran_out or is_slowing or is_too_large else larger
