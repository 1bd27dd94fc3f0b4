"""Repeatable forward and backward passes: the same weights, batches and random numbers in any precision."""

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
from autotune_amp.numerics.draws import Fp32RandomMode, comparable_draws
from autotune_amp.precision import torch_state
from autotune_amp.precision.forward_wrapper import (
    is_pinned,
    layers_with_half_compute_dtype,
    modules_named,
    override,
    parameters_by_name,
    pin_fp32,
    unpin,
)
from autotune_amp.precision.modes import MODES
from autotune_amp.precision.step_amp import StepAmp, parameters_of
from autotune_amp.precision.torch_state import autocast, is_packed, set_flags

Gradients: TypeAlias = dict[str, Tensor]
K = TypeVar("K")


@dataclass(frozen=True)
class CheckedLoop:
    """Custom training loop to check. `step(model, batch, amp)` is one training step, and `model` holds all its modules.

    `forget(model)` undoes changes by its steps that are not in tensors, such as counters. Batches have `batch_size`
    samples.
    """

    step: Callable[[Any, Any, StepAmp], object]
    forget: Callable[[Any], object]
    batch_size: int


@dataclass(frozen=True)
class CheckInputs:
    """Inputs of a check: a model in training mode, its loss function, and batches on its device.

    `make_optimizer(model)` returns a new optimizer for a model like this one. With a custom training `loop` the model
    holds all of its modules, `loss` is `raise_no_loss`, and the optimizer steps all of its parameters.

    `reference` is the workload to run in fp32, without changes such as compiled or converted layers; None if it is the
    same. Each pass runs inside a new `around()`, for state of the whole process. `is_compiled` is True if such a change
    compiles the model: then module outputs are not observed, which would compile another graph. `has_like_draws` is
    False if one seed gives different random numbers in different precisions, as in compiled code: then dropout is
    disabled on a CPU too.
    """

    model: nn.Module
    loss: Callable[[nn.Module, Any], Tensor]
    batches: Sequence[Any]
    make_optimizer: Callable[[nn.Module], torch.optim.Optimizer]
    device: torch.device
    seed: int = 0
    loop: CheckedLoop | None = None
    reference: CheckInputs | None = None
    around: Callable[[], AbstractContextManager[object]] = nullcontext
    is_compiled: bool = False
    has_like_draws: bool = True


@dataclass(frozen=True)
class PassResult:
    """Result of one pass. `gradients` are unscaled, in fp32, by parameter name; they may be sparse tensors.

    Parameters without a gradient are missing. `largest` is the largest magnitude in the gradients, NaN if one is NaN.
    """

    loss: float
    gradients: Gradients
    largest: float

    @classmethod
    def from_tensors(cls, loss: Tensor, gradients: Gradients) -> PassResult:
        """Create a result from the loss and the gradients. Synchronizes with the device once."""
        numbers = torch.stack(
            [loss.detach().reshape(()).to(wide_dtype(loss.device)), largest_magnitude(gradients.values(), loss.device)]
        )
        loss_value, largest = numbers.tolist()
        return cls(loss_value, gradients, largest)

    @property
    def is_finite(self) -> bool:
        """Return whether the loss and every gradient are finite."""
        return math.isfinite(self.loss) and math.isfinite(self.largest)

    @property
    def has_gradient(self) -> bool:
        """Return whether any number in the gradients is not zero."""
        return self.largest != 0


class Passes:
    """Runner of repeatable passes over one model, by default from its first weights and buffers.

    `num_passes` counts the passes, and `seconds_of` holds the seconds of the fastest one in each precision, without
    those of restoring the first state before it: `restore_seconds`, of the latest pass that did.
    `has_random_draws` is True if a pass used, or may have used, random numbers. If `random_mode` is set, half-precision
    random numbers are drawn in fp32. For a custom training loop, `num_steps_per_call` is the number of steps of one
    optimizer in the latest call. `reuses_casts` is True if a call made several of them inside one autocast, which keeps
    using the weights cast before the first.
    """

    def __init__(self, subject: CheckInputs, model: nn.Module | None = None) -> None:
        self.subject = subject
        self.model = subject.model if model is None else model
        self.num_passes = 0
        self.num_steps_per_call = 1
        self.reuses_casts = False
        self.random_mode: Fp32RandomMode | None = None
        self.seconds_of: dict[Precision, float] = {}
        self.restore_seconds = 0.0
        self.has_random_draws = subject.device.type != "cpu"
        self._has_like_draws = subject.device.type == "cpu" and subject.has_like_draws
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
    ) -> PassResult:
        """Run a pass over batch `index`, with its loss multiplied by `scale` before the backward pass.

        With `restores` the first weights and buffers are restored before it. `seed` defaults to one per batch. The
        forward pass runs inside `around_forward`, and `before_backward` is called with the scaled loss; a custom
        training loop ignores both.
        """
        if restores:
            restore_started = time.perf_counter()
            self.restore()
            self.restore_seconds = time.perf_counter() - restore_started
        started = time.perf_counter()
        self.num_passes += 1
        self.model.zero_grad(set_to_none=True)
        set_flags(precision)
        torch_state.seed(self.subject.seed + index if seed is None else seed)
        generator_state = torch.get_rng_state()
        with self.subject.around():
            if self.subject.loop is not None:
                result = self._run_loop(self.subject.loop, index, precision, scale)
            else:
                result = self._run_model(index, precision, scale, around_forward or nullcontext(), before_backward)
        self.has_random_draws = self.has_random_draws or not torch.equal(generator_state, torch.get_rng_state())
        seconds = time.perf_counter() - started  # after the synchronisation with the device
        self.seconds_of[precision] = min(seconds, self.seconds_of.get(precision, math.inf))
        return result

    def _run_model(
        self,
        index: int,
        precision: Precision,
        scale: float,
        around_forward: AbstractContextManager[object],
        before_backward: Callable[[Tensor], object] | None,
    ) -> PassResult:
        """Run forward and backward pass of the model, without an optimizer step."""
        with comparable_draws(self.model, self.random_mode, are_alike=self._has_like_draws):
            with autocast(precision, self.subject.device.type), around_forward:
                loss = self.subject.loss(self.model, self.subject.batches[index])
            scaled_loss = scaled(loss, scale)
            if before_backward is not None:
                before_backward(scaled_loss)
            torch.autograd.backward(scaled_loss)
        gradients = {
            name: parameter.grad
            for name, parameter in parameters_by_name(self.model).items()
            if parameter.grad is not None
        }
        self.model.zero_grad(set_to_none=True)
        return PassResult.from_tensors(loss, unscaled(gradients, scale))

    def _run_loop(self, loop: CheckedLoop, index: int, precision: Precision, scale: float) -> PassResult:
        """Run one training step of the loop, collecting gradients in place of optimizer steps; sum up its losses.

        Raises `NoStepError` if the call contains no optimizer step.
        """
        device_type = self.subject.device.type
        names = {id(parameter): name for name, parameter in parameters_by_name(self.model).items()}
        loss_scale = LossScale() if MODES[precision].takes_scaler else None
        config = AmpConfig(precision=precision, batch_size=loop.batch_size, loss_scale=loss_scale)
        amp = GradientCollectingAmp(lambda: autocast(precision, device_type), device_type, config, names, scale)
        amp.begin()
        with comparable_draws(self.model, self.random_mode, are_alike=self._has_like_draws):
            loop.step(self.model, self.subject.batches[index], amp)
        self.model.zero_grad(set_to_none=True)
        loss = amp.total_loss(needs_autocast=MODES[precision].uses_autocast)
        if amp.num_steps == 0:
            raise NoStepError("one call of train_step takes no optimizer step")
        self.num_steps_per_call = max(amp.steps_of.values())
        self.reuses_casts = self.reuses_casts or amp.reuses_casts
        return PassResult.from_tensors(loss, amp.gradients)

    def step(self, optimizer: torch.optim.Optimizer, gradients: Gradients) -> None:
        """Set these gradients and step the optimizer."""
        for name, parameter in parameters_by_name(self.model).items():
            if name in gradients:
                parameter.grad = gradients[name].to(parameter.dtype)
        optimizer.step()
        self.model.zero_grad(set_to_none=True)

    def keep(self) -> None:
        """Make the current parameters and buffers the first state, which `restore` and `run` begin from."""
        self._first_state.clear()  # frees its memory for the copies
        self._first_state = _copied_state(self.model)

    def changed(self, tensors: Iterable[tuple[str, Tensor]]) -> Iterator[str]:
        """Yield the names of the parameters or buffers that differ from the first state.

        Synchronizes with the device for each. Tensors without data, on the meta device, are left out.
        """
        first = self._first_state
        for name, value in tensors:
            if not value.is_meta and (
                name not in first or not torch.equal(stored_values(value), stored_values(first[name].to(value.device)))
            ):
                yield name

    def restore(self) -> None:
        """Restore the first parameters and buffers.

        Buffers that are new or have changed their shape, such as caches, stay as they are, and so do expanded ones,
        which cannot be written in place.
        """
        if self.subject.loop is not None:
            self.subject.loop.forget(self.model)
        with torch.no_grad():
            for name, value in (*self.model.named_parameters(), *self.model.named_buffers()):
                first = self._first_state.get(name)
                if first is not None and first.shape == value.shape and not _is_expanded(value):
                    value.copy_(first)

    @contextmanager
    def pinned(self, names: Sequence[str]) -> Iterator[None]:
        """Pin these modules in fp32 within the context; pins that the user set stay.

        Raises `InvalidRequestError` if a module is missing or cannot be pinned.
        """
        with ExitStack() as stack:
            for module in [module for module in modules_named(self.model, names) if not is_pinned(module)]:
                pin_fp32(module, self.subject.device.type)
                stack.callback(unpin, module)
            yield


def _is_expanded(tensor: Tensor) -> bool:
    sizes = zip(tensor.stride(), tensor.shape, strict=True) if tensor.layout == torch.strided else ()
    return any(stride == 0 and size > 1 for stride, size in sizes)


def _copied_state(model: nn.Module) -> dict[str, Tensor]:
    """Return copies, of plain tensors in host memory, since a training may fill that of its device."""
    values = {name: value.detach() for name, value in (*model.named_parameters(), *model.named_buffers())}
    return {name: v.to("cpu", copy=True) if is_plain_tensor(v) else v.clone() for name, v in values.items()}


class NoStepError(Exception):
    """Raised with the reason if a call of train_step leaves no gradients of one optimizer step to compare."""


class GradientCollectingAmp(StepAmp):
    """StepAmp with a fixed loss scale `factor` that collects gradients instead of stepping optimizers.

    `gradients` are unscaled, in fp32, by parameter name; if a parameter is stepped twice, those of its last step.
    `names` maps the id of each parameter to its name.
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
        """Divide the gradients by the factor. Non-finite gradients are collected now, before clipping can hide them."""
        pairs = _gradients(optimizer)
        for parameter, gradient in zip(pairs, unscaled(pairs, self._factor).values(), strict=True):
            parameter.grad = gradient.to(parameter.dtype)
        gradients = [parameter.grad for parameter in pairs if parameter.grad is not None]
        is_finite = not gradients or math.isfinite(float(largest_magnitude(gradients, gradients[0].device)))
        if not is_finite:
            self._collect(optimizer, 1.0)
        self._unscaled[id(optimizer)] = is_finite

    def step(self, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> bool:
        """Collect the gradients in place of a step, and return True. Raises `NoStepError` for a step with a closure."""
        if any(map(callable, (*args, *kwargs.values()))):
            raise NoStepError("a step with a closure computes several gradients")
        self.num_steps += 1
        self.steps_of[id(optimizer)] += 1
        if torch.is_autocast_enabled(self._device) and torch.is_autocast_cache_enabled():
            around = self._stepped_inside.get(id(optimizer))
            self.reuses_casts = self.reuses_casts or around == self.num_autocasts
            self._stepped_inside[id(optimizer)] = self.num_autocasts
        is_finite = self._unscaled.pop(id(optimizer), None)
        if is_finite is not False:
            self._collect(optimizer, self._factor if is_finite is None else 1.0)
        return True

    def update(self, new_scale: float | Tensor | None = None) -> None:  # noqa: ARG002 # as in GradScaler
        """End the step without changing the factor."""
        super().update()
        self._unscaled.clear()

    def _collect(self, optimizer: torch.optim.Optimizer, factor: float) -> None:
        gradients = {self._names[id(parameter)]: gradient for parameter, gradient in _gradients(optimizer).items()}
        self.gradients |= unscaled(gradients, factor)


def raise_no_loss(model: nn.Module, batch: Any) -> Tensor:  # noqa: ARG001 # a loss function's signature
    """Raise `WorkloadError`. Used in place of the loss function of a custom training loop, which has none."""
    raise WorkloadError("A custom training loop has no separate loss function.", "Run its train_step.")


def scaled(loss: Tensor, factor: float) -> Tensor:
    """Multiply `loss` by `factor` as an fp32 tensor, like GradScaler, so that an fp16 loss has an fp16 gradient."""
    return loss * torch.full((), factor, device=loss.device)


def unscaled(gradients: Mapping[K, Tensor], factor: float) -> dict[K, Tensor]:
    """Return copies of the gradients divided by the factor, in fp32 or complex; sparse ones stay sparse."""
    results = {
        key: gradient.detach().coalesce() if gradient.is_sparse else gradient.detach()
        for key, gradient in gradients.items()
    }
    keys = list(results)
    for indices in foreach_groups(list(results.values())):
        group = [results[keys[index]] for index in indices]
        if is_plain_tensor(group[0]) and group[0].dtype == torch.float32:
            divided = list(torch._foreach_mul(group, 1 / factor))
        else:  # CSR has no division
            divided = [(each if each.is_complex() else each.float()) * (1 / factor) for each in group]
        results.update(zip((keys[index] for index in indices), divided, strict=True))
    return results


def largest_magnitude(tensors: Iterable[Tensor], device: torch.device) -> Tensor:
    """Return the largest magnitude of all entries, on the device; NaN if one is NaN."""
    parts = [
        torch.view_as_real(part) if part.is_complex() else part for part in map(stored_values, tensors) if part.numel()
    ]
    maxima = [torch.zeros((), dtype=wide_dtype(device), device=device)]
    for indices in foreach_groups(parts):
        group = [parts[index] for index in indices]
        norms = torch._foreach_norm(group, math.inf) if is_plain_tensor(group[0]) else [group[0].abs().amax()]
        maxima.append(torch.stack(list(norms)).amax().to(maxima[0]))
    return torch.stack(maxima).amax()


def foreach_groups(tensors: Sequence[Tensor]) -> list[list[int]]:
    """Group the indices of tensors that one `torch._foreach` call accepts; other tensors get a group of their own."""
    groups: dict[object, list[int]] = {}
    for index, tensor in enumerate(tensors):
        groups.setdefault((tensor.device, tensor.dtype) if is_plain_tensor(tensor) else index, []).append(index)
    return list(groups.values())


def is_plain_tensor(tensor: Tensor) -> bool:
    """Return whether the tensor is strided, has data, and is not of a subclass, which may lack operations."""
    return type(tensor) in (Tensor, nn.Parameter) and tensor.layout == torch.strided and not tensor.is_meta


def wide_dtype(device: torch.device) -> torch.dtype:
    """Return fp64, in which squares of fp32 numbers do not overflow; on MPS, which lacks it, fp32."""
    return torch.float32 if device.type == "mps" else torch.float64


def stored_values(tensor: Tensor) -> Tensor:
    """Return a view of the numbers that a tensor stores: for a sparse one the explicit entries."""
    if tensor.layout == torch.strided:
        return tensor
    return tensor._values() if tensor.is_sparse else tensor.values()


def _gradients(optimizer: torch.optim.Optimizer) -> dict[Tensor, Tensor]:
    return {parameter: parameter.grad for parameter in parameters_of(optimizer) if parameter.grad is not None}


def are_equal(one: Any, other: Any) -> bool:
    """Return whether two batches hold the same numbers; batches without tensors count as different."""
    first, second = ([leaf for leaf in tree_leaves(batch) if isinstance(leaf, Tensor)] for batch in (one, other))
    if not first or len(first) != len(second):
        return False
    pairs = zip(first, second, strict=True)
    return all(a.shape == b.shape and a.dtype == b.dtype and holds_equal(a, b) for a, b in pairs)


def holds_equal(one: Tensor, other: Tensor) -> bool:
    """Return whether two tensors of one shape hold the same numbers in the same places, NaN as in `torch.equal`."""
    if one.layout != other.layout:
        return False
    stored = zip(_stored(one), _stored(other), strict=True)
    return all(a.shape == b.shape and torch.equal(a, b) for a, b in stored)


def _stored(tensor: Tensor) -> list[Tensor]:
    """Return the dense tensors that a tensor is stored as: itself, or the places and values of a sparse one."""
    if tensor.layout == torch.strided:
        return [tensor]
    if tensor.is_sparse:
        return [tensor._indices(), tensor._values()]
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        return [tensor.crow_indices(), tensor.col_indices(), tensor.values()]
    return [tensor.ccol_indices(), tensor.row_indices(), tensor.values()]


def _in_fp32(tensor: Tensor) -> Tensor:
    return tensor.float() if tensor.is_floating_point() and not is_packed(tensor) else tensor


def fp32_copy(model: nn.Module, device_type: str) -> nn.Module:
    """Return a copy of the model with fp32 weights that runs in fp32. Quantized weights stay, and are computed with in
    fp32.
    """
    reference = copy.deepcopy(model)
    # Module.float() would convert packed weights too, and Transformers refuses it for quantized models.
    reference._apply(_in_fp32)  # type: ignore[no-untyped-call]  # torch does not type it
    for layer in layers_with_half_compute_dtype(reference):
        layer.compute_dtype = torch.float32
    override(reference, "fp32", device_type)  # casts its inputs to fp32
    return reference
