"""Modules kept in fp32 whatever the precision."""

from __future__ import annotations

from typing import Any

from autotune_amp.dimensions.dimension import Dimension


class _PinnedModules(Dimension[tuple[str, ...]]):
    """Dimension whose values the fidelity check finds: which modules to pin."""

    name = "pinned_modules"
    found_by = None

    def apply(self, training: Any, value: tuple[str, ...]) -> None:
        training.pin(value)


PINNED_MODULES = _PinnedModules()
