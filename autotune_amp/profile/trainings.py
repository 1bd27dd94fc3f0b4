"""Child side of a profile: a training for each precision, all of the same first weights."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import nn

from autotune_amp.core.workload import Workload
from autotune_amp.isolation.packing import compile_with, compiler_of
from autotune_amp.precision import torch_state
from autotune_amp.trial.context import Context, LoopState, make_model
from autotune_amp.trial.jobs import Trial
from autotune_amp.trial.optimizers import each
from autotune_amp.trial.training import BaseTraining, Training, make_training


def trainings(context: Context, trials: Sequence[Trial]) -> Iterator[BaseTraining]:
    """Each with a model of its own, all of the same first weights."""
    device = torch.device(trials[0].device)
    first = context.model(device)
    models = [first, *(_another(context.workload, first, trial.seed).to(device) for trial in trials[1:])]
    for model, trial in zip(models, trials, strict=True):
        yield make_training(context.workload, model, trial)


def _another(workload: Workload, first: nn.Module, seed: int) -> nn.Module:
    """A model like the first; a copy of it where the workload hands out the same parameters again."""
    torch_state.seed(seed)
    made = make_model(workload)
    known = {id(parameter) for parameter in first.parameters()}
    if known.isdisjoint(id(parameter) for parameter in made.parameters()):
        return made
    copied = LoopState(copy.deepcopy(made.held)) if isinstance(made, LoopState) else copy.deepcopy(made)
    for ours, theirs in zip(copied.modules(), made.modules(), strict=True):
        if (context := compiler_of(theirs)) is not None:
            compile_with(ours, context)
    return copied


def unfused_optimizer(training: BaseTraining) -> str | None:
    """The class of the first optimizer that could step in fused kernels and does not."""
    optimizers: Iterable[torch.optim.Optimizer] = ()
    if isinstance(training.model, LoopState):
        optimizers = training.model.optimizers.values()
    elif isinstance(training, Training):
        optimizers = each(training.optimizer)
    for optimizer in optimizers:
        accepts = "fused" in inspect.signature(type(optimizer)).parameters
        if accepts and not any(group.get("fused") for group in optimizer.param_groups):
            return type(optimizer).__name__
    return None
