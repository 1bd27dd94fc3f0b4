"""The grade: where its limits lie, "unchecked" only where fp32 itself fails."""

from __future__ import annotations

import math
from typing import Any

import msgspec
import pytest

from autotune_amp.core.outcome import GradientDamage, Verdict
from autotune_amp.numerics.grading import Findings, TrainingDivergence, grade, next_step, reason_to_train_longer


def damage(least: float = 0.0, flushed_share: float = 0.0) -> GradientDamage:
    return GradientDamage(
        name="body.weight", noise_ratio=0.1, common_error=2 * least, common_error_interval=(least, 3 * least),
        cosine=1.0, norm_ratio=1.0, flushed_share=flushed_share,
    )  # fmt: skip


def parted(distance: float, *, spread: float = 0.1, resolution: float = 0.01) -> TrainingDivergence:
    return TrainingDivergence(distance, spread, resolution, fall=2.0, num_steps=48)


FAITHFUL = Findings(
    noise_ratio=0.05,
    common_error=0.001,
    common_error_interval=(0.0, 0.01),
    norm_ratio=1.0,
    flushed_share=0.001,
    most_common=damage(least=0.1),
    most_flushed=damage(flushed_share=0.1),
    forward_max=1000.0,
    format_max=65504.0,
    loss_error=1e-4,
    training_gap=2.0,
    training_noise_gap=0.1,
    lost_share=0.1,
)
GAP = {"training_gap": 50.0}
APART, TOGETHER = parted(0.5), parted(0.09)
BIAS: dict[str, Any] = {"common_error": 0.1, "common_error_interval": (0.05, 0.15)}
UNRESOLVED = {"noise_ratio": 1.0, "common_error_interval": (0.0, 0.5)}
CASES: list[tuple[dict[str, Any], Verdict, str]] = [
    ({}, "faithful", "noise between batches"),
    ({"is_reference_finite": False, "is_finite": False}, "unchecked", "fp32"),
    ({"has_signal": False}, "unchecked", "gradient is zero"),
    ({"has_signal": False, "forward_max": 6e4}, "unfaithful", "activations reach"),
    ({"is_reference_finite": False, "loss_error": 0.1}, "unchecked", "within a few training steps"),
    ({"num_steps_per_call": 8}, "faithful", "8 optimizer steps in one call"),
    ({"num_steps_per_call": 8, "flushed_share": 0.5}, "unfaithful", "8 optimizer steps in one call"),
    ({"num_steps_per_call": 8, "reuses_casts": True}, "unfaithful", "inside one amp.autocast()"),
    ({"is_finite": False}, "unfaithful", "not finite"),
    ({"is_finite": False, "has_safe_scale": False}, "unfaithful", "every loss scale"),
    ({"is_training_finite": False}, "unfaithful", "no longer finite"),
    # Noise is told, and harms nobody where no error is hidden in it.
    ({"noise_ratio": 0.24}, "faithful", "noise between batches"),
    ({"noise_ratio": 1.0}, "faithful", "a batch 50 % smaller"),
    (UNRESOLVED, "undecided", "no training run was made"),
    ({**UNRESOLVED, "divergence": TOGETHER}, "faithful", "a batch 50 % smaller"),
    ({**UNRESOLVED, "divergence": APART}, "unfaithful", "0.5 from fp32's"),
    ({"noise_ratio": 1.0, "common_error_interval": None}, "undecided", "no training run was made"),
    ({"divergence": parted(0.5, spread=0.6)}, "faithful", ""),  # as orders of fp32 part
    ({"divergence": parted(0.03, spread=0.01)}, "faithful", ""),  # a small share of its fall
    # An error that all batches share harms, or may.
    (BIAS, "doubtful", "10 % of the gradient is the same in every batch"),
    ({**BIAS, "divergence": TOGETHER}, "doubtful", "do not show it"),
    ({**BIAS, "divergence": APART}, "unfaithful", "25 % of its fall"),
    ({"common_error_interval": (0.0, 0.06)}, "undecided", "up to 6 %"),
    ({"common_error": 0.03, "common_error_interval": (0.01, 0.04)}, "faithful", ""),  # maybe by chance
    ({"common_error": 0.8, "common_error_interval": (0.6, 1.0)}, "unfaithful", "80 % of the gradient"),
    ({"common_error": 0.4, "common_error_interval": (0.2, 0.6)}, "doubtful", "40 % of the gradient"),
    ({"most_common": damage(least=0.6)}, "undecided", "body.weight"),
    ({"most_common": damage(least=0.6), "divergence": TOGETHER}, "faithful", ""),
    ({"divergence": parted(0.5, resolution=0.6)}, "faithful", ""),  # the loss rounds
    ({"norm_ratio": 0.3}, "undecided", "0.3 times as long"),
    # A gradient that shrinks, in one parameter too, is no noise.
    ({"shortest": msgspec.structs.replace(damage(), norm_ratio=0.4)}, "doubtful", "body.weight is 0.4 times as long"),
    ({"shortest": msgspec.structs.replace(damage(), norm_ratio=0.6)}, "faithful", ""),
    ({"is_cut": True}, "undecided", "no time for a training"),
    ({"is_cut": True, "loss_error": None}, "undecided", "no time to find a loss scale"),
    ({"is_cut": True, "flushed_share": 0.5}, "unfaithful", "flushed"),
    ({"flushed_share": 0.005}, "faithful", ""),
    ({"flushed_share": 0.05}, "unfaithful", "5 % of the significant gradient entries"),
    ({"flushed_share": 0.05, "format_max": 3.4e38}, "faithful", ""),
    ({"most_flushed": damage(flushed_share=0.4)}, "faithful", ""),
    ({"most_flushed": damage(flushed_share=0.6)}, "unfaithful", "60 % of the gradient of body.weight"),
    ({"forward_max": 0.2 * 65504}, "faithful", ""),
    ({"forward_max": 0.3 * 65504}, "unfaithful", "activations reach"),
    ({"forward_max": 5e4, "format_max": 3.4e38}, "faithful", ""),
    ({"forward_max": math.inf}, "faithful", ""),  # a mask, since the gradients are finite
    ({"lost_share": 0.4}, "faithful", ""),
    ({"lost_share": 0.6}, "doubtful", "60 % of the updates"),
    ({**GAP, "training_noise_gap": 0.4}, "faithful", ""),  # no batch would notice it
    ({**GAP, "training_noise_gap": 0.7}, "undecided", "50 times as far"),
    ({**GAP, "training_noise_gap": 0.7, "divergence": TOGETHER}, "faithful", ""),
    ({"training_gap": 4.0, "training_noise_gap": 9.0}, "faithful", ""),  # as far as fp32 is from itself
    # The worst wins, and keeps its own reasons alone.
    ({"lost_share": 0.6, "flushed_share": 0.5, "forward_max": 6e4}, "unfaithful", "activations"),
]


@pytest.mark.parametrize(("worse", "verdict", "says"), CASES)
def test_where_the_limits_lie(worse: dict[str, Any], verdict: Verdict, says: str) -> None:
    found = grade(FAITHFUL._replace(**worse))
    assert found.verdict == verdict, found.reason
    assert says in found.reason
    assert verdict != "unfaithful" or "updates" not in found.reason
    assert (verdict == "undecided") <= (
        reason_to_train_longer(FAITHFUL._replace(**worse)) is not None or "is_cut" in worse
    )


def test_what_to_do_next_follows_from_the_verdict_the_pins_and_the_weights() -> None:
    assert "Train in bf16" in next_step("bf16", "faithful", ())
    assert "pinned_modules=['head']" in next_step("bf16", "unfaithful", ("head",))
    assert grade(FAITHFUL._replace(lost_share=0.9)).is_due_to_low_weights
    assert not grade(FAITHFUL._replace(lost_share=0.9, **BIAS)).is_due_to_low_weights
    assert "model.float()" in next_step("bf16", "doubtful", (), is_due_to_low_weights=True)
