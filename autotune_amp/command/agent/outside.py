"""Batch size, precision and accumulation steps set from outside, for a script without arguments for them.

The precision is set in the first of these places that exists: the argument of the script's framework (`frameworks`);
the script's own autocast regions; around the outermost forward, with outputs back in fp32, as Accelerate does it. Never
around the whole process: autocast's cache of cast weights is emptied only when the outermost region is left.
"""

from __future__ import annotations

import functools
import types
from typing import Any

import torch
from torch.amp.autocast_mode import autocast
from torch.amp.grad_scaler import GradScaler
from torch.utils.data import BatchSampler, dataloader

from . import where
from .frameworks import Frameworks
from .imports import after_import

_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
_ENABLED = 5  # position of GradScaler's argument `enabled`


class Outside:
    """Hooks that set `batch_size` of the loader made at `maker` (else of each loader that shuffles), `precision` and
    `accumulation_steps`, and report each value once. Without any values, they only report what could be set.

    `controller_of` makes a PrecisionController from the script's GradScaler, if one is wanted: from then on the
    controller decides the precision.
    """

    def __init__(self, channel: Any, passes: Any, settings: dict[str, Any], controller_of: Any = None) -> None:
        self.channel = channel
        self.values = {name: value for name, value in settings.items() if name != "maker" and value is not None}
        self.is_in_framework = False  # whether the framework sets the precision
        self._passes = passes
        self._maker: str | None = settings.get("maker")
        self._controller_of = controller_of
        self._controller: Any = None
        self._has_scaler = False
        self._is_in_regions = False  # whether the precision is set in the script's own regions
        self._is_in_forward = False
        self._has_own_regions = False  # whether the script has autocast regions that are enabled today
        self._num_forwards = 0  # running forwards that have a region of ours
        self._told: set[str] = set()

    def install(self) -> None:
        """Hook into torch and the frameworks."""
        Frameworks(self).install()
        if "batch_size" in self.values:
            self._set_batch_size()
        precision = self.values.get("precision")
        if precision is not None or self._controller_of is not None:
            self._set_scaler()
            self._set_regions()
            self._passes.on_outermost.append(self._set_forward)
        if precision in ("fp32", "tf32"):
            torch.set_float32_matmul_precision("high" if precision == "tf32" else "highest")

    def tell(self, name: str, what: str, was: Any, value: Any, line: str = "") -> None:
        """Report once that the value of `name` was set in `what`, at `line` (by default the user's line that runs)."""
        if name not in self._told:
            self._told.add(name)
            self.channel.add("set", name=name, what=what, was=was, value=value, line=line or where.user_line())

    def _set_batch_size(self) -> None:
        loader_class: Any = dataloader.DataLoader
        original = loader_class.__init__

        @functools.wraps(original)
        def __init__(
            loader: Any,
            dataset: Any,
            batch_size: Any = 1,
            shuffle: Any = None,
            sampler: Any = None,
            batch_sampler: Any = None,
            *args: Any,
            **kwargs: Any,
        ) -> None:
            shuffles = bool(shuffle) or type(sampler).__name__ in ("RandomSampler", "DistributedSampler")
            if "batch_size" in self.values and (where.maker() == self._maker if self._maker else shuffles):
                size = self.values["batch_size"]
                if type(batch_sampler) is BatchSampler:
                    self.tell("batch_size", "DataLoader", batch_sampler.batch_size, size)
                    batch_sampler = BatchSampler(batch_sampler.sampler, size, batch_sampler.drop_last)
                elif batch_sampler is None and batch_size is not None:
                    self.tell("batch_size", "DataLoader", batch_size, size)
                    batch_size = size
            original(loader, dataset, batch_size, shuffle, sampler, batch_sampler, *args, **kwargs)

        loader_class.__init__ = __init__

    def _set_scaler(self) -> None:
        """Hook into GradScaler: it is enabled for fp16 and disabled for other precisions, as a script's own switch
        would do.
        """
        scaler_class: Any = GradScaler
        original = scaler_class.__init__

        @functools.wraps(original)
        def __init__(scaler: Any, *args: Any, **kwargs: Any) -> None:
            is_users = type(scaler) in (GradScaler, torch.cuda.amp.GradScaler) and where.is_called_by_user()
            if "precision" in self.values and is_users:
                args, kwargs = args[:_ENABLED], {**kwargs, "enabled": self.values["precision"] == "fp16"}
            original(scaler, *args, **kwargs)
            self._has_scaler = self._has_scaler or scaler.is_enabled()
            if self._controller_of is not None and is_users and self._controller is None:
                self._controller = self._controller_of(scaler)
                if self._controller is not None:
                    self._has_scaler = True
                    self.tell("scaler", "GradScaler's place", None, "PrecisionController")

        scaler_class.__init__ = __init__

    def _wanted(self) -> Any:
        """Return the dtype to compute in now: None for fp32, `...` if none is to be set."""
        if self.is_in_framework:
            return ...
        if self._controller is not None:
            if not torch.is_grad_enabled():  # the controller's autocast would begin a step
                return _DTYPES.get(self._controller.config.precision)
            region = self._controller.autocast()
            return region.fast_dtype if isinstance(region, autocast) and region._enabled else None
        precision = self.values.get("precision")
        if precision is None or (precision == "fp16" and not self._has_scaler):
            return ...  # without a scaler fp16 gradients would vanish
        return _DTYPES.get(precision)

    def _set_regions(self) -> None:
        region_class: Any = autocast
        begin, enter = region_class.__init__, region_class.__enter__

        @functools.wraps(begin)
        def __init__(region: Any, *args: Any, **kwargs: Any) -> None:
            begin(region, *args, **kwargs)
            if where.is_called_by_user():
                region._autotune_amp_own = region._enabled, region.fast_dtype

        @functools.wraps(enter)
        def __enter__(region: Any) -> Any:
            own = region.__dict__.get("_autotune_amp_own")
            if own is not None and _is_usable(region.device):
                region._enabled, region.fast_dtype = self._decided(region.device, *own)
            return enter(region)

        region_class.__init__, region_class.__enter__ = __init__, __enter__
        after_import("torch._dynamo.variables.ctx_manager", self._set_compiled_regions)

    def _set_compiled_regions(self, module: Any) -> None:
        """Set the autocast regions that dynamo traces, by changing its graph, which is also part of its cache keys."""
        owner = getattr(module, "AutocastModeVariable", None)
        create = getattr(owner, "create", None)
        if owner is None or create is None:
            return

        @functools.wraps(create)
        def create_(*args: Any, **kwargs: Any) -> Any:
            region = create(*args, **kwargs)
            device, dtype, is_on, caches = region.target_values
            is_on, dtype = self._decided(device, is_on, dtype or torch.get_autocast_dtype(device))
            region.target_values = [device, dtype, is_on, caches]
            return region

        owner.create = staticmethod(create_)

    def _decided(self, device: str, is_on: bool, dtype: Any) -> tuple[bool, Any]:
        """Return whether a region is to be enabled, and its dtype.

        A region is set if it is enabled, or if it is the script's switch that is off today. Other disabled regions stay
        off, since the script has its own reasons for them.
        """
        is_outermost = not torch.is_autocast_enabled(device) and self._num_forwards == 0
        is_switch = is_outermost and not (self._is_in_forward or self._has_own_regions)
        wanted = self._wanted() if is_on or is_switch else ...
        if is_on and is_outermost:
            self._has_own_regions = True
        if wanted is ...:
            return is_on, dtype
        if "precision" in self.values:
            was = _NAMES.get(dtype, str(dtype)) if is_on else None
            self.tell("precision", "autocast", was, self.values["precision"])
        self._is_in_regions = True
        return wanted is not None, dtype if wanted is None else wanted

    def _set_forward(self, module: Any) -> None:
        """Set the precision around the forward of a module that runs in training outside of all regions."""
        device = next(module.parameters()).device.type
        if "precision" not in self.values or self._is_in_regions or torch.is_autocast_enabled(device):
            return
        if self._wanted() in (..., None):
            return
        is_compiled = module.__dict__.get("_compiled_call_impl") is not None
        name = "_compiled_call_impl" if is_compiled else "forward"  # compiled code must not see the region
        if isinstance(getattr(module, name), _InRegion):
            return
        self._is_in_forward = True
        self.tell("precision", f"the forward of {type(module).__name__}", None, self.values["precision"])
        object.__setattr__(module, name, _InRegion(self, module, getattr(module, name), device))


class _InRegion:
    """Forward of a module in an autocast region, with outputs in fp32. A copy of the module gets its own."""

    def __init__(self, outside: Outside, module: Any, forward: Any, device: str) -> None:
        functools.update_wrapper(self, forward)
        self._outside = outside
        self._module = module
        self._forward = forward
        self._device = device

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        outside, dtype = self._outside, self._outside._wanted()
        if dtype in (..., None):
            return self._forward(*args, **kwargs)
        outside._num_forwards += 1
        try:
            with autocast(self._device, dtype=dtype):
                output = self._forward(*args, **kwargs)
        finally:
            outside._num_forwards -= 1
        return in_fp32(output)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        copied = memo.get(id(self._module))
        if copied is None or not isinstance(self._forward, types.MethodType):
            return self
        return _InRegion(self._outside, copied, types.MethodType(self._forward.__func__, copied), self._device)

    def __reduce__(self) -> Any:  # a pickled model is as the script wrote it
        return getattr, (self._module, "forward")


def _is_usable(device: str) -> bool:
    return device == "cpu" or bool(getattr(torch, device).is_available())


def in_fp32(output: Any) -> Any:
    """Return a module's output with its half-precision tensors in fp32."""
    if isinstance(output, torch.Tensor):
        return output.float() if output.dtype in (torch.float16, torch.bfloat16) else output
    if isinstance(output, tuple) and hasattr(output, "_fields"):
        return type(output)(*map(in_fp32, output))
    if isinstance(output, (list, tuple)):
        return type(output)(map(in_fp32, output))
    if hasattr(output, "items") and hasattr(output, "__setitem__"):  # a dict, or a ModelOutput of transformers
        for key, value in list(output.items()):
            if value is not None:
                output[key] = in_fp32(value)
    return output
