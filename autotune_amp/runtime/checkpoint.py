"""The controller's state as plain types: GradScaler's five keys on top, what the controller knows below one key."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, TypeVar

import msgspec

from autotune_amp.core.config import MIN_LOSS_SCALE
from autotune_amp.core.dimensions import Precision
from autotune_amp.core.errors import FormatError
from autotune_amp.runtime.executor import Executor, Wish
from autotune_amp.runtime.gradient_check import Window
from autotune_amp.runtime.model import SavedStatistics
from autotune_amp.runtime.policy import PolicyState, check_scale
from autotune_amp.runtime.scaler import Waiting
from autotune_amp.runtime.status import Metrics, from_plain, to_plain

KEY = "autotune_amp"
FORMAT = 1
_Saved = TypeVar("_Saved")
_RULE = ("growth_factor", "backoff_factor", "growth_interval")
_Factor = Annotated[float, msgspec.Meta(gt=0, le=sys.float_info.max)]


# What the types of the parts must be.
class _Scaler(msgspec.Struct):
    scale: object
    growth_factor: _Factor
    backoff_factor: _Factor
    growth_interval: Annotated[int, msgspec.Meta(ge=1)]
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


class Counters(msgspec.Struct):
    """What a run had counted and was waiting for."""

    num_steps: int
    num_amp_steps: int
    num_passes: int
    loss_was_finite: bool
    loss: float
    is_off: bool
    wishes: list[tuple[Wish, str]]
    waiting: list[tuple[list[float], list[int]]]
    run_id: str | None = None  # of its log, where it has one


class _Own(_Versioned):
    steering: _Steering
    pinned: list[str]
    statistics: SavedStatistics | None
    history: list[_Record]
    counters: Counters


def save(
    executor: Executor,
    metrics: Metrics,
    window: Window,
    *,
    scale: float,
    growth_tracker: int,
    wishes: Sequence[tuple[Wish, str]],
    waiting: Waiting,
) -> dict[str, Any]:
    """Plain types only: it loads under ``torch.load(weights_only=True)``.

    `scale` and `growth_tracker` are the device's, `wishes` what is to be done once the window ends, and `waiting` what
    is on its way from the device.
    """
    rule, model = executor.policy.scale, executor.model
    return {
        "scale": scale,
        **{name: getattr(rule, name) for name in _RULE},
        "_growth_tracker": growth_tracker,
        KEY: {
            "format": FORMAT,
            "steering": executor.policy.state_dict(),
            "statistics": model.saved_statistics() if model and window.num_passes > 0 else None,
            "pinned": list(model.pinned) if model else list(executor.pins_to_come),
            "history": [to_plain(record) for record in executor.history],
            "counters": {
                "run_id": metrics.run_id,
                "num_steps": metrics.num_steps,
                "num_amp_steps": metrics.num_amp_steps,
                "num_passes": window.num_passes,
                "loss_was_finite": math.isfinite(float(window.loss_probe)),
                "loss": float(window.loss),
                "is_off": executor.is_off,
                "wishes": [list(wish) for wish in wishes],
                "waiting": [[list(values), list(label)] for values, label in waiting],
            },
        },
    }


def load(executor: Executor, metrics: Metrics, window: Window, state: object) -> Counters | None:
    """Take over a saved state, but for what it returns: what the controller has still to do, None for a GradScaler's.

    Raises `FormatError` for what is no such state, was written by a newer version or belongs to other rungs, and
    `InvalidRequestError` for a loss scale that cannot work. Nothing is changed then.
    """
    if not isinstance(state, Mapping):
        raise FormatError(
            f"The scaler's state is a {type(state).__name__}; it must be what state_dict() gave.",
            "If the checkpoint has none, do not load one: the controller then starts as its config says.",
        )
    if not state:  # a disabled GradScaler's
        metrics.resume(None)
        return None
    _converted(state, _Scaler)
    check_scale(state["scale"])
    own = state.get(KEY)
    if own is None:
        rule = executor.policy.scale
        for name in _RULE:
            setattr(rule, name, state[name])
        rule.growth_tracker = state["_growth_tracker"]
        rule.set(state["scale"])
        metrics.resume(None)
        return None
    if (version := _converted(own, _Versioned).format) > FORMAT:
        raise FormatError(
            f"The controller's state has format {version}; this version reads up to {FORMAT}.", "Upgrade autotune_amp."
        )
    counters = _converted(own, _Own).counters
    history = [from_plain(record) for record in own["history"]]
    if executor.model is not None:
        executor.model.check_state(own["pinned"], own["statistics"])
    executor.policy.load_state_dict(own["steering"])  # the last that can fail
    for name in _RULE:
        setattr(executor.policy.scale, name, state[name])
    executor.history[:] = history
    executor.load_model_state(own["pinned"], own["statistics"])
    executor.is_off = counters.is_off
    metrics.resume(counters.run_id)
    metrics.num_steps, metrics.num_amp_steps = counters.num_steps, counters.num_amp_steps
    policy = executor.policy  # which once did not count the updates of a run that was disabled
    policy.num_updates = max(policy.num_updates, metrics.num_steps + policy.num_skips)
    window.num_passes = counters.num_passes
    window.loss_probe = 0.0 if counters.loss_was_finite else math.nan
    window.loss = own["counters"]["loss"]
    return counters


def _converted(state: object, what: type[_Saved]) -> _Saved:
    try:
        return msgspec.convert(state, what)
    except msgspec.ValidationError as error:
        raise FormatError(f"The controller's state is damaged: {error}.", "Load an earlier checkpoint.") from error
