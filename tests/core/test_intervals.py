from __future__ import annotations

import math
import random
from statistics import fmean, variance

import pytest
from scipy import stats  # type: ignore[import-untyped]

from autotune_amp.core.intervals import (
    prediction_interval,
    ratio_interval,
    t_quantile,
    trimmed_interval,
    unpaired_ratio_interval,
)


@pytest.mark.parametrize("degrees", [*range(1, 41), 60, 120, 1000])
def test_t_quantile_agrees_with_scipy(degrees: int) -> None:
    assert t_quantile(degrees) == pytest.approx(stats.t.ppf(0.975, degrees), rel=2e-3)
    assert t_quantile(degrees, is_strict=True) == pytest.approx(stats.t.ppf(0.995, degrees), rel=4e-3)


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
    with pytest.raises(ValueError):  # noqa: PT011  # of statistics.fmean
        trimmed_interval([])


def test_an_interval_of_times_is_cut_off_at_0() -> None:
    low, high = trimmed_interval([0.01, 0.01, 4.0])
    assert low == 0.0
    assert high > 4.0


def test_a_new_process_and_a_ratio_have_the_posterior_interval_of_their_logs_with_the_prior() -> None:
    ours, others = [80.0, 100.0, 125.0], [[50.0, 80.0], [50.0]]
    logs, theirs = ([math.log(value) for value in values] for values in (ours, others[0]))
    # The prior counts for 3 degrees of freedom, these values for 2, the pair of another candidate for 1.
    spread = math.sqrt((3 * 0.05**2 + 2 * variance(logs) + variance(theirs)) / 6)
    half = stats.t.ppf(0.975, 6) * spread * math.sqrt(1 + 1 / 3)
    expected = pytest.approx((100 * math.exp(-half), 100 * math.exp(half)), rel=1e-3)
    assert prediction_interval(ours, others) == expected


def test_a_ratio_has_the_spread_that_was_seen_and_the_prior_where_too_little_was() -> None:
    ours, theirs = [80.0, 100.0, 125.0], [200.0] * 3
    half = stats.t.ppf(0.975, 2) * math.sqrt(variance([math.log(value) for value in ours]) / 3)
    expected = pytest.approx((0.5 * math.exp(-half), 0.5 * math.exp(half)), rel=1e-3)
    assert ratio_interval(ours, theirs) == expected
    half = stats.t.ppf(0.975, 3) * 0.05 * math.sqrt(2)  # of one process each, paired or not
    expected = pytest.approx((2 * math.exp(-half), 2 * math.exp(half)), rel=1e-3)
    assert ratio_interval([200.0], [100.0]) == expected
    assert unpaired_ratio_interval([200.0], [100.0]) == expected
    others = [[1.0, 1.01, 1.02]]
    half = stats.t.ppf(0.975, 2) * math.sqrt(2 * variance([math.log(value) for value in others[0]]))
    assert unpaired_ratio_interval([200.0], [100.0], others) == pytest.approx(
        (2 * math.exp(-half), 2 * math.exp(half)), rel=1e-3
    )


def test_one_ratio_in_forty_lies_above_its_interval() -> None:
    chance = random.Random(0)
    num_above = 0
    for _ in range(4000):
        ratios = [math.exp(chance.gauss(0.0, 0.1)) for _ in range(3)]
        num_above += ratio_interval(ratios, [1.0] * 3)[0] > 1
    assert 0.015 < num_above / 4000 < 0.035
