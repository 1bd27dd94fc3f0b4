"""Weights kept in low precision: what rounding leaves of an optimizer step, and what would help."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from autotune_amp.core.fidelity import LowWeights
from autotune_amp.precision.mode import HALF_DTYPES


def lost_updates(model: nn.Module, before: Mapping[str, Tensor], after: Mapping[str, Tensor]) -> LowWeights | None:
    """What becomes of one fp32 step, from the weights `before` it to those `after`, where `model` keeps its weights.

    Over the trainable parameters in half precision; None where there are none. The weights `before` are numbers that
    the half precision holds. Stochastic rounding takes one of the two neighbours so that the mean is right; its
    variance is (x - below) (above - x) [exact].
    """
    num_moved = num_lost = 0
    moved = applied = variance = 0.0
    dtypes = set()
    for name, parameter in model.named_parameters():
        if parameter.dtype not in HALF_DTYPES or not parameter.requires_grad:
            continue
        dtypes.add(parameter.dtype)
        update = (after[name] - before[name]).double()
        nearest = after[name].to(parameter.dtype).double() - before[name].double()
        # Not finite: a mask of -inf kept as a parameter, or a step past the end of the format, which is no rounding.
        counts = (update != 0) & update.isfinite() & nearest.isfinite()
        update, nearest = update.where(counts, 0), nearest.where(counts, 0)
        num_moved += int((update != 0).sum())
        num_lost += int(((update != 0) & (nearest == 0)).sum())
        moved += float(update.square().sum())
        applied += float((update * nearest).sum())
        variance += float(_stochastic_variance(after[name], parameter.dtype).where(counts.cpu(), 0).sum())
    if not num_moved or not moved:
        return None
    return LowWeights(
        weights="fp16" if torch.float16 in dtypes else "bf16",
        lost_share=num_lost / num_moved,
        applied_share=applied / moved,
        stochastic_noise=math.sqrt(variance / moved),
    )


def _stochastic_variance(exact: Tensor, dtype: torch.dtype) -> Tensor:
    exact = exact.cpu()  # nextafter in half precision is not there on every accelerator
    nearest = exact.to(dtype)
    toward = torch.where(exact > nearest.float(), math.inf, -math.inf).to(dtype)
    other = torch.nextafter(nearest, toward)
    return (exact.double() - nearest.double()).abs() * (other.double() - exact.double()).abs()
