"""What a variant of ours changes: constants of the package's modules, and rules that it does not have."""

from __future__ import annotations

from typing import Any, NamedTuple

import msgspec

from autotune_amp.search.planner import Planner
from autotune_amp.trial.jobs import Trial


class Patch(NamedTuple):
    """A module's constant or function, replaced for one variant."""

    module: Any
    name: str
    value: Any


def steps(low: int, high: int) -> Patch:
    """Search trials of these many steps."""
    original = Planner.trial

    def trial(*args: Any) -> Trial:
        return msgspec.structs.replace(original(*args), num_steps=(low, high))

    return Patch(Planner, "trial", trial)
