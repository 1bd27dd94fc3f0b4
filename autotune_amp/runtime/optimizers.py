"""Optimizers of the loop: how each has to be stepped, and problems with the parameters that it holds."""

from __future__ import annotations

import functools
import inspect
import logging
import math
import numbers
import weakref
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from autotune_amp.core.errors import InvalidRequestError
from autotune_amp.core.precisions import Precision
from autotune_amp.numerics.locate import is_nonfinite_weight, nonfinite_parameters
from autotune_amp.precision.modes import MODES
from autotune_amp.precision.step_amp import needs_closure, parameters_of
from autotune_amp.precision.torch_state import HALF_DTYPES
from autotune_amp.runtime.scaler import NO_GRADIENTS

log = logging.getLogger("autotune_amp.runtime")

IDLE_UPDATES = 3  # without any gradient so far; a single one is normal for frameworks that step all optimizers
IDLE_AFTER_TRAINING_UPDATES = 100  # a part of the model may rest for a while


def refuse_half_parameters(optimizer: torch.optim.Optimizer, precision: Precision) -> None:
    """Raise `InvalidRequestError` for half-precision parameters under fp16, whose gradients cannot be unscaled."""
    for parameter in parameters_of(optimizer):
        if MODES[precision].takes_scaler and parameter.requires_grad and parameter.dtype.to_real() in HALF_DTYPES:
            raise InvalidRequestError(
                f"A trainable parameter of shape {tuple(parameter.shape)} is {str(parameter.dtype).split('.')[1]}; "
                "precision fp16 needs trainable parameters in fp32, since fp16 gradients cannot be unscaled.",
                "Convert the model with model.float(), autocast casts where it pays; or train with bf16 "
                "weights under precision bf16.",
            )


def makes_buffers_unread(optimizer: torch.optim.Optimizer) -> bool:
    """Whether a first step that the device skips leaves uninitialized memory behind, as fused SGD's momentum."""
    if not isinstance(optimizer, torch.optim.SGD) or optimizer.state:
        return False
    return any(group.get("fused") and group["momentum"] for group in optimizer.param_groups)


@functools.cache
def takes_a_scaler(optimizer: type[torch.optim.Optimizer]) -> bool:
    """Whether the optimizer's `step` takes the scaler itself, as custom optimizers used to."""
    return "grad_scaler" in inspect.signature(optimizer.step).parameters


def refuse_closure(optimizer: torch.optim.Optimizer, args: Sequence[Any] = (), kwargs: Mapping[str, Any] = {}) -> None:
    """Raise `InvalidRequestError` for an optimizer whose step needs a closure, and for a step that is given one."""
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
    """Raise `InvalidRequestError` unless `clip_norm` is a number above 0, or infinity."""
    is_number = isinstance(clip_norm, numbers.Real) and not isinstance(clip_norm, bool)
    if not is_number or math.isnan(clip_norm) or clip_norm <= 0:  # type: ignore[operator, arg-type] # a number
        raise InvalidRequestError(
            f"clip_norm is {clip_norm!r}; it must be a number above 0.",
            "Pass the largest norm that the gradients may have, as 1.0; leave it out where nothing is to be clipped.",
        )


class KnownOptimizers:
    """Optimizers stepped by the loop, by number, and the number of updates that each has had no gradient."""

    def __init__(self) -> None:
        self._known: dict[int, weakref.ref[torch.optim.Optimizer]] = {}
        self._num_idle: Counter[int] = Counter()
        self._have_trained: set[int] = set()

    def __getstate__(self) -> dict[str, Any]:
        """Return an empty state, since a copy steps other optimizers."""
        return vars(KnownOptimizers())

    def __len__(self) -> int:
        return len(self._known)

    def __contains__(self, number: int) -> bool:
        return number in self._known

    def add(self, number: int, optimizer: torch.optim.Optimizer) -> None:
        """Register an optimizer by a weak reference."""
        self._known[number] = weakref.ref(optimizer)

    def _living(self) -> list[torch.optim.Optimizer]:
        return [optimizer for reference in self._known.values() if (optimizer := reference()) is not None]

    def num_gradient_entries(self) -> int:
        """Return the number of entries of all gradients, without those of optimizers that are gone."""
        trained = (p for optimizer in self._living() for p in parameters_of(optimizer) if p.requires_grad)
        return sum(parameter.numel() for parameter in trained)

    def may_hold_gradients(self) -> bool:
        """Return whether any optimizer may hold gradients, which is unknown as long as none was stepped."""
        known = self._living()
        # FSDP, whose parameters are DTensors, keeps the gradients of a pass without an exchange elsewhere.
        return not known or any(
            parameter.grad is not None or hasattr(parameter, "to_local")
            for optimizer in known
            for parameter in parameters_of(optimizer)
        )

    def note(self, verdicts: Mapping[int, float | Tensor]) -> None:
        """Count an update in which these optimizers were stepped, and log an error for one without gradients for many
        updates.

        GradScaler raises at once; but a framework that steps all its optimizers every time may go on.
        """
        for number, verdict in verdicts.items():
            if verdict != NO_GRADIENTS:
                self._have_trained.add(number)
                self._num_idle[number] = 0
                continue
            self._num_idle[number] += 1
            first = IDLE_AFTER_TRAINING_UPDATES if number in self._have_trained else IDLE_UPDATES
            if self._num_idle[number] in {first * 10**power for power in range(8)}:
                self._warn(number)

    def _warn(self, number: int) -> None:
        optimizer = self._known[number]() if number in self._known else None
        held = [] if optimizer is None else parameters_of(optimizer)
        what = f", whose first parameter has shape {tuple(held[0].shape)}," if held else ""
        log.error(
            "The optimizer %s (number %d)%s has had no gradient in %d updates running: nothing that it holds is "
            "trained. It may hold the parameters of another copy of the model, or of what the model was before they "
            "were replaced; or the loss is detached from them. Make the optimizer from the parameters of the model "
            "that computes the loss.",
            "" if optimizer is None else type(optimizer).__name__,
            number + 1,
            what,
            self._num_idle[number],
        )

    def bad_weights(self, model: nn.Module | None) -> tuple[str, ...]:
        """Return the names of non-finite parameters of optimizers and model. Synchronizes with the device."""
        names = () if model is None else nonfinite_parameters(model)
        own = {id(parameter) for parameter in (() if model is None else model.parameters())}
        held = [(known(), number) for number, known in self._known.items()]
        return *names, *(
            f"one of shape {tuple(parameter.shape)} of {type(optimizer).__name__} {number + 1}"
            for optimizer, number in held
            for parameter in ([] if optimizer is None else parameters_of(optimizer))
            if id(parameter) not in own and is_nonfinite_weight(parameter)
        )
