"""Number of the DataLoader's worker processes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from autotune_amp.dimensions.dimension import Dimension


class _NumWorkers(Dimension[int | None]):
    """Number of worker processes, None for the user's own. Others are tried if the loader limits the speed.

    See `search.stages.workers`.
    """

    name = "num_workers"
    affects = frozenset({"speed"})
    found_by = None
    removable: ClassVar[Mapping[str, float]] = {"loader": 1.0}

    def risk(self, value: int | None) -> int:
        return 0 if value is None else 1 + value


NUM_WORKERS = _NumWorkers()
