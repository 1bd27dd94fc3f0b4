"""The grade of a precision, from what was measured: faithful, doubtful or unfaithful, with the reason. Pure, no torch.

Limits: studies/fidelity has the table that they were set on, and the workloads that they were tried on after.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

from autotune_amp.core.outcome import GradientDamage, Verdict

FAITHFUL_NOISE, UNFAITHFUL_NOISE = 0.2, 0.3  # rounding noise over the noise between batches
MAX_PARAMETER_NOISE = 1.0  # the same of any one parameter
MAX_FLUSHED_SHARE = 0.01  # of the gradient's entries that count
MAX_PARAMETER_FLUSHED_SHARE = 0.5  # of any one parameter
MAX_FORWARD_SHARE = 0.25  # of the format's largest number: two octaves for growth
MAX_LOST_SHARE = 0.5  # of a step's updates to low-precision weights
FAITHFUL_GAP = 5.0  # in units of what one rounding of the first weights does
# Less rounding noise and a wider gap, which say nothing alone, are a doubt together: added after the examination.
NOISE_WITH_GAP, GAP_WITH_NOISE = 0.1, 10.0
FAITHFUL_SCATTER, UNFAITHFUL_SCATTER = 0.5, 1.0  # of the loss from batch to batch

_ORDER: tuple[Verdict, ...] = ("faithful", "doubtful", "unfaithful")
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


class Findings(NamedTuple):
    """What was measured; None where it was not."""

    is_finite: bool = True
    is_reference_finite: bool = True
    has_safe_scale: bool = True
    loss_error: float | None = None
    noise_ratio: float | None = None
    flushed_share: float | None = None
    noisiest: GradientDamage | None = None
    most_flushed: GradientDamage | None = None
    forward_max: float | None = None
    format_max: float = math.inf
    is_training_finite: bool = True
    training_gap: float | None = None
    training_noise_gap: float | None = None
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
    if not grades:
        if not found.has_signal:
            return Grade("unchecked", _NO_SIGNAL, next_step=_FIX_LOSS)
        return Grade("faithful", "its rounding noise is small beside what sampling does anyway" + unmoved)
    verdict = max((each.verdict for each in grades), key=_ORDER.index)
    worst = [each for each in grades if each.verdict == verdict]
    is_of_weights = all(each.is_of_weights for each in worst)
    return Grade(verdict, "; ".join(each.reason for each in worst) + unmoved, is_of_weights)


def next_step(label: str, verdict: Verdict, pins: tuple[str, ...], *, is_of_weights: bool = False) -> str:
    """What the user does next. `pins`: modules that heal it once they run in fp32."""
    if verdict == "faithful":
        return f"Train in {label}."
    if verdict == "unchecked":
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
    if found.noise_ratio is not None and found.noise_ratio >= FAITHFUL_NOISE:
        verdict: Verdict = "unfaithful" if found.noise_ratio > UNFAITHFUL_NOISE else "doubtful"
        yield Grade(verdict, f"its rounding noise is {found.noise_ratio:.2g} times the noise between batches")
    if found.flushed_share is not None and found.flushed_share > MAX_FLUSHED_SHARE:
        share = f"{100 * found.flushed_share:.0f} %"
        yield Grade("unfaithful", f"{share} of the gradient's entries that count are flushed to zero")
    flushed, noisiest = found.most_flushed, found.noisiest
    if flushed is not None and flushed.flushed_share > MAX_PARAMETER_FLUSHED_SHARE:
        share = f"{100 * flushed.flushed_share:.0f} %"
        yield Grade("unfaithful", f"{share} of the gradient of {flushed.name} are flushed to zero")
    if noisiest is not None and noisiest.noise_ratio > MAX_PARAMETER_NOISE:
        times = f"{noisiest.noise_ratio:.2g} times the noise between batches"
        yield Grade("doubtful", f"the gradient of {noisiest.name} has {times}")
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
    gap, scatter, noise = found.training_gap, found.training_noise_gap, found.noise_ratio
    if gap is None or scatter is None:
        return
    apart = "within a few training steps its loss parts from fp32's"
    times = f"{gap:.2g} times as far as one rounding of the first weights takes it"
    if gap >= FAITHFUL_GAP and scatter >= FAITHFUL_SCATTER:
        verdict: Verdict = "unfaithful" if scatter > UNFAITHFUL_SCATTER else "doubtful"
        yield Grade(verdict, f"{apart} by {scatter:.2g} times the scatter between batches, {times}")
    elif gap >= GAP_WITH_NOISE and noise is not None and noise >= NOISE_WITH_GAP:
        yield Grade("doubtful", f"its rounding noise is {noise:.2g} of the noise between batches, and {apart} {times}")
