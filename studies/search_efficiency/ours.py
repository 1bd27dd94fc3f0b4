"""The package's own search on a replay, as it is and with one thing changed, to find out what is best."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from statistics import median
from typing import Any, NamedTuple
from unittest.mock import patch

from changes import Patch, climbing_within, steps
from landscape import Landscape
from optuna.samplers import GPSampler
from search_replay import search_replay
from truth import Rates, regret

from autotune_amp.core.outcome import Measurement, Record
from autotune_amp.core.setting import Setting
from autotune_amp.search import ranking, study
from autotune_amp.search.stages import confirm, explore, trials

BUDGET_SECONDS = 110.0  # the default
EVERY = 99  # sizes: more than there are


def _nothing(*_: Any) -> None:
    """In place of a rule of the seeds, or of the step-time model."""


def _never(*_: Any) -> bool:
    """In place of the rule that the confirmation borrows by."""
    return False


def _budget(seconds: float) -> Patch:
    return Patch(sys.modules[__name__], "BUDGET_SECONDS", seconds)


_NO_SAMPLER = Patch(explore, "MAX_IDLE_SUGGESTIONS", 0)
_NO_LOOK = Patch(explore, "_round_the_best", _nothing)
_NO_REPEATS = Patch(explore, "NUM_SEARCH_PROCESSES", 1)

VARIANTS: dict[str, tuple[Patch, ...]] = {
    "ours": (),
    "before: neither looks round nor repeats": (_NO_LOOK, _NO_REPEATS),
    "does not look round the best": (_NO_LOOK,),
    "does not repeat": (_NO_REPEATS,),
    "looks at every size": (Patch(explore, "NUM_FAR_BEHIND", EVERY),),
    "repeats the best 5": (Patch(explore, "NUM_REPEATED", 5),),
    "repeats the best 3 twice": (Patch(explore, "NUM_SEARCH_PROCESSES", 3),),
    "no sampler after the seeds": (_NO_SAMPLER,),
    "GP after the seeds": (Patch(study, "TPESampler", GPSampler),),
    "8 idle suggestions": (Patch(explore, "MAX_IDLE_SUGGESTIONS", 8),),
    "4 steps": (steps(4, 4),),
    "8 steps": (steps(8, 8),),
    "cut at 1.1": (Patch(trials, "CUT_RATIO", 1.1),),
    "cut at 1.5": (Patch(trials, "CUT_RATIO", 1.5),),
    "no cut": (Patch(trials, "CUT_RATIO", math.inf),),
    "2 rounds": (Patch(confirm, "NUM_ROUNDS", 2),),
    "3 rounds": (Patch(confirm, "NUM_ROUNDS", 3),),
    "does not borrow for the confirmation": (Patch(confirm, "_is_short", _never),),
    "1 s a confirming process": (Patch(confirm, "MEASURE_SECONDS", 1.0),),
    "budget of 220 s": (_budget(220.0),),
    "no step-time model": (Patch(explore, "fit_step_time", _nothing),),
    "a climb ends below 3 %": (Patch(explore, "MIN_GAIN", 0.03),),
    "precisions within 30 % climb": (climbing_within(0.30),),
    "precisions within 30 % climb, 8 steps, no sampler": (climbing_within(0.30), steps(8, 8), _NO_SAMPLER),
    "no plateau": (Patch(ranking, "PLATEAU", 0.0),),
}


class Ours(NamedTuple):
    """One replayed search: the cell recommended after each of its trials, and how it was spent."""

    trace: list[tuple[float, Setting]]
    facts: dict[str, Any]
    fastest_searched: Setting
    fastest_confirmed: Setting

    def as_json(self, truth: Rates) -> dict[str, Any]:
        return self.facts | {
            "fastest_searched": round(regret(self.fastest_searched, truth), 4),
            "fastest_confirmed": round(regret(self.fastest_confirmed, truth), 4),
        }


def play_ours(searching: Landscape, seed: int, variant: str) -> Ours:
    with ExitStack() as stack:
        for change in VARIANTS[variant]:
            stack.enter_context(patch.object(*change))
        found = search_replay(searching, seed, BUDGET_SECONDS)
    records = [record for _, record in found.records]
    is_searched = [r.purpose == "search" for r in records]
    confirmed = _rates(records, "confirm")
    searched = _rates(records, "search")
    return Ours(
        found.trace,
        {
            "search_seconds": round(found.searched_seconds, 2),
            "seconds": round(found.records[-1][0], 2),
            "num_trials": sum(is_searched),
        },
        max(searched, key=lambda c: searched[c]),
        max(confirmed or searched, key=lambda c: (confirmed or searched)[c]),
    )


def _rates(records: Sequence[Record], purpose: str) -> dict[Setting, float]:
    """Median samples per second of each cell in this purpose's processes."""
    seen: dict[Setting, list[float]] = {}
    for record in records:
        if record.purpose == purpose and isinstance(record.outcome, Measurement):
            seen.setdefault(record.candidate, []).append(record.outcome.samples_per_second)
    return {cell: median(rates) for cell, rates in seen.items()}
