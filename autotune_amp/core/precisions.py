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
