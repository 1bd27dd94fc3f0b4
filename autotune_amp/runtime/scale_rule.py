"""The loss scale's rule as arithmetic: GradScaler's, with bounds and hysteresis. Bit for bit what devices compute."""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping
from typing import Any

from autotune_amp.core.config import MIN_LOSS_SCALE, LossScale
from autotune_amp.core.errors import FormatError, InvalidRequestError

_STATE = ("scale", "growth_tracker", "hysteresis_left", "floor")
_LARGEST = 2.0**127  # power of two in float32


def float32(value: float) -> float:
    """`value` rounded as torch's kernel rounds the new scale: computed in double precision, stored in float32."""
    return float(struct.unpack("f", struct.pack("f", value))[0])


class ScaleRule:
    """The current scale and what an optimizer step does to it.

    An overflow multiplies the scale by `backoff_factor` once `hysteresis` overflows were counted since it last grew;
    `growth_interval` steps without one multiply it by `growth_factor`. It stays within [`floor`, `max_scale`].
    """

    def __init__(self, loss_scale: LossScale) -> None:
        self.scale = float32(loss_scale.init_scale)
        self.growth_tracker = 0
        self.growth_factor = loss_scale.growth_factor
        self.backoff_factor = loss_scale.backoff_factor
        self.growth_interval = loss_scale.growth_interval
        self.hysteresis = loss_scale.hysteresis
        self.hysteresis_left = loss_scale.hysteresis
        self.floor = float32(MIN_LOSS_SCALE if loss_scale.min_scale is None else loss_scale.min_scale)
        self.max_scale = float32(min(loss_scale.max_scale, _LARGEST))

    @property
    def would_cross_floor(self) -> bool:
        """Whether the next overflow is one that the floor alone keeps from lowering the scale in full."""
        return self.hysteresis_left <= 1 and self.scale * self.backoff_factor < self.floor

    def overflow(self) -> float:
        """Count an overflow; returns the octaves that it costs, those suppressed by the floor included."""
        self.growth_tracker = 0
        self.hysteresis_left -= 1
        if self.hysteresis_left > 0:
            return 0.0
        self.scale = max(self.floor, float32(self.scale * self.backoff_factor))
        return -math.log2(self.backoff_factor)

    def clean(self) -> float:
        """Count a step without overflow; returns the octaves gained, 0 where the scale did not grow."""
        self.growth_tracker += 1
        if self.growth_tracker < self.growth_interval:
            return 0.0
        self.growth_tracker = 0
        self.hysteresis_left = self.hysteresis
        before = self.scale
        self.scale = min(self.max_scale, float32(before * self.growth_factor))
        return math.log2(self.scale / before)

    def set(self, scale: float) -> None:
        """Set the scale, within its bounds; the tracker is kept, as GradScaler keeps it."""
        self.scale = float32(min(self.max_scale, max(self.floor, scale)))

    def state_dict(self) -> dict[str, float | int]:
        """What changes while training; plain numbers."""
        return {name: getattr(self, name) for name in _STATE}

    @staticmethod
    def check_state(state: Mapping[str, Any]) -> None:
        """Raise `FormatError` for a state that lacks a part, `InvalidRequestError` for a scale that cannot work."""
        missing = sorted(set(_STATE) - set(state))
        if missing:
            raise FormatError(f"The controller's state lacks {', '.join(missing)}.", "Load a state that it saved.")
        check_scale(state["scale"])

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over a saved state; raises as `check_state`."""
        self.check_state(state)
        for name in _STATE:
            setattr(self, name, state[name])
        self.set(state["scale"])  # the bounds may be others now


def check_scale(scale: object) -> float:
    """`scale` as a float; raises `InvalidRequestError` unless it is a finite number above 0."""
    if not isinstance(scale, (int, float)) or isinstance(scale, bool) or not math.isfinite(scale) or scale <= 0:
        raise InvalidRequestError(
            f"The loss scale given is {scale!r}; it must be a finite number above 0. At 0 or infinity GradScaler "
            "turns the weights into NaN or never steps again.",
            "Load a checkpoint from before the scale collapsed, or leave the controller's state out and start at "
            "the config's init_scale.",
        )
    return float(scale)
