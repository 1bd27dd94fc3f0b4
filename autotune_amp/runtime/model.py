"""User's model as the controller handles it: its outputs are watched, modules pinned, and skipped steps undone."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.parallel import DistributedDataParallel

from autotune_amp.core.precisions import Precision
from autotune_amp.dimensions import FP8_RECIPE
from autotune_amp.dimensions.live_training import LiveTraining
from autotune_amp.precision import forward_wrapper, fp8
from autotune_amp.precision.forward_wrapper import modules_named, names_matching, unwrap


class AttachedModel:
    """Model under observation by the controller. `rerun` recomputes the loss of the latest batch.

    TorchScript modules in it are trained, but neither observed nor pinned; a model that is one cannot be forced into a
    precision.
    """

    def __init__(
        self,
        model: nn.Module,
        rerun: Callable[[], Tensor] | None,
        device: torch.device,
        *,
        is_from_closure: bool = False,
    ) -> None:
        self.is_from_closure = is_from_closure  # found by `train_step` instead of given by the user
        self.given = model  # as the loop calls it: DDP's wrapper has gradients of its own
        self.model = unwrap(model)
        self.rerun = rerun
        self.pinned: tuple[str, ...] = ()
        self.num_window_passes = 1  # of the latest update; `rerun` repeats the last pass
        self.is_verifying = False  # this window records which precisions the layers run in
        self._device, self._device_type = device, device.type
        self.ddp_modules = [m for m in model.modules() if isinstance(m, DistributedDataParallel)]
        self.statistics = RunningStatistics(self.model)
        self._is_in_window = True  # the statistics were saved just now
        self._own_fp8_recipe = fp8.recipe_of([self.model])
        self.is_forced = True  # assumed: an earlier controller may have forced it, and left pins behind too
        self.run_in(None)
        for module in self.model.modules():
            forward_wrapper.unpin(module)
        observed = [
            m
            for m in self.model.modules()
            if forward_wrapper.is_cast_by_autocast(m) and forward_wrapper.can_be_wrapped(m)
        ]
        self.observer = forward_wrapper.ForwardObserver(len(observed), device)
        for slot, module in enumerate(observed):
            forward_wrapper.observe(module, self.observer, slot)
        # TorchScript's modules take no hooks.
        holder = self.model if forward_wrapper.can_be_wrapped(self.model) else nn.Module()
        self._hook = holder.register_load_state_dict_post_hook(_OnLoad(self))  # type: ignore[no-untyped-call]

    def __getstate__(self) -> dict[str, Any]:
        """Return the state without a closure found by `train_step`: a copy's training brings its own."""
        return vars(self) | ({"rerun": None} if self.is_from_closure else {})

    def detach(self) -> None:
        """Restore the model: remove pins, the forced precision and observers."""
        self.run_in(None)
        self.run_fp8(self._own_fp8_recipe)
        for module in self.model.modules():
            forward_wrapper.unpin(module)
            forward_wrapper.stop_observing(module)
        self._hook.remove()

    @property
    def can_be_forced(self) -> bool:
        """Whether the model's forward can run in another precision than the surrounding autocast."""
        return forward_wrapper.can_be_wrapped(self.model)

    @property
    def holds_script(self) -> bool:
        """Whether TorchScript modules are in it, whose compiled code keeps its first half precision."""
        return any(not forward_wrapper.can_be_wrapped(module) for module in self.model.modules())

    def begin_window(self, *, has_run: bool = False) -> None:
        """Save the running statistics, once per accumulation window.

        If a forward pass of the window `has_run`, the older ones are kept, since it may have spoilt the present ones.
        """
        if not (self._is_in_window or has_run):
            self.statistics.save()
        self._is_in_window = True

    def end_window(self, skipped: bool | Tensor) -> None:
        """Restore the running statistics if the window's step was skipped.

        Then save them, since the next window may begin after its forward pass.
        """
        self.statistics.undo_where(skipped)
        self.statistics.save()
        self._is_in_window = False

    def run_in(self, name: Precision | None) -> None:
        """Force the model's forward into a precision, overriding the user's own autocast; None removes the override."""
        if name is not None and self.can_be_forced:
            forward_wrapper.override(self.model, name, self._device_type)
        elif self.is_forced:
            forward_wrapper.clear_override(self.model)
        self.is_forced = name is not None

    def run_fp8(self, recipe: str | None) -> None:
        """Make the linear layers multiply in fp8, or with None as usual. Their parameters stay the same."""
        fp8.set_recipe([self.model], recipe, self._device)

    def why_not_fp8(self, recipe: str) -> str | None:
        """Return why the model's layers cannot run in fp8, or None if they can or already do."""
        live = LiveTraining([self.model], [], self._device)
        return None if FP8_RECIPE.is_applied(recipe, live) else FP8_RECIPE.unsupported_reason(recipe, live)

    def begin_verifying(self) -> None:
        """Record which precisions the layers run in during the next window."""
        self.is_verifying = True
        self.observer.precisions.clear()
        self.observer.is_sampling = True

    def pin(self, names: Sequence[str], *, only: bool = False) -> None:
        """Keep the named modules in fp32 (``*`` stands for any text); with `only`, unpin all others.

        Raises `InvalidRequestError` for a name that matches no module.
        """
        names = names_matching(self.model, names)
        modules = modules_named(self.model, names)
        if only:
            for module in modules_named(self.model, self.pinned):
                forward_wrapper.unpin(module)
            self.pinned = ()
        for module in modules:
            forward_wrapper.pin_fp32(module, self._device_type)
        self.pinned = tuple(dict.fromkeys((*self.pinned, *names)))

    def forward_max(self) -> float | None:
        """Return the largest magnitude in a watched module's output, or None. Synchronizes with the device."""
        maxima = self.observer.read()
        return float(maxima.amax()) if maxima.numel() else None


class _OnLoad:
    """Hook that saves the running statistics after weights were loaded, since those saved before belong to other
    weights.

    In a copy or pickle of the model, which includes the hook, a function of Python's own that does nothing replaces it.
    """

    def __init__(self, attachment: AttachedModel) -> None:
        self._attachment = weakref.ref(attachment)

    def __call__(self, *_: object) -> None:
        attachment = self._attachment()
        if attachment is not None:
            attachment.statistics.collect()

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (nullcontext(), "__exit__")


class RunningStatistics:
    """Running statistics of all batch-norm layers of `model`, saved to undo skipped steps (pytorch#88474)."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._layers: list[_NormBase] = []
        self._saved: dict[tuple[torch.device, torch.dtype], Tensor] = {}
        self.collect()

    def collect(self) -> None:
        """Save the statistics of the layers that the model has now. Walking through a large model takes milliseconds,
        too long for every step.
        """
        self._layers = [module for module in self._model.modules() if isinstance(module, _NormBase)]
        self.save()

    def save(self) -> None:
        """Save the present statistics at the start of a window."""
        self._saved = {key: _flat(alike) for key, alike in self._alike().items()}

    def undo_where(self, skipped: bool | Tensor) -> None:
        """Restore the saved statistics if `skipped`. It may be a scalar on the device, nonzero for skipped, without a
        host sync.

        Buffers that were converted or replaced meanwhile are left alone.
        """
        for key, alike in self._alike().items() if skipped is not False else ():
            before = self._saved.get(key)
            if before is None or before.numel() != sum(buffer.numel() for buffer in alike):
                continue
            if isinstance(skipped, Tensor):
                is_on_host = before.device.type == "cpu"  # which would read a non-blocking copy too early
                skipped_here = skipped.to(before.device, non_blocking=not is_on_host)
                before = torch.where(skipped_here != 0, before, _flat(alike))
            parts = torch.split(before, [buffer.numel() for buffer in alike])
            torch._foreach_copy_(alike, [p.reshape(b.shape) for p, b in zip(parts, alike, strict=True)])

    def _alike(self) -> dict[tuple[torch.device, torch.dtype], list[Tensor]]:
        # Collected at each call: model.to() and load_state_dict(assign=True) replace buffers.
        alike: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
        layers = (layer for layer in self._layers if layer.track_running_stats)
        for buffer in (buffer for layer in layers for buffer in layer._buffers.values()):
            if buffer is not None:
                alike.setdefault((buffer.device, buffer.dtype), []).append(buffer)
        return alike


def _flat(buffers: Sequence[Tensor]) -> Tensor:
    return torch.cat([buffer.reshape(-1) for buffer in buffers])
