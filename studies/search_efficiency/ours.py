"""The package's own search on a replay, as it is and with one thing changed, to find out what is best."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from statistics import median
from typing import Any, NamedTuple
from unittest.mock import patch

from changes import Patch, steps
from landscape import Landscape
from search_replay import search_replay
from truth import Rates, regret

from autotune_amp.core.outcome import Measurement, Record
from autotune_amp.core.setting import Setting
from autotune_amp.search import planner, ranking
from autotune_amp.search.options import SearchOptions
from autotune_amp.search.stages import confirm, explore

BUDGET_SECONDS = SearchOptions().budget_seconds


def _budget(seconds: float) -> Patch:
    return Patch(sys.modules[__name__], "BUDGET_SECONDS", seconds)


VARIANTS: dict[str, tuple[Patch, ...]] = {
    "ours": (),
    "measures nothing again": (Patch(explore, "MAX_PROCESSES", 1),),
    "least gain 0.05 %": (Patch(planner, "MIN_JOB_GAIN", 0.0005),),
    "least gain 1 %": (Patch(planner, "MIN_JOB_GAIN", 0.01),),
    "believes one lucky process": (Patch(explore, "PLATEAU", math.inf),),
    "4 steps": (steps(4, 4),),
    "8 steps": (steps(8, 8),),
    "no cut": (Patch(planner, "CUT_RATIO", math.inf),),
    "2 rounds": (Patch(confirm, "MAX_ROUNDS", 2),),
    "budget of 220 s": (_budget(220.0),),
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
