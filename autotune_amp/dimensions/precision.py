"""Precision of the forward and backward pass, the modules that run in fp32 in every precision, and whether the caller's
own TF32 flags and autocast are kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from autotune_amp.core.precisions import PRECISIONS, Precision
from autotune_amp.dimensions.dimension import Choices, Dimension


class _Precision(Dimension[Precision]):
    name = "precision"
    found_by = "curves"

    def choices(self, hardware: Any, description: Any, options: Any) -> Choices[Precision]:
        candidates: Sequence[Precision] = options.precisions or PRECISIONS
        reasons = {precision: self.unsupported_reason(precision, hardware, description) for precision in candidates}
        left_out = {precision: reason for precision, reason in reasons.items() if reason is not None}
        return Choices(tuple(precision for precision in candidates if precision not in left_out), left_out)

    def unsupported_reason(self, precision: Precision, hardware: Any, description: Any) -> str | None:
        """Return the reason why the workload cannot be trained in `precision` on this hardware, or None if it can."""
        weights = description.weights
        capability = hardware.precisions.get(precision)
        if capability is None:
            return f"the probe of {hardware.device} did not test it"
        if capability.level == "unsupported":  # first, since it holds for every workload
            return str(capability.reason)
        if precision in description.unsettable:
            return str(description.unsettable[precision])
        if precision == "fp8":
            return "fp8 is tried on the best setting in another precision, with --try fp8_recipe"
        kept = f"the weights are kept in {weights}"
        if weights == "bf16" and precision == "fp16":
            return (
                f"{kept}: values outside of fp16's range would overflow, and the gradient scaler needs fp32 gradients"
            )
        if weights == "fp16" and precision in ("fp16", "bf16"):
            return f"{kept}, and so are their gradients, which GradScaler cannot unscale; keep the weights in fp32"
        if weights in ("bf16", "fp16") and precision == "tf32":
            return f"{kept}: TF32 only affects products of fp32 numbers, so it is the same as fp32"
        return None

    def apply(self, training: Any, value: Precision) -> None:
        training.set_precision(value)

    def risk(self, value: Precision) -> int:
        return PRECISIONS.index(value)


class _AsFound(Dimension[bool]):
    """Whether the caller's own flags and autocast are kept. Of the settings that are measured, it is True only for the
    baseline; of the configs to train with, also for those of commands, which keep the script's own TF32 flags.

    The baseline has the fidelity of the precision that its flags amount to (`ranking.check_key`).
    """

    name = "as_found"
    affects = frozenset({"speed", "memory"})
    found_by = None


class _PinnedModules(Dimension[tuple[str, ...]]):
    """Names of the modules that run in fp32, which the fidelity check finds."""

    name = "pinned_modules"
    found_by = None

    def apply(self, training: Any, value: tuple[str, ...]) -> None:
        training.pin(value)


PRECISION = _Precision()
AS_FOUND = _AsFound()
PINNED_MODULES = _PinnedModules()
