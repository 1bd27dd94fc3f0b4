"""Checks and calibrations in words, a line for each. Plain text, for every renderer."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from autotune_amp.core.text import count, exact, one_line

if TYPE_CHECKING:
    from collections.abc import Sequence

    from autotune_amp.core.config import LossScale
    from autotune_amp.core.fidelity import Accumulation, Fidelity
    from autotune_amp.core.recommendation import LossScaleEvidence


_NO_LIMIT = 1e30  # what only fp16 is below: nothing comes near the range that bf16 shares with fp32


def check_line(found: Fidelity) -> str:
    """A check: its verdict with the modules to blame, the numbers, and the modules that heal it."""
    pinned = f"with {names(found.pinned_modules)} in fp32 " if found.pinned_modules else ""
    parts = [pinned + one_line(found.reason).rstrip("."), *_numbers(found)]
    if found.healing_pins:
        parts.append(f"with {names(found.healing_pins)} in fp32 it is faithful")
    return "; ".join(parts)


def accumulation_line(found: Accumulation) -> str:
    """What accumulated gradients are to those of the whole batch."""
    by = f" by {found.weighted_by}" if found.weighted_by else ""
    error = "" if found.error is None else f", {small(found.error)} off the whole batch's gradient"
    return f"{found.verdict}{by}{error}"


def loss_scale_line(scale: LossScale, known: LossScaleEvidence | None) -> str:
    """fp16's init_scale and growth interval, and what they were chosen on."""
    text = f"starts at {exact(scale.init_scale)}, growth interval {scale.growth_interval}"
    if known is None:
        return text
    text += (
        f"; over {known.num_steps:,} steps {count(known.num_skips, 'skip')} foretold, "
        f"{_percent(known.applied_share)} of the gradient applied "
        f"(GradScaler's defaults: {known.default_num_skips}, {_percent(known.default_applied_share)})"
    )
    if known.num_confirming_steps:
        text += (
            f"; in {known.num_confirming_steps:,} measured steps {count(known.num_skips_seen, 'skip')} seen, "
            f"{known.num_skips_foretold} foretold"
        )
    return text + (
        f"; largest safe scale 2^{known.log2_safe_scale_min:.1f} at the least and 2^{known.log2_safe_scale_median:.1f} "
        f"in the median of {count(known.num_calibrated_steps, 'step')}, "
        f"{_percent(known.flushed_share)} of the gradient's entries flushed"
    )


def names(modules: Sequence[str]) -> str:
    """Modules by name; the empty name is the code outside of every module."""
    return one_line(", ".join(name or "code outside of every module" for name in modules))


def _numbers(found: Fidelity) -> list[str]:
    parts = []
    if found.noise_ratio is not None:
        parts.append(f"noise ratio {small(found.noise_ratio)}")
    if found.flushed_share is not None:
        parts.append(f"{_percent(found.flushed_share)} flushed")
    if found.forward_max is not None:
        has_limit = found.format_max is not None and found.format_max < _NO_LIMIT
        limit = f" of {found.format_max:.5g}" if has_limit else ""
        parts.append(f"activations up to {found.forward_max:.3g}{limit}")
    if found.training_gap is not None:
        parts.append(f"training gap {small(found.training_gap)} over {count(found.num_paired_steps, 'step')}")
    if found.low_weights is not None:
        parts.append(f"{_percent(found.low_weights.lost_share)} of the updates round away")
    return parts


def small(value: float) -> str:
    """Two significant digits, or that it is no number."""
    return f"{value:.2g}" if math.isfinite(value) else "not finite"


def _percent(share: float) -> str:
    if share in (0.0, 1.0):
        return f"{100 * share:.0f} %"
    # 99.997 % must not read as 100 %, nor 0.003 % as 0 %.
    digits = max(0, -math.floor(math.log10(min(share, 1 - share))) - 2)
    return f"{100 * share:.{digits}f} %"
