"""The controller's state as plain types: GradScaler's five keys on top, what the controller knows below one key."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from typing import Annotated, Any

import msgspec

from autotune_amp.core.errors import FormatError
from autotune_amp.precision.forward_wrapper import named
from autotune_amp.runtime.executor import Executor, Wish
from autotune_amp.runtime.metrics import Totals
from autotune_amp.runtime.policy_state import check_scale, converted
from autotune_amp.runtime.scaler import Window
from autotune_amp.runtime.status import from_plain, to_plain

KEY = "autotune_amp"
FORMAT = 2
_RULE = ("growth_factor", "backoff_factor", "growth_interval")
_Factor = Annotated[float, msgspec.Meta(gt=0, le=sys.float_info.max)]


class _Scaler(msgspec.Struct):
    scale: object  # looked at by `check_scale`
    growth_factor: _Factor
    backoff_factor: _Factor
    growth_interval: Annotated[int, msgspec.Meta(ge=1)]
    growth_tracker: int = msgspec.field(name="_growth_tracker")


class _Versioned(msgspec.Struct):
    format: int


class _Counters(msgspec.Struct):
    totals: Totals
    totals_at_reset: Totals
    epoch: int | None
    flushed_share: float | None
    num_passes: int
    loss_was_finite: bool
    loss: float
    is_off: bool
    wishes: list[tuple[Wish, str]]
    waiting: list[tuple[list[float], list[int]]]
    run_id: str | None = None  # of its log, where it has one


class _Own(msgspec.Struct):
    steering: dict[str, Any]  # the policy's
    pinned: list[str]
    history: list[dict[str, Any]]
    counters: _Counters


def save(executor: Executor, window: Window) -> dict[str, Any]:
    """Plain types only: it loads under ``torch.load(weights_only=True)``. `window` is the one that the loop is in."""
    scaler, metrics = executor.scaler, executor.metrics
    return {
        "scale": scaler.current_scale(),
        **{name: getattr(scaler.rule, name) for name in _RULE},
        "_growth_tracker": scaler.current_growth_tracker(),
        KEY: {
            "format": FORMAT,
            "steering": executor.policy.state_dict(),
            "pinned": list(executor.model.pinned if executor.model else executor.pins_to_come),
            "history": [to_plain(record) for record in executor.history],
            "counters": {
                "run_id": metrics.run_id,
                "totals": msgspec.to_builtins(metrics.totals),
                "totals_at_reset": msgspec.to_builtins(metrics.totals_at_reset),
                "epoch": metrics.epoch,
                "flushed_share": metrics.flushed_share,
                "num_passes": window.num_passes,
                "loss_was_finite": math.isfinite(float(window.loss_probe)),
                "loss": float(window.loss),
                "is_off": executor.is_off,
                "wishes": [list(wish) for wish in executor.wishes if wish[0] != "act"],
                "waiting": [[list(values), list(label)] for values, label in scaler.reader.waiting()],
            },
        },
    }


def load(executor: Executor, window: Window, state: object) -> None:
    """Take over a saved state.

    Raises `FormatError` for what is no such state, was written by a newer version or belongs to other rungs, and
    `InvalidRequestError` for a loss scale that cannot work. Nothing is changed then.
    """
    if not isinstance(state, Mapping):
        raise FormatError(
            f"The scaler's state is a {type(state).__name__}; it must be what state_dict() gave.",
            "If the checkpoint has none, do not load one: the controller then starts as its config says.",
        )
    metrics, scaler = executor.metrics, executor.scaler
    if not state:  # a disabled GradScaler's
        metrics.resume(None)
        return
    plain, rule = converted(state, _Scaler), scaler.rule
    scale = check_scale(plain.scale)
    own = state.get(KEY)
    if own is None:
        for name in _RULE:
            setattr(rule, name, state[name])
        rule.growth_tracker = plain.growth_tracker
        rule.set(scale)
        metrics.resume(None)
        executor.apply()
        return
    if (version := converted(own, _Versioned).format) != FORMAT:
        raise FormatError(
            f"The controller's state has format {version}; this version of autotune_amp reads {FORMAT}.",
            "Resume with the version that saved it, or leave the state out: the run then starts as its config says.",
        )
    saved = converted(own, _Own)
    history = [from_plain(record) for record in saved.history]
    if executor.model is not None:
        named(executor.model.model, saved.pinned)
    executor.policy.load_state_dict(saved.steering)  # the last that can fail
    for name in _RULE:
        setattr(rule, name, state[name])
    counters = saved.counters
    executor.history[:] = history
    executor.wishes[:] = counters.wishes
    executor.pins_to_come = tuple(saved.pinned)
    if executor.model is not None:
        executor.model.pin(saved.pinned, only=True)
        executor.model.statistics.save()
    executor.is_off = counters.is_off
    metrics.resume(counters.run_id)
    metrics.totals, metrics.totals_at_reset = counters.totals, counters.totals_at_reset
    metrics.epoch, metrics.flushed_share = counters.epoch, counters.flushed_share
    window.num_passes = counters.num_passes
    window.loss_probe = 0.0 if counters.loss_was_finite else math.nan
    window.loss = counters.loss
    executor.apply()
    scaler.reader.restore(counters.waiting)
    if counters.waiting:  # the device, at this scale, was that much ahead of the host
        scaler.place(executor.ranks.device, scale, plain.growth_tracker)
