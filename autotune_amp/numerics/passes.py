"""Forward and backward passes that can be repeated: the same weights, batches and draws in any precision."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from autotune_amp.core.config import Precision
from autotune_amp.core.errors import InvalidRequestError
from autotune_amp.numerics.blame import modules_by_name, parameters_by_name
from autotune_amp.numerics.draws import comparable_draws
from autotune_amp.numerics.loop import CatchingAmp, Loop, NoStepError, is_all_finite, scaled, unscaled
from autotune_amp.precision import torch_state
from autotune_amp.precision.mode import autocast, is_pinned, pin_fp32, set_flags, unpin

Gradients: TypeAlias = dict[str, Tensor]


@dataclass(frozen=True)
class Subject:
    """What is checked: a model in training mode, its loss as the workload computes it, and batches on its device.

    `make_optimizer` gives a fresh optimizer over the parameters of a model like this one. With a `loop` the model holds
    all of its modules, the loss is `no_loss`, and the optimizer steps all that the loop has.
    """

    model: nn.Module
    loss: Callable[[nn.Module, Any], Tensor]
    batches: Sequence[Any]
    make_optimizer: Callable[[nn.Module], torch.optim.Optimizer]
    device: torch.device
    seed: int = 0
    loop: Loop | None = None


@dataclass(frozen=True)
class Pass:
    """One pass. `gradients` are unscaled, in fp32, by parameter name, sparse where autograd makes them so.

    Parameters that got none are missing.
    """

    loss: float
    gradients: Gradients

    @property
    def is_finite(self) -> bool:
        """Whether the loss and every gradient are."""
        return math.isfinite(self.loss) and all(is_all_finite(gradient) for gradient in self.gradients.values())


class Passes:
    """Passes over one model, which is left in its first state after each; counts them."""

    def __init__(self, subject: Subject, model: nn.Module | None = None) -> None:
        self.subject = subject
        self.model = subject.model if model is None else model
        self.num_passes = 0
        self._draws = comparable_draws(subject.device)
        self._first_state = {name: value.detach().clone() for name, value in _state(self.model)}

    def run(
        self,
        index: int,
        precision: Precision,
        *,
        scale: float = 1.0,
        around_forward: AbstractContextManager[object] | None = None,
        before_backward: Callable[[Tensor], object] | None = None,
        around_backward: AbstractContextManager[object] | None = None,
    ) -> Pass:
        """One pass over batch `index` from the first weights, its loss multiplied by `scale` before going back.

        `before_backward` is given the scaled loss.
        """
        self.restore()
        return self.go_on(
            index,
            precision,
            scale=scale,
            around_forward=around_forward,
            before_backward=before_backward,
            around_backward=around_backward,
        )

    def go_on(
        self,
        index: int,
        precision: Precision,
        *,
        scale: float = 1.0,
        around_forward: AbstractContextManager[object] | None = None,
        before_backward: Callable[[Tensor], object] | None = None,
        around_backward: AbstractContextManager[object] | None = None,
    ) -> Pass:
        """`run` from the weights as they are, for a training run; buffers move on.

        A loop's forward and backward passes are its own affair: what is to be done around them is not.
        """
        self.num_passes += 1
        self.model.zero_grad(set_to_none=True)
        set_flags(precision)
        torch_state.seed(self.subject.seed + index)
        if self.subject.loop is not None:
            return self._loop_pass(self.subject.loop, index, precision, scale)
        with self._draws, autocast(precision, self.subject.device.type), around_forward or nullcontext():
            loss = self.subject.loss(self.model, self.subject.batches[index])
        to_go_back_from = scaled(loss, scale)
        if before_backward is not None:
            before_backward(to_go_back_from)
        with around_backward or nullcontext():
            torch.autograd.backward(to_go_back_from)
        value = float(loss.detach())
        return Pass(value, self._take_gradients(scale))

    def _loop_pass(self, loop: Loop, index: int, precision: Precision, scale: float) -> Pass:
        """A whole step that nothing is stepped in; its loss is the sum of all that it went back from.

        Raises `NoStepError` where the call is not a whole step.
        """
        device_type = self.subject.device.type
        names = {id(parameter): name for name, parameter in parameters_by_name(self.model).items()}
        amp = CatchingAmp(lambda: autocast(precision, device_type), device_type, loop.config(precision), names, scale)
        amp.begin()
        with self._draws:
            loop.step(self.model, self.subject.batches[index], amp)
        self.model.zero_grad(set_to_none=True)
        loss = float(amp.total_loss(needs_autocast=precision in ("bf16", "fp16")))
        if amp.num_steps == 0:
            raise NoStepError
        return Pass(loss, amp.gradients)

    def step(self, optimizer: torch.optim.Optimizer, gradients: Gradients) -> None:
        """Have the optimizer step on these gradients."""
        for name, parameter in parameters_by_name(self.model).items():
            if name in gradients:
                parameter.grad = gradients[name].to(parameter.dtype)
        optimizer.step()
        self.model.zero_grad(set_to_none=True)

    def keep(self) -> None:
        """Have `run` begin from the parameters and buffers as they are now."""
        for name, value in _state(self.model):
            first = self._first_state.get(name)
            if first is None or first.shape != value.shape:
                self._first_state[name] = value.detach().clone()
            else:
                first.copy_(value.detach())

    def has_moved(self) -> bool:
        """Whether a trained parameter is no longer what `run` begins from; waits for the device."""
        trained = ((name, value) for name, value in self.model.named_parameters() if value.requires_grad)
        return any(
            name not in self._first_state or not torch.equal(value, self._first_state[name]) for name, value in trained
        )

    def restore(self) -> None:
        """Put the first parameters and buffers back.

        Buffers that came since, or that have another shape now, stay: they are caches, whose module knows their size.
        """
        if self.subject.loop is not None:
            self.subject.loop.forget(self.model)
        with torch.no_grad():
            for name, value in _state(self.model):
                first = self._first_state.get(name)
                if first is not None and first.shape == value.shape:
                    value.copy_(first)

    @contextmanager
    def pinned(self, names: Sequence[str]) -> Iterator[None]:
        """Run these modules in fp32; raises `InvalidRequestError` for one that cannot be, or is not there."""
        with ExitStack() as stack:
            # What the user's own model has pinned already stays so.
            for module in [module for module in named(self.model, names) if not is_pinned(module)]:
                pin_fp32(module, self.subject.device.type)
                stack.callback(unpin, module)
            yield

    def _take_gradients(self, scale: float) -> Gradients:
        gradients = {}
        for name, parameter in parameters_by_name(self.model).items():
            if parameter.grad is not None:
                gradients[name] = unscaled(parameter.grad, scale)
                parameter.grad = None
        return gradients


def named(model: nn.Module, names: Sequence[str]) -> list[nn.Module]:
    """The modules of the user's own model with these names; raises `InvalidRequestError` where one is missing."""
    modules = modules_by_name(model)
    for name in names:
        if name not in modules:
            raise InvalidRequestError(
                f"The model has no module named {name!r}.", "Take names from model.named_modules()."
            )
    return [modules[name] for name in names]


def _state(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from model.named_parameters()
    # An expanded buffer cannot be written to in place, by the model no more than by `restore`.
    yield from ((name, buffer) for name, buffer in model.named_buffers() if not _is_expanded(buffer))


def _is_expanded(tensor: Tensor) -> bool:
    return tensor.layout == torch.strided and any(
        stride == 0 and size > 1 for stride, size in zip(tensor.stride(), tensor.shape, strict=True)
    )
