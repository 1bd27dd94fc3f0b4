"""Intervals for step times and throughputs, and memory against the batch size: plain arithmetic of workers and parents.

What varies most is the process, not the step: thirty steps in one process are within 5 % of the truth 78 % of the
time, five processes of six steps 93 % (studies/README.md, Timing). Three to five processes say little
about their own spread, so the spread between processes gets a prior, weighed like `PRIOR_WEIGHT` observations.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from statistics import fmean

TRIM_SHARE = 0.1  # the slowest steps dropped: a collection, a page fault, another process
SPREAD_PRIOR = 0.05  # between processes 2.5 to 9.5 % was seen (studies/README.md, Timing); on the log scale
PRIOR_WEIGHT = 3  # degrees of freedom the prior counts for; observed processes outweigh it from five on
NUM_DEGREES_SEEN = 2  # from so many degrees of freedom on, whether one is faster is asked of what was seen alone

# Student's t, 97.5 % quantile, 1 to 30 degrees of freedom: NIST/SEMATECH e-Handbook of Statistical Methods, 1.3.6.7.2.
_T_TABLE = (
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228,
    2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086,
    2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042,
)  # fmt: skip
_Z = 1.959964  # the normal distribution's 97.5 % quantile


def t_quantile(degrees_of_freedom: int) -> float:
    """Student's t, 97.5 % quantile: tabulated to 30 degrees, then Abramowitz and Stegun 26.7.5 (first two terms)."""
    if degrees_of_freedom <= len(_T_TABLE):
        return _T_TABLE[degrees_of_freedom - 1]
    return _Z + (_Z**3 + _Z) / (4 * degrees_of_freedom)


def trimmed_interval(samples: Sequence[float]) -> tuple[float, float]:
    """The 95 % t-interval of the mean of `samples` without the slowest tenth, cut off at 0; in the samples' unit.

    The tenth is rounded to whole samples, so that it is one of eight. One sample says nothing of its spread: its
    interval is plus and minus all of it. Raises `ValueError` without samples.
    """
    kept = sorted(samples)[: len(samples) - round(TRIM_SHARE * len(samples))]
    mean = fmean(kept)
    if len(kept) < 2:
        return 0.0, 2 * mean
    half = t_quantile(len(kept) - 1) * math.sqrt(_variance(kept) / len(kept))
    return max(0.0, mean - half), mean + half


def prediction_interval(process_values: Sequence[float], others: Sequence[Sequence[float]] = ()) -> tuple[float, float]:
    """Where a new process's value lands 95 % of the time, given the values of a few processes (one at least).

    A prediction interval, because what is promised to the user is their next run and not the mean of ours:
    exp(m -+ t(v) * s * sqrt(1 + 1/n)) with m the mean log of n values, v = v0 + sum(n_k - 1), s^2 = (v0 * s0^2 +
    sum((n_k - 1) * s_k^2)) / v, s0 = `SPREAD_PRIOR`, v0 = `PRIOR_WEIGHT`: the posterior prediction of a normal sample
    under a scaled inverse chi-squared prior on its variance (Gelman et al., Bayesian Data Analysis, 3.2-3.3). The sum
    is over these values and `others`, those of other candidates in the same rounds: how far processes differ is the
    machine's doing, so that each of them says something of it (the pooled variance of an analysis of variance).
    """
    groups = [[math.log(value) for value in values] for values in (process_values, *others)]
    return _interval(groups, SPREAD_PRIOR, 1 + 1 / len(process_values))


def ratio_interval(
    a_values: Sequence[float], b_values: Sequence[float], others: Sequence[Sequence[float]] = ()
) -> tuple[float, float]:
    """The 95 % interval of the mean ratio a / b, from pairs measured in the same round (one pair at least).

    Pairing takes out what slows a whole round. The spread is that of these ratios and of `others`, those of other
    candidates in the same rounds; with fewer than `NUM_DEGREES_SEEN` degrees of freedom of it the prior of
    `prediction_interval` is added, times sqrt(2), since a ratio has two processes in it. Raises `ValueError` when the
    lengths differ.
    """
    ratios = [a / b for a, b in zip(a_values, b_values, strict=True)]
    logs = [[math.log(ratio) for ratio in group] for group in (ratios, *others)]
    return _interval(logs, SPREAD_PRIOR * math.sqrt(2), 1 / len(ratios), _prior_weight(logs))


def apart_interval(
    a_values: Sequence[float], b_values: Sequence[float], others: Sequence[Sequence[float]] = ()
) -> tuple[float, float]:
    """The 95 % interval of the ratio of the means of a and b, from processes that had no round in common.

    The spread is pooled over both and the processes of `others`, with the prior as in `ratio_interval`.
    """
    groups = [[math.log(value) for value in values] for values in (a_values, b_values, *others)]
    share = 1 / len(a_values) + 1 / len(b_values)
    low, high = _interval(groups, SPREAD_PRIOR, share, _prior_weight(groups))
    theirs = math.exp(fmean(groups[1]))
    return low / theirs, high / theirs


def _prior_weight(groups: Sequence[Sequence[float]]) -> int:
    return 0 if sum(len(logs) - 1 for logs in groups) >= NUM_DEGREES_SEEN else PRIOR_WEIGHT


def _interval(
    groups: Sequence[Sequence[float]], spread_prior: float, share: float, prior_weight: int = PRIOR_WEIGHT
) -> tuple[float, float]:
    """Around the mean of the first group of logs; `share` is its variance as a multiple of the spread's square."""
    degrees = prior_weight + sum(len(logs) - 1 for logs in groups)
    observed = sum((len(logs) - 1) * _variance(logs) for logs in groups if len(logs) > 1)
    spread = math.sqrt((prior_weight * spread_prior**2 + observed) / degrees)
    mean, half = fmean(groups[0]), t_quantile(degrees) * spread * math.sqrt(share)
    return math.exp(mean - half), math.exp(mean + half)


def _variance(values: Sequence[float]) -> float:
    # statistics.variance works in fractions: a hundred times slower, in a loop that runs between timed steps.
    mean = fmean(values)
    return sum((value - mean) ** 2 for value in values) / (len(values) - 1)


def fit_memory(points: Iterable[tuple[int, int]]) -> Callable[[float], float] | None:
    """Bytes that count against the limit at any batch size, M(b) = max(m0, m1 + m2·b), of (batch size, bytes) points.

    The smallest batches sit on the optimizer's plateau m0 (studies/README.md), so the line is that through the two
    largest; memory never falls with the batch size. None with fewer than two sizes.
    """
    at = sorted(dict(points).items())
    if len(at) < 2:
        return None
    (b1, m1), (b2, m2) = at[-2:]
    slope = max(0.0, (m2 - m1) / (b2 - b1))
    m0 = min(m for _, m in at)
    return lambda size: max(m0, m2 + slope * (size - b2))
