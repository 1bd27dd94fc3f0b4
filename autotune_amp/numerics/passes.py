"""Repeatable forward and backward passes: the same weights, batches and random draws in any precision."""

from __future__ import annotations

import copy
import math
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeVar

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from autotune_amp.core.config import AmpConfig, LossScale
from autotune_amp.core.errors import WorkloadError
from autotune_amp.core.precisions import Precision
from autotune_amp.numerics.draws import DrawnInFp32, comparable_draws
from autotune_amp.precision import torch_state
from autotune_amp.precision.forward_wrapper import is_pinned, named, override, parameters_by_name, pin_fp32, unpin
from autotune_amp.precision.modes import MODES
from autotune_amp.precision.step_amp import StepAmp, parameters_of
from autotune_amp.precision.torch_state import autocast, set_flags

Gradients: TypeAlias = dict[str, Tensor]
K = TypeVar("K")


@dataclass(frozen=True)
class Loop:
    """A training loop of the user's own, whose modules `model` holds; `step(model, batch, amp)` is one training step.

    `forget(model)` undoes the changes of its steps other than to numbers in tensors. Batches have `batch_size` samples.
    """

    step: Callable[[Any, Any, StepAmp], object]
    forget: Callable[[Any], object]
    batch_size: int


@dataclass(frozen=True)
class CheckInputs:
    """Objects of a check: a model in training mode, its loss as the workload computes it, and batches on its device.

    `make_optimizer` returns a new optimizer for the parameters of a model like this one. With a `loop` the model holds
    all of its modules, the loss is `no_loss`, and the optimizer steps all parameters of the loop.

    `reference` is the same workload without changes other than the precision, None if there are none. `is_compiled`:
    one of these changes compiles the model; watching its passes would make another graph. Without `has_like_draws`, as
    with compiled code, dropout is disabled on a CPU too.
    """

    model: nn.Module
    loss: Callable[[nn.Module, Any], Tensor]
    batches: Sequence[Any]
    make_optimizer: Callable[[nn.Module], torch.optim.Optimizer]
    device: torch.device
    seed: int = 0
    loop: Loop | None = None
    reference: CheckInputs | None = None
    is_compiled: bool = False
    has_like_draws: bool = True


@dataclass(frozen=True)
class Pass:
    """Result of one pass. `gradients` are unscaled, in fp32, by parameter name, and sparse if autograd makes them so.

    Parameters without a gradient are missing. `largest` is the largest magnitude in the gradients, NaN if one is NaN.
    """

    loss: float
    gradients: Gradients
    largest: float

    @classmethod
    def measured(cls, loss: Tensor, gradients: Gradients) -> Pass:
        """Return the pass with its numbers; synchronizes with the device once."""
        numbers = torch.stack(
            [loss.detach().reshape(()).to(wide_dtype(loss.device)), largest_of(gradients.values(), loss.device)]
        )
        known, largest = numbers.tolist()
        return cls(known, gradients, largest)

    @property
    def is_finite(self) -> bool:
        """Return whether the loss and every gradient are finite."""
        return math.isfinite(self.loss) and math.isfinite(self.largest)

    @property
    def has_gradient(self) -> bool:
        """Return whether any number in the gradients is not zero."""
        return self.largest != 0


class Passes:
    """Repeatable passes over one model, by default from its first state; `num_passes` counts them.

    `drawn` makes random draws in half precision comparable. For a loop, `num_steps_per_call` is how often the latest
    call stepped one optimizer, `reuses_casts` whether any call did so inside one autocast in half precision, whose
    casts of the weights then predate the first step. `seconds_of` holds the seconds of the fastest pass in each
    precision. `has_drawn`: a pass used, or may have used, random numbers.
    """

    def __init__(self, subject: CheckInputs, model: nn.Module | None = None) -> None:
        self.subject = subject
        self.model = subject.model if model is None else model
        self.num_passes = 0
        self.num_steps_per_call = 1
        self.reuses_casts = False
        self.drawn: DrawnInFp32 | None = None
        self.seconds_of: dict[Precision, float] = {}
        self.has_drawn = subject.device.type != "cpu"
        self._draw_alike = subject.device.type == "cpu" and subject.has_like_draws
        self._first_state = _copied_state(self.model)

    def run(
        self,
        index: int,
        precision: Precision,
        *,
        scale: float = 1.0,
        restores: bool = True,
        around_forward: AbstractContextManager[object] | None = None,
        before_backward: Callable[[Tensor], object] | None = None,
        seed: int | None = None,
    ) -> Pass:
        """Run a pass over batch `index`, with its loss multiplied by `scale` before the backward pass.

        It begins from the first weights or, without `restores`, from the present weights and buffers. Each batch has a
        `seed` of its own. `before_backward` is called with the scaled loss. For a training loop of the user's own
        `around_forward` and `before_backward` are ignored.
        """
        started = time.perf_counter()
        if restores:
            self.restore()
        self.num_passes += 1
        self.model.zero_grad(set_to_none=True)
        set_flags(precision)
        torch_state.seed(self.subject.seed + index if seed is None else seed)
        generator = torch.get_rng_state()
        if self.subject.loop is not None:
            done = self._loop_pass(self.subject.loop, index, precision, scale)
        else:
            done = self._plain_pass(index, precision, scale, around_forward or nullcontext(), before_backward)
        self.has_drawn = self.has_drawn or not torch.equal(generator, torch.get_rng_state())
        seconds = time.perf_counter() - started  # after the synchronisation with the device
        self.seconds_of[precision] = min(seconds, self.seconds_of.get(precision, math.inf))
        return done

    def _plain_pass(
        self,
        index: int,
        precision: Precision,
        scale: float,
        around_forward: AbstractContextManager[object],
        before_backward: Callable[[Tensor], object] | None,
    ) -> Pass:
        with comparable_draws(self.model, self.drawn, are_alike=self._draw_alike):
            with autocast(precision, self.subject.device.type), around_forward:
                loss = self.subject.loss(self.model, self.subject.batches[index])
            to_go_back_from = scaled(loss, scale)
            if before_backward is not None:
                before_backward(to_go_back_from)
            torch.autograd.backward(to_go_back_from)
        gradients = {
            name: parameter.grad
            for name, parameter in parameters_by_name(self.model).items()
            if parameter.grad is not None
        }
        self.model.zero_grad(set_to_none=True)
        return Pass.measured(loss, unscaled(gradients, scale))

    def _loop_pass(self, loop: Loop, index: int, precision: Precision, scale: float) -> Pass:
        """Run a whole step of the loop without stepping an optimizer; its loss is the sum of all losses in it.

        Raises `NoStepError` if the call contains no optimizer step.
        """
        device_type = self.subject.device.type
        names = {id(parameter): name for name, parameter in parameters_by_name(self.model).items()}
        loss_scale = LossScale() if MODES[precision].takes_scaler else None
        config = AmpConfig(precision=precision, batch_size=loop.batch_size, loss_scale=loss_scale)
        amp = CatchingAmp(lambda: autocast(precision, device_type), device_type, config, names, scale)
        amp.begin()
        with comparable_draws(self.model, self.drawn, are_alike=self._draw_alike):
            loop.step(self.model, self.subject.batches[index], amp)
        self.model.zero_grad(set_to_none=True)
        loss = amp.total_loss(needs_autocast=MODES[precision].uses_autocast)
        if amp.num_steps == 0:
            raise NoStepError
        self.num_steps_per_call = max(amp.steps_of.values())
        self.reuses_casts = self.reuses_casts or amp.reuses_casts
        return Pass.measured(loss, amp.gradients)

    def step(self, optimizer: torch.optim.Optimizer, gradients: Gradients) -> None:
        """Set these gradients and step the optimizer."""
        for name, parameter in parameters_by_name(self.model).items():
            if name in gradients:
                parameter.grad = gradients[name].to(parameter.dtype)
        optimizer.step()
        self.model.zero_grad(set_to_none=True)

    def keep(self) -> None:
        """Make the present parameters and buffers the first state, from which `run` begins."""
        self._first_state.clear()  # before the copies, which need its memory
        self._first_state = _copied_state(self.model)

    def changed(self, named: Iterable[tuple[str, Tensor]]) -> Iterator[str]:
        """Yield the names of the parameters or buffers that differ from the first state.

        Synchronizes with the device for each. Tensors without data, on the meta device, are left out.
        """
        first = self._first_state
        for name, value in named:
            if not value.is_meta and (name not in first or not torch.equal(stored(value), stored(first[name]))):
                yield name

    def restore(self) -> None:
        """Restore the first parameters and buffers.

        Buffers that are new, or have another shape now, are left: they are caches, whose module knows their size. So
        are expanded ones, which cannot be written in place.
        """
        if self.subject.loop is not None:
            self.subject.loop.forget(self.model)
        changed: list[Tensor] = []
        first: list[Tensor] = []
        for name, value in (*self.model.named_parameters(), *self.model.named_buffers()):
            before = self._first_state.get(name)
            if before is not None and before.shape == value.shape and not _is_expanded(value):
                changed.append(value)
                first.append(before)
        with torch.no_grad():
            for indices in alike(changed):
                ours, theirs = ([values[index] for index in indices] for values in (changed, first))
                if is_plain(ours[0]):
                    torch._foreach_copy_(ours, theirs)
                else:
                    ours[0].copy_(theirs[0])

    @contextmanager
    def pinned(self, names: Sequence[str]) -> Iterator[None]:
        """Pin these modules in fp32 within the context. Raises `InvalidRequestError` if one is missing or cannot be."""
        with ExitStack() as stack:
            # Pins that the user's own model has already are kept.
            for module in [module for module in named(self.model, names) if not is_pinned(module)]:
                pin_fp32(module, self.subject.device.type)
                stack.callback(unpin, module)
            yield


def _is_expanded(tensor: Tensor) -> bool:
    sizes = zip(tensor.stride(), tensor.shape, strict=True) if tensor.layout == torch.strided else ()
    return any(stride == 0 and size > 1 for stride, size in sizes)


def _copied_state(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.detach().clone() for name, value in (*model.named_parameters(), *model.named_buffers())}


class NoStepError(Exception):
    """Raised if a call of train_step took no optimizer step, so that there are no gradients to compare."""


class CatchingAmp(StepAmp):
    """StepAmp with a fixed loss scale `factor` that collects gradients instead of stepping optimizers.

    `gradients` are unscaled, in fp32, by parameter name, which `names` gives for the parameter's id; for a parameter
    that is stepped twice the last.
    """

    def __init__(
        self,
        new_autocast: Callable[[], AbstractContextManager[object]],
        device_type: str,
        config: AmpConfig,
        names: Mapping[int, str],
        factor: float,
    ) -> None:
        super().__init__(new_autocast, device_type, config, scales=False)
        self.gradients: dict[str, Tensor] = {}
        self._names = names
        self._factor = factor
        self._unscaled: dict[int, bool] = {}  # by optimizer: whether its gradients were finite
        self.steps_of: Counter[int] = Counter()  # by optimizer
        self.reuses_casts = False
        self._stepped_inside: dict[int, int] = {}  # by optimizer: number of the autocast around its latest step

    def is_enabled(self) -> bool:
        """Return whether a scaler of the precision would be enabled."""
        return self.config.loss_scale is not None

    def get_scale(self) -> float:
        """Return the factor by which losses are multiplied."""
        super().get_scale()
        return self._factor

    def scale(self, outputs: Any) -> Any:
        """Multiply `outputs` by the factor."""
        super().scale(outputs)
        return tree_map(lambda leaf: scaled(leaf, self._factor) if isinstance(leaf, Tensor) else leaf, outputs)

    def unscale_(self, optimizer: torch.optim.Optimizer) -> None:
        """Divide the gradients by the factor. Non-finite ones are collected at once: clipping might hide them."""
        pairs = _gradients(optimizer)
        for parameter, gradient in zip(pairs, unscaled(pairs, self._factor).values(), strict=True):
            parameter.grad = gradient.to(parameter.dtype)
        gradients = [parameter.grad for parameter in pairs if parameter.grad is not None]
        is_finite = not gradients or math.isfinite(float(largest_of(gradients, gradients[0].device)))
        if not is_finite:
            self._catch(optimizer, 1.0)
        self._unscaled[id(optimizer)] = is_finite

    def step(self, optimizer: torch.optim.Optimizer, *_: Any, **__: Any) -> bool:
        """Collect the gradients, and return True like a step that was taken."""
        self.num_steps += 1
        self.steps_of[id(optimizer)] += 1
        if torch.is_autocast_enabled(self._device) and torch.is_autocast_cache_enabled():
            around = self._stepped_inside.get(id(optimizer))
            self.reuses_casts = self.reuses_casts or around == self.num_autocasts
            self._stepped_inside[id(optimizer)] = self.num_autocasts
        is_finite = self._unscaled.pop(id(optimizer), None)
        if is_finite is not False:
            self._catch(optimizer, self._factor if is_finite is None else 1.0)
        return True

    def update(self, new_scale: float | Tensor | None = None) -> None:  # noqa: ARG002 # as in GradScaler
        """End the step; the factor stays the same."""
        super().update()
        self._unscaled.clear()

    def _catch(self, optimizer: torch.optim.Optimizer, factor: float) -> None:
        gradients = {self._names[id(parameter)]: gradient for parameter, gradient in _gradients(optimizer).items()}
        self.gradients |= unscaled(gradients, factor)


def no_loss(model: nn.Module, batch: Any) -> Tensor:  # noqa: ARG001 # a loss function's signature
    """Raise `WorkloadError`. It stands in for the loss function where a training loop has none."""
    raise WorkloadError("A loop of its own has no loss function to run alone.", "Run its train_step.")


def scaled(loss: Tensor, factor: float) -> Tensor:
    """Multiply `loss` by an fp32 tensor, as GradScaler does, so that an fp16 loss gets its gradient in fp16."""
    return loss * torch.full((), factor, device=loss.device)


def unscaled(gradients: Mapping[K, Tensor], factor: float) -> dict[K, Tensor]:
    """Return copies of the gradients divided by the factor, in fp32 or complex; sparse ones stay sparse."""
    found = {
        key: gradient.detach().coalesce() if gradient.is_sparse else gradient.detach()
        for key, gradient in gradients.items()
    }
    keys = list(found)
    for indices in alike(list(found.values())):
        some = [found[keys[index]] for index in indices]
        if is_plain(some[0]) and some[0].dtype == torch.float32:
            divided = list(torch._foreach_mul(some, 1 / factor))
        else:  # CSR has no division
            divided = [(each if each.is_complex() else each.float()) * (1 / factor) for each in some]
        found.update(zip((keys[index] for index in indices), divided, strict=True))
    return found


def largest_of(tensors: Iterable[Tensor], device: torch.device) -> Tensor:
    """Return the largest magnitude of all entries, on the device; NaN if one is NaN."""
    parts = [torch.view_as_real(part) if part.is_complex() else part for part in map(stored, tensors) if part.numel()]
    found = [torch.zeros((), dtype=wide_dtype(device), device=device)]
    for indices in alike(parts):
        some = [parts[index] for index in indices]
        each = torch._foreach_norm(some, math.inf) if is_plain(some[0]) else [some[0].abs().amax()]
        found.append(torch.stack(list(each)).amax().to(found[0]))
    return torch.stack(found).amax()


def alike(tensors: Sequence[Tensor]) -> list[list[int]]:
    """Group the indices of tensors that one call of a `torch._foreach` function accepts; others are single."""
    groups: dict[object, list[int]] = {}
    for index, tensor in enumerate(tensors):
        groups.setdefault((tensor.device, tensor.dtype) if is_plain(tensor) else index, []).append(index)
    return list(groups.values())


def is_plain(tensor: Tensor) -> bool:
    """Return whether the tensor is strided, has data, and is of no subclass, which might lack an operation."""
    return type(tensor) in (Tensor, nn.Parameter) and tensor.layout == torch.strided and not tensor.is_meta


def wide_dtype(device: torch.device) -> torch.dtype:
    """Return fp64, in which squares of fp32 numbers do not overflow; on MPS, which lacks it, fp32."""
    return torch.float32 if device.type == "mps" else torch.float64


def stored(tensor: Tensor) -> Tensor:
    """Return a view of the numbers that a tensor stores: for a sparse one the explicit entries."""
    if tensor.layout == torch.strided:
        return tensor
    return tensor._values() if tensor.is_sparse else tensor.values()


def _gradients(optimizer: torch.optim.Optimizer) -> dict[Tensor, Tensor]:
    return {parameter: parameter.grad for parameter in parameters_of(optimizer) if parameter.grad is not None}


def are_equal(one: Any, other: Any) -> bool:
    """Return whether two batches hold the same numbers; batches without tensors count as different."""
    ours, theirs = ([leaf for leaf in tree_leaves(batch) if isinstance(leaf, Tensor)] for batch in (one, other))
    if not ours or len(ours) != len(theirs):
        return False
    pairs = zip(ours, theirs, strict=True)
    return all(a.shape == b.shape and a.dtype == b.dtype and torch.equal(a, b) for a, b in pairs)


def in_fp32(model: nn.Module, device_type: str) -> nn.Module:
    """Return a copy of the model with fp32 weights that runs in fp32."""
    reference = copy.deepcopy(model).float()
    override(reference, "fp32", device_type)  # casts its inputs to fp32
    return reference
