"""Choice of init_scale and growth_interval for fp16: `best_pair` among pairs replayed on one calibration. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import median
from typing import NamedTuple, TypeAlias

from autotune_amp.core.config import FP16_MAX, LossScale
from autotune_amp.core.evidence import LossScaleEvidence
from autotune_amp.core.outcome import OF_THE_PRECISION, Calibration, Failure, Measurement, Record
from autotune_amp.core.recommendation import Exclusion
from autotune_amp.core.setting import Setting
from autotune_amp.core.text import exact
from autotune_amp.numerics.grading import MAX_FLUSHED_SHARE, MAX_FORWARD_SHARE
from autotune_amp.numerics.scaler_replay import (
    FlushedShares,
    Replay,
    extend,
    replay,
    skips,
    starting_scale,
    stretches,
)
from autotune_amp.precision.modes import MODES
from autotune_amp.search.options import DEFAULT_NUM_STEPS
from autotune_amp.search.ranking import accumulation_result
from autotune_amp.trial.jobs import num_warmup_steps

Pair: TypeAlias = tuple[float, int]  # init_scale, growth_interval

DEFAULT_PAIR: Pair = (65536.0, 2000)  # of torch.amp.GradScaler
LOG2_INIT_SCALES = (-24, 24)  # range searched: fp16's smallest values to LossScale's default maximum
_INTERVALS = (2000, 200)  # GradScaler's default, and one that recovers ten times as fast after a scale fell

_MIN_GAIN = 5e-4  # least gain in the applied share for another pair than the preferred one


class MissingCalibration(NamedTuple):
    """Calibration that gave no loss scale, with the reason.

    `refusal` is why fp16 is excluded: it cannot be calibrated, or no loss scale is safe. It is None if the calibration
    did not finish, which speaks neither for nor against fp16.
    """

    reason: str
    refusal: str | None = None


class Stretch(NamedTuple):
    """Consecutive steps at one loss scale: their first step, and the skip that ended them, None if the scale grew."""

    scale: float
    first_step: int
    skip: int | None


class Scales:
    """Replays of any pair of loss scale and growth interval over `num_steps` optimizer steps, from one calibration.

    `scored` holds the pairs replayed so far: `seeds`, then those that Optuna suggests (`stages.checks.LossScales`).

    A pair is run within `LossScale`'s own bounds, as the `PrecisionController` runs it. The loss of each pass of an
    accumulation window is divided by `accumulation_steps`, unless it `is_loss_sum`, which in effect divides its scale
    too; a window overflows if any of its passes does. Raises `ValueError` if no step has a safe scale.
    """

    def __init__(
        self, calibration: Calibration, num_steps: int, accumulation_steps: int = 1, *, is_loss_sum: bool = False
    ) -> None:
        self.calibration = calibration
        self.num_steps = num_steps
        self.log2_divisor = 0.0 if is_loss_sum else math.log2(accumulation_steps)
        self.log2_scales = [-math.inf if s is None else s + self.log2_divisor for s in calibration.log2_scales]
        self._accumulation_steps = accumulation_steps
        self._trace = extend(self.log2_scales, num_steps, num_passes_per_step=accumulation_steps)
        self._flushed = FlushedShares(dict(calibration.gradient_histogram), self.log2_divisor)
        self.preferred: Pair = (starting_scale(self.log2_scales, LOG2_INIT_SCALES[1]), _INTERVALS[0])
        self.scored: dict[Pair, Replay] = {}
        for pair in self.seeds:
            self.replay(pair)

    @property
    def seeds(self) -> tuple[Pair, ...]:
        """Return the first pairs to replay, the preferred one first."""
        ours = [(self.preferred[0], interval) for interval in _INTERVALS]
        return tuple(dict.fromkeys([ours[0], DEFAULT_PAIR, *ours[1:]]))

    def replay(self, pair: Pair) -> Replay:
        """Return the replay of a pair over `num_steps` optimizer steps."""
        if pair not in self.scored:
            self.scored[pair] = replay(self._trace, rule(pair), self._flushed, is_bounded=True)
        return self.scored[pair]

    def course(self, pair: Pair, *, is_bounded: bool = True) -> list[Stretch]:
        """Return a pair's stretches of constant loss scale. Without `is_bounded`, follow ``torch.amp.GradScaler``."""
        found, step = [], 0
        for scale, num_clean, skip in stretches(self._trace, rule(pair), is_bounded=is_bounded):
            found.append(Stretch(scale, step, skip))
            step += num_clean + (skip is not None)
        return found

    @property
    def gradscaler_replay(self) -> Replay:
        """Return the replay of ``torch.amp.GradScaler`` with its defaults, which has no bounds."""
        return replay(self._trace, rule(DEFAULT_PAIR), self._flushed)

    @property
    def best(self) -> Pair:
        """Return the pair to recommend among those replayed."""
        return best_pair(self.scored, self.preferred)

    @property
    def refusal(self) -> str | None:
        """Return why fp16 must not be used at all, or None if it may be (studies/README.md, Loss scaling, "Choice")."""
        forward_max = self.calibration.forward_max
        if forward_max > MAX_FORWARD_SHARE * FP16_MAX:
            return (
                f"activations reach {forward_max:.5g} at batch {self.calibration.batch_size}, "
                f"where fp16 ends at {FP16_MAX:g}"
            )
        share = self.flushed_share(self.best)
        if share <= MAX_FLUSHED_SHARE:
            return None
        return (
            f"{100 * share:.1f} % of the gradient's entries are flushed to zero at a loss scale of "
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
        """Return how many of a process's `num_measured` steps are predicted to be skipped.

        The measured steps follow the warm-up, which goes on until the loss scale has come down. A trial trains with
        ``torch.amp.GradScaler``, which has no bounds.
        """
        num_foreseen = num_warmup + 64 + num_measured
        trace = extend(self.log2_scales, num_foreseen, num_burst_steps=0, num_passes_per_step=self._accumulation_steps)
        steps = set(skips(trace, rule(pair)))
        after_warmup = range(num_warmup, num_foreseen - num_measured)
        start = next((step for step in after_warmup if step - 1 not in steps), after_warmup.stop)
        return sum(start <= step < start + num_measured for step in steps)


def best_pair(scored: Mapping[Pair, Replay], preferred: Pair) -> Pair:
    """Return the pair (init_scale, growth_interval) to recommend: `preferred` unless another applies `_MIN_GAIN` more.

    The other is the one with the highest applied share; of equals the smaller init_scale, then the larger
    growth_interval. `preferred` is the calibrated starting scale with GradScaler's own interval. Raises `KeyError` if
    it has no score.
    """
    best = max(scored, key=lambda pair: (scored[pair].applied_share, -pair[0], pair[1]))
    gain = scored[best].applied_share - scored[preferred].applied_share
    return best if gain > _MIN_GAIN else preferred


CalibrationResult: TypeAlias = Scales | MissingCalibration
# By `Setting.scaling`: a calibration holds for every fp16 setting with the same modules in fp16.
AllScales: TypeAlias = "Mapping[Setting, Answer]"


def nearest_power_of_two(init_scale: float) -> float:
    """Return the power of two nearest to `init_scale` on a log scale, since multiplying by a power of two is exact."""
    return float(2.0 ** round(math.log2(init_scale)))


def calibration_results(records: Sequence[Record], num_steps: int = DEFAULT_NUM_STEPS) -> dict[Setting, CalibrationResult]:
    """Return the results of the calibrations among the records, over a horizon of `num_steps` optimizer steps."""
    found = accumulation_result(records)
    is_sum = found is not None and found.verdict == "sum"
    return {
        r.candidate.scaling: calibration_result(r, num_steps, is_loss_sum=is_sum) for r in records if r.purpose == "calibration"
    }


def calibration_result(record: Record, num_steps: int, *, is_loss_sum: bool = False) -> CalibrationResult:
    """Return the result of one calibration. `is_loss_sum`: the loss is a sum over samples."""
    outcome = record.outcome
    if isinstance(outcome, Failure):
        if outcome.kind in OF_THE_PRECISION:
            return _fp16_excluded(f"its loss scale could not be calibrated: {outcome.kind}: {outcome.message}")
        return MissingCalibration(f"the calibration did not come to an end: {outcome.kind}: {outcome.message}")
    assert isinstance(outcome, Calibration)
    if outcome.init_scale is None or all(s is None for s in outcome.log2_scales):
        return _fp16_excluded("its loss or gradients are not finite at any loss scale")
    return Scales(outcome, num_steps, record.candidate.accumulation_steps, is_loss_sum=is_loss_sum)


def _fp16_excluded(reason: str) -> MissingCalibration:
    return MissingCalibration(reason, reason)


def refusal(scales: AllScales, candidate: Setting) -> str | None:
    """Return why an fp16 candidate is excluded, or None if it is not."""
    found = _result_for(scales, candidate)
    return None if found is None else found.refusal


def exclusions(scales: AllScales) -> tuple[Exclusion, ...]:
    """Return the batch sizes at which fp16 is refused. With pinned modules they remain candidates."""
    return tuple(
        Exclusion(precision="fp16", batch_size=key.batch_size, reason=found.refusal)
        for key, found in scales.items()
        if found.refusal is not None and key.is_ordinary
    )


def why_uncalibrated(scales: AllScales, candidate: Setting) -> str | None:
    """Return why calibrating an fp16 candidate gave no loss scale, or None if it did or was never tried."""
    found = _result_for(scales, candidate)
    return found.reason if isinstance(found, MissingCalibration) else None


def scales_of(scales: AllScales, candidate: Setting) -> Scales | None:
    """Return the calibrated loss scales of an fp16 candidate; None for other precisions or without a calibration."""
    found = _result_for(scales, candidate)
    return found if isinstance(found, Scales) else None


def _result_for(scales: AllScales, candidate: Setting) -> CalibrationResult | None:
    return scales.get(candidate.scaling) if MODES[candidate.precision].takes_scaler else None


def evidence(scales: AllScales, candidate: Setting, confirming: Sequence[Measurement]) -> LossScaleEvidence | None:
    """Return the evidence for the recommended pair, or None. `confirming` are the processes that ran with it."""
    found = scales_of(scales, candidate)
    if found is None:
        return None
    pair = found.best
    ours, defaults = found.replay(pair), found.gradscaler_replay
    counts = [(m.num_steps, num_warmup_steps(m)) for m in confirming]
    return LossScaleEvidence(
        num_steps=found.num_steps,
        num_skips=ours.num_skips,
        applied_share=ours.applied_share,
        default_num_skips=defaults.num_skips,
        default_applied_share=defaults.applied_share,
        num_confirming_steps=sum(num_measured for num_measured, _ in counts),
        num_skips_seen=sum(m.num_skips for m in confirming),
        num_skips_foretold=sum(found.predicted_num_skips(pair, *count) for count in counts),
        num_calibrated_steps=len(found.log2_scales),
        log2_safe_scale_min=min(found.finite_log2_scales),
        log2_safe_scale_median=median(found.finite_log2_scales),
        flushed_share=found.flushed_share(pair),
    )


def rule(pair: Pair) -> LossScale:
    """Return the pair as the loss scale of a training run."""
    return LossScale(init_scale=pair[0], growth_interval=pair[1])
