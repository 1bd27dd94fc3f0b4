"""Choice of init_scale and growth_interval for fp16: `best_pair` among pairs replayed on one calibration. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import median
from typing import NamedTuple, TypeAlias

from autotune_amp.core.config import FP16_MAX, LossScale
from autotune_amp.core.evidence import LossScaleEvidence
from autotune_amp.core.outcome import PRECISION_FAILURE_KINDS, Calibration, Failure, Measurement, Record
from autotune_amp.core.recommendation import Exclusion
from autotune_amp.core.setting import Setting
from autotune_amp.core.text import exact
from autotune_amp.numerics.grading import MAX_FLUSHED_SHARE, MAX_FORWARD_SHARE
from autotune_amp.numerics.scaler_replay import (
    FlushedShares,
    Replay,
    constant_scale_stretches,
    extend_trace,
    replay,
    skipped_steps,
    starting_scale,
)
from autotune_amp.precision.modes import MODES
from autotune_amp.search.options import DEFAULT_NUM_STEPS, MAX_STEPS
from autotune_amp.search.ranking import accumulation_result
from autotune_amp.trial.jobs import num_warmup_steps

Pair: TypeAlias = tuple[float, int]  # init_scale, growth_interval

DEFAULT_PAIR: Pair = (65536.0, 2000)  # of torch.amp.GradScaler
LOG2_INIT_SCALES = (-24, 24)  # search range: from fp16's smallest value to LossScale's default maximum
_INTERVALS = (2000, 200)  # GradScaler's default, and one that recovers ten times as fast after a scale fell

_MIN_GAIN = 5e-4  # least gain in the applied share for another pair than the preferred one


class MissingCalibration(NamedTuple):
    """Result of a calibration that gave no loss scale, with the `reason`.

    `refusal` is the reason to exclude fp16: it cannot be calibrated, or no loss scale is safe. It is None if the
    calibration did not finish, which does not exclude fp16.
    """

    reason: str
    refusal: str | None = None


class Stretch(NamedTuple):
    """Consecutive steps at one loss scale: the first, and the skipped step that ended them; None if the scale grew."""

    scale: float
    first_step: int
    skip: int | None


class Scales:
    """Replays of any pair of loss scale and growth interval over `num_steps` optimizer steps, from one calibration.

    Of a training run that is longer than `MAX_STEPS`, these first steps are replayed.

    `scored` maps each pair replayed so far to its replay: `seeds`, then pairs from Optuna (`stages.checks.LossScales`).

    The loss scale stays within `LossScale`'s bounds, as in the `PrecisionController`. The loss of each pass of an
    accumulation window is divided by `accumulation_steps`, unless it `is_loss_sum`, which in effect divides its scale
    too; a window overflows if any of its passes does. Raises `ValueError` if no step has a safe scale.
    """

    def __init__(
        self, calibration: Calibration, num_steps: int, accumulation_steps: int = 1, *, is_loss_sum: bool = False
    ) -> None:
        self.calibration = calibration
        self.num_steps = num_steps = min(num_steps, MAX_STEPS)
        self.log2_divisor = 0.0 if is_loss_sum else math.log2(accumulation_steps)
        self.log2_scales = [-math.inf if s is None else s + self.log2_divisor for s in calibration.log2_scales]
        self._accumulation_steps = accumulation_steps
        self._trace = extend_trace(self.log2_scales, num_steps, num_passes_per_step=accumulation_steps)
        self._flushed = FlushedShares(dict(calibration.gradient_histogram), self.log2_divisor)
        self.preferred: Pair = (starting_scale(self.log2_scales, LOG2_INIT_SCALES[1]), _INTERVALS[0])
        self.scored: dict[Pair, Replay] = {}
        for pair in self.seeds:
            self.replay(pair)

    @property
    def seeds(self) -> tuple[Pair, ...]:
        """Return the first pairs to replay, the preferred one first."""
        pairs = [(self.preferred[0], interval) for interval in _INTERVALS]
        return tuple(dict.fromkeys([pairs[0], DEFAULT_PAIR, *pairs[1:]]))

    def replay(self, pair: Pair) -> Replay:
        """Return the replay of a pair over `num_steps` optimizer steps."""
        if pair not in self.scored:
            self.scored[pair] = replay(self._trace, loss_scale_of(pair), self._flushed, is_bounded=True)
        return self.scored[pair]

    def scale_stretches(self, pair: Pair, *, is_bounded: bool = True) -> list[Stretch]:
        """Return a pair's stretches of constant loss scale. Without `is_bounded`, follow ``torch.amp.GradScaler``."""
        result, step = [], 0
        for scale, num_clean, skip in constant_scale_stretches(self._trace, loss_scale_of(pair), is_bounded=is_bounded):
            result.append(Stretch(scale, step, skip))
            step += num_clean + (skip is not None)
        return result

    @property
    def gradscaler_replay(self) -> Replay:
        """Return the replay of ``torch.amp.GradScaler`` with its defaults, whose loss scale has no bounds."""
        return replay(self._trace, loss_scale_of(DEFAULT_PAIR), self._flushed)

    @property
    def best(self) -> Pair:
        """Return the pair to recommend among those replayed."""
        return best_pair(self.scored, self.preferred)

    @property
    def refusal(self) -> str | None:
        """Return the reason to exclude fp16, or None if it may be used (studies/README.md, Loss scaling, "Choice")."""
        forward_max = self.calibration.forward_max
        if forward_max > MAX_FORWARD_SHARE * FP16_MAX:
            return (
                f"activations reach {forward_max:.5g} at batch {self.calibration.batch_size}, "
                f"and fp16 overflows above {FP16_MAX:g}"
            )
        share = self.flushed_share(self.best)
        if share <= MAX_FLUSHED_SHARE:
            return None
        return (
            f"{100 * share:.1f} % of the gradient's entries underflow to zero at a loss scale of "
            f"{exact(self.best[0])}, and larger ones overflow (the largest safe one is "
            f"2^{min(self.finite_log2_scales):.1f})"
        )

    def flushed_share(self, pair: Pair) -> float:
        """Return the share of the gradient's entries that fp16 flushes to zero at the pair's init_scale."""
        return self._flushed.at(math.log2(pair[0]))

    @property
    def finite_log2_scales(self) -> list[float]:
        """Return log2 of the largest safe loss scale, for each calibrated pass that has one."""
        return [s for s in self.log2_scales if s > -math.inf]

    def predicted_num_skips(self, pair: Pair, num_measured: int, num_warmup: int) -> int:
        """Return the predicted number of skipped steps among a process's `num_measured` steps.

        They follow the warm-up, which goes on until a step is not skipped. A trial trains with
        ``torch.amp.GradScaler``, whose loss scale has no bounds.
        """
        num_foreseen = num_warmup + 64 + num_measured
        trace = extend_trace(
            self.log2_scales, num_foreseen, num_burst_steps=0, num_passes_per_step=self._accumulation_steps
        )
        steps = set(skipped_steps(trace, loss_scale_of(pair)))
        after_warmup = range(num_warmup, num_foreseen - num_measured)
        start = next((step for step in after_warmup if step - 1 not in steps), after_warmup.stop)
        return sum(start <= step < start + num_measured for step in steps)


def best_pair(scored: Mapping[Pair, Replay], preferred: Pair) -> Pair:
    """Return the pair (init_scale, growth_interval) to recommend: `preferred` unless another gains `_MIN_GAIN`.

    The gain is in the applied share, that of samples that reach the optimizer. The other is the one with the highest
    applied share; of equals the smaller init_scale, then the larger growth_interval. `preferred` is the calibrated
    starting scale with GradScaler's own interval. Raises `KeyError` if it was not replayed.
    """
    best = max(scored, key=lambda pair: (scored[pair].applied_share, -pair[0], pair[1]))
    gain = scored[best].applied_share - scored[preferred].applied_share
    return best if gain > _MIN_GAIN else preferred


CalibrationResult: TypeAlias = Scales | MissingCalibration
# Calibration results by `Setting.scaling`: one holds for every fp16 setting with the same modules in fp16.
AllScales: TypeAlias = "Mapping[Setting, CalibrationResult]"


def nearest_power_of_two(init_scale: float) -> float:
    """Return the power of two nearest to `init_scale` on a log scale, since multiplying by a power of two is exact."""
    return float(2.0 ** round(math.log2(init_scale)))


def calibration_results(
    records: Sequence[Record], num_steps: int = DEFAULT_NUM_STEPS
) -> dict[Setting, CalibrationResult]:
    """Return the results of all calibrations in the records, over `num_steps` optimizer steps."""
    accumulation = accumulation_result(records)
    is_sum = accumulation is not None and accumulation.verdict == "sum"
    return {
        r.candidate.scaling: calibration_result(r, num_steps, is_loss_sum=is_sum)
        for r in records
        if r.purpose == "calibration"
    }


def calibration_result(record: Record, num_steps: int, *, is_loss_sum: bool = False) -> CalibrationResult:
    """Return the result of one calibration. `is_loss_sum`: the loss is a sum over samples."""
    outcome = record.outcome
    if isinstance(outcome, Failure):
        if outcome.kind in PRECISION_FAILURE_KINDS:
            return _fp16_excluded(f"its loss scale could not be calibrated: {outcome.kind}: {outcome.message}")
        return MissingCalibration(f"the calibration did not finish: {outcome.kind}: {outcome.message}")
    assert isinstance(outcome, Calibration)
    if outcome.init_scale is None or all(s is None for s in outcome.log2_scales):
        return _fp16_excluded("its loss or gradients are not finite at any loss scale")
    return Scales(outcome, num_steps, record.candidate.accumulation_steps, is_loss_sum=is_loss_sum)


def _fp16_excluded(reason: str) -> MissingCalibration:
    return MissingCalibration(reason, reason)


def refusal(scales: AllScales, candidate: Setting) -> str | None:
    """Return the reason to exclude an fp16 candidate, or None."""
    result = _result_for(scales, candidate)
    return None if result is None else result.refusal


def exclusions(scales: AllScales) -> tuple[Exclusion, ...]:
    """Return exclusions for the batch sizes without a safe loss scale. With pinned modules fp16 may still be tried."""
    return tuple(
        Exclusion(precision="fp16", batch_size=key.batch_size, reason=result.refusal)
        for key, result in scales.items()
        if result.refusal is not None and key.is_ordinary
    )


def why_uncalibrated(scales: AllScales, candidate: Setting) -> str | None:
    """Return the reason that an fp16 candidate has no loss scale; None if it has one or was not calibrated."""
    result = _result_for(scales, candidate)
    return result.reason if isinstance(result, MissingCalibration) else None


def scales_of(scales: AllScales, candidate: Setting) -> Scales | None:
    """Return the calibrated loss scales of an fp16 candidate; None for other precisions or without a calibration."""
    result = _result_for(scales, candidate)
    return result if isinstance(result, Scales) else None


def _result_for(scales: AllScales, candidate: Setting) -> CalibrationResult | None:
    return scales.get(candidate.scaling) if MODES[candidate.precision].takes_scaler else None


def evidence(scales: AllScales, candidate: Setting, confirming: Sequence[Measurement]) -> LossScaleEvidence | None:
    """Return the evidence for the recommended pair, or None. `confirming` are processes that ran with it."""
    calibrated = scales_of(scales, candidate)
    if calibrated is None:
        return None
    pair = calibrated.best
    replay, default_replay = calibrated.replay(pair), calibrated.gradscaler_replay
    counts = [(m.num_steps, num_warmup_steps(m)) for m in confirming]
    return LossScaleEvidence(
        num_steps=calibrated.num_steps,
        num_skips=replay.num_skips,
        applied_share=replay.applied_share,
        default_num_skips=default_replay.num_skips,
        default_applied_share=default_replay.applied_share,
        num_confirming_steps=sum(num_measured for num_measured, _ in counts),
        num_skips_seen=sum(m.num_skips for m in confirming),
        num_skips_foretold=sum(calibrated.predicted_num_skips(pair, *count) for count in counts),
        num_calibrated_steps=len(calibrated.log2_scales),
        log2_safe_scale_min=min(calibrated.finite_log2_scales),
        log2_safe_scale_median=median(calibrated.finite_log2_scales),
        flushed_share=calibrated.flushed_share(pair),
    )


def loss_scale_of(pair: Pair) -> LossScale:
    """Return the `LossScale` with the pair's init_scale and growth_interval."""
    return LossScale(init_scale=pair[0], growth_interval=pair[1])
