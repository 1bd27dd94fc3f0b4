"""The user's model as the controller sees it: what it puts out, what is pinned in it, what a skipped step must undo."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import TypeAlias

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from autotune_amp.core.dimensions import Precision
from autotune_amp.core.errors import InvalidRequestError
from autotune_amp.precision import forward_wrapper, torch_state
from autotune_amp.precision.forward_wrapper import named, unwrap

SavedStatistics: TypeAlias = list[list[float]]


class Attachment:
    """`model` under observation. `rerun` recomputes the loss of the latest batch."""

    def __init__(self, model: nn.Module, rerun: Callable[[], Tensor] | None, device: torch.device) -> None:
        self.given = model  # as the loop calls it: DDP's wrapper has gradients of its own
        self.model = unwrap(model)
        self.rerun = rerun
        self.pinned: tuple[str, ...] = ()
        self.num_window_passes = 1  # of the latest update, of which `rerun` repeats the last
        self.is_verifying = False  # this window is watched for the precisions that the layers run in
        self._device_type = device.type
        self._statistics = RunningStatistics(self.model)
        self._statistics_are_saved = True
        self._statistics_were_loaded = False  # in the window of a checkpoint, whatever is loaded first
        self.is_forced = True  # by an earlier controller, which may have left pins behind, too
        self.run_in(None)
        for module in self.model.modules():
            forward_wrapper.unpin(module)
        observed = [m for m in self.model.modules() if forward_wrapper.is_cast(m)]
        self.observer = forward_wrapper.Observer(len(observed), device)
        for slot, module in enumerate(observed):
            forward_wrapper.observe(module, self.observer, slot)
        self._hook = self.model.register_load_state_dict_post_hook(_OnLoad(self))  # type: ignore[no-untyped-call]

    def detach(self) -> None:
        """Leave the model as it was: nothing in it is pinned, forced into a precision or watched any more."""
        self.run_in(None)
        for module in self.model.modules():
            forward_wrapper.unpin(module)
            forward_wrapper.stop_observing(module)
        self._hook.remove()

    def loaded(self) -> None:
        """Weights were loaded: what was remembered of the statistics belongs to those before."""
        if not self._statistics_were_loaded:
            self._statistics.save()

    @property
    def has_frozen_half_weights(self) -> bool:
        """Whether frozen weights are in half precision: without autocast no fp32 activation multiplies by them."""
        return any(p.dtype in torch_state.HALF_DTYPES and not p.requires_grad for p in self.model.parameters())

    def begin_window(self) -> None:
        """Remember the running statistics, once until the window ends."""
        if not self._statistics_are_saved:
            self._statistics.save()
            self._statistics_are_saved = True

    def end_window(self, skipped: bool | Tensor) -> None:
        """Undo the running statistics if the window's step was skipped."""
        if isinstance(skipped, Tensor):
            self._statistics.undo_where(skipped)
        elif skipped:
            self._statistics.undo()
        self._statistics_are_saved = self._statistics_were_loaded = False

    def run_in(self, name: Precision | None) -> None:
        """Force the model's forward into a precision, against an autocast of the user's own; None leaves it alone."""
        if name is not None:
            forward_wrapper.override(self.model, name, self._device_type)
        elif self.is_forced:
            forward_wrapper.clear_override(self.model)
        self.is_forced = name is not None

    def begin_verifying(self) -> None:
        """In the next window, watch which precisions the layers run in."""
        self.is_verifying = True
        self.observer.precisions.clear()
        self.observer.is_sampling = True

    def pin(self, names: Sequence[str]) -> None:
        """Keep these modules in fp32. Raises `InvalidRequestError` for a name that the model does not have."""
        for module in named(self.model, names):
            forward_wrapper.pin_fp32(module, self._device_type)
        self.pinned = tuple(dict.fromkeys((*self.pinned, *names)))

    def check_state(self, pinned: Sequence[str], statistics: SavedStatistics | None) -> None:
        """Raise `InvalidRequestError` for what cannot be pinned and put back in this model."""
        named(self.model, pinned)
        if statistics is not None and not self._statistics.can_load(statistics):
            raise InvalidRequestError(
                "The state's running statistics are those of another model.",
                "Load a state that was saved with this model attached.",
            )

    def load_state(self, pinned: Sequence[str], statistics: SavedStatistics | None) -> None:
        """Pin these modules and no others; `statistics` are those from before the window that was saved."""
        for module in named(self.model, self.pinned):
            forward_wrapper.unpin(module)
        self.pinned = ()
        self.pin(pinned)
        self._statistics.save()
        self._statistics_were_loaded = statistics is not None
        if statistics is not None:
            self._statistics.load(statistics)

    def saved_statistics(self) -> SavedStatistics:
        """The running statistics from before the window, for a checkpoint inside it."""
        return self._statistics.saved()

    def forward_max(self) -> float | None:
        """The largest magnitude that a watched module put out so far, None without any; waits for the device."""
        maxima = self.observer.read()
        return float(maxima.amax()) if maxima.numel() else None

    def bad_parameters(self) -> tuple[str, ...]:
        """The parameters whose gradients are not finite now; waits for the device."""
        return tuple(
            name for name, p in self.model.named_parameters() if p.grad is not None and not p.grad.isfinite().all()
        )


class _OnLoad:
    """The model's hook: a copy or a pickle of the model knows nothing of the controller."""

    def __init__(self, attachment: Attachment | None = None) -> None:
        self._attachment = None if attachment is None else weakref.ref(attachment)

    def __call__(self, *_: object) -> None:
        attachment = None if self._attachment is None else self._attachment()
        if attachment is not None:
            attachment.loaded()

    def __reduce__(self) -> tuple[type[_OnLoad], tuple[()]]:
        return _OnLoad, ()


class RunningStatistics:
    """The running statistics of every such layer of `model` (pytorch#88474)."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._saved: dict[tuple[torch.device, torch.dtype], Tensor] = {}
        self.save()

    def save(self) -> None:
        """Remember them as they are now: a window begins."""
        self._saved = {key: torch.cat([b.reshape(-1) for b in alike]) for key, alike in self._alike().items()}

    def saved(self) -> SavedStatistics:
        """What is remembered, in plain types."""
        return [flat.tolist() for flat in self._saved.values()]

    def can_load(self, saved: SavedStatistics) -> bool:
        """Whether `saved` is of layers like these."""
        return [len(flat) for flat in saved] == [len(flat) for flat in self._saved.values()]

    def load(self, saved: SavedStatistics) -> None:
        """Remember what `saved` gave."""
        for flat, values in zip(self._saved.values(), saved, strict=True):
            flat.copy_(torch.tensor(values, dtype=flat.dtype))

    def undo(self) -> None:
        """Put them back as they were remembered."""
        for alike, saved in self._pairs():
            self._write(alike, saved)

    def undo_where(self, skipped: Tensor) -> None:
        """Put them back where `skipped`, a scalar on the device, is not 0; the host need not know."""
        for alike, saved in self._pairs():
            now = torch.cat([buffer.reshape(-1) for buffer in alike])
            self._write(alike, torch.where(skipped.to(now.device, non_blocking=True) != 0, saved, now))

    def _pairs(self) -> Iterator[tuple[list[Tensor], Tensor]]:
        """What is there now with what was saved of it; not what was converted or replaced in between."""
        for key, alike in self._alike().items():
            saved = self._saved.get(key)
            if saved is not None and saved.numel() == sum(buffer.numel() for buffer in alike):
                yield alike, saved

    @staticmethod
    def _write(buffers: list[Tensor], flat: Tensor) -> None:
        pieces = torch.split(flat, [buffer.numel() for buffer in buffers])
        torch._foreach_copy_(buffers, [p.reshape(b.shape) for p, b in zip(pieces, buffers, strict=True)])

    def _alike(self) -> dict[tuple[torch.device, torch.dtype], list[Tensor]]:
        # Read anew each time: model.to() and load_state_dict(assign=True) replace buffers, conversions whole layers.
        alike: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
        layers = (m for m in self._model.modules() if isinstance(m, _NormBase) and m.track_running_stats)
        for buffer in (buffer for layer in layers for buffer in layer._buffers.values()):
            if buffer is not None:
                alike.setdefault((buffer.device, buffer.dtype), []).append(buffer)
        return alike
