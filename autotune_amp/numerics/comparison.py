"""What a precision does beside what fp32 does: to gradients, to the loss of a short training, to weights kept in it.

Gradients are compared parameter by parameter, in units of the noise between batches. Two healthy training runs part
as a small difference grows: so the distance of their losses is held against that between fp32 runs whose first weights
differ by one rounding of the low precision.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, fields, replace
from itertools import chain
from operator import attrgetter
from statistics import fmean, pstdev
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from autotune_amp.core.config import MIN_LOSS_SCALE
from autotune_amp.core.dimensions import Precision
from autotune_amp.core.intervals import t_quantile
from autotune_amp.core.outcome import GradientDamage, LowWeights
from autotune_amp.numerics.grading import Parting, least_common_error
from autotune_amp.numerics.passes import Gradients, Pass, Passes, Subject, stored
from autotune_amp.precision.forward_wrapper import parameters_by_name
from autotune_amp.precision.modes import MODES
from autotune_amp.precision.torch_state import HALF_DTYPES

# Entries so much smaller than the largest of their parameter move nothing: not worth a loss scale.
COUNTS = 2.0**-12
# A gradient that another rounding in fp32 changes by more than this share of itself is rounding noise, not a signal:
# that of a key's bias in attention, for one, is zero on paper.
MAX_OWN_NOISE = 0.1
_MOVED_DTYPES = (*HALF_DTYPES, torch.float32, torch.float64)
_NUM_HALVINGS = 4  # of a step's loss scale, before it is asked whether any will do
_MAX_MODULES = 40  # rows of a chart
MIN_VARIANCE = 1e-6  # of a gradient's square: less between batches is rounding of the sums
_STRETCH = 2**22  # entries of each batch's error that are multiplied at a time


@dataclass
class Sums:
    """Sums over the entries of one parameter, or of several, and over batches; `+` adds another's.

    `errors` [batch, batch] holds the products of what rounding does to the gradients of each two batches, `total` is
    the squared length of the sum of all fp32 gradients, the others are sums of squares and products, and counts.
    """

    errors: Tensor
    total: float = 0.0
    reference: float = 0.0
    low: float = 0.0
    product: float = 0.0
    num_counting: float = 0.0
    num_flushed: float = 0.0

    def __add__(self, other: Sums) -> Sums:
        return Sums(*(getattr(self, field.name) + getattr(other, field.name) for field in fields(self)))

    def damage(self, name: str) -> GradientDamage:
        """What is said of the parameter or module of this name.

        The variance between batches is the yardstick of rounding's, or the gradient itself where they are all alike.
        The cosine is 1 where both gradients are zero.
        """
        num_batches = len(self.errors)
        square = self.reference / num_batches
        between = (num_batches * self.reference - self.total) / (num_batches * max(1, num_batches - 1))
        are_alike = num_batches < 2 or between <= MIN_VARIANCE * square
        yardstick = square if are_alike else between
        norms = math.sqrt(self.reference) * math.sqrt(self.low)
        common, half = common_error(self.errors)
        half = None if are_alike else half  # of batches that are alike, noise is alike too
        least, most = (_root(_ratio(common + side * (half or 0.0), square)) for side in (-1, 1))
        return GradientDamage(
            name=name,
            noise_ratio=math.sqrt(_ratio(float(self.errors.trace()) / num_batches, yardstick)),
            common_error=_root(_ratio(common, square)),
            common_error_interval=None if half is None else (least, most),
            cosine=min(1.0, self.product / norms) if norms else float(self.reference == self.low),
            norm_ratio=math.sqrt(self.low / self.reference) if self.reference else 1.0,
            flushed_share=self.num_flushed / self.num_counting if self.num_counting else 0.0,
        )


def common_error(errors: Tensor) -> tuple[float, float | None]:
    """The squared length of the error that all batches share, and half the width of its 95 % interval.

    `errors` [K, K] holds the products of the errors of K batches. The mean product of two different batches has no part
    of the noise in each of them: what is left is common. The interval is the jackknife's, over batches: None for
    fewer than three.
    """
    num_batches = len(errors)
    if num_batches < 2:
        return 0.0, None
    pairs = errors - torch.diag(errors.diagonal())
    common = float(pairs.sum()) / (num_batches * (num_batches - 1))
    if num_batches < 3:
        return common, None
    left_out = (pairs.sum() - 2 * pairs.sum(1)) / ((num_batches - 1) * (num_batches - 2))
    variance = (num_batches - 1) / num_batches * float((left_out - left_out.mean()).square().sum())
    return common, t_quantile(num_batches - 1) * math.sqrt(variance)


class Comparison(NamedTuple):
    """The `whole` gradient, of the parameters that carry a signal, and each of these, in the model's order.

    `modules` are those that hold them, the noisiest ones where there are many.
    """

    whole: GradientDamage
    parameters: list[GradientDamage]
    modules: list[GradientDamage]

    def findings(self) -> dict[str, Any]:
        """Return the fields of `Findings` that it fills, by name."""
        whole, parameters = self.whole, self.parameters
        return {
            "noise_ratio": whole.noise_ratio,
            "common_error": whole.common_error,
            "common_error_interval": whole.common_error_interval,
            "norm_ratio": whole.norm_ratio,
            "flushed_share": whole.flushed_share,
            "most_flushed": max(parameters, key=attrgetter("flushed_share"), default=None),
            "most_common": max(parameters, key=least_common_error, default=None),
            "shortest": min(parameters, key=attrgetter("norm_ratio"), default=None),
        }


class Gathered:
    """Gradients of batches in the low precision and in fp32, gathered batch by batch, over the parameters in `names`.

    Errors are kept in bf16, which changes no product of two by more than its rounding; nothing else is kept of a batch.
    A parameter without a gradient has a zero one.
    """

    def __init__(self, names: Collection[str]) -> None:
        self._names = names
        self._errors: dict[str, list[Tensor]] = defaultdict(list)
        self._totals: dict[str, Tensor] = {}
        self._sums: dict[str, Sums] = {}
        self._num_batches = 0

    def add(self, low: Gradients, reference: Gradients) -> None:
        """Add a batch; waits for the device."""
        for name in dict.fromkeys(chain(reference, low)):
            if name not in self._names:
                continue
            some = reference[name] if name in reference else low[name]
            ours, theirs = (
                torch.zeros_like(_dense(some)) if name not in gradients else _dense(gradients[name])
                for gradients in (low, reference)
            )
            error = (ours - theirs).flatten().bfloat16()
            errors = self._errors[name]
            errors += [*[torch.zeros_like(error)] * (self._num_batches - len(errors)), error]
            self._totals[name] = self._totals[name] + theirs.float() if name in self._totals else theirs.float()
            counts = theirs.abs() > COUNTS * (theirs.abs().amax() if theirs.numel() else 0.0)
            sums = self._sums.setdefault(name, Sums(torch.zeros(())))
            sums.reference += _norm(theirs) ** 2
            sums.low += _norm(ours) ** 2
            sums.product += float((ours * theirs).sum())
            sums.num_counting += float(counts.sum())
            sums.num_flushed += float((counts & (ours == 0)).sum())
        self._num_batches += 1

    def compared(self) -> Comparison:
        """Compare the gradients of all batches that were added, of which there is one at least."""
        parameters: dict[str, Sums] = {}
        modules: dict[str, Sums] = {}
        nothing = torch.zeros(self._num_batches, self._num_batches, dtype=torch.float64)
        whole = Sums(nothing)
        for name, sums in self._sums.items():
            errors = self._errors[name]
            errors += [torch.zeros_like(errors[0])] * (self._num_batches - len(errors))
            parameters[name] = replace(sums, errors=_products(errors), total=_norm(_wide(self._totals[name])) ** 2)
            whole = whole + parameters[name]
            module = name.rpartition(".")[0]
            modules[module] = modules.get(module, Sums(nothing)) + parameters[name]
        damages = [sums.damage(name) for name, sums in modules.items()]
        noisiest = sorted(damages, key=attrgetter("noise_ratio"), reverse=True)[:_MAX_MODULES]
        return Comparison(
            whole=whole.damage(""),
            parameters=[sums.damage(name) for name, sums in parameters.items()],
            modules=[damage for damage in damages if damage in noisiest],
        )


def signals(gradients: Gradients, perturbed: Gradients) -> set[str]:
    """The parameters whose fp32 gradient survives another rounding, so that it can be held against."""
    return {
        name
        for name, gradient in gradients.items()
        if name in perturbed
        and _norm(_dense(gradient) - _dense(perturbed[name])) < MAX_OWN_NOISE * _norm(_dense(gradient))
    }


def compare(low: Sequence[Gradients], reference: Sequence[Gradients], names: Collection[str]) -> Comparison:
    """Compare gradients of the same batches in the low precision and in fp32, over the parameters in `names`."""
    gathered = Gathered(names)
    for ours, theirs in zip(low, reference, strict=True):
        gathered.add(ours, theirs)
    return gathered.compared()


def _products(errors: Sequence[Tensor]) -> Tensor:
    """The products [K, K] of K flat tensors, in double precision, a stretch at a time."""
    products = torch.zeros(len(errors), len(errors), dtype=torch.float64)
    for start in range(0, errors[0].numel(), _STRETCH):
        stretch = _wide(torch.stack([error[start : start + _STRETCH] for error in errors]))
        products += (stretch @ stretch.T).cpu().double()
    return products


def _dense(gradient: Tensor) -> Tensor:
    """Real, with every entry, in double precision, whose squares do not overflow."""
    dense = gradient if gradient.layout == torch.strided else gradient.to_dense()
    dense = torch.view_as_real(dense.resolve_conj()) if dense.is_complex() else dense
    return _wide(dense)


def _wide(tensor: Tensor) -> Tensor:
    """In double precision; on MPS, which has none, in fp32."""
    return tensor.float() if tensor.device.type == "mps" else tensor.double()


def _root(share: float) -> float:
    """The square root, 0 of what is below zero by chance."""
    return math.sqrt(max(0.0, share))


def _norm(tensor: Tensor) -> float:
    return float(torch.linalg.vector_norm(tensor)) if tensor.numel() else 0.0


# -- training runs on the same batches ---------------------------------------------------------------------------------


class Run(NamedTuple):
    """The losses of a training run, one for each step; cut short after the first that was not finite."""

    losses: tuple[float, ...]
    num_skips: int

    @property
    def is_finite(self) -> bool:
        """Whether every step was."""
        return all(map(math.isfinite, self.losses))


def train(
    passes: Passes,
    precision: Precision,
    num_steps: int,
    *,
    scale: float = 1.0,
    perturbation: float = 0.0,
    seed: int = 0,
    order: Sequence[int] | None = None,
) -> Run:
    """Train from the first weights, each of them first moved by up to `perturbation` times itself, on the batches in
    their own `order`, again and again, or another.

    Where gradients overflow, the scale is halved and the step tried again, so that all runs see the same batches; each
    such try is a skip. The model is left where training ended.
    """
    passes.restore()
    perturb(passes.model, perturbation, seed)
    optimizer = passes.subject.make_optimizer(passes.model)
    losses: list[float] = []
    num_skips = 0
    for step in range(num_steps):
        index = step % len(passes.subject.batches) if order is None else order[step]
        done, scale, num_more = finite_pass(passes, index, precision, scale, restores=False)
        num_skips += num_more
        if not done.is_finite:
            losses.append(math.nan if math.isfinite(done.loss) else done.loss)
            break
        losses.append(done.loss)
        passes.step(optimizer, done.gradients)
    return Run(tuple(losses), num_skips)


def train_before(subject: Subject, batches: Iterable[Any]) -> int:
    """Leave the subject's model as one fp32 step on each of these batches makes it; the first that is not finite ends
    it. Returns the steps that were taken."""
    at_hand: list[Any] = []
    passes, optimizer = Passes(replace(subject, batches=at_hand)), subject.make_optimizer(subject.model)
    num_steps = 0
    for batch in batches:
        at_hand[:] = [batch]
        done = passes.run(0, "fp32", restores=False, seed=subject.seed + num_steps)
        if not done.is_finite:
            break
        passes.step(optimizer, done.gradients)
        num_steps += 1
    return num_steps


def gap(low: Run, reference: Run, perturbed: Run) -> tuple[float, float]:
    """How far the low precision's losses are from the reference's; all runs of equal length, and finite.

    Their mean distance over that of the perturbed run, and over the scatter from batch to batch.
    """
    distance, chance = _distance(low, reference), _distance(perturbed, reference)
    # The scatter of the differences, so that the loss's fall does not count as scatter.
    steps = [after - before for before, after in zip(reference.losses, reference.losses[1:], strict=False)]
    scatter = pstdev(steps) / math.sqrt(2)
    return _ratio(distance, chance), _ratio(distance, scatter)


def shuffled(num_steps: int, num_batches: int, order: int) -> list[int]:
    """The batch of each step: all of them again and again, shuffled each time in a way that is the `order`'s own."""
    generator = torch.Generator().manual_seed(order)
    rounds = (torch.randperm(num_batches, generator=generator).tolist() for _ in range(-(-num_steps // num_batches)))
    return list(chain.from_iterable(rounds))[:num_steps]


def parting(low: Sequence[Run], fp32: Sequence[Run], rerounded: Run, num_batches: int, roundoff: float) -> Parting:
    """Say how far runs in the precision part from those in fp32, pass after pass through all `num_batches`.

    All runs are finite; each two saw the batches in the same order, and the `rerounded` one saw them as the first in
    fp32 did, from weights that fp32 rounds otherwise. `roundoff` is the precision's unit.
    """
    num_rounds = len(fp32[0].losses) // num_batches
    rounds = [slice(number * num_batches, (number + 1) * num_batches) for number in range(num_rounds)]
    theirs = [[fmean(run.losses[one]) for run in fp32] for one in rounds]
    differences = [
        [fmean(run.losses[one]) - mean for run, mean in zip(low, means, strict=True)]
        for one, means in zip(rounds, theirs, strict=True)
    ]
    return Parting(
        distance=fmean(abs(fmean(each)) for each in differences),
        spread=fmean(
            max(max(means) - min(means), max(each) - min(each), abs(fmean(rerounded.losses[one]) - means[0]))
            for one, means, each in zip(rounds, theirs, differences, strict=True)
        ),
        resolution=2 * roundoff * fmean(abs(mean) for means in theirs for mean in means),
        fall=abs(fmean(theirs[0]) - fmean(theirs[-1])),
        num_steps=num_rounds * num_batches,
    )


def finite_pass(
    passes: Passes, index: int, precision: Precision, scale: float, *, restores: bool
) -> tuple[Pass, float, int]:
    """A pass over batch `index`, its scale and how often that was halved for it; not finite where no scale helps."""
    num_halvings = 0
    done = passes.run(index, precision, restores=restores, scale=scale)
    while MODES[precision].takes_scaler and math.isfinite(done.loss) and not done.is_finite and scale > MIN_LOSS_SCALE:
        if num_halvings == _NUM_HALVINGS:
            lowest = passes.run(index, precision, restores=restores, scale=MIN_LOSS_SCALE)
            if not lowest.is_finite:
                return lowest, MIN_LOSS_SCALE, num_halvings
        scale, num_halvings = scale / 2, num_halvings + 1
        done = passes.run(index, precision, restores=restores, scale=scale)
    return done, scale, num_halvings


def perturb(model: nn.Module, relative: float, seed: int) -> None:
    """Multiply each weight by 1 + u, u drawn evenly from [-relative, relative].

    Weights that such a step does not move stay as they are: integers, as packed or quantized weights are, and formats
    of 8 bits or less. So do those of a Tensor subclass without the operation.
    """
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters() if relative else ():
            if parameter.dtype.to_real() not in _MOVED_DTYPES or parameter.is_meta:
                continue
            values = stored(parameter)
            noise = torch.rand(values.shape, generator=generator).to(values) * 2 - 1
            with nullcontext() if type(parameter) is nn.Parameter else suppress(Exception):
                values.mul_(1 + relative * noise)


def _distance(one: Run, other: Run) -> float:
    return fmean(abs(a - b) for a, b in zip(one.losses, other.losses, strict=True))


def _ratio(distance: float, yardstick: float) -> float:
    return distance / yardstick if yardstick else (math.inf if distance else 0.0)


# -- weights kept in low precision -------------------------------------------------------------------------------------


def lost_updates(model: nn.Module, before: Mapping[str, Tensor], after: Mapping[str, Tensor]) -> LowWeights | None:
    """What becomes of one fp32 step, from the weights `before` it to those `after`, where `model` keeps its weights.

    Over the trainable parameters in half precision; None where there are none. The weights `before` are numbers that
    the half precision holds.
    """
    num_moved = num_lost = 0
    dtypes = set()
    for name, parameter in parameters_by_name(model).items():
        if parameter.dtype not in HALF_DTYPES or not parameter.requires_grad:
            continue
        dtypes.add(parameter.dtype)
        update = after[name] - before[name]
        nearest = after[name].to(parameter.dtype).to(before[name]) - before[name]
        # Not finite: a mask of -inf kept as a parameter, or a step past the end of the format, which is no rounding.
        moved = (update != 0) & update.isfinite() & nearest.isfinite()
        num_moved += int(moved.sum())
        num_lost += int((moved & (nearest == 0)).sum())
    if not num_moved:
        return None
    return LowWeights(weights="fp16" if torch.float16 in dtypes else "bf16", lost_share=num_lost / num_moved)
