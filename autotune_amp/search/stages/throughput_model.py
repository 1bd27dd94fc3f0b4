"""Model of the throughput of all settings from the measured ones, and the value of one more trial. Pure.

The logarithm of the throughput is a Gaussian process over the precision and log2 of the batch size, with a part that
all precisions share and a part of each precision. The value of a trial is its knowledge gradient: the expected
improvement of the setting that the model would choose once the trial's result is known (Frazier, Powell, Dayanik, 2009,
The Knowledge-Gradient Policy for Correlated Normal Beliefs). It is large where a curve is unknown and may lead or where
the leader was measured too rarely, and zero where a whole curve lies too low to lead anywhere.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from autotune_amp.core.setting import Setting
from autotune_amp.dimensions import ACCUMULATION_STEPS, BATCH_SIZE, DIMENSIONS, NUM_WORKERS, PRECISION, risks
from autotune_amp.search.ranking import PLATEAU

Array = npt.NDArray[np.float64]

# Prior standard deviations of the logarithm of the throughput.
LEVEL_DEVIATION, PRECISION_DEVIATION = 3.0, 0.7
RISE_PER_OCTAVE = 0.2  # prior mean slope: the cost of kernel launches is shared by more samples
SLOPE_DEVIATION, PRECISION_SLOPE_DEVIATION = 0.2, 0.1
VALUE_DEVIATION, WORKERS_DEVIATION = 0.45, 1.0  # of a further dimension's value (studies/real_card), and of a number of workers
BATCH_SIZE_DEVIATION = 0.02  # deviation of one batch size from its neighbours
SHARED_BEND_DEVIATION, SHARED_BEND_OCTAVES = 0.5, 4.0  # the bend that all curves share, and its length scale in doublings of the batch size
OWN_BEND_OCTAVES = 2.0
# Grids over which the model averages, weighted by likelihood: the bend of a single curve, and the spread between
# processes of the same setting.
OWN_BEND_DEVIATIONS = (0.1, 0.2, 0.4)
NOISE_DEVIATIONS = (0.01, 0.03, 0.08, 0.15)

_NODES, _WEIGHTS = np.polynomial.hermite_e.hermegauss(21)


class ThroughputModel:
    """Gaussian-process model of the throughput of `observed` and `others` settings.

    `observed` maps a setting to the throughputs of its processes, in any unit.
    """

    def __init__(self, observed: Mapping[Setting, Sequence[float]], others: Sequence[Setting]) -> None:
        self.settings = tuple(dict.fromkeys((*observed, *others)))
        self._num_observed = len(observed)
        index = {setting: number for number, setting in enumerate(self.settings)}
        rows = np.array([index[setting] for setting, values in observed.items() for _ in values])
        logs = np.log(np.array(list(itertools.chain(*observed.values())), dtype=np.float64))
        trend = RISE_PER_OCTAVE * np.log2([setting.batch_size for setting in self.settings])
        level = float((logs - trend[rows]).mean())
        self._expected: Array = level + trend
        prior, bending = _prior(self.settings)
        left = logs - self._expected[rows]
        fits = [_fit(prior + bend**2 * bending, rows, left, noise) for bend in OWN_BEND_DEVIATIONS for noise in NOISE_DEVIATIONS]
        likelihoods = np.array([fit.log_likelihood for fit in fits])
        weights = np.exp(likelihoods - likelihoods.max())
        self._fits, self._weights = fits, weights / weights.sum()
        self.means: Array = self._expected + np.average([fit.means for fit in fits], axis=0, weights=self._weights)

    def gains(self, choosable: Collection[Setting], least: float = 0.0) -> dict[Setting, float]:
        """Return the knowledge gradient of one more process of each `choosable` setting, as a share of the best
        throughput.

        Throughputs below `least`, that of the baseline, gain nothing, since the baseline can be kept. A setting that
        was never measured cannot be chosen before it is. As in the final choice, a setting with less to go wrong may be
        up to `PLATEAU` slower.
        """
        order = sorted(range(len(self.settings)), key=lambda number: risks(self.settings[number]))
        handicap = np.empty(len(order))
        handicap[order] = PLATEAU * np.arange(len(order)) / max(1, len(order) - 1)
        added = self._expected - handicap
        chosen = [number for number, setting in enumerate(self.settings) if setting in choosable]
        is_measured = np.array([number < self._num_observed for number in chosen])
        floor = math.log(least) if least > 0 else -math.inf
        gains = [fit.gains(chosen, added, is_measured, floor) for fit in self._fits]
        found = np.average(gains, axis=0, weights=self._weights)
        return {self.settings[number]: float(gain) for number, gain in zip(chosen, found, strict=True)}

    def throughput(self, setting: Setting) -> float:
        """Return the throughput that the model expects of `setting`, in the unit of the observations."""
        return math.exp(self.means[self.settings.index(setting)])


class _Fit(NamedTuple):
    means: Array
    covariance: Array
    noise: float
    log_likelihood: float

    def gains(self, chosen: Sequence[int], added: Array, is_measured: npt.NDArray[np.bool_], floor: float) -> Array:
        """Return the knowledge gradient of each setting in `chosen`, in the logarithm of the throughput.

        After the trial the best of the measured settings and the one tried is chosen, unless all lie below `floor`.
        """
        values, covariance = (self.means + added)[chosen], self.covariance[np.ix_(chosen, chosen)]
        spread = np.sqrt(np.diag(covariance) + self.noise**2)
        changes = covariance / spread[:, None]  # change of all means if a setting's process is one deviation off
        may_be_chosen = is_measured | np.eye(len(chosen), dtype=bool)
        values_after = values[None, :, None] + changes[:, :, None] * _NODES
        best = np.maximum(np.where(may_be_chosen[:, :, None], values_after, -np.inf).max(axis=1), floor)
        # While nothing was measured nothing can be chosen, so any result of a trial counts as gain.
        gains: Array = best @ _WEIGHTS / _WEIGHTS.sum() - values[is_measured].max(initial=max(values.min() - 1, floor))
        return gains


def _fit(prior: Array, rows: npt.NDArray[Any], logs: Array, noise: float) -> _Fit:
    within = prior[np.ix_(rows, rows)] + noise**2 * np.eye(len(rows))
    lower = np.linalg.cholesky(within)
    white = np.linalg.solve(lower, np.column_stack((logs, prior[rows])))
    seen, explained = white[:, 0], white[:, 1:]
    return _Fit(
        means=explained.T @ seen,
        covariance=prior - explained.T @ explained,
        noise=noise,
        log_likelihood=float(-0.5 * seen @ seen - np.log(np.diag(lower)).sum()),
    )


def _prior(settings: Sequence[Setting]) -> tuple[Array, Array]:
    """Return the settings' prior covariance, and at unit variance that of the bend of a precision's curve."""
    octaves = np.log2([setting.batch_size for setting in settings])
    centred, apart = octaves - octaves.mean(), np.abs(octaves[:, None] - octaves)
    sloped = np.outer(centred, centred)
    shared = LEVEL_DEVIATION**2 + SLOPE_DEVIATION**2 * sloped + SHARED_BEND_DEVIATION**2 * np.exp(-0.5 * (apart / SHARED_BEND_OCTAVES) ** 2)
    own = PRECISION_DEVIATION**2 + PRECISION_SLOPE_DEVIATION**2 * sloped
    is_alike = _are_equal([setting.precision for setting in settings])
    prior = shared + is_alike * own + _further(settings) + BATCH_SIZE_DEVIATION**2 * np.eye(len(settings))
    return prior, is_alike * np.exp(-apart / OWN_BEND_OCTAVES)


def _further(settings: Sequence[Setting]) -> Array:
    """Return the covariance of two settings from the non-default values of further dimensions that they share."""
    found = np.zeros((len(settings), len(settings)))
    for dimension in DIMENSIONS:
        if dimension not in (PRECISION, BATCH_SIZE, ACCUMULATION_STEPS):
            values = [getattr(setting, dimension.name) for setting in settings]
            is_other = np.array([value != dimension.default for value in values])
            deviation = WORKERS_DEVIATION if dimension is NUM_WORKERS else VALUE_DEVIATION
            found += deviation**2 * _are_equal(values) * np.outer(is_other, is_other)
    return found


def _are_equal(values: Sequence[Any]) -> Array:
    return np.array([[float(a == b) for b in values] for a in values])
