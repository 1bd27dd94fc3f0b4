"""What a variant of ours changes: constants of the package's modules, and rules that it does not have."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import msgspec

from autotune_amp.core.dimensions import Precision
from autotune_amp.search.stages import explore
from autotune_amp.search.stages.trials import Conditions
from autotune_amp.trial.jobs import Trial


class Patch(NamedTuple):
    """A module's constant or function, replaced for one variant."""

    module: Any
    name: str
    value: Any


def steps(low: int, high: int) -> Patch:
    """Search trials of these many steps."""
    original = Conditions.search_trial

    def search_trial(*args: Any) -> Trial:
        return msgspec.structs.replace(original(*args), num_steps=(low, high))

    return Patch(Conditions, "search_trial", search_trial)


def climbing_within(share: float) -> Patch:
    """Only precisions whose best so far is within `share` of the best are worth a search for their batch."""

    def best_precisions(known: Mapping[Precision, Any]) -> list[Precision]:
        best = {precision: max(found.rates.values()) for precision, found in known.items() if found.rates}
        ranked = sorted(best, key=lambda precision: -best[precision])
        return [precision for precision in ranked if best[precision] >= (1 - share) * best[ranked[0]]]

    return Patch(explore, "_best_precisions", best_precisions)
