"""Checks and calibrations in words, a line for each. Plain text, for every renderer."""

from __future__ import annotations

from typing import TYPE_CHECKING

from autotune_amp.core.explain import small
from autotune_amp.core.text import count, number

if TYPE_CHECKING:
    from autotune_amp.core.fidelity import Accumulation, Calibration, Fidelity


def short_check(found: Fidelity) -> str:
    """The verdict with the two numbers that say most."""
    ratio = "" if found.noise_ratio is None else f", rounding {small(found.noise_ratio)} of batch noise"
    gap = "" if found.training_gap is None else f", training gap {small(found.training_gap)}"
    return f"{found.verdict}{ratio}{gap}"


def short_calibration(found: Calibration) -> str:
    """The scale to start with and how many steps say so."""
    if found.init_scale is None:
        return "no loss scale is safe"
    return f"loss scale {number(found.init_scale)}, from {count(len(found.log2_scales), 'step')}"


def short_accumulation(found: Accumulation) -> str:
    """The verdict with how far the gradients part."""
    by = f" by {found.weighted_by}" if found.weighted_by else ""
    error = "" if found.error is None else f", gradients part by {small(found.error)}"
    return f"accumulation {found.verdict}{by}{error}"
