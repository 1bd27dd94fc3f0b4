from __future__ import annotations

import math
import random
from statistics import fmean
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats  # type: ignore[import-untyped]

from autotune_amp.core.intervals import (
    SPREAD_PRIOR,
    prediction_interval,
    ratio_interval,
    t_quantile,
    trimmed_interval,
)

if TYPE_CHECKING:
    from collections.abc import Callable

speeds = st.floats(min_value=1e-3, max_value=1e6)


@pytest.mark.parametrize("degrees", [*range(1, 41), 60, 120, 1000])
def test_t_quantile_agrees_with_scipy(degrees: int) -> None:
    assert t_quantile(degrees) == pytest.approx(stats.t.ppf(0.975, degrees), rel=2e-3)


@pytest.mark.parametrize(("num", "num_dropped"), [(2, 0), (5, 0), (6, 1), (8, 1), (14, 1), (20, 2), (40, 4)])
def test_the_slowest_tenth_is_dropped(num: int, num_dropped: int) -> None:
    samples = [1.0] * (num - num_dropped) + [9.0] * num_dropped
    assert trimmed_interval(samples[::-1]) == (1.0, 1.0)
    assert trimmed_interval([9.0, *samples[1:]])[1] > 1.0


def test_trimmed_interval_is_the_textbook_interval_of_what_is_kept() -> None:
    samples = [1.0, 1.1, 0.9, 1.05, 0.95, 1.02, 0.98, 50.0]
    expected = stats.t.interval(0.95, 6, loc=fmean(samples[:7]), scale=stats.sem(samples[:7]))
    assert trimmed_interval(samples) == pytest.approx(expected, rel=1e-3)


def test_one_sample_says_nothing_and_none_is_an_error() -> None:
    assert trimmed_interval([0.5]) == (0.0, 1.0)
    with pytest.raises(ValueError, match="no samples"):
        trimmed_interval([])


def test_one_process_gives_the_prior_alone() -> None:
    half = t_quantile(3) * SPREAD_PRIOR
    assert prediction_interval([100.0]) == pytest.approx(
        (100 * math.exp(-half * math.sqrt(2)), 100 * math.exp(half * math.sqrt(2)))
    )
    assert ratio_interval([200.0], [100.0]) == pytest.approx(
        (2 * math.exp(-half * math.sqrt(2)), 2 * math.exp(half * math.sqrt(2)))
    )


@pytest.mark.parametrize(
    ("num", "num_others", "spread", "coverage"),
    [
        (3, 0, 0.005, 0.93),
        (3, 0, 0.03, 0.93),
        (5, 0, 0.05, 0.90),  # noisier than the prior believes
        (3, 2, 0.02, 0.93),
        (3, 2, 0.25, 0.88),
    ],
)
def test_a_new_process_lands_in_the_prediction_interval(
    num: int, num_others: int, spread: float, coverage: float
) -> None:
    rng = random.Random(1)

    def covers() -> bool:
        ours, *others = ([rng.lognormvariate(5 + n, spread) for _ in range(num)] for n in range(1 + num_others))
        low, high = prediction_interval(ours, others)
        return low <= rng.lognormvariate(5, spread) <= high

    assert _share_of(covers) >= coverage


@pytest.mark.parametrize("num", [3, 5])
def test_the_true_ratio_lies_in_its_interval(num: int) -> None:
    rng = random.Random(2)

    def covers() -> bool:
        drift = [rng.lognormvariate(0, 0.2) for _ in range(num)]  # a slow round is slow for both
        a = [1.5 * d * rng.lognormvariate(5, 0.03) for d in drift]
        b = [d * rng.lognormvariate(5, 0.03) for d in drift]
        low, high = ratio_interval(a, b)
        return low <= 1.5 <= high

    assert _share_of(covers) >= 0.93


def _share_of(covers: Callable[[], bool], num: int = 4000) -> float:
    return sum(covers() for _ in range(num)) / num


def test_more_processes_narrow_the_interval_and_disagreement_widens_it() -> None:
    def width(values: list[float]) -> float:
        low, high = prediction_interval(values)
        return high / low

    assert width([100.0] * 5) < width([100.0] * 3) < width([100.0]) < width([70.0, 100.0, 140.0])


@given(st.lists(speeds, min_size=1, max_size=6), st.floats(min_value=0.1, max_value=10))
def test_intervals_scale_with_their_values(values: list[float], factor: float) -> None:
    low, high = prediction_interval(values)
    assert prediction_interval([factor * v for v in values]) == pytest.approx((factor * low, factor * high))
    assert ratio_interval([factor * v for v in values], values)[0] < factor
    assert ratio_interval([factor * v for v in values], values)[1] > factor


def test_the_spread_of_others_on_the_machine_widens_the_interval() -> None:
    alone = prediction_interval([100.0, 101.0, 99.0])
    steady = prediction_interval([100.0, 101.0, 99.0], [[50.0, 50.5, 49.5]] * 2)
    shaken = prediction_interval([100.0, 101.0, 99.0], [[50.0, 80.0, 40.0]] * 2)
    assert shaken[0] < alone[0] < steady[0]
    assert shaken[1] > alone[1] > steady[1]


def test_an_interval_of_times_is_cut_off_at_0() -> None:
    low, high = trimmed_interval([0.01, 0.01, 4.0])
    assert low == 0.0
    assert high > 4.0
