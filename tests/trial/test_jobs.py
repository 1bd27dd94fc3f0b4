"""When a trial has warmed up, and when it has measured enough."""

from __future__ import annotations

import math
import random
from statistics import fmean
from typing import Any, Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scripted_backend import measurement

from autotune_amp.core.outcome import Failure, FailureKind
from autotune_amp.core.setting import Setting
from autotune_amp.trial.jobs import (
    MAX_FALLING_SECONDS,
    MAX_WARMUP_STEPS,
    MEASURE_SECONDS,
    NUM_TRIALS_FORESEEN,
    Trial,
    measurement_limit_seconds,
    should_continue_warmup,
    stop_reason,
)

FP32 = Setting(precision="fp32", batch_size=8)
STEADY, RESTLESS = [0.1] * 8, [0.1, 0.3] * 4


def reason(
    steps: list[float],
    measuring_seconds: float = 0.0,
    training_seconds: float = 0.0,
    num_steps: int | None = None,
    **fields: Any,
) -> Literal["cut", "enough"] | None:
    spec = Trial(candidate=FP32, **{"device": "cpu", **fields})
    return stop_reason(
        spec,
        steps,
        is_whole=len(steps) >= 8,
        is_most=len(steps) >= 20,
        measure_seconds=1.0,
        measuring_seconds=measuring_seconds,
        training_seconds=training_seconds,
        num_steps=len(steps) * spec.num_steps_per_report if num_steps is None else num_steps,
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
        # Each was a step alone, as the first ones of a command are.
        (STEADY[:2], {"cut_step_seconds": 0.09, "device": "cuda", "measuring_seconds": 0.8, "num_steps": 2}, None),
        # A fast card goes on for longer than its least number of steps, even its largest, unless its time is up.
        (STEADY, {"device": "cuda", "measuring_seconds": 0.24}, None),
        (RESTLESS * 3, {"device": "cuda", "measuring_seconds": 0.24}, None),
        (STEADY[:1], {"device": "cuda", "training_seconds": 6.1, "deadline_seconds": 10.0}, "enough"),
    ],
)
def test_what_ends_measuring(steps: list[float], fields: dict[str, Any], expected: str | None) -> None:
    assert reason(steps, **fields) == expected


@pytest.mark.parametrize("budget_seconds", [1.0, 30.0, 32.0, 600.0])
def test_many_trials_fit_into_a_small_budget_and_in_a_large_one_each_is_short(budget_seconds: float) -> None:
    assert measurement_limit_seconds(budget_seconds) <= min(MEASURE_SECONDS, budget_seconds / NUM_TRIALS_FORESEEN)


@pytest.mark.parametrize(("kind", "is_kept"), [("timeout", True), ("crash", False), ("oom", False)])
def test_what_was_measured_outlasts_an_evaluation_without_an_end_but_no_death_of_the_process(
    kind: FailureKind, is_kept: bool
) -> None:
    so_far, failure = measurement(100.0), Failure(kind=kind, message="while it evaluated")
    assert Trial(candidate=FP32, device="cpu").after(failure, so_far) is (so_far if is_kept else failure)


def falls(groups: list[float], num_steps: int = 10, warming_seconds: float = 0.1) -> bool:
    return should_continue_warmup(groups, num_steps=num_steps, warming_seconds=warming_seconds)


@pytest.mark.parametrize(
    ("groups", "expected"),
    [
        ([1.3], True),  # nothing says yet that it is steady
        ([1.36, 1.12, 1.18, 1.16], False),  # two groups no faster than the one before them
        ([1.36, 1.12, 1.18, 1.16, 1.10, 0.91], True),
        ([1.36, 1.12, 1.18, 1.16, 1.10, 0.91, 1.01, 1.02], False),
        ([12.9, 1.0], True),  # the first holds what a shape costs once
        ([12.9, 1.0, 0.99, 0.99], False),  # a percent is no fall
        ([0.8, 1.0, 1.2], False),  # what rises is warm
    ],
)
def test_a_warm_up_goes_on_while_its_steps_fall(groups: list[float], expected: bool) -> None:
    assert falls(groups) == expected
    assert not falls(groups, warming_seconds=MAX_FALLING_SECONDS), "what falls for ever is measured all the same"
    assert not falls(groups, num_steps=MAX_WARMUP_STEPS)
    assert falls(groups, num_steps=2), "so few are taken in any case, unless they are long"


@settings(deadline=None)
@given(seed=st.integers(0, 2**32), spread=st.floats(0, 1))
def test_noise_alone_does_not_go_on_for_long(seed: int, spread: float) -> None:
    chance = random.Random(seed)
    counts = []
    for _ in range(100):
        groups = [math.exp(chance.gauss(0, spread)) for _ in range(60)]
        counts.append(next(n for n in range(1, 61) if not falls(groups[:n])))
    assert fmean(counts) < 6  # 4.2 are expected
