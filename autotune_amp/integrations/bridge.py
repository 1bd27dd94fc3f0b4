"""Common parts of all adapters to frameworks: the config, contradictions to it, accumulation windows, and metrics."""

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


def config_of(given: AmpConfig | Recommendation) -> AmpConfig:
    """Return the config itself, or the config of a recommendation."""
    return given if isinstance(given, AmpConfig) else given.config


def refuse_other(name: str, given: object, wanted: object) -> None:
    """Raise `InvalidRequestError` if a framework's argument is given and differs from the config's value."""
    if given is not None and given != wanted:
        raise InvalidRequestError(
            f"{name}={given!r} contradicts the config, which says {wanted!r}.",
            f"Leave {name} out: the config decides it.",
        )


def refuse_other_window(controller: PrecisionController, own: AmpConfig, why: str, next_step: str) -> None:
    """Raise `DemotedError` if the current rung was measured with another batch size or accumulation than the run's own.

    `why` is the message's explanation of why this ends the run.
    """
    plan = controller.config
    if (plan.batch_size, plan.accumulation_steps) == (own.batch_size, own.accumulation_steps):
        return
    move = next(m for m in reversed(controller.status().history) if m.before != m.after == plan.precision)
    raise DemotedError(
        f"The precision went from {move.before} to {move.after}: {move.reason}. It was measured with batch size "
        f"{plan.batch_size} and {plan.accumulation_steps} accumulation steps, not {own.batch_size} and "
        f"{own.accumulation_steps}: {why}.",
        next_step,
        plan,
    )


def numbers(controller: PrecisionController) -> dict[str, float]:
    """Return the numeric metrics by name, for a framework's loggers. Synchronizes with the device."""
    return {name: value for name, value in metric_values(controller.status()).items() if not isinstance(value, str)}


def lasting(scheduler: Any) -> Any:
    """Return the scheduler, changed to stay at its end instead of raising: a trial may take more steps."""
    step = scheduler.step

    def step_on(*args: Any, **kwargs: Any) -> None:
        with contextlib.suppress(ValueError):  # OneCycleLR's
            step(*args, **kwargs)

    scheduler.step = step_on
    return scheduler


@contextlib.contextmanager
def replaced(holder: Any, **attributes: Any) -> Iterator[None]:
    """Set attributes on an object temporarily."""
    own = vars(holder)
    before = {name: own[name] for name in attributes if name in own}
    own.update(attributes)
    try:
        yield
    finally:
        for name in attributes:
            own.pop(name, None)
        own.update(before)


class Window:
    """Accumulation window of a controller, in which each optimizer is unscaled once, and which ends when all have
    stepped.

    A framework requests unscaling before clipping and again before the step, and updates its scaler after each
    optimizer: the scale, and here the precision, would change between two optimizers whose gradients come from one
    backward pass.
    """

    def __init__(self, controller: PrecisionController) -> None:
        self._controller = controller
        self._unscaled: set[int] = set()
        self._stepped: set[int] = set()

    @property
    def num_stepped(self) -> int:
        """Return the number of optimizers that have stepped or skipped their step in the window."""
        return len(self._stepped)

    def unscale_(self, optimizer: torch.optim.Optimizer) -> None:
        """Unscale and check an optimizer's gradients; a second call in the window does nothing."""
        if id(optimizer) not in self._unscaled:
            self._unscaled.add(id(optimizer))
            self._controller.unscale_(optimizer)

    def step(self, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
        """Step the optimizer unless the step is to be skipped, and return the controller's result."""
        taken = self._controller.step(optimizer, *args, **kwargs)
        self._stepped.add(id(optimizer))
        return taken

    def clear(self) -> None:
        """Start a new window without ending this one."""
        self._unscaled.clear()
        self._stepped.clear()

    def end(self) -> None:
        """End the window if any optimizer has stepped in it: the scale and the precision may change."""
        if self._stepped:
            self.clear()
            self._controller.update()
