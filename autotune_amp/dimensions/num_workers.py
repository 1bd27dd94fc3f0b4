"""Number of the DataLoader's worker processes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from autotune_amp.dimensions.dimension import Dimension


class _NumWorkers(Dimension[int | None]):
    """Dimension that is tried if the data loader limits the speed (`search.stages.variants`), starting with the user's
    own number.
    """

    name = "num_workers"
    affects = frozenset({"speed"})
    found_by = None
    removable: ClassVar[Mapping[str, float]] = {"loader": 1.0}

    def risk(self, value: int | None) -> int:
        return 0 if value is None else 1 + value


NUM_WORKERS = _NumWorkers()
