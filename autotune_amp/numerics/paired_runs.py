"""Training runs in a low precision beside those in fp32: how far their losses part, and what weights kept in it lose.

Two healthy runs part as a small difference grows: so the distance of their losses is compared with that between fp32
runs whose first weights differ by one rounding of the low precision.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import replace
from itertools import chain
from statistics import fmean, pstdev
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from autotune_amp.core.config import MIN_LOSS_SCALE
from autotune_amp.core.dimensions import Precision
from autotune_amp.core.outcome import LowWeights
from autotune_amp.numerics.grading import Parting
from autotune_amp.numerics.passes import Pass, Passes, Subject, stored
from autotune_amp.precision.forward_wrapper import parameters_by_name
from autotune_amp.precision.modes import MODES
from autotune_amp.precision.torch_state import HALF_DTYPES

REROUNDING = 2.0**-20  # moves weights enough for fp32 to round otherwise, and no more
_MOVED_DTYPES = (*HALF_DTYPES, torch.float32, torch.float64)
_NUM_HALVINGS = 4  # of a step's loss scale, before it is asked whether any will do


class Run(NamedTuple):
    """The losses of a training run, one for each step; cut short after the first that was not finite.

    `last_index` is the batch of its last step.
    """

    losses: tuple[float, ...]
    num_skips: int
    last_index: int = 0

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
    num_skips = index = 0
    for step in range(num_steps):
        index = step % len(passes.subject.batches) if order is None else order[step]
        done, scale, num_more = finite_pass(passes, index, precision, scale, restores=False)
        num_skips += num_more
        if not done.is_finite:
            losses.append(math.nan if math.isfinite(done.loss) else done.loss)
            break
        losses.append(done.loss)
        passes.step(optimizer, done.gradients)
    return Run(tuple(losses), num_skips, index)


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


def gap(low: Run, reference: Run, perturbed: Run) -> float:
    """Return the mean distance of the low precision's losses from the reference's over that of the perturbed run's.

    All runs are finite and of equal length.
    """
    return _ratio(_distance(low, reference), _distance(perturbed, reference))


def noise_gap(low: Run, reference: Run) -> float:
    """Return the mean distance of the low precision's losses from the reference's over their scatter from batch to
    batch; both runs are finite and of equal length."""
    # The scatter of the differences, so that the loss's fall does not count as scatter.
    steps = [after - before for before, after in zip(reference.losses, reference.losses[1:], strict=False)]
    return _ratio(_distance(low, reference), pstdev(steps) / math.sqrt(2))


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
    generators: dict[torch.device, torch.Generator] = {}
    with torch.no_grad():
        for parameter in model.parameters() if relative else ():
            if parameter.dtype.to_real() not in _MOVED_DTYPES or parameter.is_meta:
                continue
            values = stored(parameter)
            if values.device not in generators:
                generators[values.device] = torch.Generator(values.device).manual_seed(seed)
            factors = torch.empty(values.shape, device=values.device)
            factors.uniform_(1 - relative, 1 + relative, generator=generators[values.device])
            with nullcontext() if type(parameter) is nn.Parameter else suppress(Exception):
                values.mul_(factors)


def _distance(one: Run, other: Run) -> float:
    return fmean(abs(a - b) for a, b in zip(one.losses, other.losses, strict=True))


def _ratio(distance: float, yardstick: float) -> float:
    return distance / yardstick if yardstick else (math.inf if distance else 0.0)


# -- weights kept in low precision -------------------------------------------------------------------------------------


def lost_updates(model: nn.Module, before: Mapping[str, Tensor], after: Mapping[str, Tensor]) -> LowWeights | None:
    """Return how much of an fp32 step is lost, from weights `before` it to those `after`, where `model` keeps them.

    Over the parameters in half precision that the step moves, those without a gradient too, as a teacher's that follow
    the model's weights by a moving average; None where there are none. The weights `before` are numbers that the half
    precision holds.
    """
    counts: list[Tensor] = []  # of what moves, and of what of it is lost
    dtypes = set()
    for name, parameter in parameters_by_name(model).items():
        if parameter.dtype not in HALF_DTYPES:
            continue
        dtypes.add(parameter.dtype)
        update = after[name] - before[name]
        nearest = after[name].to(parameter.dtype).to(before[name]) - before[name]
        # Not finite: a mask of -inf kept as a parameter, or a step past the end of the format, which is no rounding.
        moved = (update != 0) & update.isfinite() & nearest.isfinite()
        counts.append(torch.stack([moved.sum(), (moved & (nearest == 0)).sum()]).cpu())
    num_moved, num_lost = torch.stack(counts).sum(0).tolist() if counts else (0, 0)
    if not num_moved:
        return None
    return LowWeights(weights="fp16" if torch.float16 in dtypes else "bf16", lost_share=num_lost / num_moved)
