"""Hooks that set batch size, precision and accumulation steps in a script that has no arguments for them.

The precision is set in the first of these places that exists: the argument of the script's framework (see
`frameworks`); the script's own autocast regions; a new region around the outermost forward, with outputs converted to
fp32, as in Accelerate. It is never set for the whole process: autocast would keep its cache of cast weights, which only
the end of the outermost region clears.
"""

from __future__ import annotations

import copy
import functools
import types
from typing import Any

import torch
from torch.amp.autocast_mode import autocast
from torch.amp.grad_scaler import GradScaler
from torch.utils.data import BatchSampler, dataloader

from .. import where
from ..imports import after_import
from .frameworks import FrameworkHooks

_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
_ENABLED = 5  # position of GradScaler's argument `enabled`


class SettingHooks:
    """Hooks that set the values in `settings` (`batch_size`, `precision`, `accumulation_steps`) and report each once.
    The batch size is set in the DataLoader made at `maker` (see `where.maker`), else in each that shuffles. Without
    values, they only report the framework arguments that could be set.

    `controller_of`, if given, turns the script's GradScaler into a PrecisionController, which then chooses the
    precision.
    """

    def __init__(self, channel: Any, passes: Any, settings: dict[str, Any], controller_of: Any = None) -> None:
        self.channel = channel
        self.values = {name: value for name, value in settings.items() if name != "maker" and value is not None}
        self.is_in_framework = False  # whether a framework's argument sets the precision
        self.is_batch_size_in_framework = False  # whether a framework's argument sets the batch size
        self._passes = passes
        self._maker: str | None = settings.get("maker")
        self._controller_of = controller_of
        self._controller: Any = None
        self._has_scaler = False
        self._is_in_regions = False  # whether the precision is set in the script's own regions
        self._is_in_forward = False
        self._has_own_regions = False  # whether the script has autocast regions that are enabled today
        self._num_forwards = 0  # running forwards in an autocast region that was added here
        self._reported: set[str] = set()

    def install(self) -> None:
        """Hook into torch and the frameworks."""
        FrameworkHooks(self).install()
        if "batch_size" in self.values:
            self._hook_loaders()
        precision = self.values.get("precision")
        if precision is not None or self._controller_of is not None:
            self._hook_scaler()
            self._hook_regions()
            _hook_scripting()
            self._passes.on_outermost.append(self._wrap_forward)
        if precision in ("fp32", "tf32"):
            self._set_matmul_precision()
            self._passes.on_outermost.append(self._set_matmul_precision)  # after the script, which may have set its own

    def _set_matmul_precision(self, *_: Any) -> None:
        torch.set_float32_matmul_precision("high" if self.values["precision"] == "tf32" else "highest")

    def report_set(self, name: str, what: str, was: Any, value: Any, line: str = "") -> None:
        """Report once that the value of `name` was set in `what`, at `line` (by default the user's line that runs)."""
        if name not in self._reported:
            self._reported.add(name)
            self.channel.add("set", name=name, what=what, was=was, value=value, line=line or where.user_line())

    def _hook_loaders(self) -> None:
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
            if not self.is_batch_size_in_framework and (where.maker() == self._maker if self._maker else shuffles):
                size = self.values["batch_size"]
                if type(batch_sampler) is BatchSampler:
                    self.report_set("batch_size", "DataLoader", batch_sampler.batch_size, size)
                    batch_sampler = BatchSampler(batch_sampler.sampler, size, batch_sampler.drop_last)
                elif batch_sampler is None and batch_size is not None:
                    self.report_set("batch_size", "DataLoader", batch_size, size)
                    batch_size = size
                    _set_saved_batch_size(loader, size)
            original(loader, dataset, batch_size, shuffle, sampler, batch_sampler, *args, **kwargs)

        loader_class.__init__ = __init__

    def _hook_scaler(self) -> None:
        """Hook into GradScaler: enable the script's scaler for fp16, disable it for other precisions."""
        scaler_class: Any = GradScaler
        original = scaler_class.__init__

        @functools.wraps(original)
        def __init__(scaler: Any, *args: Any, **kwargs: Any) -> None:
            is_made_by_user = type(scaler) in (GradScaler, torch.cuda.amp.GradScaler) and where.is_called_by_user()
            if "precision" in self.values and is_made_by_user:
                args, kwargs = args[:_ENABLED], {**kwargs, "enabled": self.values["precision"] == "fp16"}
            original(scaler, *args, **kwargs)
            self._has_scaler = self._has_scaler or scaler.is_enabled()
            if self._controller_of is not None and is_made_by_user:
                controller = self._controller_of(scaler)
                if controller is not None:
                    self._controller = controller
                    self._has_scaler = True
                    self.report_set("scaler", "GradScaler's place", None, "PrecisionController")

        scaler_class.__init__ = __init__

    def _target_dtype(self) -> Any:
        """Return the autocast dtype to set now: None for fp32 (autocast off), `...` to leave the script's own."""
        if self.is_in_framework:
            return ...
        if self._controller is not None:
            if not torch.is_grad_enabled():  # the controller's autocast would begin a step
                return _DTYPES.get(self._controller.config.precision)
            region = self._controller.autocast()
            return region.fast_dtype if isinstance(region, autocast) and region._enabled else None
        precision = self.values.get("precision")
        if precision is None or (precision == "fp16" and not self._has_scaler):
            return ...  # without a GradScaler small fp16 gradients would underflow to zero
        return _DTYPES.get(precision)

    def _hook_regions(self) -> None:
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
            if own is not None and _is_available(region.device):
                region._enabled, region.fast_dtype = self._region_settings(region.device, *own)
            return enter(region)

        region_class.__init__, region_class.__enter__ = __init__, __enter__
        after_import("torch._dynamo.variables.ctx_manager", self._hook_compiled_regions)

    def _hook_compiled_regions(self, module: Any) -> None:
        """Set the autocast regions in compiled code, in the variable that dynamo traces: cached graphs then differ by
        precision.
        """
        owner = getattr(module, "AutocastModeVariable", None)
        create = getattr(owner, "create", None)
        if owner is None or create is None:
            return

        @functools.wraps(create)
        def create_(*args: Any, **kwargs: Any) -> Any:
            region = create(*args, **kwargs)
            device, dtype, is_enabled, caches = region.target_values
            is_enabled, dtype = self._region_settings(device, is_enabled, dtype or torch.get_autocast_dtype(device))
            region.target_values = [device, dtype, is_enabled, caches]
            return region

        owner.create = staticmethod(create_)

    def _region_settings(self, device: str, is_enabled: bool, dtype: Any) -> tuple[bool, Any]:
        """Return whether an autocast region of the script should be enabled, and its dtype.

        An enabled region is set; a disabled one only if it is outermost and the script has no enabled region (its mixed
        precision is then switched off today). Other disabled regions stay disabled: their code probably needs fp32.
        """
        is_outermost = not torch.is_autocast_enabled(device) and self._num_forwards == 0
        is_switch = is_outermost and not (self._is_in_forward or self._has_own_regions)
        target = self._target_dtype() if is_enabled or is_switch else ...
        if is_enabled and is_outermost:
            self._has_own_regions = True
        if target is ...:
            return is_enabled, dtype
        if "precision" in self.values:
            was = _NAMES.get(dtype, str(dtype)) if is_enabled else None
            self.report_set("precision", "autocast", was, self.values["precision"])
        self._is_in_regions = True
        return target is not None, dtype if target is None else target

    def _wrap_forward(self, module: Any) -> None:
        """Put the forward of an outermost module in an autocast region, unless the script has its own regions."""
        device = next(module.parameters()).device.type
        if "precision" not in self.values or self._is_in_regions or torch.is_autocast_enabled(device):
            return
        if self._target_dtype() in (..., None):
            return
        is_compiled = module.__dict__.get("_compiled_call_impl") is not None
        # Around compiled code, not inside, where dynamo would trace the region.
        name = "_compiled_call_impl" if is_compiled else "forward"
        if isinstance(getattr(module, name), _ForwardInAutocast):
            return
        self._is_in_forward = True
        self.report_set("precision", f"the forward of {type(module).__name__}", None, self.values["precision"])
        object.__setattr__(module, name, _ForwardInAutocast(self, module, getattr(module, name), device))


class _ForwardInAutocast:
    """Forward of a module in an autocast region, with outputs in fp32. A trace, an export or TorchScript of the module
    is as the script wrote it, and so is the pickled module. A deep copy of the module gets its own wrapper.
    """

    def __init__(self, hooks: SettingHooks, module: Any, forward: Any, device: str) -> None:
        # torch.export reads `__code__`.
        functools.update_wrapper(self, forward, (*functools.WRAPPER_ASSIGNMENTS, "__code__"))
        self._hooks = hooks
        self._module = module
        self._forward = forward
        self._device = device

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        hooks, dtype = self._hooks, self._hooks._target_dtype()
        is_traced = torch.jit.is_tracing()  # type: ignore[attr-defined, no-untyped-call]
        if dtype in (..., None) or is_traced or torch.compiler.is_exporting():
            return self._forward(*args, **kwargs)
        hooks._num_forwards += 1
        try:
            with autocast(self._device, dtype=dtype):
                output = self._forward(*args, **kwargs)
        finally:
            hooks._num_forwards -= 1
        return in_fp32(output)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        copied = memo.get(id(self._module))
        if copied is None or not isinstance(self._forward, types.MethodType):
            return self
        return _ForwardInAutocast(self._hooks, copied, types.MethodType(self._forward.__func__, copied), self._device)

    def __reduce__(self) -> Any:
        return copy.copy, (self._forward,)


def _hook_scripting() -> None:
    """Let TorchScript compile the script's own forward of each module that has a `_ForwardInAutocast`."""
    recursive: Any = getattr(torch.jit, "_recursive", None)
    create = getattr(recursive, "create_script_module", None)
    if create is None:  # another version of torch, whose private functions differ
        return

    @functools.wraps(create)
    def create_(module: Any, *args: Any, **kwargs: Any) -> Any:
        wrapped = [
            (vars(part), forward)
            for part in module.modules()
            if isinstance(forward := vars(part).get("forward"), _ForwardInAutocast)
        ]
        for attributes, forward in wrapped:
            attributes["forward"] = forward._forward
        try:
            return create(module, *args, **kwargs)
        finally:
            for attributes, forward in wrapped:
                attributes["forward"] = forward

    recursive.create_script_module = create_


def _set_saved_batch_size(loader: Any, size: int) -> None:
    """Set the batch size in the arguments that Lightning has saved of a DataLoader made in a hook of its modules: it
    makes the loader again from them, with a sampler for the ranks. A subclass has arguments of its own.
    """
    saved = loader.__dict__
    if "__pl_saved_args" in saved and type(loader) is dataloader.DataLoader:
        arguments = dict(zip(saved["__pl_saved_arg_names"], saved["__pl_saved_args"], strict=True))
        saved["__pl_saved_kwargs"] = {**arguments, **saved["__pl_saved_kwargs"], "batch_size": size}
        saved["__pl_saved_args"] = saved["__pl_saved_arg_names"] = ()


def _is_available(device: str) -> bool:
    return device == "cpu" or bool(getattr(torch, device).is_available())


def in_fp32(output: Any) -> Any:
    """Return a module's output with half-precision tensors converted to fp32, in nested containers too."""
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
