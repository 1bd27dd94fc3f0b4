"""Batch size of a forward pass, and the number of such passes in an optimizer step."""

from __future__ import annotations

from autotune_amp.dimensions.dimension import Dimension


class _BatchSize(Dimension[int]):
    """Dimension whose values follow from the effective batch size (`search.space`)."""

    name = "batch_size"
    affects = frozenset({"speed", "memory"})
    found_by = "curves"

    def risk(self, value: int) -> int:
        return value


class _AccumulationSteps(Dimension[int]):
    """Dimension that makes up the rest of the effective batch size. A check tells whether accumulation is exact."""

    name = "accumulation_steps"
    affects = frozenset({"speed"})
    found_by = None


BATCH_SIZE = _BatchSize()
ACCUMULATION_STEPS = _AccumulationSteps()
