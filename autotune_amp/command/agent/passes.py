"""Observer of the passes behind a step: losses, backward passes, autocast regions, and inputs of the outermost modules.
"""

from __future__ import annotations

import functools
import math
import time
import weakref
from typing import Any

import torch
from torch.amp.autocast_mode import autocast
from torch.amp.grad_scaler import GradScaler
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.data import get_worker_info

from . import where
from .batches import first_tensor, size_of
from .channel import Channel

NUM_FULLY_WATCHED = 3  # steps in which modules are watched too; after them the patch is removed
MAX_BACKWARD_WITHOUT_STEP = 512  # more passes than any script accumulates
MAX_FORWARDS, MAX_LOSSES = MAX_BACKWARD_WITHOUT_STEP, 8  # reported of one step


class Passes:
    """Record of the passes since the previous optimizer step."""

    def __init__(self, channel: Channel) -> None:
        self.num_backward = 0
        self.has_stepped = False  # whether an optimizer of torch has taken a step
        self.latest: Any = None  # the first tensor that entered the outermost module, if `keeps_latest`
        self.keeps_latest = False
        self.overhead_seconds = 0.0
        self.sample_dim = 0  # dimension of a module's inputs along which samples are counted
        self.on_outermost: list[Any] = []  # called with each outermost module, before its forward
        self._channel = channel
        self._losses: list[Any] = []
        self._is_scaled = False  # whether the loss was recorded before it was scaled
        self._backward_depth = 0
        self._forwards: list[Any] = []
        self._entered: list[Any] = []  # weak references to module and tensors of each forward
        self._regions: dict[str, None] = {}
        self._watches_modules = False

    def taken(self) -> dict[str, Any]:
        """Return the record since the last call, and begin a new one.

        `losses` of the backward passes, to be read by `read`. `forwards`: for each outermost module that ran in
        training, its class, the size of its input along `sample_dim`, and the dtype that its weights were used in; once
        if the same tensors enter again (in the closure of LBFGS or SAM). `regions`: ``device:dtype`` of the autocast
        regions that were entered, ``device:off`` for one that is disabled. Regions in a compiled function are seen when
        it is traced, which happens even if its code is cached.
        """
        found = {
            "losses": self._losses[-MAX_LOSSES:],
            "num_backward": self.num_backward,
            "forwards": self._forwards[:MAX_FORWARDS],
            "regions": list(self._regions),
        }
        self._losses, self._forwards, self._entered, self._regions = [], [], [], {}
        return found

    def watch(self) -> None:
        """Hook into torch."""
        self._watch_losses()
        self._channel.after_init(GradScaler, self._made_scaler)
        self._watch_regions()
        self.watch_modules()

    def _watch_losses(self) -> None:
        scaler_class: Any = GradScaler
        scale, backward = scaler_class.scale, torch.autograd.backward
        scaling, passing_back = self._channel.shield(self._scaling), self._channel.shield(self._passing_back)

        @functools.wraps(scale)
        def scale_(scaler: Any, outputs: Any) -> Any:
            scaling(outputs)
            return scale(scaler, outputs)

        @functools.wraps(backward)
        def backward_(tensors: Any, *args: Any, **kwargs: Any) -> Any:
            self._backward_depth += 1
            try:
                if self._backward_depth == 1:
                    passing_back(tensors)
                return backward(tensors, *args, **kwargs)
            finally:
                self._backward_depth -= 1

        scaler_class.scale = scale_
        torch.autograd.backward = backward_

    def _scaling(self, outputs: Any) -> None:
        if isinstance(outputs, torch.Tensor) and outputs.numel() == 1:
            self._losses.append(_kept(outputs))
            self._is_scaled = True

    def _passing_back(self, tensors: Any) -> None:
        began = time.perf_counter()
        self.num_backward += 1
        first = tensors[0] if isinstance(tensors, (tuple, list)) else tensors
        if not self._is_scaled and isinstance(first, torch.Tensor) and first.numel() == 1:
            self._losses.append(_kept(first))
        self._is_scaled = False
        if self.num_backward == MAX_BACKWARD_WITHOUT_STEP and not self.has_stepped:
            self._channel.send("unstepped", num_backward=self.num_backward)
        self.overhead_seconds += time.perf_counter() - began

    def _made_scaler(self, scaler: Any) -> None:
        line, maker = where.user_line(), where.maker()
        self._channel.add("scaler", is_enabled=bool(scaler.is_enabled()), line=line, maker=maker)

    def _watch_regions(self) -> None:
        region_class: Any = autocast
        begin, enter = region_class.__init__, region_class.__enter__
        begun, entering = self._channel.shield(self._begun_region), self._channel.shield(self._entering_region)

        @functools.wraps(begin)
        def __init__(region: Any, *args: Any, **kwargs: Any) -> None:
            begin(region, *args, **kwargs)
            begun(region)

        @functools.wraps(enter)
        def __enter__(region: Any) -> Any:
            entering(region)
            return enter(region)

        region_class.__init__, region_class.__enter__ = __init__, __enter__

    def _begun_region(self, region: Any) -> None:
        if not region._enabled and torch.is_grad_enabled() and not torch.is_autocast_enabled(region.device):
            self._regions[f"{region.device}:off"] = None

    def _entering_region(self, region: Any) -> None:
        if region._enabled and torch.is_grad_enabled():
            self._regions[f"{region.device}:{_name(region.fast_dtype)}"] = None

    def watch_modules(self) -> None:
        """Hook into Module.__call__. It is patched only while no module runs, so that nothing traced inside ever sees
        the patch.
        """
        module_class: Any = torch.nn.Module
        original = module_class.__call__
        entering = self._channel.shield(self._entering_outermost)
        self._watches_modules = True

        def outermost(module: Any, *args: Any, **kwargs: Any) -> Any:
            module_class.__call__ = original
            if get_worker_info() is not None:  # transforms may call a dozen modules for each sample, and with every
                self.unwatch_modules()  # patch Python goes through all subclasses
            try:
                if self._watches_modules:
                    entering(module, args, kwargs)
                return original(module, *args, **kwargs)
            finally:
                if self._watches_modules:
                    module_class.__call__ = outermost

        module_class.__call__ = outermost

    def unwatch_modules(self) -> None:
        """Stop watching modules; the patch is removed at the next call."""
        self._watches_modules = False

    def _entering_outermost(self, module: Any, args: Any, kwargs: Any) -> None:
        began = time.perf_counter()
        if module.training and torch.is_grad_enabled() and next(module.parameters(), None) is not None:
            for action in self.on_outermost:
                action(module)
            given = [*args, *kwargs.values()]
            if self.keeps_latest:
                self.latest = first_tensor(given)
            if self._is_new(module, given):
                size = size_of(given, self.sample_dim)
                self._forwards.append((type(module).__name__, size, _used_dtype(module)))
        self.overhead_seconds += time.perf_counter() - began

    def _is_new(self, module: Any, given: list[Any]) -> bool:
        """Whether these inputs have not entered this module since the latest step."""
        try:
            contents = [_content(each) for each in given if isinstance(each, torch.Tensor)]
        except Exception:  # a tensor of a kind that has no storage
            return True
        entered = weakref.ref(module), contents
        if contents and entered in self._entered:
            return False
        self._entered.append(entered)
        return True


def _content(tensor: Any) -> tuple[Any, ...]:
    """Return a key that is equal for tensors with the same content, without keeping their memory: the location, and how
    often it was written to.
    """
    version = 0 if tensor.is_inference() else tensor._version
    storage = StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]  # torch does not type it
    return storage, tensor.storage_offset(), tuple(tensor.shape), version


def _kept(loss: Any) -> Any:
    """Return a loss to be read later: its value if that is available at once, else a copy on the device."""
    is_at_hand = loss.device.type == "cpu" and not torch.compiler.is_compiling()
    return loss.item() if is_at_hand else loss.detach().clone()


def read(loss: Any) -> float | str:
    """Return the value of a recorded loss, as text if it is not finite: JSON has no such numbers."""
    value = float(loss)
    return value if math.isfinite(value) else str(value)


def _used_dtype(module: Any) -> str:
    """Return the name of the dtype in which the weights of a module are used: that of FSDP's policy, else that of most
    of them, packed integers not counted.
    """
    num_by_dtype: dict[str, int] = {}
    for part in module.modules():
        state = getattr(part, "_get_fsdp_state", None)
        policy = getattr(part, "mixed_precision", None) if state is None else state()._mp_policy
        used = getattr(policy, "param_dtype", None)
        if isinstance(used, torch.dtype):
            return _name(used)
    for parameter in module.parameters():
        name = _name(parameter.dtype)
        is_packed = not (parameter.is_floating_point() or parameter.is_complex())
        num_by_dtype[name] = num_by_dtype.get(name, 0) + (0 if is_packed else parameter.numel())
    return max(num_by_dtype, key=lambda name: num_by_dtype[name])


def _name(dtype: Any) -> str:
    return str(dtype).replace("torch.", "")
