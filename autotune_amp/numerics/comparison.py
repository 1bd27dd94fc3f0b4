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
from autotune_amp.core.outcome import GradientDamage, LowWeights
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


@dataclass
class Sums:
    """Sums of squares over entries and batches, and counts; `+=` adds another's."""

    difference: float = 0.0
    reference: float = 0.0
    low: float = 0.0
    product: float = 0.0
    noise: float = 0.0
    num_counting: float = 0.0
    num_flushed: float = 0.0

    def __iadd__(self, other: Sums) -> Sums:
        for field in fields(self):
            setattr(self, field.name, getattr(self, field.name) + getattr(other, field.name))
        return self

    def damage(self, name: str) -> GradientDamage:
        """What is said of the parameter or module of this name.

        The noise between batches is the yardstick of rounding's, or the gradient itself where they are all alike. The
        cosine is 1 where both gradients are zero.
        """
        yardstick = self.noise if self.noise > 1e-12 * self.reference else self.reference
        norms = math.sqrt(self.reference) * math.sqrt(self.low)
        return GradientDamage(
            name=name,
            noise_ratio=math.sqrt(_ratio(self.difference, yardstick)),
            cosine=min(1.0, self.product / norms) if norms else float(self.reference == self.low),
            norm_ratio=math.sqrt(self.low / self.reference) if self.reference else 1.0,
            flushed_share=self.num_flushed / self.num_counting if self.num_counting else 0.0,
        )


class Comparison(NamedTuple):
    """The `whole` gradient, of the parameters that carry a signal, and each of these, in the model's order.

    `modules` are those that hold them, the noisiest ones where there are many.
    """

    whole: GradientDamage
    parameters: list[GradientDamage]
    modules: list[GradientDamage]


def signals(gradients: Gradients, perturbed: Gradients) -> set[str]:
    """The parameters whose fp32 gradient survives another rounding, so that it can be held against."""
    return {
        name
        for name, gradient in gradients.items()
        if name in perturbed
        and _norm(_dense(gradient) - _dense(perturbed[name])) < MAX_OWN_NOISE * _norm(_dense(gradient))
    }


def compare(low: Sequence[Gradients], reference: Sequence[Gradients], names: Collection[str]) -> Comparison:
    """Gradients of the same batches in the low precision and in fp32, over the parameters in `names`.

    The noise is that between each batch and the next in fp32; `reference` may hold more batches than `low`. A parameter
    without a gradient has a zero one.
    """
    parameters: dict[str, Sums] = {}
    modules: dict[str, Sums] = defaultdict(Sums)
    whole = Sums()
    for name in dict.fromkeys(chain(*reference, *low)):
        if name in names:
            sums = parameters[name] = Sums()
            for index, gradients in enumerate(low):
                following = reference[(index + 1) % len(reference)]
                sums += _sums(gradients.get(name), reference[index].get(name), following.get(name))
            whole += sums
            modules[name.rpartition(".")[0]] += sums
    damages = [sums.damage(name) for name, sums in modules.items()]
    noisiest = sorted(damages, key=attrgetter("noise_ratio"), reverse=True)[:_MAX_MODULES]
    return Comparison(
        whole=whole.damage(""),
        parameters=[sums.damage(name) for name, sums in parameters.items()],
        modules=[damage for damage in damages if damage in noisiest],
    )


def _sums(low: Tensor | None, reference: Tensor | None, other: Tensor | None) -> Sums:
    some = next((tensor for tensor in (reference, low, other) if tensor is not None), None)
    if some is None:
        return Sums()
    ours, theirs, others = (torch.zeros_like(_dense(some)) if t is None else _dense(t) for t in (low, reference, other))
    counts = theirs.abs() > COUNTS * (theirs.abs().amax() if theirs.numel() else 0.0)
    return Sums(
        difference=_norm(ours - theirs) ** 2,
        reference=_norm(theirs) ** 2,
        low=_norm(ours) ** 2,
        product=float((ours * theirs).sum()),
        noise=_norm(theirs - others) ** 2,
        num_counting=float(counts.sum()),
        num_flushed=float((counts & (ours == 0)).sum()),
    )


def _dense(gradient: Tensor) -> Tensor:
    """In double precision, whose squares do not overflow; MPS has none."""
    dense = gradient if gradient.layout == torch.strided else gradient.to_dense()
    dense = torch.view_as_real(dense.resolve_conj()) if dense.is_complex() else dense
    return dense if dense.device.type == "mps" else dense.double()


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
) -> Run:
    """Train from the first weights, each of them first moved by up to `perturbation` times itself.

    Where gradients overflow, the scale is halved and the step tried again, so that all runs see the same batches; each
    such try is a skip. The model is left where training ended.
    """
    passes.restore()
    perturb(passes.model, perturbation, seed)
    optimizer = passes.subject.make_optimizer(passes.model)
    losses: list[float] = []
    num_skips = 0
    for step in range(num_steps):
        index = step % len(passes.subject.batches)
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
