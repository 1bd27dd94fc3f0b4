"""What a speed-up amounts to. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from autotune_amp.profile.results import Verdict

EXCELLENT, SIGNIFICANT, MODEST, NEGLIGIBLE = 1.5, 1.2, 1.05, 0.95


def verdict(speedup: float) -> Verdict:
    """``excellent`` above 1.5, ``significant`` from 1.2, ``modest`` from 1.05, ``negligible`` from 0.95, ``slower``."""
    if speedup > EXCELLENT:
        return "excellent"
    if speedup >= SIGNIFICANT:
        return "significant"
    if speedup >= MODEST:
        return "modest"
    return "negligible" if speedup >= NEGLIGIBLE else "slower"


def verdicts(interval: tuple[float, float]) -> tuple[Verdict, Verdict]:
    """Those of the two ends of a speed-up's interval; alike where it leaves no doubt."""
    low, high = interval
    return verdict(low), verdict(high)
