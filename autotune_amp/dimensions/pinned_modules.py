"""Modules that run in fp32 in every precision."""

from __future__ import annotations

from typing import Any

from autotune_amp.dimensions.dimension import Dimension


class _PinnedModules(Dimension[tuple[str, ...]]):
    """Names of the modules that run in fp32, which the fidelity check finds."""

    name = "pinned_modules"
    found_by = None

    def apply(self, training: Any, value: tuple[str, ...]) -> None:
        training.pin(value)


PINNED_MODULES = _PinnedModules()
