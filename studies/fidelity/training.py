"""A plain training loop over a subject's batches, fp16 through torch.amp.GradScaler: what really happens."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from contextlib import ExitStack
from statistics import fmean
from typing import NamedTuple

import torch
from torch import nn

from autotune_amp.core.precisions import Precision
from autotune_amp.numerics.paired_runs import perturb
from autotune_amp.numerics.passes import CheckInputs
from autotune_amp.precision import torch_state
from autotune_amp.precision.forward_wrapper import modules_named, override, pin_fp32
from autotune_amp.precision.torch_state import autocast, set_flags

STEPS_PER_RECORD = 10


class Trained(NamedTuple):
    """A training run; cut short after a loss that is not finite, except where GradScaler skips the step.

    losses      of every 10th step
    first, tail the mean loss of the first five steps, and of the last tenth of them
    is_finite   the tail and the weights at the end
    num_skips   steps that the optimizer did not take
    """

    losses: list[float]
    first: float
    tail: float
    is_finite: bool
    num_steps: int
    num_skips: int


def train(
    subject: CheckInputs,
    precision: Precision,
    num_steps: int,
    *,
    init_scale: float = 2.0**16,
    pinned_modules: Sequence[str] = (),
    perturbation: float = 0.0,
    seed: int = 0,
    with_fp32_weights: bool = False,
) -> Trained:
    """One step on each batch in turn, on a copy of the model whose weights are first perturbed; the same dropout draws
    at each step in every run. GradScaler's growth interval is its default, 2000.
    """
    device = subject.device.type
    model = copy.deepcopy(subject.model)
    if with_fp32_weights:
        model.float()
        override(model, "fp32", device)  # casts inputs up
    perturb(model, perturbation, seed)
    for module in modules_named(model, pinned_modules):
        pin_fp32(module, device)
    optimizer = subject.make_optimizer(model)
    taken: list[None] = []
    optimizer.register_step_post_hook(lambda *_: taken.append(None))
    scaler = torch.amp.GradScaler(device, init_scale=init_scale, enabled=precision == "fp16")
    set_flags(precision)
    losses: list[float] = []
    with ExitStack() as stack:
        stack.callback(set_flags, "fp32")
        for step in range(num_steps):
            torch_state.seed(subject.seed + step)
            with autocast(precision, device):
                loss = subject.loss(model, subject.batches[step % len(subject.batches)])
            losses.append(float(loss.detach()))
            if not math.isfinite(losses[-1]) and precision != "fp16":
                break
            optimizer.zero_grad(set_to_none=True)
            scaler.scale(loss).backward()  # type: ignore[no-untyped-call] # torch does not type it
            scaler.step(optimizer)
            scaler.update()
    tail = fmean(losses[-max(1, num_steps // 10) :])
    return Trained(
        losses=losses[::STEPS_PER_RECORD],
        first=fmean(losses[:5]),
        tail=tail,
        is_finite=math.isfinite(tail) and _has_finite_weights(model),
        num_steps=len(losses),
        num_skips=len(losses) - len(taken),
    )


def _has_finite_weights(model: nn.Module) -> bool:
    return all(bool(torch.isfinite(parameter).all()) for parameter in model.parameters())
