"""Model of the throughput of all settings from the measured ones, and the value of one more trial. Pure.

The logarithm of the throughput is a Gaussian process over the precision and log2 of the batch size, with a part that
all precisions share and a part of each precision. The value of a trial is its knowledge gradient: the expected
improvement in throughput of the setting that would be chosen once the trial's result is known (Frazier, Powell,
Dayanik, 2009, The Knowledge-Gradient Policy for Correlated Normal Beliefs). It is large for a precision that has hardly
been measured and may be the fastest, or for a leader measured too rarely, and zero for one that is too slow at every
batch size.
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

# Prior standard deviations of the logarithm of the throughput: the level of all settings, and that of a precision.
LEVEL_DEVIATION, PRECISION_DEVIATION = 3.0, 0.7
# Prior mean of the slope per doubling of the batch size: more samples share the cost of a kernel launch.
RISE_PER_OCTAVE = 0.2
SLOPE_DEVIATION, PRECISION_SLOPE_DEVIATION = 0.2, 0.1  # of that slope, for all settings and for a precision
# Prior standard deviations of the effect of a value other than the default: of a dimension besides precision, batch
# size and accumulation (studies/real_card), and of the number of DataLoader workers.
VALUE_DEVIATION, WORKERS_DEVIATION = 0.45, 1.0
BATCH_SIZE_DEVIATION = 0.02  # of a single setting from its smooth curve over the batch size
SHARED_BEND_DEVIATION, SHARED_BEND_OCTAVES = 0.5, 4.0  # curvature shared by all precisions; its length scale in octaves
OWN_BEND_OCTAVES = 2.0  # length scale of the curvature of a single precision, in doublings of the batch size
# Values over which the model averages, weighted by likelihood: the standard deviation of a precision's own curvature,
# and that of measurements of the same setting in different processes.
OWN_BEND_DEVIATIONS = (0.1, 0.2, 0.4)
NOISE_DEVIATIONS = (0.01, 0.03, 0.08, 0.15)

# Gauss-Hermite quadrature: nodes, in standard deviations, and weights of the mean over a normal distribution.
_NODES, _WEIGHTS = np.polynomial.hermite_e.hermegauss(21)


class ThroughputModel:
    """Gaussian-process model of the throughput of measured and unmeasured settings.

    `observed` maps each measured setting to its throughputs, one from each process that measured it, in any unit.
    `others` are settings without a measurement. `means` are the expected logarithms of the throughput, in the order of
    `settings`.
    """

    def __init__(self, observed: Mapping[Setting, Sequence[float]], others: Sequence[Setting]) -> None:
        self.settings = tuple(dict.fromkeys((*observed, *others)))
        self._num_observed = len(observed)
        index = {setting: number for number, setting in enumerate(self.settings)}
        indices = np.array([index[setting] for setting, values in observed.items() for _ in values])
        logs = np.log(np.array(list(itertools.chain(*observed.values())), dtype=np.float64))
        trend = RISE_PER_OCTAVE * np.log2([setting.batch_size for setting in self.settings])
        level = float((logs - trend[indices]).mean())
        self._prior_means: Array = level + trend
        prior, curvature_covariance = _prior(self.settings)
        residuals = logs - self._prior_means[indices]
        fits = [
            _fit(prior + bend**2 * curvature_covariance, indices, residuals, noise)
            for bend in OWN_BEND_DEVIATIONS
            for noise in NOISE_DEVIATIONS
        ]
        likelihoods = np.array([fit.log_likelihood for fit in fits])
        weights = np.exp(likelihoods - likelihoods.max())
        self._fits, self._weights = fits, weights / weights.sum()
        self.means: Array = self._prior_means + np.average([fit.means for fit in fits], axis=0, weights=self._weights)

    def gains(self, choosable: Collection[Setting], least: float = 0.0) -> dict[Setting, float]:
        """Return the expected relative gain in throughput from one more process of each `choosable` setting.

        This is its knowledge gradient, 0.01 for a throughput that is expected to rise by 1 %. `least` is the throughput
        of the baseline, in the unit of the observations, 0 if it is unknown: slower settings gain nothing, since the
        baseline can be kept. A setting can be chosen only once it was measured. As in the final choice, a setting
        is preferred to one with less risk only if it is faster by a margin: from the safest setting to the riskiest,
        `PLATEAU`; between others a part of it, by their rank in `risks`.
        """
        order = sorted(range(len(self.settings)), key=lambda number: risks(self.settings[number]))
        handicap = np.empty(len(order))
        handicap[order] = PLATEAU * np.arange(len(order)) / max(1, len(order) - 1)
        offsets = self._prior_means - handicap
        candidates = [number for number, setting in enumerate(self.settings) if setting in choosable]
        is_measured = np.array([number < self._num_observed for number in candidates])
        floor = math.log(least) if least > 0 else -math.inf
        gains = [fit.gains(candidates, offsets, is_measured, floor) for fit in self._fits]
        mean_gains = np.average(gains, axis=0, weights=self._weights)
        return {self.settings[number]: float(gain) for number, gain in zip(candidates, mean_gains, strict=True)}

    def throughput(self, setting: Setting) -> float:
        """Return the throughput that the model expects of `setting`, in the unit of the observations."""
        return math.exp(self.means[self.settings.index(setting)])


class _Fit(NamedTuple):
    """Posterior of all settings for one choice of the precisions' own curvature and of the noise.

    `means` and `covariance` are of the logarithm of the throughput less its prior mean. `noise` is the standard
    deviation between processes of the same setting, in that logarithm.
    """

    means: Array
    covariance: Array
    noise: float
    log_likelihood: float

    def gains(
        self, candidates: Sequence[int], offsets: Array, is_measured: npt.NDArray[np.bool_], floor: float
    ) -> Array:
        """Return the knowledge gradient of each candidate, in the logarithm of the throughput.

        `candidates` are indices of settings, and `is_measured` says which of them have been measured. After the trial
        the best is chosen among the measured ones and the one tried, unless all are below `floor`, the logarithm of the
        baseline's throughput. `offsets` of all settings are added to `means`: the prior mean less the handicap for
        risks.
        """
        values, covariance = (self.means + offsets)[candidates], self.covariance[np.ix_(candidates, candidates)]
        spread = np.sqrt(np.diag(covariance) + self.noise**2)
        # Row by setting tried: change of all means if a process of the setting is one standard deviation faster.
        changes = covariance / spread[:, None]
        may_be_chosen = is_measured | np.eye(len(candidates), dtype=bool)
        values_after = values[None, :, None] + changes[:, :, None] * _NODES
        best = np.maximum(np.where(may_be_chosen[:, :, None], values_after, -np.inf).max(axis=1), floor)
        # Before any measurement nothing can be chosen, so any result of a trial counts as gain.
        gains: Array = best @ _WEIGHTS / _WEIGHTS.sum() - values[is_measured].max(initial=max(values.min() - 1, floor))
        return gains


def _fit(prior: Array, indices: npt.NDArray[Any], residuals: Array, noise: float) -> _Fit:
    """Return the posterior of all settings for their `prior` covariance and the observations.

    Observation i is of the setting `indices[i]`; `residuals[i]` is the logarithm of its throughput less the prior mean.
    """
    covariance = prior[np.ix_(indices, indices)] + noise**2 * np.eye(len(indices))
    lower = np.linalg.cholesky(covariance)
    whitened = np.linalg.solve(lower, np.column_stack((residuals, prior[indices])))
    whitened_residuals, explained = whitened[:, 0], whitened[:, 1:]
    return _Fit(
        means=explained.T @ whitened_residuals,
        covariance=prior - explained.T @ explained,
        noise=noise,
        log_likelihood=float(-0.5 * whitened_residuals @ whitened_residuals - np.log(np.diag(lower)).sum()),
    )


def _prior(settings: Sequence[Setting]) -> tuple[Array, Array]:
    """Return the settings' prior covariance, and the part of it due to the precisions' own curvature at unit variance.

    The first is without the second, whose variance is one of the values of `OWN_BEND_DEVIATIONS`, squared.
    """
    octaves = np.log2([setting.batch_size for setting in settings])
    centred, distances = octaves - octaves.mean(), np.abs(octaves[:, None] - octaves)
    sloped = np.outer(centred, centred)
    shared_covariance = (
        LEVEL_DEVIATION**2
        + SLOPE_DEVIATION**2 * sloped
        + SHARED_BEND_DEVIATION**2 * np.exp(-0.5 * (distances / SHARED_BEND_OCTAVES) ** 2)
    )
    precision_covariance = PRECISION_DEVIATION**2 + PRECISION_SLOPE_DEVIATION**2 * sloped
    is_same_precision = _equality_matrix([setting.precision for setting in settings])
    prior = (
        shared_covariance
        + is_same_precision * precision_covariance
        + _variant_covariance(settings)
        + BATCH_SIZE_DEVIATION**2 * np.eye(len(settings))
    )
    return prior, is_same_precision * np.exp(-distances / OWN_BEND_OCTAVES)


def _variant_covariance(settings: Sequence[Setting]) -> Array:
    """Return the part of the prior covariance due to non-default values that two settings have in common.

    Precision, batch size and accumulation are left out: other parts are for these.
    """
    covariance = np.zeros((len(settings), len(settings)))
    for dimension in DIMENSIONS:
        if dimension not in (PRECISION, BATCH_SIZE, ACCUMULATION_STEPS):
            values = [getattr(setting, dimension.name) for setting in settings]
            is_changed = np.array([value != dimension.default for value in values])
            deviation = WORKERS_DEVIATION if dimension is NUM_WORKERS else VALUE_DEVIATION
            covariance += deviation**2 * _equality_matrix(values) * np.outer(is_changed, is_changed)
    return covariance


def _equality_matrix(values: Sequence[Any]) -> Array:
    """Return the square matrix with 1.0 for each pair of equal values, else 0.0."""
    return np.array([[float(a == b) for b in values] for a in values])
