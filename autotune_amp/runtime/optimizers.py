"""Optimizers as the controller meets them: how each wants to be stepped, and which is stepped without gradients."""

from __future__ import annotations

import functools
import inspect
import math
import numbers
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from autotune_amp.core.errors import InvalidRequestError


def makes_buffers_unread(optimizer: torch.optim.Optimizer) -> bool:
    """Whether a first step that the device skips leaves memory behind that nobody wrote: fused SGD's momentum."""
    if not isinstance(optimizer, torch.optim.SGD) or optimizer.state:
        return False
    return any(group.get("fused") and group["momentum"] for group in optimizer.param_groups)


@functools.cache
def takes_a_scaler(optimizer: type[torch.optim.Optimizer]) -> bool:
    """Whether its `step` wants the scaler itself, as custom optimizers once did."""
    return "grad_scaler" in inspect.signature(optimizer.step).parameters


def needs_closure(optimizer: torch.optim.Optimizer) -> bool:
    """Whether its `step` computes gradients itself, by a closure that it calls: LBFGS, SAM and their like."""
    if isinstance(optimizer, torch.optim.LBFGS) or hasattr(optimizer, "first_step"):
        return True
    closure = inspect.signature(type(optimizer).step).parameters.get("closure")
    return closure is not None and closure.default is inspect.Parameter.empty


def refuse_closure(optimizer: torch.optim.Optimizer, args: Sequence[Any] = (), kwargs: Mapping[str, Any] = {}) -> None:
    """Raise `InvalidRequestError` for an optimizer that steps by a closure, and for a step that is given one."""
    name = type(optimizer).__name__
    if needs_closure(optimizer):
        raise InvalidRequestError(
            f"{name} calls a closure in its step, which computes gradients that nobody would check.",
            f"Train with an optimizer that takes one gradient a step; or with {name} in a plain loop, without a "
            "controller, in fp32 or bf16.",
        )
    if "closure" in kwargs or any(map(callable, args)):
        raise InvalidRequestError(
            f"step({name}, closure) was called; the gradients that a closure computes inside of step would not be "
            "checked.",
            "Compute the loss under controller.autocast(), call controller.backward(loss), then "
            "controller.step(optimizer) without a closure; or controller.train_step(closure, optimizer).",
        )


def refuse_clip_norm(clip_norm: object) -> None:
    """Raise `InvalidRequestError` unless gradients can be clipped to this norm: a number above 0, or infinity."""
    is_number = isinstance(clip_norm, numbers.Real) and not isinstance(clip_norm, bool)
    if not is_number or math.isnan(clip_norm) or clip_norm <= 0:  # type: ignore[operator, arg-type] # a number
        raise InvalidRequestError(
            f"clip_norm is {clip_norm!r}; it must be a number above 0.",
            "Pass the largest norm that the gradients may have, as 1.0; leave it out where nothing is to be clipped.",
        )
