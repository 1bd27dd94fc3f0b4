"""Batch size and precision set from outside of a script that has no switch for them.

In this order: where the script's framework has an argument for it, in that; in the script's own autocast regions; around
the outermost forward, with outputs back in fp32, as Accelerate does it. Never for the whole process: autocast's cache of
cast weights empties only when the outermost region is left.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch.amp.autocast_mode import autocast
from torch.utils.data import BatchSampler, dataloader

from . import where
from .channel import Channel
from .imports import after_import

_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
_LIGHTNING = {"fp32": "32-true", "tf32": "32-true", "bf16": "bf16-mixed", "fp16": "16-mixed"}


class Outside:
    """What is to be set: `batch_size` of the loader made at `maker` (else of each that shuffles), `precision`."""

    def __init__(self, channel: Channel, observer: Any, settings: dict[str, Any]) -> None:
        self._channel = channel
        self._observer = observer
        self._batch_size: int | None = settings.get("batch_size")
        self._maker: str | None = settings.get("maker")
        self._precision: str | None = settings.get("precision")
        self._dtype = _DTYPES.get(self._precision or "")
        self._how = ""  # framework, regions or forward: the first that applies
        self._in_own_region = 0

    def install(self) -> None:
        """Hook into torch and the frameworks; each thing that is set is told once."""
        if self._batch_size is not None:
            self._set_batch_size()
        if self._precision is not None:
            after_import("accelerate.accelerator", self._set_accelerate)
            after_import("lightning.pytorch.trainer.trainer", self._set_lightning)
            after_import("pytorch_lightning.trainer.trainer", self._set_lightning)
            self._set_regions()
            self._observer.passes.on_outermost.append(self._set_forward)
            if self._precision in ("fp32", "tf32"):
                torch.set_float32_matmul_precision("high" if self._precision == "tf32" else "highest")

    def _tell(self, what: str, was: Any, value: Any) -> None:
        self._channel.add("set", what=what, was=was, value=value, line=where.user_line())

    def _set_batch_size(self) -> None:
        original = dataloader.DataLoader.__init__

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
            maker = where.maker()
            shuffles = bool(shuffle) or type(sampler).__name__ in ("RandomSampler", "DistributedSampler")
            if maker == self._maker if self._maker is not None else shuffles:
                if batch_sampler is None and batch_size is not None:
                    self._tell("batch_size", batch_size, self._batch_size)
                    batch_size = self._batch_size
                elif type(batch_sampler) is BatchSampler:
                    self._tell("batch_size", batch_sampler.batch_size, self._batch_size)
                    assert self._batch_size is not None
                    batch_sampler = BatchSampler(batch_sampler.sampler, self._batch_size, batch_sampler.drop_last)
            original(loader, dataset, batch_size, shuffle, sampler, batch_sampler, *args, **kwargs)

        dataloader.DataLoader.__init__ = __init__  # type: ignore[method-assign]

    def _set_argument(self, owner: Any, name: str, value: str, framework: str) -> None:
        original = owner.__init__

        @functools.wraps(original)
        def __init__(self_: Any, *args: Any, **kwargs: Any) -> None:
            self._how = "framework"
            self._tell(f"{framework}'s {name}", kwargs.get(name), value)
            original(self_, *args, **{**kwargs, name: value})

        owner.__init__ = __init__

    def _set_accelerate(self, module: Any) -> None:
        value = "no" if self._dtype is None else str(self._precision)
        self._set_argument(module.Accelerator, "mixed_precision", value, "Accelerator")

    def _set_lightning(self, module: Any) -> None:
        self._set_argument(module.Trainer, "precision", _LIGHTNING[str(self._precision)], "Trainer")

    def _set_regions(self) -> None:
        original = autocast.__init__

        @functools.wraps(original)
        def __init__(
            region: Any, device_type: str, dtype: Any = None, enabled: bool = True, cache_enabled: Any = None
        ) -> None:
            is_outermost = not torch.is_autocast_enabled(device_type) and self._in_own_region == 0
            if is_outermost and self._how in ("", "regions") and where.is_called_by_user():
                if not self._how:
                    self._tell("autocast", str(dtype) if enabled else None, self._precision)
                self._how = "regions"
                enabled, dtype = self._dtype is not None, self._dtype or dtype
            original(region, device_type, dtype, enabled, cache_enabled)

        autocast.__init__ = __init__  # type: ignore[method-assign, assignment]

    def _set_forward(self, module: Any) -> None:
        device = next(module.parameters()).device.type
        if self._how not in ("", "forward") or self._dtype is None or torch.is_autocast_enabled(device):
            return
        if "_autotune_amp_is_set" in module.__dict__:
            return
        self._how = "forward"
        self._tell(f"forward of {type(module).__name__}", None, self._precision)
        forward = module.forward

        @functools.wraps(forward)
        def in_region(*args: Any, **kwargs: Any) -> Any:
            self._in_own_region += 1
            try:
                with autocast(device, dtype=self._dtype):
                    output = forward(*args, **kwargs)
            finally:
                self._in_own_region -= 1
            return in_fp32(output)

        module.__dict__["_autotune_amp_is_set"] = True
        object.__setattr__(module, "forward", in_region)


def in_fp32(output: Any) -> Any:
    """What a module put out, its half-precision tensors in fp32."""
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
