"""When a trial has measured enough."""

from __future__ import annotations

from typing import Any, Literal

import pytest

from autotune_amp.core.setting import Setting
from autotune_amp.trial.jobs import Trial, stop

FP32 = Setting(precision="fp32", batch_size=8)
STEADY, RESTLESS = [0.1] * 8, [0.1, 0.3] * 4


def reason(
    steps: list[float], measuring_seconds: float = 0.0, training_seconds: float = 0.0, **fields: Any
) -> Literal["cut", "enough"] | None:
    spec = Trial(candidate=FP32, **{"device": "cpu", **fields})
    return stop(
        spec,
        steps,
        is_whole=len(steps) >= 8,
        is_most=len(steps) >= 20,
        measure_seconds=1.0,
        measuring_seconds=measuring_seconds,
        training_seconds=training_seconds,
    )


@pytest.mark.parametrize(
    ("steps", "fields", "expected"),
    [
        (STEADY, {}, "enough"),
        (STEADY[:7], {}, None),
        (RESTLESS, {"interval_share": 1.0}, "enough"),
        (RESTLESS[:1], {"measuring_seconds": 1.01}, "enough"),
        (STEADY[:5], {"cut_step_seconds": 0.09}, "cut"),
        (STEADY[:4], {"cut_step_seconds": 0.09}, None),
        ([0.1, 0.1, 0.1, 0.3, 0.3], {"cut_step_seconds": 0.15}, None),  # its median is not over it
        (RESTLESS * 3, {}, "enough"),
        # Four steps stand behind each.
        (STEADY[:2], {"cut_step_seconds": 0.09, "device": "cuda", "measuring_seconds": 0.8}, "cut"),
        # A fast card goes on for longer than its least number of steps, even its largest, unless its time is up.
        (STEADY, {"device": "cuda", "measuring_seconds": 0.24}, None),
        (RESTLESS * 3, {"device": "cuda", "measuring_seconds": 0.24}, None),
        (STEADY[:1], {"device": "cuda", "training_seconds": 6.1, "deadline_seconds": 10.0}, "enough"),
    ],
)
def test_what_ends_measuring(steps: list[float], fields: dict[str, Any], expected: str | None) -> None:
    assert reason(steps, **fields) == expected
