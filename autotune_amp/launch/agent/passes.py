"""The passes behind a step: losses, backward passes, autocast regions, and what enters the outermost modules."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch.amp.autocast_mode import autocast
from torch.amp.grad_scaler import GradScaler

from .batches import leading

MAX_FORWARDS = 64  # told of one step


class Passes:
    """What was seen since the step before."""

    def __init__(self) -> None:
        self.num_backward = 0
        self.overhead_seconds = 0.0
        self.on_outermost: list[Any] = []  # called with each outermost module, before its forward
        self._losses: list[Any] = []
        self._is_scaled = False  # the loss was seen before it was scaled
        self._backward_depth = 0
        self._forwards: list[Any] = []
        self._regions: dict[str, None] = {}
        self._watches_modules = False

    def take_losses(self) -> list[Any]:
        """Of every backward pass, as the device has them."""
        losses, self._losses = self._losses, []
        return losses

    def take_forwards(self) -> list[Any]:
        """Class and leading dimension of what entered each outermost module in training."""
        forwards, self._forwards = self._forwards[:MAX_FORWARDS], []
        return forwards

    def take_regions(self) -> list[str]:
        """``device:dtype`` of the autocast regions that were entered, ``device:off`` of one that the script can turn on."""
        regions, self._regions = list(self._regions), {}
        return regions

    def watch(self, _: Any) -> None:
        """Hook into torch."""
        self._watch_losses()
        self._watch_regions()
        self._watch_modules()

    def _watch_losses(self) -> None:
        scale, backward = GradScaler.scale, torch.autograd.backward

        def scale_(scaler: Any, outputs: Any) -> Any:
            if isinstance(outputs, torch.Tensor) and outputs.numel() == 1:
                self._losses.append(outputs.detach().clone())
                self._is_scaled = True
            return scale(scaler, outputs)

        @functools.wraps(backward)
        def backward_(tensors: Any, *args: Any, **kwargs: Any) -> Any:
            self._backward_depth += 1
            try:
                if self._backward_depth == 1:
                    self.num_backward += 1
                    first = tensors[0] if isinstance(tensors, (tuple, list)) else tensors
                    if not self._is_scaled and isinstance(first, torch.Tensor) and first.numel() == 1:
                        self._losses.append(first.detach().clone())
                    self._is_scaled = False
                return backward(tensors, *args, **kwargs)
            finally:
                self._backward_depth -= 1

        GradScaler.scale = scale_  # type: ignore[method-assign, assignment]
        torch.autograd.backward = backward_

    def _watch_regions(self) -> None:
        begin, enter = autocast.__init__, autocast.__enter__

        @functools.wraps(begin)
        def __init__(
            region: Any, device_type: str, dtype: Any = None, enabled: bool = True, *rest: Any, **more: Any
        ) -> None:
            begin(region, device_type, dtype, enabled, *rest, **more)
            if not enabled and torch.is_grad_enabled() and not torch.is_autocast_enabled(device_type):
                self._regions[f"{device_type}:off"] = None

        def __enter__(region: Any) -> Any:
            if region._enabled and torch.is_grad_enabled():
                self._regions[f"{region.device}:{str(region.fast_dtype).replace('torch.', '')}"] = None
            return enter(region)

        autocast.__init__ = __init__  # type: ignore[method-assign]
        autocast.__enter__ = __enter__  # type: ignore[method-assign]

    def _watch_modules(self) -> None:
        """Patched only while no module runs, so that nothing that is traced inside ever sees it."""
        module_class: Any = torch.nn.Module
        original = module_class.__call__
        self._watches_modules = True

        def outermost(module: Any, *args: Any, **kwargs: Any) -> Any:
            module_class.__call__ = original
            try:
                if module.training and torch.is_grad_enabled() and next(module.parameters(), None) is not None:
                    for action in self.on_outermost:
                        action(module)
                    self._forwards.append((type(module).__name__, leading([*args, *kwargs.values()])))
                return original(module, *args, **kwargs)
            finally:
                if self._watches_modules:
                    module_class.__call__ = outermost

        module_class.__call__ = outermost

    def unwatch_modules(self) -> None:
        """From the next call on."""
        self._watches_modules = False
