"""Recorder of forward and backward passes: losses, autocast regions, and the inputs of the outermost modules."""

from __future__ import annotations

import functools
import math
import time
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch.amp.autocast_mode import autocast
from torch.amp.grad_scaler import GradScaler
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.parameter import is_lazy
from torch.optim.optimizer import Optimizer
from torch.utils.data import get_worker_info

from .batches import first_tensor, size_of
from .channel import Channel
from .tokens import TokenCount, count_tokens

NUM_FULLY_WATCHED = (
    3  # first steps, in which module calls are recorded; then the patch is removed, as it slows training
)
_MAX_STEPS_OF_OTHERS = 10  # optimizer steps after which an optimizer without a step is not waited for
MAX_BACKWARD_WITHOUT_STEP = 512  # assumed larger than any accumulation; then the script seems to update weights itself
MAX_FORWARDS, MAX_LOSSES = MAX_BACKWARD_WITHOUT_STEP, 8  # the most that are reported for a step


class PassRecorder:
    """Recorder of the passes since the previous optimizer step."""

    def __init__(self, channel: Channel) -> None:
        self.num_backward = 0
        self.has_stepped = False  # whether an optimizer of torch has taken a step
        self.latest: Any = None  # first input tensor of the latest outermost module, if `keeps_latest` is set
        self.keeps_latest = False
        self.overhead_seconds = 0.0
        self.sample_dim = 0  # dimension of a module's inputs along which samples are counted
        self.on_outermost: list[Any] = []  # called with each outermost module, before its forward
        self.on_loss: list[Any] = []  # called with each loss, unscaled, before its backward pass
        self._channel = channel
        self.num_steps = 0
        self._last_watched = NUM_FULLY_WATCHED  # number of the step after which modules are no longer watched
        self._unstepped: weakref.WeakSet[Any] = weakref.WeakSet()  # optimizers that have taken no step yet
        self._losses: list[Any] = []
        self._is_loss_recorded = False  # whether GradScaler.scale has recorded the loss of the next backward pass
        self._backward_depth = 0
        self._forwards: list[Any] = []
        self._inputs_of_forwards: list[
            Any
        ] = []  # (weak reference to the module, keys of its input tensors) of each forward
        self._regions: dict[str, None] = {}
        self._tokens: TokenCount | None = None  # in the inputs of the forwards
        self._watches_modules = False
        self._is_patched = False  # whether `Module.__call__` is patched, also while an outermost module runs

    def pop_record(self) -> dict[str, Any]:
        """Return the recorded passes since the last call, and clear the record.

        `losses` of the backward passes, to be read by `read`. `forwards`: for each outermost module that ran in
        training, its class, the size of its input along `sample_dim`, and the dtype that its weights were used in; once
        if the same tensors are passed again (in the closure of LBFGS or SAM). `tokens`: those in the inputs of the
        forwards, to be read by `TokenCount.read`, None without token ids. `regions`: ``device:dtype`` of the autocast
        regions that were entered, ``device:off`` for one that is disabled. Regions in a compiled function are
        seen when it is traced, which happens even if its code is cached.
        """
        record = {
            "losses": self._losses[-MAX_LOSSES:],
            "num_backward": self.num_backward,
            "forwards": self._forwards[:MAX_FORWARDS],
            "tokens": self._tokens,
            "regions": list(self._regions),
        }
        self._losses, self._forwards, self._inputs_of_forwards, self._regions = [], [], [], {}
        self._tokens = None
        return record

    def watch(self) -> None:
        """Hook into backward passes, GradScaler, autocast and module calls."""
        self._hook_losses()
        self._channel.after_init(GradScaler, self._report_scaler)
        self._hook_regions()
        self.watch_first_steps()

    def _hook_losses(self) -> None:
        scaler_class: Any = GradScaler
        scale, backward = scaler_class.scale, torch.autograd.backward
        record_unscaled_loss = self._channel.shield(self.record_unscaled_loss)
        record_backward = self._channel.shield(self._record_backward)

        @functools.wraps(scale)
        def scale_(scaler: Any, outputs: Any) -> Any:
            record_unscaled_loss(outputs)
            return scale(scaler, outputs)

        @functools.wraps(backward)
        def backward_(tensors: Any, *args: Any, **kwargs: Any) -> Any:
            self._backward_depth += 1
            try:
                if self._backward_depth == 1:
                    record_backward(tensors)
                return backward(tensors, *args, **kwargs)
            finally:
                self._backward_depth -= 1

        scaler_class.scale = scale_
        torch.autograd.backward = backward_

    def record_unscaled_loss(self, outputs: Any) -> None:
        """Record the loss of the next backward pass before a scaler multiplies it."""
        if isinstance(outputs, torch.Tensor) and outputs.numel() == 1:
            self._record_loss(outputs)
            self._is_loss_recorded = True

    def _record_loss(self, loss: Any) -> None:
        for action in self.on_loss:
            action(loss)
        self._losses.append(_readable_later(loss))

    def _record_backward(self, tensors: Any) -> None:
        began = time.perf_counter()
        self.num_backward += 1
        first = tensors[0] if isinstance(tensors, (tuple, list)) else tensors
        if not self._is_loss_recorded and isinstance(first, torch.Tensor) and first.numel() == 1:
            self._record_loss(first)
        self._is_loss_recorded = False
        if self.num_backward == MAX_BACKWARD_WITHOUT_STEP and not self.has_stepped:
            self._channel.send("unstepped", num_backward=self.num_backward)
        self.overhead_seconds += time.perf_counter() - began

    def _report_scaler(self, _: Any) -> None:
        self._channel.add("scaler")

    def _hook_regions(self) -> None:
        region_class: Any = autocast
        original_init, original_enter = region_class.__init__, region_class.__enter__
        record_disabled = self._channel.shield(self._record_disabled_region)
        record_enabled = self._channel.shield(self._record_enabled_region)

        @functools.wraps(original_init)
        def __init__(region: Any, *args: Any, **kwargs: Any) -> None:
            original_init(region, *args, **kwargs)
            record_disabled(region)

        @functools.wraps(original_enter)
        def __enter__(region: Any) -> Any:
            record_enabled(region)
            return original_enter(region)

        region_class.__init__, region_class.__enter__ = __init__, __enter__

    def _record_disabled_region(self, region: Any) -> None:
        if not region._enabled and torch.is_grad_enabled() and not torch.is_autocast_enabled(region.device):
            self._regions[f"{region.device}:off"] = None

    def _record_enabled_region(self, region: Any) -> None:
        if region._enabled and torch.is_grad_enabled():
            self._regions[f"{region.device}:{_dtype_name(region.fast_dtype)}"] = None

    def watch_first_steps(self) -> None:
        """Watch modules in the first steps, and in those after an optimizer is made until it has taken a step: a second
        model may train after the first. `count_step` must be called after each step.
        """
        self.watch_modules()
        optimizer_class: Any = Optimizer
        original, watch_again = optimizer_class.__init__, self._channel.shield(self._watch_again)

        @functools.wraps(original)
        def __init__(optimizer: Any, *args: Any, **kwargs: Any) -> None:
            original(optimizer, *args, **kwargs)
            watch_again(optimizer)

        optimizer_class.__init__ = __init__

    def _watch_again(self, optimizer: Any) -> None:
        self._unstepped.add(optimizer)
        self._last_watched = self.num_steps + NUM_FULLY_WATCHED
        self.watch_modules()

    def count_step(self, optimizer: Any) -> None:
        """Count a step of an optimizer, and stop watching modules if it is the last of the first steps.

        Optimizers of the same parameters have stepped too: those that wrap one another, as in sharpness-aware training.
        """
        self.num_steps += 1
        stepped = {id(parameter) for parameter in parameters_of(optimizer)} if self._unstepped else set()
        for other in list(self._unstepped):
            if other is optimizer or any(id(parameter) in stepped for parameter in parameters_of(other)):
                self._unstepped.discard(other)
        num_more = self.num_steps - self._last_watched
        if num_more >= 0 and (not self._unstepped or num_more == _MAX_STEPS_OF_OTHERS):
            self.unwatch_modules()

    def watch_modules(self) -> None:
        """Patch Module.__call__, only while no module runs: then torch.compile never traces the patch inside of one."""
        module_class: Any = torch.nn.Module
        self._watches_modules = True
        if self._is_patched:
            return
        self._is_patched = True
        original = module_class.__call__
        record_forward = self._channel.shield(self._record_forward)

        def call_outermost(module: Any, *args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_compiling():  # a function that calls the module
                return original(module, *args, **kwargs)
            module_class.__call__ = original
            if get_worker_info() is not None:  # not in loader workers: their transforms call many modules,
                self.unwatch_modules()  # and each change of the class makes Python visit all its subclasses
            try:
                if self._watches_modules:
                    record_forward(module, args, kwargs)
                return original(module, *args, **kwargs)
            finally:
                self._is_patched = self._watches_modules
                if self._is_patched:
                    module_class.__call__ = call_outermost

        module_class.__call__ = call_outermost

    def unwatch_modules(self) -> None:
        """Stop watching modules; the patch is removed at the next call."""
        self._watches_modules = False

    def _record_forward(self, module: Any, args: Any, kwargs: Any) -> None:
        began = time.perf_counter()
        if module.training and torch.is_grad_enabled() and not all(map(is_lazy, module.parameters())):
            for action in self.on_outermost:
                action(module)
            inputs = [*args, *kwargs.values()]
            if self.keeps_latest:
                self.latest = first_tensor(inputs)
            if self._is_new(module, inputs):
                size = size_of(inputs, self.sample_dim)
                self._forwards.append((type(module).__name__, size, _used_dtype(module)))
                tokens = count_tokens([*args, kwargs])
                if tokens is not None:
                    self._tokens = tokens if self._tokens is None else tokens.plus(self._tokens)
        self.overhead_seconds += time.perf_counter() - began

    def _is_new(self, module: Any, inputs: list[Any]) -> bool:
        """Whether the module has not yet run on these inputs since the latest step; also remember them."""
        try:
            contents = [_content_key(each) for each in inputs if isinstance(each, torch.Tensor)]
        except Exception:  # a tensor subclass without storage
            return True
        entered = weakref.ref(module), contents
        if contents and entered in self._inputs_of_forwards:
            return False
        self._inputs_of_forwards.append(entered)
        return True


def _content_key(tensor: Any) -> tuple[Any, ...]:
    """Return a key that is equal for tensors with the same content: storage, position in it, and version counter. It
    does not keep the tensor's memory allocated.
    """
    version = 0 if tensor.is_inference() else tensor._version
    storage = StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]  # torch does not type it
    return storage, tensor.storage_offset(), tuple(tensor.shape), version


def _readable_later(loss: Any) -> Any:
    """Return the value of a loss on a CPU, else a copy on the device, since reading that now would synchronize."""
    is_at_hand = loss.device.type == "cpu" and not torch.compiler.is_compiling()
    return loss.item() if is_at_hand else loss.detach().clone()


def read(loss: Any) -> float | str:
    """Return the value of a recorded loss, as text if it is not finite: JSON has no such numbers."""
    value = float(loss)
    return value if math.isfinite(value) else str(value)


def _used_dtype(module: Any) -> str:
    """Return the dtype that a module computes its forward with: that of FSDP's mixed precision, else the most frequent
    dtype of its parameters, not counting packed ones.
    """
    num_by_dtype: dict[str, int] = {}
    for part in module.modules():
        state = getattr(part, "_get_fsdp_state", None)
        policy = getattr(part, "mixed_precision", None) if state is None else state()._mp_policy
        used = getattr(policy, "param_dtype", None)
        if isinstance(used, torch.dtype):
            return _dtype_name(used)
    for parameter in module.parameters():
        if is_lazy(parameter):
            continue
        name = _dtype_name(parameter.dtype)
        is_counted = (parameter.is_floating_point() or parameter.is_complex()) and not is_packed(parameter)
        num_by_dtype[name] = num_by_dtype.get(name, 0) + (parameter.numel() if is_counted else 0)
    return max(num_by_dtype, key=lambda name: num_by_dtype[name])


def before_update(
    args: Any, kwargs: Any, action: Callable[[], object], around_closure: Callable[[], Any] = nullcontext
) -> Any:
    """Call `action` when the gradients of an optimizer step with these arguments are complete, before it uses them.

    If the step has a closure, in which Lightning and LBFGS call forward and backward, that is at the end of the
    closure, which runs inside `around_closure()`: return the arguments with another closure then, else None.
    """
    closure = kwargs.get("closure") or (args[1] if len(args) > 1 else None)
    if closure is None:
        action()
        return None

    @functools.wraps(closure)
    def closure_then_action(*args_: Any, **kwargs_: Any) -> Any:
        with around_closure():
            loss = closure(*args_, **kwargs_)
        action()
        return loss

    return args[:1], {**kwargs, "closure": closure_then_action}


def parameters_of(optimizer: Any) -> list[Any]:
    """Return the parameters of an optimizer, without those of lazy modules that no forward has initialized yet."""
    return [p for group in optimizer.param_groups for p in group["params"] if not is_lazy(p)]


def is_packed(tensor: Any) -> bool:
    """Whether a tensor packs numbers of fewer bits, as bitsandbytes' 4-bit weights, which FSDP stores as bf16."""
    return getattr(tensor, "quant_state", None) is not None


def _dtype_name(dtype: Any) -> str:
    return str(dtype).replace("torch.", "")
