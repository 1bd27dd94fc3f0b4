"""Verdict on a precision from measurements, with the reason. Pure functions, no torch.

Non-finite, overflowing or flushed numbers are harmful, and so is an error that is the same in every batch. Rounding
noise is not: it is reported, and if it might hide such an error a longer training run decides.

The limits were set on the workloads in the table of studies/fidelity, and tested on the other workloads there.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

from autotune_amp.core.outcome import GradientDamage, Verdict
from autotune_amp.core.text import percent

NOISY = 0.25  # rounding noise over the noise between batches; has the effect of a batch 6 % smaller
# Error common to all batches, over the length of the gradient. If the lower end of its interval is above
# MAX_COMMON_ERROR it may be harmful, above UNFAITHFUL_COMMON_ERROR it is. If the upper end is above NOISY_COMMON_ERROR,
# or with little noise above QUIET_COMMON_ERROR, a training run decides.
MAX_COMMON_ERROR, UNFAITHFUL_COMMON_ERROR = 0.02, 0.5
QUIET_COMMON_ERROR, NOISY_COMMON_ERROR = 0.05, 0.2
MAX_PARAMETER_COMMON_ERROR = 0.5  # limit of the lower end for a single parameter
MAX_NORM_RATIO = 2.0  # length of the gradient over that in fp32; its inverse is the lower limit
MAX_FLUSHED_SHARE = 0.01  # share of significant gradient entries, in a format with a smaller range than fp32
MAX_OF_SMALL_RANGE = 1e6  # fp16 ends at 65,504 and fp8 below it; bf16 and TF32 have fp32's range
MAX_PARAMETER_FLUSHED_SHARE = 0.5  # the same for a single parameter
MAX_FORWARD_SHARE = 0.25  # activations over the format's largest number: leaves two octaves for growth
MAX_LOST_SHARE = 0.5  # share of a step's updates that round away on low-precision weights
FAITHFUL_GAP = 5.0  # distance of the losses from fp32's, over the effect of rounding the first weights once
SUSPICIOUS_SCATTER = 0.5  # distance of the losses from fp32's, over the loss's scatter between batches
MIN_FALL = 0.02  # share of the loss's fall in fp32: a smaller difference is harmless

_VERDICTS_BY_SEVERITY: tuple[Verdict, ...] = ("faithful", "undecided", "doubtful", "unfaithful")
_UNMOVED = "; this holds for the first weights only: the training run changed no weight, as with a learning rate of 0"
_SEVERAL_STEPS = (
    "; train_step takes {} optimizer steps in one call, and their gradients were all computed with the weights before "
    "the first: the effect of one of these steps on the next was not checked"
)
_REUSES_CASTS = (
    "train_step steps an optimizer several times inside one amp.autocast(), which keeps using the weights cast before "
    "the first of these steps (enter a new amp.autocast() for each forward pass)"
)
_NO_SIGNAL = (
    "there is nothing to compare with: fp32's own gradient is zero or rounding noise for every parameter, as that of "
    "a loss over a single class, or of one that draws from a random generator of its own"
)
_FIX_LOSS = (
    "Check it on data that the model learns from: with several classes, labels that are not ignored, and random "
    "numbers by the global generators of torch, numpy or Python."
)
_FIX_STEP = "Fix the training in fp32 first: torch.autograd.set_detect_anomaly(True) names the operation."
_FIX_TRAINING = "Lower the learning rate or clip gradients until training in fp32 stays finite, then check again."


class TrainingDivergence(NamedTuple):
    """Distance of the losses in the precision from those in fp32, in the loss's unit, over several orders of batches.

    `distance` is that of the mean loss per pass through the batches, averaged over orders and passes. `spread` is the
    largest such distance between two orders or between fp32 runs with different rounding. `resolution` is the rounding
    of a loss in the precision, `fall` the decrease of fp32's loss from the first pass to the last.
    """

    distance: float
    spread: float
    resolution: float
    fall: float
    num_steps: int

    @property
    def is_apart(self) -> bool:
        """Return whether `distance` exceeds `spread`, `resolution` and 2 % of `fall`."""
        return self.distance > max(self.spread, self.resolution, MIN_FALL * self.fall)


class Findings(NamedTuple):
    """Measurements of a precision to grade, as defined in `Fidelity`; None if not measured."""

    is_finite: bool = True
    is_reference_finite: bool = True
    has_safe_scale: bool = True
    loss_error: float | None = None
    noise_ratio: float | None = None
    common_error: float | None = None
    common_error_interval: tuple[float, float] | None = None
    norm_ratio: float | None = None
    flushed_share: float | None = None
    most_common: GradientDamage | None = None
    shortest: GradientDamage | None = None  # the parameter whose gradient shrinks most
    most_flushed: GradientDamage | None = None
    forward_max: float | None = None
    format_max: float = math.inf
    is_training_finite: bool = True
    training_gap: float | None = None
    training_noise_gap: float | None = None
    divergence: TrainingDivergence | None = None
    is_cut: bool = False  # time ran out before any training run; if `loss_error` is None, before a loss scale was found
    has_moved: bool = True  # False if the training run changed no weight
    lost_share: float | None = None
    has_signal: bool = True  # fp32's gradient of some parameter is more than rounding noise
    num_steps_per_call: int = 1  # optimizer steps in one call of a custom train_step
    reuses_casts: bool = False  # train_step steps an optimizer several times inside one autocast


class Grade(NamedTuple):
    """A verdict and the reason for it, a clause without a full stop.

    `is_due_to_low_weights` is True if the only fault is that weights are kept in low precision. `next_step` is advice
    for an *unchecked* fp32 run, None for other verdicts.
    """

    verdict: Verdict
    reason: str
    is_due_to_low_weights: bool = False
    next_step: str | None = None

    @property
    def is_bad(self) -> bool:
        """Return whether there is an error whose cause can be searched for."""
        return self.verdict in ("doubtful", "unfaithful")


def least_common_error(damage: GradientDamage) -> float:
    """Return the lower bound of the error common to all batches, over the size of the gradient; 0 if unknown."""
    return 0.0 if damage.common_error_interval is None else damage.common_error_interval[0]


def bias_reason(findings: Findings) -> str | None:
    """Return a clause on a large error that is certainly common to all batches, None without one.

    A gradient much shorter than fp32's counts too: noise would make it longer, not shorter.
    """
    least = 0.0 if findings.common_error_interval is None else findings.common_error_interval[0]
    if findings.common_error is not None and least > MAX_COMMON_ERROR:
        return f"an error of {percent(findings.common_error)} of the gradient is the same in every batch"
    shortest = findings.shortest
    if shortest is not None and shortest.norm_ratio < 1 / MAX_NORM_RATIO:
        return f"the gradient of {shortest.name} is {shortest.norm_ratio:.2g} times as long as fp32's"
    return None


def reason_to_train_longer(findings: Findings) -> str | None:
    """Return a clause on an error that may be harmful, which a longer training run has to decide; None without one."""
    if (biased := bias_reason(findings)) is not None:
        return biased
    parameter = (
        findings.most_common
    )  # one parameter in hundreds exceeds its limit by chance, so this is no verdict by itself
    if parameter is not None and least_common_error(parameter) > MAX_PARAMETER_COMMON_ERROR:
        share = percent(parameter.common_error or 0.0)
        return f"an error of {share} of the gradient of {parameter.name} may be the same in every batch"
    if findings.norm_ratio is not None and not 1 / MAX_NORM_RATIO <= findings.norm_ratio <= MAX_NORM_RATIO:
        return f"its gradient is {findings.norm_ratio:.2g} times as long as fp32's"
    most = math.inf if findings.common_error_interval is None else findings.common_error_interval[1]
    if findings.noise_ratio is not None and findings.noise_ratio >= NOISY and most > NOISY_COMMON_ERROR:
        return f"its rounding error is {findings.noise_ratio:.2g} times the noise between batches"
    if QUIET_COMMON_ERROR < most < math.inf and findings.noise_ratio is not None and findings.noise_ratio < NOISY:
        return f"an error of up to {percent(most)} of the gradient may be the same in every batch"
    gap, scatter = findings.training_gap, findings.training_noise_gap
    if gap is not None and scatter is not None and gap >= FAITHFUL_GAP and scatter >= SUSPICIOUS_SCATTER:
        times = f"{gap:.2g} times as far as if the first weights are rounded once"
        return f"within a few training steps its loss moves away from fp32's, {times}"
    return None


def grade(findings: Findings) -> Grade:
    """Return the worst verdict of all findings, with its reasons."""
    if not findings.is_reference_finite:
        is_first_step = findings.loss_error is None
        when = "" if is_first_step else " within a few training steps"
        reason = f"there is nothing to compare with: fp32 itself gives non-finite numbers{when}"
        return Grade("unchecked", reason, next_step=_FIX_STEP if is_first_step else _FIX_TRAINING)
    grades = [*_step_grades(findings), *_training_grades(findings)]
    caveats = "" if findings.has_moved else _UNMOVED
    if findings.num_steps_per_call > 1:
        caveats += _SEVERAL_STEPS.format(findings.num_steps_per_call)
    if grades:
        verdict = max((each.verdict for each in grades), key=_VERDICTS_BY_SEVERITY.index)
        worst = [each for each in grades if each.verdict == verdict]
        is_due_to_low_weights = all(each.is_due_to_low_weights for each in worst)
        return Grade(verdict, "; ".join(each.reason for each in worst) + caveats, is_due_to_low_weights)
    if not findings.has_signal:
        return Grade("unchecked", _NO_SIGNAL, next_step=_FIX_LOSS)
    if (suspicion := reason_to_train_longer(findings)) is not None and findings.divergence is None:
        return Grade("undecided", f"{suspicion}, and no training run was made to see whether that does harm" + caveats)
    if findings.is_cut:
        reason = "single steps show no harm, and there was no time for a training run"
        if findings.loss_error is None:
            reason = "there was no time to find a loss scale at which its gradients are finite"
        return Grade("undecided", reason + caveats)
    if findings.divergence is not None:
        caveats = f"; {findings.divergence.num_steps} training steps show no harm" + caveats
    noise = findings.noise_ratio
    if noise is None or noise < NOISY:
        return Grade("faithful", "its rounding noise is small compared with the noise between batches" + caveats)
    share = noise**2 / (1 + noise**2)  # added variance, as if this share of the samples was missing
    reason = f"its rounding adds as much noise as a batch {percent(share)} smaller"
    return Grade("faithful", f"{reason}, and no harm beyond that{caveats}")


def next_step(label: str, verdict: Verdict, pins: tuple[str, ...], *, is_due_to_low_weights: bool = False) -> str:
    """Return advice for the user. `pins` are modules that make the precision faithful if they run in fp32."""
    if verdict == "faithful":
        return f"Train in {label}."
    if verdict in ("unchecked", "undecided"):
        return "Train a few hundred steps in fp32 and in this precision and compare the losses before relying on it."
    if is_due_to_low_weights:
        return "Keep the weights in fp32 (model.float()) and use autocast, or round updates stochastically."
    if pins:
        return f"Pass pinned_modules={list(pins)!r} to AmpConfig: with these in fp32 it is faithful."
    if verdict == "doubtful":
        return "Compare the losses of a few hundred steps in fp32 and in this precision before relying on it."
    return "Train in a safer precision, or fix the code that the reason names."


def _step_grades(findings: Findings) -> Iterator[Grade]:
    """Yield a grade for each fault in single steps."""
    if not findings.is_finite:
        at = "" if findings.has_safe_scale else " at every loss scale"
        yield Grade("unfaithful", f"its loss or gradients are not finite{at}, where fp32's are")
        return
    if findings.reuses_casts:
        yield Grade("unfaithful", _REUSES_CASTS)
    if (biased := bias_reason(findings)) is not None:
        if findings.common_error_interval is not None and findings.common_error_interval[0] > UNFAITHFUL_COMMON_ERROR:
            yield Grade("unfaithful", biased)
        elif findings.divergence is None:
            yield Grade("doubtful", biased)
        elif not findings.divergence.is_apart:
            yield Grade("doubtful", f"{biased}, though {findings.divergence.num_steps} training steps do not show it")
    # In a format with fp32's range, entries become zero only as terms cancel, which is rounding: in cuDNN's LSTM in
    # bf16 3 % of the entries, with a common error of 0.5 % (studies/fidelity).
    may_flush = findings.format_max < MAX_OF_SMALL_RANGE
    if may_flush and findings.flushed_share is not None and findings.flushed_share > MAX_FLUSHED_SHARE:
        share = f"{100 * findings.flushed_share:.0f} %"
        yield Grade("unfaithful", f"{share} of the significant gradient entries are flushed to zero")
    flushed = findings.most_flushed
    if flushed is not None and flushed.flushed_share > MAX_PARAMETER_FLUSHED_SHARE:
        share = f"{100 * flushed.flushed_share:.0f} %"
        yield Grade("unfaithful", f"{share} of the gradient of {flushed.name} is flushed to zero")
    if findings.forward_max is not None and MAX_FORWARD_SHARE * findings.format_max < findings.forward_max < math.inf:
        end = f"where the format ends at {findings.format_max:.5g}"
        yield Grade("unfaithful", f"activations reach {findings.forward_max:.3g}, {end}")
    if findings.lost_share is not None and findings.lost_share > MAX_LOST_SHARE:
        reason = f"{100 * findings.lost_share:.0f} % of the updates round away on weights kept in low precision"
        yield Grade("doubtful", reason, is_due_to_low_weights=True)


def _training_grades(findings: Findings) -> Iterator[Grade]:
    """Yield a grade for each fault in training runs."""
    if not findings.is_training_finite:
        yield Grade("unfaithful", "within a few training steps it is no longer finite, where fp32 is")
        return
    if findings.divergence is not None and findings.divergence.is_apart:
        distance, spread, _, fall, num_steps = findings.divergence
        share = f", {percent(distance / fall)} of its fall" if fall else ""
        compared = f", while fp32 runs differ by {spread:.2g} among themselves"
        yield Grade("unfaithful", f"in {num_steps} steps its loss is {distance:.2g} from fp32's{share}{compared}")
