"""Training runs in a low precision paired with fp32: the distance of their losses, and updates lost by rounding.

Small differences grow in training, so two equivalent runs diverge too. Therefore the distance of the losses is compared
with that between fp32 runs whose first weights differ by one rounding of the low precision.
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
from autotune_amp.core.outcome import LostUpdates
from autotune_amp.core.precisions import Precision
from autotune_amp.numerics.comparison import ratio
from autotune_amp.numerics.grading import TrainingDivergence
from autotune_amp.numerics.passes import CheckInputs, Passes, PassResult, stored_values
from autotune_amp.precision.forward_wrapper import parameters_by_name
from autotune_amp.precision.modes import MODES
from autotune_amp.precision.torch_state import HALF_DTYPES, is_packed

REROUNDING = 2.0**-20  # relative change of the weights, just enough for fp32 to round differently
_PERTURBED_DTYPES = (*HALF_DTYPES, torch.float32, torch.float64)
_NUM_HALVINGS = 4  # halvings of a step's loss scale before the lowest scale is tried


class TrainingRun(NamedTuple):
    """Losses of a training run, one per step; the run ends after a loss that is not finite.

    `last_index` is the batch index of the last step.
    """

    losses: tuple[float, ...]
    num_skips: int
    last_index: int = 0

    @property
    def is_finite(self) -> bool:
        """Return whether the losses of all steps are finite."""
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
) -> TrainingRun:
    """Train for `num_steps` from the first weights, of which each is changed by up to `perturbation` times its value.

    The batches are used cyclically, or in the `order` of indices, one per step. If gradients overflow, the loss scale
    is halved and the step repeated, so that all runs see the same batches; each repetition counts as a skip. The model
    keeps the weights of the last step.
    """
    passes.restore()
    perturb(passes.model, perturbation, seed)
    optimizer = passes.subject.make_optimizer(passes.model)
    losses: list[float] = []
    num_skips = index = 0
    for step in range(num_steps):
        index = step % len(passes.subject.batches) if order is None else order[step]
        result, scale, num_halvings = run_finite_pass(passes, index, precision, scale, restores=False)
        num_skips += num_halvings
        if not result.is_finite:
            losses.append(math.nan if math.isfinite(result.loss) else result.loss)
            break
        losses.append(result.loss)
        passes.step(optimizer, result.gradients)
    return TrainingRun(tuple(losses), num_skips, index)


def train_in_fp32(subject: CheckInputs, batches: Iterable[Any]) -> int:
    """Train the subject's model in fp32, one step per batch, until one is not finite. Return the number of steps."""
    current_batch: list[Any] = []
    passes, optimizer = Passes(replace(subject, batches=current_batch)), subject.make_optimizer(subject.model)
    num_steps = 0
    for batch in batches:
        current_batch[:] = [batch]
        result = passes.run(0, "fp32", restores=False, seed=subject.seed + num_steps)
        if not result.is_finite:
            break
        passes.step(optimizer, result.gradients)
        num_steps += 1
    return num_steps


def relative_gap(low: TrainingRun, reference: TrainingRun, perturbed: TrainingRun) -> float:
    """Return the mean distance between the losses of `low` and `reference`, over that of `perturbed` and `reference`.

    All runs are finite and of equal length.
    """
    return ratio(_distance(low, reference), _distance(perturbed, reference))


def noise_gap(low: TrainingRun, reference: TrainingRun) -> float:
    """Return the mean distance between the losses of `low` and `reference`, over the reference's scatter by batch.

    Both runs are finite and of equal length.
    """
    # From differences of successive losses, so that the decrease of the loss does not count as scatter.
    steps = [after - before for before, after in zip(reference.losses, reference.losses[1:], strict=False)]
    return ratio(_distance(low, reference), pstdev(steps) / math.sqrt(2))


def shuffled_batch_order(num_steps: int, num_batches: int, order: int) -> list[int]:
    """Return the batch index of each step: all batches repeatedly, shuffled each time with the seed `order`."""
    generator = torch.Generator().manual_seed(order)
    rounds = (torch.randperm(num_batches, generator=generator).tolist() for _ in range(-(-num_steps // num_batches)))
    return list(chain.from_iterable(rounds))[:num_steps]


def training_divergence(
    low: Sequence[TrainingRun], fp32: Sequence[TrainingRun], rerounded: TrainingRun, num_batches: int, roundoff: float
) -> TrainingDivergence:
    """Return the divergence of the losses of `low` from those of `fp32`, from the means over rounds of `num_batches`.

    All runs are finite. Runs at the same position in `low` and `fp32` used the batches in the same order. `rerounded`
    is an fp32 run in the first order from weights that round differently. `roundoff` is the precision's unit roundoff.
    """
    num_rounds = len(fp32[0].losses) // num_batches
    rounds = [slice(number * num_batches, (number + 1) * num_batches) for number in range(num_rounds)]
    fp32_means = [[fmean(run.losses[steps]) for run in fp32] for steps in rounds]
    differences = [
        [fmean(run.losses[steps]) - mean for run, mean in zip(low, means, strict=True)]
        for steps, means in zip(rounds, fp32_means, strict=True)
    ]
    return TrainingDivergence(
        distance=fmean(abs(fmean(each)) for each in differences),
        spread=fmean(
            max(max(means) - min(means), max(each) - min(each), abs(fmean(rerounded.losses[steps]) - means[0]))
            for steps, means, each in zip(rounds, fp32_means, differences, strict=True)
        ),
        resolution=2 * roundoff * fmean(abs(mean) for means in fp32_means for mean in means),
        fall=abs(fmean(fp32_means[0]) - fmean(fp32_means[-1])),
        num_steps=num_rounds * num_batches,
    )


def run_finite_pass(
    passes: Passes, index: int, precision: Precision, scale: float, *, restores: bool
) -> tuple[PassResult, float, int]:
    """Run a pass over batch `index`, halving the loss scale until it is finite.

    Return the pass, its loss scale and the number of halvings. The pass is not finite if it is not at any scale.
    """
    num_halvings = 0
    result = passes.run(index, precision, restores=restores, scale=scale)
    while (
        MODES[precision].takes_scaler and math.isfinite(result.loss) and not result.is_finite and scale > MIN_LOSS_SCALE
    ):
        if num_halvings == _NUM_HALVINGS:
            lowest = passes.run(index, precision, restores=restores, scale=MIN_LOSS_SCALE)
            if not lowest.is_finite:
                return lowest, MIN_LOSS_SCALE, num_halvings
        scale, num_halvings = scale / 2, num_halvings + 1
        result = passes.run(index, precision, restores=restores, scale=scale)
    return result, scale, num_halvings


def perturb(model: nn.Module, relative: float, seed: int) -> None:
    """Multiply each weight by 1 + u, with u uniform in [-relative, relative].

    Integer and packed weights, formats of 8 bits or less, and Tensor subclasses without this operation stay unchanged.
    """
    generators: dict[torch.device, torch.Generator] = {}
    with torch.no_grad():
        for parameter in model.parameters() if relative else ():
            if parameter.dtype.to_real() not in _PERTURBED_DTYPES or parameter.is_meta or is_packed(parameter):
                continue
            values = stored_values(parameter)
            if values.device not in generators:
                generators[values.device] = torch.Generator(values.device).manual_seed(seed)
            factors = torch.empty(values.shape, device=values.device)
            factors.uniform_(1 - relative, 1 + relative, generator=generators[values.device])
            with nullcontext() if type(parameter) is nn.Parameter else suppress(Exception):
                values.mul_(factors)


def _distance(one: TrainingRun, other: TrainingRun) -> float:
    return fmean(abs(a - b) for a, b in zip(one.losses, other.losses, strict=True))


# -- weights kept in low precision -------------------------------------------------------------------------------------


def lost_updates(model: nn.Module, before: Mapping[str, Tensor], after: Mapping[str, Tensor]) -> LostUpdates | None:
    """Return the share of updates, from weights `before` to `after`, that round away in the dtype of `model`'s weights.

    Counts the half-precision parameters that the fp32 step changed, also without a gradient, such as a moving average
    of the weights; None if there are none. `before` must be representable in half precision.
    """
    counts: list[Tensor] = []  # numbers of changed entries, and of lost ones among them
    dtypes = set()
    for name, parameter in parameters_by_name(model).items():
        if parameter.dtype not in HALF_DTYPES or is_packed(parameter):
            continue
        dtypes.add(parameter.dtype)
        update = after[name] - before[name]
        nearest = after[name].to(parameter.dtype).to(before[name]) - before[name]
        # Non-finite updates are left out: masks of -inf in a parameter, or overflow of the dtype.
        moved = (update != 0) & update.isfinite() & nearest.isfinite()
        counts.append(torch.stack([moved.sum(), (moved & (nearest == 0)).sum()]).cpu())
    num_moved, num_lost = torch.stack(counts).sum(0).tolist() if counts else (0, 0)
    if not num_moved:
        return None
    return LostUpdates(weights="fp16" if torch.float16 in dtypes else "bf16", lost_share=num_lost / num_moved)
