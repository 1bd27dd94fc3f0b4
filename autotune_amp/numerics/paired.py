"""Short training runs on the same batches: the loss in a low precision against fp32, and fp32 against itself.

Two healthy runs part as a small difference grows. So the distance is judged against that between fp32 runs whose
first weights differ by one rounding of the low precision.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean, pstdev
from typing import NamedTuple

import torch
from torch import nn

from autotune_amp.core.config import Precision
from autotune_amp.numerics.passes import Pass, Passes
from autotune_amp.numerics.safe_scale import MIN_LOG2_SCALE

_NUM_HALVINGS = 4  # before it is asked whether any scale will do
# Unit roundoff 2^-p of a significand of p bits, the leading one counted.
UNIT_ROUNDOFF: dict[Precision, float] = {"tf32": 2.0**-11, "bf16": 2.0**-8, "fp16": 2.0**-11, "fp32": 2.0**-24}


class Run(NamedTuple):
    """The losses of a training run, one for each step; cut short after the first that was not finite."""

    losses: tuple[float, ...]
    num_skips: int

    @property
    def is_finite(self) -> bool:
        """Whether every step was."""
        return all(map(math.isfinite, self.losses))


class Gap(NamedTuple):
    """Mean distances between losses: over that of the perturbed runs, and over the scatter from batch to batch."""

    over_perturbed: float
    over_scatter: float


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
        done, scale, num_more = _finite_pass(passes, step, precision, scale)
        num_skips += num_more
        if not done.is_finite:
            losses.append(math.nan if math.isfinite(done.loss) else done.loss)
            break
        losses.append(done.loss)
        passes.step(optimizer, done.gradients)
    return Run(tuple(losses), num_skips)


def gap(low: Run, reference: Run, perturbed: Sequence[Run]) -> Gap:
    """How far the low precision's losses are from the reference's; all runs of equal length, and finite."""
    distance = _distance(low, reference)
    chance = fmean(_distance(run, reference) for run in perturbed)
    # The scatter of the differences, so that the loss's fall does not count as scatter.
    steps = [after - before for before, after in zip(reference.losses, reference.losses[1:], strict=False)]
    scatter = pstdev(steps) / math.sqrt(2)
    return Gap(_ratio(distance, chance), _ratio(distance, scatter))


def _finite_pass(passes: Passes, step: int, precision: Precision, scale: float) -> tuple[Pass, float, int]:
    index = step % len(passes.subject.batches)
    num_skips = 0
    done = passes.go_on(index, precision, scale=scale)
    while precision == "fp16" and math.isfinite(done.loss) and not done.is_finite and scale > 2.0**MIN_LOG2_SCALE:
        if num_skips == _NUM_HALVINGS:
            lowest = passes.go_on(index, precision, scale=2.0**MIN_LOG2_SCALE)
            if not lowest.is_finite:
                return lowest, 2.0**MIN_LOG2_SCALE, num_skips
        scale, num_skips = scale / 2, num_skips + 1
        done = passes.go_on(index, precision, scale=scale)
    return done, scale, num_skips


def perturb(model: nn.Module, relative: float, seed: int) -> None:
    """Multiply each weight by 1 + u, u drawn evenly from [-relative, relative]."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters() if relative else ():
            noise = torch.rand(parameter.shape, generator=generator).to(parameter) * 2 - 1
            parameter.mul_(1 + relative * noise)


def _distance(one: Run, other: Run) -> float:
    return fmean(abs(a - b) for a, b in zip(one.losses, other.losses, strict=True))


def _ratio(distance: float, yardstick: float) -> float:
    return distance / yardstick if yardstick else (math.inf if distance else 0.0)
