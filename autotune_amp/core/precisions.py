"""The precisions that a model can be trained in."""

from __future__ import annotations

from typing import Literal, TypeAlias

Precision: TypeAlias = Literal["fp32", "tf32", "bf16", "fp16", "fp8"]

# Ordered from the safest at run time to the most failure-prone.
PRECISIONS: tuple[Precision, ...] = ("fp32", "tf32", "bf16", "fp16", "fp8")
AROUND_FP8: Precision = "bf16"  # precision of the rest of a model whose linear layers multiply in fp8


def autocast_precision(precision: Precision) -> Precision:
    """Return the precision of autocast for `precision`: bf16 for fp8, whose layers are part of a bf16 model."""
    return AROUND_FP8 if precision == "fp8" else precision


def product_precision(precision: Precision, weights: str, *, as_found: bool = False) -> Precision | None:
    """Return the precision that matrix products are computed in, None if it differs between the layers.

    Without autocast (fp32 or tf32) it is that of the `weights` (see `Description`); fp32 with the user's own flags
    (`as_found`) counts as TF32.
    """
    if precision not in ("fp32", "tf32") or weights == "fp32":
        return "tf32" if precision == "fp32" and as_found else precision
    return next((each for each in PRECISIONS if each == weights), None)
