"""The workload's optimizer, or several of them as one."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from autotune_amp.core.errors import WorkloadError
from autotune_amp.core.workload import OptimizersOfModel, Workload, type_name

# Of a schedule's peak: as in the first part of a warm-up. At the peak, a training without its warm-up may diverge.
LEAST_SHARE_OF_PEAK = 0.1


class Optimizers(torch.optim.Optimizer):
    """Several optimizers that step together; their parameter groups are its own, so that what sets one sets both."""

    def __init__(self, parts: Sequence[torch.optim.Optimizer]) -> None:
        groups = [group for part in parts for group in part.param_groups]
        # torch refuses a parameter that is in two groups, but two optimizers may train the same one.
        super().__init__(list(dict.fromkeys(parameter for group in groups for parameter in group["params"])), {})
        self.param_groups = groups
        self.parts = tuple(parts)

    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # no closure is ever passed
        """Step each of them."""
        for part in self.parts:
            part.step(closure)

    def state_dict(self) -> dict[str, Any]:
        """Theirs, in order."""
        return {"parts": [part.state_dict() for part in self.parts]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Undo to each what `state_dict` saved; learning rates are theirs again too."""
        for part, saved in zip(self.parts, state_dict["parts"], strict=True):
            part.load_state_dict(saved)
        self.param_groups = [group for part in self.parts for group in part.param_groups]


def each(optimizer: torch.optim.Optimizer) -> tuple[torch.optim.Optimizer, ...]:
    """The user's own optimizers in it."""
    return optimizer.parts if isinstance(optimizer, Optimizers) else (optimizer,)


def make_optimizer(workload: Workload, model: nn.Module) -> torch.optim.Optimizer:
    """A fresh optimizer over the model's parameters; of an instance the class and hyperparameters are taken.

    Learning rates are as `raise_learning_rates` leaves them.
    """
    several = _made(workload, model)
    for optimizer in several:
        raise_learning_rates(optimizer)
    return several[0] if len(several) == 1 else Optimizers(several)


def _made(workload: Workload, model: nn.Module) -> list[torch.optim.Optimizer]:
    given = workload.optimizer
    if given is None:
        return [torch.optim.AdamW(model.parameters())]
    if not isinstance(given, torch.optim.Optimizer) and callable(given):
        return _checked(given(model if isinstance(given, OptimizersOfModel) else model.parameters()))
    several = _checked(given)
    return [_like(optimizer, workload.model, model, is_alone=len(several) == 1) for optimizer in several]


def _checked(made: Any) -> list[torch.optim.Optimizer]:
    several = list(made) if isinstance(made, list | tuple) else [made]
    for optimizer in several:
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise WorkloadError(
                f"The optimizer function returned a {type_name(optimizer)}; it must return a torch.optim.Optimizer "
                "or several in a list.",
                "Return for example torch.optim.SGD(parameters, lr=0.1).",
            )
    if not several:
        raise WorkloadError("There is no optimizer in the list.", "Return at least one, or leave optimizer= out.")
    return several


def _like(
    optimizer: torch.optim.Optimizer, given_model: Any, model: nn.Module, *, is_alone: bool
) -> torch.optim.Optimizer:
    kind = type(optimizer)
    accepted = inspect.signature(kind).parameters
    defaults = {name: value for name, value in optimizer.defaults.items() if name in accepted}
    own = {id(parameter): parameter for parameter in model.parameters()}
    if isinstance(given_model, nn.Module):  # which the one at hand may be a copy of
        own |= {id(given): ours for given, ours in zip(given_model.parameters(), model.parameters(), strict=True)}
    groups: Iterable[Any] = model.parameters()
    if all(id(parameter) in own for group in optimizer.param_groups for parameter in group["params"]):
        groups = [{**group, "params": [own[id(p)] for p in group["params"]]} for group in optimizer.param_groups]
    elif len(optimizer.param_groups) > 1 or not is_alone:
        whose = f"The optimizer has {len(optimizer.param_groups)} parameter groups" if is_alone else "One optimizer is"
        raise WorkloadError(
            f"{whose} over another model's parameters.",
            "Pass the model instance that it was made for, or an optimizer function of the parameters.",
        )
    return kind(groups, **defaults)


def raise_learning_rates(optimizer: torch.optim.Optimizer) -> None:
    """Raise each learning rate that a scheduler has set to at least a tenth of the schedule's peak.

    A warm-up begins at 0 and a schedule that has ended leaves 0, with which no weight of a trial would move. The peak
    is what torch's schedulers keep in the parameter group: ``initial_lr``, and OneCycleLR ``max_lr``.
    """
    for group in optimizer.param_groups:
        if "initial_lr" in group:
            rate, least = group["lr"], LEAST_SHARE_OF_PEAK * float(group.get("max_lr", group["initial_lr"]))
            if rate < least:
                # A tensor may be the user's own, which another optimizer reads.
                group["lr"] = torch.full_like(rate, least) if isinstance(rate, Tensor) else least
