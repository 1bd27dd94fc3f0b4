"""Intervals for step times and throughputs, and a fit of memory against batch size. Pure functions.

The variance between processes exceeds that between steps: thirty steps in one process are within 5 % of the truth 78 %
of the time, five processes of six steps 93 % (studies/README.md, Timing). Three to five processes say little about
their own spread, so the spread between processes gets a prior, weighted like `PRIOR_WEIGHT` observations.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from statistics import fmean

TRIM_SHARE = 0.1  # share of the slowest steps that is dropped, against garbage collections and page faults
SPREAD_PRIOR = 0.05  # prior spread between processes, log scale; 2.5 to 9.5 % observed (studies/README.md, Timing)
PRIOR_WEIGHT = 3  # degrees of freedom of the prior; from five observed processes on they outweigh it
MIN_DEGREES_WITHOUT_PRIOR = 2  # observed degrees of freedom from which on ratios need no prior

# 97.5 % quantiles of Student's t, 1 to 30 degrees of freedom: NIST/SEMATECH e-Handbook of Statistical Methods,
# 1.3.6.7.2.
_T_TABLE = (
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228,
    2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086,
    2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042,
)  # fmt: skip
_STRICT_T_TABLE = (  # 99.5 %, from the same table
    63.657, 9.925, 5.841, 4.604, 4.032, 3.707, 3.499, 3.355, 3.250, 3.169,
    3.106, 3.055, 3.012, 2.977, 2.947, 2.921, 2.898, 2.878, 2.861, 2.845,
    2.831, 2.819, 2.807, 2.797, 2.787, 2.779, 2.771, 2.763, 2.756, 2.750,
)  # fmt: skip
_Z, _STRICT_Z = 1.959964, 2.575829  # these quantiles of the normal distribution


def t_quantile(degrees_of_freedom: int, *, is_strict: bool = False) -> float:
    """Return the 97.5 % quantile of Student's t distribution, 99.5 % if `is_strict`.

    It is tabulated up to 30 degrees of freedom, then Abramowitz and Stegun 26.7.5 (first two terms).
    """
    table, z = (_STRICT_T_TABLE, _STRICT_Z) if is_strict else (_T_TABLE, _Z)
    if degrees_of_freedom <= len(table):
        return table[degrees_of_freedom - 1]
    return z + (z**3 + z) / (4 * degrees_of_freedom)


def trimmed_interval(samples: Sequence[float]) -> tuple[float, float]:
    """Return the 95 % t-interval of the mean of `samples` without the slowest tenth, in the samples' unit, from 0 up.

    The tenth is rounded to whole samples: one of eight. For a single sample, whose spread is unknown, the interval is
    plus and minus its value. Raises `ValueError` for no samples.
    """
    kept = sorted(samples)[: len(samples) - round(TRIM_SHARE * len(samples))]
    mean = fmean(kept)
    if len(kept) < 2:
        return 0.0, 2 * mean
    half = t_quantile(len(kept) - 1) * math.sqrt(_variance(kept) / len(kept))
    return max(0.0, mean - half), mean + half


def prediction_interval(process_values: Sequence[float], others: Sequence[Sequence[float]] = ()) -> tuple[float, float]:
    """Return the interval in which a new process's value is expected to land with 95 % probability.

    `process_values` are the values of the processes measured so far, one at least. This is a prediction interval, since
    the report promises the speed of the next run, not a mean: exp(m -+ t(v) * s * sqrt(1 + 1/n)) with m the mean log of
    n values, v = v0 + sum(n_k - 1), s^2 = (v0 * s0^2 + sum((n_k - 1) * s_k^2)) / v, s0 = `SPREAD_PRIOR`, v0 =
    `PRIOR_WEIGHT`: the posterior prediction of a normal sample under a scaled inverse chi-squared prior on its variance
    (Gelman et al., Bayesian Data Analysis, 3.2-3.3). The sum is over these values and `others`, the values of other
    candidates in the same rounds: the machine causes the differences between processes, so that all of them contribute
    (the pooled variance of an analysis of variance).
    """
    groups = [[math.log(value) for value in values] for values in (process_values, *others)]
    return _interval(groups, SPREAD_PRIOR, 1 + 1 / len(process_values))


def ratio_interval(
    a_values: Sequence[float], b_values: Sequence[float], *, is_strict: bool = False
) -> tuple[float, float]:
    """Return the 95 % interval of the mean ratio a / b, from pairs measured in the same round (one pair at least).

    Pairing removes the effect of a slow round. The spread is that of these ratios; if it has fewer than
    `MIN_DEGREES_WITHOUT_PRIOR` degrees of freedom, the prior of `prediction_interval` is added, times sqrt(2), since a
    ratio involves two processes. `is_strict`: 99 %, for an interval that is looked at after each pair until it excludes
    1. Raises `ValueError` for sequences of different lengths.
    """
    logs = [[math.log(a / b) for a, b in zip(a_values, b_values, strict=True)]]
    spread_prior = SPREAD_PRIOR * math.sqrt(2)
    return _interval(logs, spread_prior, 1 / len(logs[0]), _prior_weight(logs), is_strict=is_strict)


def unpaired_ratio_interval(
    a_values: Sequence[float], b_values: Sequence[float], others: Sequence[Sequence[float]] = ()
) -> tuple[float, float]:
    """Return the 95 % interval of the ratio of the means of a and b, from processes that were not run in pairs.

    The spread is pooled over both and the processes of `others`, with the prior as in `ratio_interval`.
    """
    groups = [[math.log(value) for value in values] for values in (a_values, b_values, *others)]
    share = 1 / len(a_values) + 1 / len(b_values)
    low, high = _interval(groups, SPREAD_PRIOR, share, _prior_weight(groups))
    b_mean = math.exp(fmean(groups[1]))
    return low / b_mean, high / b_mean


def _prior_weight(groups: Sequence[Sequence[float]]) -> int:
    return 0 if sum(len(logs) - 1 for logs in groups) >= MIN_DEGREES_WITHOUT_PRIOR else PRIOR_WEIGHT


def _interval(
    groups: Sequence[Sequence[float]],
    spread_prior: float,
    share: float,
    prior_weight: int = PRIOR_WEIGHT,
    *,
    is_strict: bool = False,
) -> tuple[float, float]:
    """Return the interval exp(mean ± t * spread * sqrt(share)) around the mean of the first group of logarithms.

    `share` is the variance of the estimate as a multiple of the squared spread, which is pooled over `groups`.
    """
    degrees = prior_weight + sum(len(logs) - 1 for logs in groups)
    observed = sum((len(logs) - 1) * _variance(logs) for logs in groups if len(logs) > 1)
    spread = math.sqrt((prior_weight * spread_prior**2 + observed) / degrees)
    mean, half = fmean(groups[0]), t_quantile(degrees, is_strict=is_strict) * spread * math.sqrt(share)
    return math.exp(mean - half), math.exp(mean + half)


def _variance(values: Sequence[float]) -> float:
    # statistics.variance uses fractions: a hundred times slower, in a loop that runs between timed steps.
    mean = fmean(values)
    return sum((value - mean) ** 2 for value in values) / (len(values) - 1)


def fit_memory(points: Iterable[tuple[int, int]]) -> Callable[[float], float] | None:
    """Return a function that predicts memory in bytes at any batch size, M(b) = max(m0, m1 + m2·b).

    `points` are (batch size, bytes) pairs. The smallest batches lie on the optimizer's plateau m0 (studies/README.md),
    so the line is drawn through the two largest, with a slope of 0 at least. None for fewer than two sizes.
    """
    sizes = sorted(dict(points).items())
    if len(sizes) < 2:
        return None
    (b1, m1), (b2, m2) = sizes[-2:]
    slope = max(0.0, (m2 - m1) / (b2 - b1))
    m0 = min(m for _, m in sizes)
    return lambda size: max(m0, m2 + slope * (size - b2))
