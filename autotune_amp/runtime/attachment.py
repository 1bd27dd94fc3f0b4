"""The user's model as the controller sees it: what it puts out, what is pinned in it, what a skipped step must undo."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from autotune_amp.core.config import Precision
from autotune_amp.core.errors import InvalidRequestError
from autotune_amp.numerics.modules import modules_by_name, unwrap
from autotune_amp.precision import mode as precision
from autotune_amp.runtime.batchnorm import RunningStatistics, SavedStatistics


class Attachment:
    """`model` under observation. `rerun` recomputes the loss of the latest batch."""

    def __init__(self, model: nn.Module, rerun: Callable[[], Tensor] | None, device: torch.device) -> None:
        self.given = model  # as the loop calls it: DDP's wrapper has gradients of its own
        self.model = unwrap(model)
        self.rerun = rerun
        self.pinned: tuple[str, ...] = ()
        self.num_window_passes = 1  # of the latest update, of which `rerun` repeats the last
        self._device_type = device.type
        self._statistics = RunningStatistics(self.model)
        self._statistics_are_saved = True
        self._statistics_were_loaded = False  # in the window of a checkpoint, whatever is loaded first
        self.run_in(None)
        for module in self.model.modules():
            precision.unpin(module)  # what an earlier controller left behind
        observed = [m for m in self.model.modules() if precision.is_cast(m)]
        self.observer = precision.Observer(len(observed), device)
        for slot, module in enumerate(observed):
            precision.observe(module, self.observer, slot)
        self._hook = self.model.register_load_state_dict_post_hook(_OnLoad(self))  # type: ignore[no-untyped-call]

    def detach(self) -> None:
        """Leave the model as it was: nothing in it is pinned, forced into a precision or watched any more."""
        self.run_in(None)
        for module in self.model.modules():
            precision.unpin(module)
            precision.stop_observing(module)
        self._hook.remove()

    def loaded(self) -> None:
        """Weights were loaded: what was remembered of the statistics belongs to those before."""
        if not self._statistics_were_loaded:
            self._statistics.save()

    @property
    def has_frozen_half_weights(self) -> bool:
        """Whether frozen weights are in half precision: without autocast no fp32 activation multiplies by them."""
        return any(p.dtype in precision.HALF_DTYPES and not p.requires_grad for p in self.model.parameters())

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
        self.is_forced = name is not None
        if name is None:
            precision.clear_override(self.model)
        else:
            precision.override(self.model, name, self._device_type)

    def pin(self, names: Sequence[str]) -> None:
        """Keep these modules in fp32. Raises `InvalidRequestError` for a name that the model does not have."""
        for module in self._modules_of(names):
            precision.pin_fp32(module, self._device_type)
        self.pinned = tuple(dict.fromkeys((*self.pinned, *names)))

    def check_state(self, pinned: Sequence[str], statistics: SavedStatistics | None) -> None:
        """Raise `InvalidRequestError` for what cannot be pinned and put back in this model."""
        self._modules_of(pinned)
        if statistics is not None and not self._statistics.can_load(statistics):
            raise InvalidRequestError(
                "The state's running statistics are those of another model.",
                "Load a state that was saved with this model attached.",
            )

    def load_state(self, pinned: Sequence[str], statistics: SavedStatistics | None) -> None:
        """Pin these modules and no others; `statistics` are those from before the window that was saved."""
        for module in self._modules_of(self.pinned):
            precision.unpin(module)
        self.pinned = ()
        self.pin(pinned)
        self._statistics.save()
        self._statistics_were_loaded = statistics is not None
        if statistics is not None:
            self._statistics.load(statistics)

    def saved_statistics(self) -> SavedStatistics:
        """The running statistics from before the window, for a checkpoint inside it."""
        return self._statistics.saved()

    def _modules_of(self, names: Sequence[str]) -> list[nn.Module]:
        modules = modules_by_name(self.model)
        for name in names:
            if name not in modules:
                raise InvalidRequestError(
                    f"The model has no module {name!r} to pin in fp32.",
                    "Use names as model.named_modules() gives them, without a wrapper's prefix.",
                )
        return [modules[name] for name in names]

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

    def __init__(self, attachment: Attachment) -> None:
        self._attachment = weakref.ref(attachment)

    def __call__(self, *_: object) -> None:
        attachment = self._attachment()
        if attachment is not None:
            attachment.loaded()

    def __deepcopy__(self, memo: object) -> Callable[..., None]:
        return _on_load_of_a_copy

    def __reduce__(self) -> tuple[Callable[[], Callable[..., None]], tuple[()]]:
        return _hook_of_a_pickle, ()


def _on_load_of_a_copy(*_: object) -> None:
    """Nothing to remember."""


def _hook_of_a_pickle() -> Callable[..., None]:
    return _on_load_of_a_copy
