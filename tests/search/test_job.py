from __future__ import annotations

from typing import Any

import pytest
from test_decide import FP32, Log, at, decided

from autotune_amp.core.evidence import job_line
from autotune_amp.search.answer.decide import cost_of_training
from autotune_amp.search.options import SearchOptions

DECISION = decided(
    Log().add(FP32, 100.0).add(at("bf16", 64), 200.0).confirm(FP32, 100.0).confirm(at("bf16", 64), 200.0)
)


def made(**options: Any) -> Any:
    return cost_of_training(DECISION.config, DECISION.evidence, SearchOptions.from_user(**options))


def test_steps_are_those_of_the_recommended_config() -> None:
    found = made(steps=1000)
    assert (found.num_steps, found.num_samples) == (1000, 64_000)
    assert found.hours == pytest.approx(64_000 / 200 / 3600)
    assert found.baseline_hours == pytest.approx(64_000 / 100 / 3600)
    slow, fast = DECISION.evidence.samples_per_second_interval
    assert found.hours_interval == pytest.approx((64_000 / fast / 3600, 64_000 / slow / 3600))
    assert (found.price_per_hour, found.price, found.price_interval) == (None, None, None)


def test_samples_over_several_ranks_end_in_a_whole_step() -> None:
    found = made(samples=1_000_001, num_ranks=4, price_per_hour=3)
    assert found.num_steps == -(-1_000_001 // (64 * 4))
    assert found.num_samples == 1_000_001
    assert found.hours == pytest.approx(1_000_001 / (200 * 4) / 3600)
    assert found.price == pytest.approx(3 * found.hours)
    assert found.price_interval == pytest.approx(tuple(3 * hours for hours in found.hours_interval))
    low, high = found.hours_interval
    assert job_line(found) == (
        f"0.35 h ({low:.2g} to {high:.2g}) for 3,907 steps, 1.04 ({3 * low:.2f} to {3 * high:.2f}) at 3 an hour; "
        "0.69 h as it runs today"
    )
