from __future__ import annotations

import torch

from autotune_amp.core.outcome import Fidelity
from autotune_amp.core.precisions import Precision
from autotune_amp.numerics.frozen import fidelity_from_gradients

STEPS = [{"weight": torch.randn(64, generator=torch.Generator().manual_seed(step))} for step in range(3)]
LOSSES = (1.0, 1.1, 0.9)


def judged(
    low: list[dict[str, torch.Tensor]], losses: tuple[float, ...] = LOSSES, precision: Precision = "bf16"
) -> Fidelity:
    return fidelity_from_gradients(low, STEPS, (losses, LOSSES), precision, 8, label=precision)


def test_rounding_is_faithful() -> None:
    found = judged([{"weight": step["weight"].bfloat16().float()} for step in STEPS])
    assert (found.verdict, found.precision, found.batch_size) == ("faithful", "bf16", 8)
    assert 0 < (found.noise_ratio or 0) < 0.05
    assert (found.gradient_cosine or 0) > 0.999


def test_noise_as_large_as_that_between_batches_is_not() -> None:
    others = [{"weight": torch.randn(64, generator=torch.Generator().manual_seed(9 + step))} for step in range(3)]
    found = judged(others)
    assert found.verdict not in ("faithful", "unchecked")
    assert (found.noise_ratio or 0) > 0.5


def test_gradients_that_vanish_are_told_by_parameter() -> None:
    found = judged([{"weight": torch.zeros(64)} for _ in STEPS])
    assert found.verdict not in ("faithful", "unchecked")
    assert (found.flushed_share or 0) > 0.9


def test_small_gradients_that_vanish_count_where_the_format_has_a_small_range() -> None:
    flushed = [{"weight": step["weight"].where(step["weight"].abs() > 0.3, 0.0)} for step in STEPS]
    assert "flush" not in judged(flushed).reason
    found = judged(flushed, precision="fp16")
    assert found.verdict not in ("faithful", "unchecked")
    assert "flush" in found.reason


def test_gradients_that_are_not_finite_are_never_faithful() -> None:
    found = judged([{"weight": torch.full((64,), float("inf"))}, *STEPS[1:]])
    assert found.verdict not in ("faithful", "unchecked")
    assert found.noise_ratio is None


def test_gradients_that_are_zero_in_both_say_nothing() -> None:
    zero = [{"weight": torch.zeros(64)} for _ in STEPS]
    found = fidelity_from_gradients(zero, zero, (LOSSES, LOSSES), "bf16", 8, label="bf16")
    assert found.verdict == "unchecked"
    assert "gradient" in found.reason


def test_a_loss_that_differs_is_measured() -> None:
    assert abs((judged(STEPS, (2.0, 2.2, 1.8)).loss_error or 0) - 1.0) < 1e-6
