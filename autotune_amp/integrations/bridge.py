"""Functions that all adapters to frameworks share: checks against the config, accumulation windows, and metrics."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from autotune_amp.core.config import AmpConfig, DemotedError
from autotune_amp.core.errors import InvalidRequestError
from autotune_amp.core.recommendation import Recommendation
from autotune_amp.runtime.controller import PrecisionController
from autotune_amp.runtime.status import metric_values


def config_and_options(source: AmpConfig | Recommendation) -> tuple[AmpConfig, dict[str, Any]]:
    """Return a config, or a recommendation's to train with and the controller's options that it brings: what its run
    needs to know its utilization.
    """
    if isinstance(source, AmpConfig):
        return source, {}
    return source.training_config, {"measured_flops": source.measured_flops}


def raise_if_argument_differs(name: str, argument: object, config_value: object) -> None:
    """Raise `InvalidRequestError` if a framework's argument is not None and differs from the config's value."""
    if argument is not None and argument != config_value:
        raise InvalidRequestError(
            f"{name}={argument!r} contradicts the config, which says {config_value!r}.",
            f"Leave {name} out: the config decides it.",
        )


def raise_if_window_differs(
    controller: PrecisionController, run_config: AmpConfig, reason: str, next_step: str
) -> None:
    """Raise `DemotedError` if batch size or accumulation steps of the current precision differ from `run_config`.

    `reason` is the part of the message on why the framework cannot change them, `next_step` the error's next step.
    """
    current = controller.config
    if (current.batch_size, current.accumulation_steps) == (run_config.batch_size, run_config.accumulation_steps):
        return
    move = next(m for m in reversed(controller.status().history) if m.before != m.after == current.precision)
    raise DemotedError(
        f"The precision went from {move.before} to {move.after}: {move.reason}. It was measured with batch size "
        f"{current.batch_size} and {current.accumulation_steps} accumulation steps, not {run_config.batch_size} and "
        f"{run_config.accumulation_steps}: {reason}.",
        next_step,
        current,
    )


def numeric_metrics(controller: PrecisionController) -> dict[str, float]:
    """Return the controller's numeric metrics by name, for a framework's loggers. Synchronizes with the device."""
    return {name: value for name, value in metric_values(controller.status()).items() if not isinstance(value, str)}


def hold_after_last_step(scheduler: Any) -> Any:
    """Change the scheduler to keep its last learning rate instead of raising at its end, and return it.

    A trial may take more steps than the schedule has.
    """
    step = scheduler.step

    def step_or_hold(*args: Any, **kwargs: Any) -> None:
        with contextlib.suppress(ValueError):  # raised by OneCycleLR after its total_steps
            step(*args, **kwargs)

    scheduler.step = step_or_hold
    return scheduler


@contextlib.contextmanager
def replace_attributes(holder: Any, **attributes: Any) -> Iterator[None]:
    """Set attributes of `holder` itself within the context, and restore them afterwards."""
    attributes_now = vars(holder)
    original = {name: attributes_now[name] for name in attributes if name in attributes_now}
    attributes_now.update(attributes)
    try:
        yield
    finally:
        for name in attributes:
            attributes_now.pop(name, None)
        attributes_now.update(original)


class AccumulationWindow:
    """Accumulation window of a framework: each optimizer is unscaled once, and those that have stepped are counted.

    Frameworks call `unscale_` before clipping and again before the step. They also update the scaler after each
    optimizer, which would change scale and precision between two optimizers with gradients of the same backward pass;
    here the caller calls `end` after the last one.
    """

    def __init__(self, controller: PrecisionController) -> None:
        self._controller = controller
        self._stepped: set[int] = set()

    @property
    def num_stepped(self) -> int:
        """Return the number of optimizers for which `step` was called in the window."""
        return len(self._stepped)

    def unscale_(self, optimizer: torch.optim.Optimizer) -> None:
        """Unscale and check an optimizer's gradients; a second call in the window does nothing."""
        if not self._controller.is_unscaled(optimizer):
            self._controller.unscale_(optimizer)

    def step(self, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
        """Step the optimizer unless the step is to be skipped, and return the controller's result."""
        result = self._controller.step(optimizer, *args, **kwargs)
        self._stepped.add(id(optimizer))
        return result

    def clear(self) -> None:
        """Forget the optimizers of this window, without updating the controller."""
        self._stepped.clear()

    def end(self) -> None:
        """End the window and update the controller's scale and precision; do nothing if no optimizer has stepped."""
        if self._stepped:
            self.clear()
            self._controller.update()
