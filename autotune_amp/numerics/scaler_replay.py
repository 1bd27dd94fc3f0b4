"""Simulation of GradScaler over recorded loss scales: the cost of any init_scale and growth_interval, without training.

Step t overflows exactly if its loss scale is above the largest safe one, S*(t). Between two overflows the scale only
grows, at known steps, so the replay jumps from change to change of the scale. Steps count from 0.
"""

from __future__ import annotations

import math
import random
import sys
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from ctypes import c_float
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from autotune_amp.core.config import MIN_LOSS_SCALE, LossScale

_FLUSHED_LOG2 = -25.0  # fp16 rounds magnitudes up to 2^-25 to 0: half of its least positive number
_LARGEST_SCALE = 2.0**127  # largest power of two in float32
_MAX_CACHED_SCALES = 64  # lists of overflows, to bound memory


def _log2(scale: float) -> float:
    """Return log2 of a scale; for 0 the least finite number, which is above the -inf of steps that always overflow."""
    return math.log2(scale) if scale > 0 else -sys.float_info.max


class SafeScaleTrace:
    """log2 of the largest safe loss scale S*(t) for each step of a horizon; immutable, for many replays.

    -inf marks a step that is not finite at any scale, +inf one that is finite at every scale. Raises `ValueError` for
    an empty trace and for NaN.
    """

    def __init__(self, log2_scales: Sequence[float]) -> None:
        self._log2_scales = np.array(log2_scales, dtype=np.float64)
        if not len(self._log2_scales) or np.isnan(self._log2_scales).any():
            raise ValueError("A trace needs at least one step, and a number (or -inf, inf) for each.")
        # For each scale: the steps that overflow, and the trace's length at the end. The cache is bounded, since with a
        # growth factor other than 2 every change leads to a new scale.
        self._overflows = lru_cache(maxsize=_MAX_CACHED_SCALES)(
            lambda scale: [*np.flatnonzero(self._log2_scales < _log2(scale)).tolist(), len(self)]
        )

    def __len__(self) -> int:
        return len(self._log2_scales)

    def next_overflow(self, scale: float, step: int) -> int:
        """Return the first step from `step` on that overflows at `scale`; the trace's length if none does."""
        overflows = self._overflows(scale)
        return overflows[bisect_left(overflows, step)]


class FlushedShares:
    """Share F0 of nonzero gradient entries that fp16 flushes to zero, as a function of the loss scale.

    `histogram` maps an octave k to the number of entries with floor(log2|g|) = k at loss scale 1, in fp32.
    `log2_divisor` is log2 of the number by which the loss is divided before scaling, as in gradient accumulation.
    """

    def __init__(self, histogram: Mapping[int, float], log2_divisor: float = 0.0) -> None:
        self._threshold = _FLUSHED_LOG2 + log2_divisor
        counted = {octave: number for octave, number in histogram.items() if number}
        self._edges = np.arange(min(counted, default=0), max(counted, default=-1) + 2)
        below = np.cumsum([0.0, *(counted.get(octave, 0.0) for octave in self._edges[:-1].tolist())])
        self._shares_below = below / max(below[-1], sys.float_info.min)

    def at(self, log2_scale: float) -> float:
        """Return P(|g| ≤ 2^-25 / scale), with entries uniform in log2 within the octave of the threshold.

        0 if no entry was counted.
        """
        return float(np.interp(self._threshold - log2_scale, self._edges, self._shares_below))


class Replay(NamedTuple):
    """Cost of a loss scale over a trace.

    `applied_share` is the share of the gradient that reaches the optimizer: the mean over all steps of (1 - skipped)(1
    - F0(scale)). `final_scale` is the loss scale after the last step.
    """

    num_skips: int
    applied_share: float
    final_scale: float


def constant_scale_stretches(
    trace: SafeScaleTrace, loss_scale: LossScale, *, is_bounded: bool
) -> Iterator[tuple[float, int, int | None]]:
    """Split the trace into stretches at a constant scale; yield the scale, its number of clean steps, and the skip.

    The skip is the step whose overflow ends the stretch, None if the scale grew or the trace ended. The last stretch,
    of 0 or more steps, has the final scale. `is_bounded` is explained at `replay`.
    """
    floor, ceiling, hysteresis = 0.0, math.inf, 1
    if is_bounded:
        floor = c_float(loss_scale.min_scale or MIN_LOSS_SCALE).value
        ceiling = c_float(min(loss_scale.max_scale, _LARGEST_SCALE)).value
        hysteresis = loss_scale.hysteresis
    num_steps, interval = len(trace), loss_scale.growth_interval
    scale, step, hysteresis_left = c_float(loss_scale.init_scale).value, 0, hysteresis
    while True:
        overflow, growth = trace.next_overflow(scale, step), step + interval
        if overflow < min(growth, num_steps):
            yield scale, overflow - step, overflow
            step = overflow + 1
            hysteresis_left -= 1
            if hysteresis_left <= 0:
                scale = max(floor, c_float(scale * loss_scale.backoff_factor).value)
        elif growth <= num_steps:
            yield scale, interval, None
            step = growth
            hysteresis_left = hysteresis
            # As in torch's kernel: computed in double precision, stored in float32, and never grown to infinity.
            grown = c_float(scale * loss_scale.growth_factor).value
            scale = min(ceiling, grown) if math.isfinite(grown) else scale
        else:
            yield scale, num_steps - step, None
            return


def replay(
    trace: SafeScaleTrace, loss_scale: LossScale, flushed: FlushedShares | None = None, *, is_bounded: bool = False
) -> Replay:
    """Return the cost of a run with `loss_scale` over `trace`; without `flushed` no gradient entries count as flushed.

    By default the scale follows ``torch.amp.GradScaler``, without bounds and hysteresis. With `is_bounded` it follows
    `PrecisionController`, with its bounds and hysteresis. That holds while the controller does not change the
    precision, and for overflows of gradients: after a non-finite loss it skips the step without backing off.
    """
    clean_steps: Counter[float] = Counter()
    num_skips, scale = 0, loss_scale.init_scale
    for scale, num_clean, skip in constant_scale_stretches(trace, loss_scale, is_bounded=is_bounded):
        clean_steps[scale] += num_clean
        num_skips += skip is not None
    lost = 0.0 if flushed is None else math.fsum(n * flushed.at(_log2(scale)) for scale, n in clean_steps.items())
    return Replay(num_skips, (len(trace) - num_skips - lost) / len(trace), scale)


def skipped_steps(trace: SafeScaleTrace, loss_scale: LossScale, *, is_bounded: bool = False) -> list[int]:
    """Return the steps that are skipped in `replay`, in order."""
    return [
        skip for _, _, skip in constant_scale_stretches(trace, loss_scale, is_bounded=is_bounded) if skip is not None
    ]


def extend_trace(
    log2_scales: Sequence[float],
    num_steps: int,
    *,
    seed: int = 0,
    num_burst_steps: int = 5,
    num_passes_per_step: int = 1,
) -> SafeScaleTrace:
    """Extend the recorded `log2_scales` of single passes to a trace of `num_steps`; reproducible for each `seed`.

    A step of `num_passes_per_step` overflows if any of its passes does, so its scale is their minimum. An incomplete
    step at the end of the recording is left out.

    The recorded steps come first, unchanged. The others are drawn from the recording's second half, since the start of
    a training run differs from the rest. After the recording, but not before a third of the trace, `num_burst_steps`
    in a row are not finite at any scale, so that a slow recovery of the scale has a cost. Raises `ValueError` if
    `log2_scales` is empty.
    """
    if not len(log2_scales):
        raise ValueError("Nothing was recorded: log2_scales is empty.")
    num_recorded = min(num_steps, len(log2_scales) // num_passes_per_step)
    windows = (log2_scales[step * num_passes_per_step :][:num_passes_per_step] for step in range(num_recorded))
    recorded = list(map(min, windows))
    later_half, rng = log2_scales[len(log2_scales) // 2 :], random.Random(seed)  # noqa: S311 - a simulation
    drawn = [min(rng.choices(later_half, k=num_passes_per_step)) for _ in range(num_steps - num_recorded)]
    extended = recorded + drawn
    start = max(len(recorded), num_steps // 3)
    end = min(num_steps, start + num_burst_steps)
    extended[start:end] = [-math.inf] * (end - start)
    return SafeScaleTrace(extended)


def starting_scale(log2_scales: Sequence[float], max_log2: float = 24.0) -> float:
    """Return the calibrated init_scale, 2^⌊min log2 S* - 1⌋, within [2^-24, 2^max_log2].

    Steps that are not finite at any scale are ignored if they are fewer than half; otherwise the result is 2^-24.
    Raises `ValueError` if no step is finite at any scale.
    """
    finite = [log2_scale for log2_scale in log2_scales if log2_scale > -math.inf]
    if not finite:
        raise ValueError("No step has a loss scale at which it is finite.")
    is_mostly_finite = 2 * len(finite) > len(log2_scales)
    lowest = min(finite) if is_mostly_finite else -math.inf
    return 2.0 ** math.floor(min(max(lowest - 1, math.log2(MIN_LOSS_SCALE)), max_log2))
