"""The controller's state as plain types: GradScaler's five keys on top, what the controller knows below one key."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Annotated, Any, TypeVar

import msgspec

from autotune_amp.core.config import MIN_LOSS_SCALE, Precision
from autotune_amp.core.errors import FormatError, InvalidRequestError
from autotune_amp.runtime.batchnorm import SavedStatistics
from autotune_amp.runtime.scale_rule import ScaleRule, check_scale
from autotune_amp.runtime.state import PolicyState
from autotune_amp.runtime.status import from_plain, to_plain
from autotune_amp.runtime.steering import Steering

KEY = "autotune_amp"
FORMAT = 1
_Saved = TypeVar("_Saved")
_SCALER_KEYS = ("scale", "growth_factor", "backoff_factor", "growth_interval", "_growth_tracker")


# What the types of the parts must be.
class _Scaler(msgspec.Struct):
    growth_interval: int
    growth_tracker: int = msgspec.field(name="_growth_tracker")


class _Versioned(msgspec.Struct):
    format: int


class _LossScale(msgspec.Struct):
    scale: float
    growth_tracker: int
    hysteresis_left: int
    floor: Annotated[float, msgspec.Meta(ge=MIN_LOSS_SCALE)]


class _Steering(msgspec.Struct):
    policy: PolicyState
    precision: Precision
    loss_scale: _LossScale


class _Record(msgspec.Struct, forbid_unknown_fields=True):
    update: int
    kind: str
    before: Precision
    after: Precision
    reason: str
    config: str


class _Counters(msgspec.Struct):
    num_steps: int
    num_amp_steps: int
    num_passes: int
    loss_was_finite: bool
    loss: float
    is_off: bool
    wishes: list[tuple[str, str]]
    waiting: list[tuple[list[float], list[int]]]
    run_id: str | None = None  # of its log, where it has one


class _Own(_Versioned):
    steering: _Steering
    pinned: list[str]
    statistics: SavedStatistics | None
    history: list[_Record]
    counters: _Counters


def save(steering: Steering, scaler: Mapping[str, Any], counters: Mapping[str, Any]) -> dict[str, Any]:
    """Plain types only: it loads under ``torch.load(weights_only=True)``. `counters` are what the scaler adds."""
    is_in_window = counters["num_passes"] > 0
    return {
        **scaler,
        KEY: {
            "format": FORMAT,
            "steering": steering.policy.state_dict(),
            "statistics": steering.attachment.saved_statistics() if steering.attachment and is_in_window else None,
            "pinned": list(steering.attachment.pinned) if steering.attachment else list(steering.pins_to_come),
            "history": [to_plain(record) for record in steering.history],
            "counters": dict(counters),
        },
    }


def load(steering: Steering, state: object) -> dict[str, Any]:
    """Take over a saved state; gives the scaler's own counters, none from a plain GradScaler's state.

    Raises `FormatError` for what is no such state, was written by a newer version or belongs to other rungs, and
    `InvalidRequestError` for a loss scale that cannot work. Nothing is changed then.
    """
    if not isinstance(state, Mapping):
        raise FormatError(
            f"The scaler's state is a {type(state).__name__}; it must be what state_dict() gave.",
            "If the checkpoint has none, do not load one: the controller then starts as its config says.",
        )
    if not state:
        return {}  # a disabled GradScaler's
    missing = [key for key in _SCALER_KEYS if key not in state]
    if missing:
        raise FormatError(f"The scaler's state lacks {', '.join(missing)}.", "Load what state_dict() gave.")
    check_scale(state["scale"])
    _check_rule(state)
    _converted(state, _Scaler)
    own = state.get(KEY)
    if own is None:
        rule = steering.policy.scale
        _take(rule, state)
        rule.growth_tracker = state["_growth_tracker"]
        rule.set(state["scale"])
        return {}
    if (version := _converted(own, _Versioned).format) > FORMAT:
        raise FormatError(
            f"The controller's state has format {version}; this version reads up to {FORMAT}.", "Upgrade autotune_amp."
        )
    _converted(own, _Own)
    history = [from_plain(record) for record in own["history"]]
    if steering.attachment is not None:
        steering.attachment.check_state(own["pinned"], own["statistics"])
    steering.policy.load_state_dict(own["steering"])  # the last that can fail
    _take(steering.policy.scale, state)
    steering.history[:] = history
    steering.load_model_state(own["pinned"], own["statistics"])
    return dict(own["counters"])


def _converted(state: object, what: type[_Saved]) -> _Saved:
    try:
        return msgspec.convert(state, what)
    except msgspec.ValidationError as error:
        raise FormatError(f"The controller's state is damaged: {error}.", "Load an earlier checkpoint.") from error


def _take(rule: ScaleRule, state: Mapping[str, Any]) -> None:
    rule.growth_factor = state["growth_factor"]
    rule.backoff_factor = state["backoff_factor"]
    rule.growth_interval = state["growth_interval"]


def _check_rule(state: Mapping[str, Any]) -> None:
    for key in ("growth_factor", "backoff_factor", "growth_interval"):
        value = state[key]
        if not isinstance(value, (int, float)) or not math.isfinite(value) or value <= 0:
            raise InvalidRequestError(
                f"The scaler's state has {key} {value!r}; it must be a finite number above 0.",
                "Load a checkpoint from before it was set, or leave the state out.",
            )
