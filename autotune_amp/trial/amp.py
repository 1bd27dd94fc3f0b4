"""What a trial gives to the user's `train_step`."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor
from torch.amp.grad_scaler import OptState

from autotune_amp.core.config import AmpConfig
from autotune_amp.precision.step_amp import StepAmp


class TrialAmp(StepAmp):
    """Trains as torch's GradScaler does; an optimizer without gradients is not stepped, as by the controller."""

    def __init__(
        self,
        new_autocast: Callable[[], AbstractContextManager[object]],
        device_type: str,
        config: AmpConfig,
    ) -> None:
        super().__init__(new_autocast, device_type, config)
        self._stepped: dict[int, Any] = {}  # since the last update, by optimizer
        self._on_step: list[tuple[Callable[[], object], int | None]] = []

    def step(self, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
        """``optimizer.step(*args, **kwargs)`` unless a gradient was not finite; true if it stepped.

        Behind a fused optimizer that is a tensor on its device, so that nobody waits who does not ask.
        """
        self.num_steps += 1
        stepped: bool | Tensor = True
        if not self.is_enabled():
            optimizer.step(*args, **kwargs)
        elif not has_gradients(optimizer):
            stepped = False
        else:
            super().step(optimizer, *args, **kwargs)
            stepped = sum(self._found_inf_per_device(optimizer).values()) == 0
        self._stepped[id(optimizer)] = stepped
        return stepped

    def step_together(self, optimizers: Iterable[torch.optim.Optimizer]) -> bool:
        """Step all of them or none: a non-finite gradient of one skips every one. Waits for the device."""
        given = list(optimizers)
        if self.is_enabled():
            for optimizer in filter(has_gradients, given):
                if self._per_optimizer_states[id(optimizer)]["stage"] is OptState.READY:
                    self.unscale_(optimizer)
            found = [inf for optimizer in given for inf in self._found_inf_per_device(optimizer).values()]
            if any(found):
                for inf in found:
                    inf.fill_(1.0)
        return super().step_together(given)

    def update(self, new_scale: float | Tensor | None = None) -> None:
        """End the step: the scale follows from what was found, or is `new_scale`."""
        states = self._per_optimizer_states.values() if self.is_enabled() else ()
        if self.is_enabled() and new_scale is None and not any(state["found_inf_per_device"] for state in states):
            self._note_update()  # no optimizer had gradients: nothing was learnt of the scale
            self._per_optimizer_states.clear()
        else:
            super().update(new_scale)
        for callback, key in self._on_step:
            if any(self._stepped.values()) if key is None else self._stepped.get(key):
                callback()
        self._stepped.clear()

    def on_step(self, callback: Callable[[], object], optimizer: torch.optim.Optimizer | None = None) -> None:
        """Call `callback` in `update` for every step really taken: of `optimizer`, or (None) of any."""
        self._on_step.append((callback, None if optimizer is None else id(optimizer)))


def has_gradients(optimizer: torch.optim.Optimizer) -> bool:
    """Whether any of its parameters has one."""
    return any(parameter.grad is not None for group in optimizer.param_groups for parameter in group["params"])
