"""A dimension that no version has, as a maintainer would add one: how much of the model is fused."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from autotune_amp.dimensions.dimension import Choices, Dimension

LEVELS = ("no", "partly", "wholly", "magically")


class _Fused(Dimension[str]):
    name = "fused"
    affects = frozenset({"speed", "numerics"})

    def choices(self, hardware: Any, description: Any, options: Any) -> Choices[str]:
        return Choices(("partly", "wholly"), {"magically": f"{hardware.device} has no magic"})

    def apply(self, training: Any, value: str) -> None:
        training.model.fused = value

    def risk(self, value: str) -> int:
        return LEVELS.index(value)

    def export(self, value: str, target: str) -> Sequence[str] | None:
        return None if value == "no" else [f"model = fuse(model, {value!r})  # for {target}"]


FUSED = _Fused()
