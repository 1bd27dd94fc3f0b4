"""Grading of a precision from measurements, with the reason. Pure, no torch.

Numbers that are non-finite, out of range or flushed are harmful, and so is an error that is the same in every batch.
Noise is not: it is reported, and if it might hide such an error a longer training run decides.

Limits: set on the table in studies/fidelity, and then tested on the other workloads there.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

from autotune_amp.core.outcome import GradientDamage, Verdict

NOISY = 0.25  # rounding noise over the noise between batches; acts like a batch 6 % smaller
# Error common to all batches, over the length of a gradient. If certainly above MAX_COMMON_ERROR it may be harmful, if
# above UNFAITHFUL_COMMON_ERROR it is. If possibly above NOISY_COMMON_ERROR, or above QUIET_COMMON_ERROR without much
# noise, a training run decides.
MAX_COMMON_ERROR, UNFAITHFUL_COMMON_ERROR = 0.02, 0.5
QUIET_COMMON_ERROR, NOISY_COMMON_ERROR = 0.05, 0.2
MAX_PARAMETER_COMMON_ERROR = 0.5  # the same for any one parameter
MAX_NORM_RATIO = 2.0  # length of the gradient over that in fp32, or the inverse
MAX_FLUSHED_SHARE = 0.01  # share of a gradient's significant entries, in a format with fewer exponents than fp32
MAX_OF_FEW_EXPONENTS = 1e6  # fp16 ends at 65,504, fp8 before that, and bf16 and TF32 where fp32 does
MAX_PARAMETER_FLUSHED_SHARE = 0.5  # for any one parameter
MAX_FORWARD_SHARE = 0.25  # share of the format's largest number: two octaves for growth
MAX_LOST_SHARE = 0.5  # share of a step's updates to low-precision weights
FAITHFUL_GAP = 5.0  # in units of the effect of one rounding of the first weights
SUSPICIOUS_SCATTER = 0.5  # relative to the loss's scatter from batch to batch
MIN_FALL = 0.02  # share of the loss's fall in fp32: a smaller difference is harmless

_ORDER: tuple[Verdict, ...] = ("faithful", "undecided", "doubtful", "unfaithful")
_UNMOVED = "; that is of the first weights alone: no weight moved in the training run, as with a learning rate of 0"
_UNSTEPPED = (
    "; train_step takes {} optimizer steps in one call, all of whose gradients were computed on the weights before the "
    "first: what one of these steps does to the next was not looked at"
)
_REUSES_CASTS = (
    "train_step steps an optimizer several times inside one amp.autocast(), which goes on with the weights as they "
    "were cast before the first of these steps (enter amp.autocast() anew for each forward pass)"
)
_NO_SIGNAL = (
    "fp32's own gradient is zero or rounding noise for every parameter, as that of a loss over a single class, so "
    "there is nothing to hold it to"
)
_FIX_LOSS = "Check it on data that the model learns from: with several classes, and labels that count."
_FIX_STEP = "Fix the training in fp32 first: torch.autograd.set_detect_anomaly(True) names the operation."
_FIX_TRAINING = "Lower the learning rate or clip gradients until training in fp32 stays finite, then check again."


class TrainingDivergence(NamedTuple):
    """Distance between training in the precision and in fp32 on the same batches in the same order, in the loss's unit.

    `distance` is between the mean losses of a pass through the batches, over several orders, averaged over all passes.
    `spread` is the largest such distance between two orders, of fp32's losses or of the differences, or between fp32
    runs with different rounding. `resolution` is the precision's rounding of a loss, `fall` the decrease of fp32's loss
    from the first pass to the last.
    """

    distance: float
    spread: float
    resolution: float
    fall: float
    num_steps: int

    @property
    def is_apart(self) -> bool:
        """Return whether the distance is larger than that between fp32 runs, rounding and 2 % of the loss's fall."""
        return self.distance > max(self.spread, self.resolution, MIN_FALL * self.fall)


class Findings(NamedTuple):
    """All measurements of a precision; None if not measured."""

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
    is_cut: bool = False  # time ran out, before any training; without `loss_error` before a loss scale was found
    has_moved: bool = True
    lost_share: float | None = None
    has_signal: bool = True  # fp32's gradient of some parameter is more than rounding noise
    num_steps_per_call: int = 1  # optimizer steps per call of a training loop; in a pass none is taken
    reuses_casts: bool = False  # the loop steps several times inside one autocast


class Grade(NamedTuple):
    """A verdict and the reason for it, a clause without a full stop.

    `is_of_weights`: the only fault is that weights are kept in low precision. `next_step` is advice on an fp32 training
    run that nothing can be compared with, None otherwise.
    """

    verdict: Verdict
    reason: str
    is_of_weights: bool = False
    next_step: str | None = None

    @property
    def is_bad(self) -> bool:
        """Return whether there is an error whose cause can be searched for."""
        return self.verdict in ("doubtful", "unfaithful")


def least_common_error(damage: GradientDamage) -> float:
    """Return the lower bound of the error common to all batches, over the size of the gradient; 0 if unknown."""
    return 0.0 if damage.common_error_interval is None else damage.common_error_interval[0]


def bias(found: Findings) -> str | None:
    """Return a clause that describes a certain and large error common to all batches, None without one.

    A gradient that shrinks has such an error, whatever its noise, which makes it longer.
    """
    least = 0.0 if found.common_error_interval is None else found.common_error_interval[0]
    if found.common_error is not None and least > MAX_COMMON_ERROR:
        return f"an error of {_percent(found.common_error)} of the gradient is the same in every batch"
    shortest = found.shortest
    if shortest is not None and shortest.norm_ratio < 1 / MAX_NORM_RATIO:
        return f"the gradient of {shortest.name} is {shortest.norm_ratio:.2g} times as long as fp32's"
    return None


def suspicion(found: Findings) -> str | None:
    """Return a clause that describes an open question for a longer training run; None if there is none."""
    if (biased := bias(found)) is not None:
        return biased
    parameter = found.most_common  # one in hundreds exceeds its interval by chance: it excludes nothing by itself
    if parameter is not None and least_common_error(parameter) > MAX_PARAMETER_COMMON_ERROR:
        share = _percent(parameter.common_error or 0.0)
        return f"an error of {share} of the gradient of {parameter.name} may be the same in every batch"
    if found.norm_ratio is not None and not 1 / MAX_NORM_RATIO <= found.norm_ratio <= MAX_NORM_RATIO:
        return f"its gradient is {found.norm_ratio:.2g} times as long as fp32's"
    most = math.inf if found.common_error_interval is None else found.common_error_interval[1]
    if found.noise_ratio is not None and found.noise_ratio >= NOISY and most > NOISY_COMMON_ERROR:
        return f"its rounding error is {found.noise_ratio:.2g} times the noise between batches"
    if QUIET_COMMON_ERROR < most < math.inf and found.noise_ratio is not None and found.noise_ratio < NOISY:
        return f"an error of up to {_percent(most)} of the gradient may be the same in every batch"
    gap, scatter = found.training_gap, found.training_noise_gap
    if gap is not None and scatter is not None and gap >= FAITHFUL_GAP and scatter >= SUSPICIOUS_SCATTER:
        times = f"{gap:.2g} times as far as one rounding of the first weights takes it"
        return f"within a few training steps its loss parts from fp32's, {times}"
    return None


def grade(found: Findings) -> Grade:
    """Return the worst verdict of all findings, with its reasons."""
    if not found.is_reference_finite:
        is_of_step = found.loss_error is None
        when = "" if is_of_step else " within a few training steps"
        reason = f"fp32 itself gives numbers that are not finite{when}, so there is nothing to hold it to"
        return Grade("unchecked", reason, next_step=_FIX_STEP if is_of_step else _FIX_TRAINING)
    grades = [*_one_step(found), *_training(found)]
    unmoved = "" if found.has_moved else _UNMOVED
    if found.num_steps_per_call > 1:
        unmoved += _UNSTEPPED.format(found.num_steps_per_call)
    if grades:
        verdict = max((each.verdict for each in grades), key=_ORDER.index)
        worst = [each for each in grades if each.verdict == verdict]
        is_of_weights = all(each.is_of_weights for each in worst)
        return Grade(verdict, "; ".join(each.reason for each in worst) + unmoved, is_of_weights)
    if not found.has_signal:
        return Grade("unchecked", _NO_SIGNAL, next_step=_FIX_LOSS)
    if (suspected := suspicion(found)) is not None and found.divergence is None:
        return Grade("undecided", f"{suspected}, and no training was made that tells whether that harms" + unmoved)
    if found.is_cut:
        reason = "nothing in single steps speaks against it, and there was no time for a training run"
        if found.loss_error is None:
            reason = "there was no time to find a loss scale at which its gradients are finite"
        return Grade("undecided", reason + unmoved)
    if found.divergence is not None:
        unmoved = f"; {found.divergence.num_steps} training steps show no harm" + unmoved
    noise = found.noise_ratio
    if noise is None or noise < NOISY:
        return Grade("faithful", "its rounding noise is small beside what sampling does anyway" + unmoved)
    share = noise**2 / (1 + noise**2)
    reason = f"its rounding adds as much noise as a batch {_percent(share)} smaller"
    return Grade("faithful", f"{reason}, and no harm beyond that{unmoved}")


def next_step(label: str, verdict: Verdict, pins: tuple[str, ...], *, is_of_weights: bool = False) -> str:
    """Return advice for the user. `pins` are modules that make the precision faithful if they run in fp32."""
    if verdict == "faithful":
        return f"Train in {label}."
    if verdict in ("unchecked", "undecided"):
        return "Train a few hundred steps in fp32 and in this precision and compare the losses before relying on it."
    if is_of_weights:
        return "Keep the weights in fp32 (model.float()) and compute under autocast, or round updates stochastically."
    if pins:
        return f"Pass pinned_modules={list(pins)!r} to AmpConfig: with these in fp32 it is faithful."
    if verdict == "doubtful":
        return "Compare the losses of a few hundred steps in fp32 and in this precision before relying on it."
    return "Train in a precision with less to go wrong, or fix the code that the reason names."


def _one_step(found: Findings) -> Iterator[Grade]:
    if not found.is_finite:
        at = "" if found.has_safe_scale else " at every loss scale"
        yield Grade("unfaithful", f"its loss or gradients are not finite{at}, where fp32's are")
        return
    if found.reuses_casts:
        yield Grade("unfaithful", _REUSES_CASTS)
    if (biased := bias(found)) is not None:
        if found.common_error_interval is not None and found.common_error_interval[0] > UNFAITHFUL_COMMON_ERROR:
            yield Grade("unfaithful", biased)
        elif found.divergence is None:
            yield Grade("doubtful", biased)
        elif not found.divergence.is_apart:
            yield Grade("doubtful", f"{biased}, though {found.divergence.num_steps} training steps do not show it")
    # With all of fp32's exponents nothing is too small: terms that cancel to zero are rounding, as in cuDNN's LSTM in
    # bf16 (3 % of the entries, whose common error is 0.5 %: studies/fidelity).
    may_flush = found.format_max < MAX_OF_FEW_EXPONENTS
    if may_flush and found.flushed_share is not None and found.flushed_share > MAX_FLUSHED_SHARE:
        share = f"{100 * found.flushed_share:.0f} %"
        yield Grade("unfaithful", f"{share} of the gradient's entries that count are flushed to zero")
    flushed = found.most_flushed
    if flushed is not None and flushed.flushed_share > MAX_PARAMETER_FLUSHED_SHARE:
        share = f"{100 * flushed.flushed_share:.0f} %"
        yield Grade("unfaithful", f"{share} of the gradient of {flushed.name} are flushed to zero")
    if found.forward_max is not None and MAX_FORWARD_SHARE * found.format_max < found.forward_max < math.inf:
        end = f"where the format ends at {found.format_max:.5g}"
        yield Grade("unfaithful", f"activations reach {found.forward_max:.3g}, {end}")
    if found.lost_share is not None and found.lost_share > MAX_LOST_SHARE:
        reason = f"{100 * found.lost_share:.0f} % of the updates round away on weights kept in low precision"
        yield Grade("doubtful", reason, is_of_weights=True)


def _training(found: Findings) -> Iterator[Grade]:
    if not found.is_training_finite:
        yield Grade("unfaithful", "within a few training steps it is no longer finite, where fp32 is")
        return
    if found.divergence is not None and found.divergence.is_apart:
        distance, spread, _, fall, num_steps = found.divergence
        share = f", {_percent(distance / fall)} of its fall" if fall else ""
        farther = f", and other orders of the batches take fp32 {spread:.2g} from itself"
        yield Grade("unfaithful", f"in {num_steps} steps its loss is {distance:.2g} from fp32's{share}{farther}")


def _percent(share: float) -> str:
    return f"{100 * share:.2g} %" if share < 0.995 else f"{100 * share:.0f} %"
