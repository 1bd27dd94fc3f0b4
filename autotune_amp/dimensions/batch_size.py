"""Batch size of a forward pass, and the number of forward passes per optimizer step."""

from __future__ import annotations

from autotune_amp.dimensions.dimension import Dimension


class _BatchSize(Dimension[int]):
    """Batch size of a forward pass. `search.space` derives its values from the effective batch size."""

    name = "batch_size"
    affects = frozenset({"speed", "memory"})
    found_by = "curves"

    def risk(self, value: int) -> int:
        return value


class _AccumulationSteps(Dimension[int]):
    """Effective batch size over batch size. `numerics.accumulation` checks whether accumulation is exact."""

    name = "accumulation_steps"
    affects = frozenset({"speed"})
    found_by = None


BATCH_SIZE = _BatchSize()
ACCUMULATION_STEPS = _AccumulationSteps()
