"""The grade of a precision, from what was measured, with the reason. Pure, no torch.

What is not finite, out of range or flushed harms, and so does an error that is the same in every batch. Noise does not:
it is told, and where it might hide such an error a longer training decides.

Limits: studies/fidelity has the table that they were set on, and the workloads that they were tried on after.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

from autotune_amp.core.outcome import GradientDamage, Verdict

NOISY = 0.25  # rounding noise over the noise between batches, which acts like a batch 6 % smaller
# The error that all batches share, over the length of a gradient: what is surely as much may harm, what is surely more
# than half does; and what may be as much as the last, or as the one before without much noise, is to be decided.
MAX_COMMON_ERROR, UNFAITHFUL_COMMON_ERROR = 0.02, 0.5
QUIET_COMMON_ERROR, NOISY_COMMON_ERROR = 0.05, 0.2
MAX_PARAMETER_COMMON_ERROR = 0.5  # the same of any one parameter
MAX_NORM_RATIO = 2.0  # of the gradient's length over that in fp32, or the other way round
MAX_FLUSHED_SHARE = 0.01  # of the gradient's entries that count, in a format with fewer exponents than fp32
MAX_OF_FEW_EXPONENTS = 1e6  # fp16 ends at 65,504, fp8 before that, and bf16 and TF32 where fp32 does
MAX_PARAMETER_FLUSHED_SHARE = 0.5  # of any one parameter
MAX_FORWARD_SHARE = 0.25  # of the format's largest number: two octaves for growth
MAX_LOST_SHARE = 0.5  # of a step's updates to low-precision weights
FAITHFUL_GAP = 5.0  # in units of what one rounding of the first weights does
SUSPICIOUS_SCATTER = 0.5  # of the loss from batch to batch
MIN_FALL = 0.02  # of the loss's fall in fp32: what parts by less is no harm

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


class Parting(NamedTuple):
    """How far training in the precision parts from training in fp32 on the same batches in the same order.

    `distance` is between the mean losses of a pass through the batches, over several orders of them, in the mean of all
    passes; `spread` the same between two of the orders, the largest, of fp32's losses or of the differences, or between
    fp32 and fp32 from weights that are rounded otherwise; `resolution` is what the precision cannot tell apart of a
    loss, `fall` how far fp32's loss falls from the first pass to the last. All are in the loss's unit.
    """

    distance: float
    spread: float
    resolution: float
    fall: float
    num_steps: int

    @property
    def is_apart(self) -> bool:
        """Whether the precision goes where no order of the batches takes fp32."""
        return self.distance > max(self.spread, self.resolution, MIN_FALL * self.fall)


class Findings(NamedTuple):
    """What was measured; None where it was not."""

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
    parting: Parting | None = None
    is_cut: bool = False  # for want of time, before any training; before any loss scale was found without `loss_error`
    has_moved: bool = True
    lost_share: float | None = None
    has_signal: bool = True  # some parameter has a gradient in fp32 that is more than rounding noise
    num_steps_per_call: int = 1  # of a loop; none is really taken in a pass
    reuses_casts: bool = False  # it steps several times inside one autocast


class Grade(NamedTuple):
    """A verdict and the reason for it, a clause without a full stop.

    `is_of_weights`: nothing is wrong but that weights are kept in low precision. `next_step` is what to do about an
    fp32 training with which nothing can be compared, None elsewhere.
    """

    verdict: Verdict
    reason: str
    is_of_weights: bool = False
    next_step: str | None = None

    @property
    def is_bad(self) -> bool:
        """Whether there is something to look for the cause of."""
        return self.verdict in ("doubtful", "unfaithful")


def least_common_error(damage: GradientDamage) -> float:
    """The least that the error which all batches share may be, over the size of the gradient; 0 where nobody knows."""
    return 0.0 if damage.common_error_interval is None else damage.common_error_interval[0]


def bias(found: Findings) -> str | None:
    """The error that surely is the same in every batch and large, a clause without a full stop; None without one.

    A gradient that shrinks has one, whatever its noise, which makes it longer.
    """
    least = 0.0 if found.common_error_interval is None else found.common_error_interval[0]
    if found.common_error is not None and least > MAX_COMMON_ERROR:
        return f"an error of {_percent(found.common_error)} of the gradient is the same in every batch"
    shortest = found.shortest
    if shortest is not None and shortest.norm_ratio < 1 / MAX_NORM_RATIO:
        return f"the gradient of {shortest.name} is {shortest.norm_ratio:.2g} times as long as fp32's"
    return None


def suspicion(found: Findings) -> str | None:
    """Say what only a longer training decides, in a clause without a full stop; return None where nothing is open."""
    if (biased := bias(found)) is not None:
        return biased
    parameter = found.most_common  # of hundreds one is beyond its interval by chance: it is asked, and excludes nothing
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
    """The worst that any of the findings says, and what says so."""
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
    if (suspected := suspicion(found)) is not None and found.parting is None:
        return Grade("undecided", f"{suspected}, and no training was made that tells whether that harms" + unmoved)
    if found.is_cut:
        reason = "nothing in single steps speaks against it, and there was no time for a training run"
        if found.loss_error is None:
            reason = "there was no time to find a loss scale at which its gradients are finite"
        return Grade("undecided", reason + unmoved)
    if found.parting is not None:
        unmoved = f"; {found.parting.num_steps} training steps show no harm" + unmoved
    noise = found.noise_ratio
    if noise is None or noise < NOISY:
        return Grade("faithful", "its rounding noise is small beside what sampling does anyway" + unmoved)
    share = noise**2 / (1 + noise**2)
    reason = f"its rounding adds as much noise as a batch {_percent(share)} smaller"
    return Grade("faithful", f"{reason}, and no harm beyond that{unmoved}")


def next_step(label: str, verdict: Verdict, pins: tuple[str, ...], *, is_of_weights: bool = False) -> str:
    """What the user does next. `pins`: modules that heal it once they run in fp32."""
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
    return "Train in a precision with less to go wrong, or mend the code that the reason names."


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
        elif found.parting is None:
            yield Grade("doubtful", biased)
        elif not found.parting.is_apart:
            yield Grade("doubtful", f"{biased}, though {found.parting.num_steps} training steps do not show it")
    # With all of fp32's exponents nothing is too small: terms that cancel to zero are rounding, as those of cuDNN's
    # LSTM in bf16 (3 % of the entries, whose common error is 0.5 %: studies/fidelity).
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
    if found.parting is not None and found.parting.is_apart:
        distance, spread, _, fall, num_steps = found.parting
        share = f", {_percent(distance / fall)} of its fall" if fall else ""
        farther = f", and other orders of the batches take fp32 {spread:.2g} from itself"
        yield Grade("unfaithful", f"in {num_steps} steps its loss is {distance:.2g} from fp32's{share}{farther}")


def _percent(share: float) -> str:
    return f"{100 * share:.2g} %" if share < 0.995 else f"{100 * share:.0f} %"
