"""One training step of the user's workload under a candidate, split where accumulation splits it."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from autotune_amp import precision
from autotune_amp.errors import WorkloadError
from autotune_amp.numerics.passes import named
from autotune_amp.torch_state import as_found_autocast
from autotune_amp.trial import data
from autotune_amp.trial.spec import TrialSpec
from autotune_amp.workload import Workload


class Training:
    """A model, its optimizer and its batches, ready to take steps as `spec` says.

    `forward_backward` runs one batch and adds to the gradients; `update` takes the optimizer step.
    """

    def __init__(self, workload: Workload, model: nn.Module, spec: TrialSpec) -> None:
        self.spec = spec
        self.device = torch.device(spec.device)
        self.model = model
        self.loss = checked_loss(workload.loss)
        self.optimizer = make_optimizer(workload, model)
        self.batches = data.stream(workload.data, spec.candidate.batch_size)
        self.scaler = precision.grad_scaler(spec.loss_scale, self.device.type)
        if not spec.candidate.as_found:
            precision.set_flags(spec.candidate.precision)
        self._pinned: list[nn.Module] = []
        if spec.candidate.precision in ("bf16", "fp16"):
            # What the user's own model has pinned already stays so after `unpin`.
            found = named(model, spec.candidate.pinned_modules)
            self._pinned = [module for module in found if not precision.is_pinned(module)]
            for module in self._pinned:
                precision.pin_fp32(module, self.device.type)

    def next_batch(self) -> Any:
        """The next batch as the loader gives it."""
        return next(self.batches)

    def forward_backward(self, batch: Any) -> Tensor:
        """Move the batch to the device and add its gradients; returns the loss, detached, of no dimension."""
        candidate = self.spec.candidate
        if self.device.type != "cpu":
            batch = data.move(batch, self.device)
        context = (
            as_found_autocast(self.spec.torch_state, self.device.type)
            if candidate.as_found
            else precision.autocast(candidate.precision, self.device.type)
        )
        with context:
            loss = self.loss(self.model, batch)
        scaled = loss / candidate.accumulation_steps if candidate.accumulation_steps > 1 else loss
        to_go_back_from: Tensor = scaled if self.scaler is None else self.scaler.scale(scaled)
        to_go_back_from.backward()  # type: ignore[no-untyped-call]  # torch does not type it
        return loss.detach().reshape(())

    def update(self) -> None:
        """Take the optimizer step and clear the gradients."""
        if self.scaler is None:
            self.optimizer.step()
        else:
            self.scaler.step(self.optimizer)
            self.scaler.update()
        self.optimizer.zero_grad(set_to_none=True)

    def loss_scale(self) -> float | None:
        """The current scale; waits for the device."""
        return None if self.scaler is None else float(self.scaler.get_scale())

    def unpin(self) -> None:
        """Leave the model as it was before: a kept worker goes on with it."""
        for module in self._pinned:
            precision.unpin(module)


def checked_loss(loss: Callable[[nn.Module, Any], Any]) -> Callable[[nn.Module, Any], Tensor]:
    """The workload's loss; calling it raises `WorkloadError` where what it returns cannot be gone back from."""

    def checked(model: nn.Module, batch: Any) -> Tensor:
        value = loss(model, batch)
        if not isinstance(value, Tensor) or value.numel() != 1:
            given = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else f"a {_name(value)}"
            raise WorkloadError(
                f"loss(model, batch) returned {given}; it must return a tensor with one element.",
                "Reduce it, for example with .mean(), and return the loss alone.",
            )
        if not value.requires_grad:
            raise WorkloadError(
                "loss(model, batch) returned a tensor without gradient.",
                "Compute it from the model's output without torch.no_grad() or .detach().",
            )
        return value

    return checked


def _name(value: object) -> str:
    return type(value).__name__


def make_model(workload: Workload) -> nn.Module:
    """The model on the CPU or wherever its factory puts it, in training mode unless made otherwise in parts."""
    model = workload.model if isinstance(workload.model, nn.Module) else workload.model()
    if not isinstance(model, nn.Module):
        raise WorkloadError(
            f"The model function returned a {_name(model)}; it must return an nn.Module.",
            "Return the model alone.",
        )
    if not model.training:
        model.train()
    return model


def make_optimizer(workload: Workload, model: nn.Module) -> torch.optim.Optimizer:
    """A fresh optimizer over the model's parameters; of an instance the class and hyperparameters are taken."""
    given = workload.optimizer
    if given is None:
        return torch.optim.AdamW(model.parameters())
    if isinstance(given, torch.optim.Optimizer):
        return _like(given, workload.model, model)
    made = given(model.parameters())
    if not isinstance(made, torch.optim.Optimizer):
        raise WorkloadError(
            f"The optimizer function returned a {_name(made)}; it must return a torch.optim.Optimizer.",
            "Return for example torch.optim.SGD(parameters, lr=0.1).",
        )
    return made


def _like(optimizer: torch.optim.Optimizer, given_model: Any, model: nn.Module) -> torch.optim.Optimizer:
    kind = type(optimizer)
    accepted = inspect.signature(kind).parameters
    defaults = {name: value for name, value in optimizer.defaults.items() if name in accepted}
    own = {id(parameter): parameter for parameter in model.parameters()}
    if isinstance(given_model, nn.Module):  # which the one at hand may be a copy of
        own |= {id(given): ours for given, ours in zip(given_model.parameters(), model.parameters(), strict=True)}
    groups: Iterable[Any] = model.parameters()
    if all(id(parameter) in own for group in optimizer.param_groups for parameter in group["params"]):
        groups = [{**group, "params": [own[id(p)] for p in group["params"]]} for group in optimizer.param_groups]
    elif len(optimizer.param_groups) > 1:
        raise WorkloadError(
            f"The optimizer has {len(optimizer.param_groups)} parameter groups over another model's parameters.",
            "Pass the model instance that it was made for, or an optimizer function of the parameters.",
        )
    return kind(groups, **defaults)
