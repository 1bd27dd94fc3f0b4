"""The grade: where its limits lie, "unchecked" only where fp32 itself fails."""

from __future__ import annotations

import math
from typing import Any

import pytest

from autotune_amp.core.outcome import GradientDamage, Verdict
from autotune_amp.numerics.grading import Findings, grade, next_step


def damage(noise_ratio: float = 0.0, flushed_share: float = 0.0) -> GradientDamage:
    return GradientDamage(
        name="body.weight", noise_ratio=noise_ratio, cosine=1.0, norm_ratio=1.0, flushed_share=flushed_share
    )


FAITHFUL = Findings(
    noise_ratio=0.05,
    flushed_share=0.001,
    noisiest=damage(noise_ratio=0.1),
    most_flushed=damage(flushed_share=0.1),
    forward_max=1000.0,
    format_max=65504.0,
    training_gap=2.0,
    training_noise_gap=0.1,
    lost_share=0.1,
)
GAP = {"training_gap": 50.0}
CASES: list[tuple[dict[str, Any], Verdict, str]] = [
    ({}, "faithful", "sampling"),
    ({"is_reference_finite": False, "is_finite": False}, "unchecked", "fp32"),
    ({"has_signal": False}, "unchecked", "gradient is zero"),
    ({"has_signal": False, "forward_max": 6e4}, "unfaithful", "activations reach"),
    ({"is_reference_finite": False, "loss_error": 0.1}, "unchecked", "within a few training steps"),
    ({"num_steps_per_call": 8}, "faithful", "8 optimizer steps in one call"),
    ({"num_steps_per_call": 8, "noise_ratio": 0.5}, "unfaithful", "8 optimizer steps in one call"),
    ({"num_steps_per_call": 8, "reuses_casts": True}, "unfaithful", "inside one amp.autocast()"),
    ({"is_finite": False}, "unfaithful", "not finite"),
    ({"is_finite": False, "has_safe_scale": False}, "unfaithful", "every loss scale"),
    ({"is_training_finite": False}, "unfaithful", "no longer finite"),
    ({"noise_ratio": 0.19}, "faithful", ""),
    ({"noise_ratio": 0.25}, "doubtful", "0.25 times the noise"),
    ({"noise_ratio": 0.5}, "unfaithful", "0.5 times the noise"),
    ({"noise_ratio": 3.0}, "unfaithful", "3 times the noise"),
    ({"flushed_share": 0.005}, "faithful", ""),
    ({"flushed_share": 0.05}, "unfaithful", "5 % of the gradient's entries"),
    ({"most_flushed": damage(flushed_share=0.4)}, "faithful", ""),
    ({"most_flushed": damage(flushed_share=0.6)}, "unfaithful", "60 % of the gradient of body.weight"),
    ({"noisiest": damage(noise_ratio=0.9)}, "faithful", ""),
    ({"noisiest": damage(noise_ratio=1.5)}, "doubtful", "body.weight"),
    ({"forward_max": 0.2 * 65504}, "faithful", ""),
    ({"forward_max": 0.3 * 65504}, "unfaithful", "activations reach"),
    ({"forward_max": 5e4, "format_max": 3.4e38}, "faithful", ""),
    ({"forward_max": math.inf}, "faithful", ""),  # a mask, since the gradients are finite
    ({"lost_share": 0.4}, "faithful", ""),
    ({"lost_share": 0.6}, "doubtful", "60 % of the updates"),
    ({**GAP, "training_noise_gap": 0.4}, "faithful", ""),  # no batch would notice it
    ({**GAP, "training_noise_gap": 0.7}, "doubtful", "0.7 times the scatter"),
    ({**GAP, "training_noise_gap": 1.5}, "unfaithful", "1.5 times the scatter"),
    ({"training_gap": 4.0, "training_noise_gap": 9.0}, "faithful", ""),  # as far as fp32 is from itself
    ({"training_gap": 6.0, "training_noise_gap": 9.0}, "unfaithful", "9 times the scatter"),
    # Two hints that say nothing alone: found on a workload that was held out of setting the limits.
    ({"noise_ratio": 0.15, "training_gap": 16.0}, "doubtful", "0.15"),
    ({"noise_ratio": 0.09, "training_gap": 16.0}, "faithful", ""),
    ({"noise_ratio": 0.15, "training_gap": 9.0}, "faithful", ""),
    # The worst wins, and keeps its own reasons alone.
    ({"noise_ratio": 0.25, "flushed_share": 0.5, "forward_max": 6e4}, "unfaithful", "activations"),
]


@pytest.mark.parametrize(("worse", "verdict", "says"), CASES)
def test_where_the_limits_lie(worse: dict[str, Any], verdict: Verdict, says: str) -> None:
    found = grade(FAITHFUL._replace(**worse))
    assert found.verdict == verdict, found.reason
    assert says in found.reason
    assert verdict != "unfaithful" or worse.get("noise_ratio") != 0.25 or "noise between" not in found.reason


def test_what_to_do_next_follows_from_the_verdict_the_pins_and_the_weights() -> None:
    assert "Train in bf16" in next_step("bf16", "faithful", ())
    assert "pinned_modules=['head']" in next_step("bf16", "unfaithful", ("head",))
    assert grade(FAITHFUL._replace(lost_share=0.9)).is_of_weights
    assert not grade(FAITHFUL._replace(lost_share=0.9, noise_ratio=0.25)).is_of_weights
    assert "model.float()" in next_step("bf16", "doubtful", (), is_of_weights=True)
