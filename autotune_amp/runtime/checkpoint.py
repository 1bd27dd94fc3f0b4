"""State of the controller as plain types: GradScaler's five keys on top, and the controller's own under one key."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import msgspec

from autotune_amp.core.documents import Share, Whole
from autotune_amp.core.errors import FormatError
from autotune_amp.precision.forward_wrapper import modules_named
from autotune_amp.runtime.executor import Executor, RequestKind
from autotune_amp.runtime.metrics import Totals
from autotune_amp.runtime.policy import (
    BackoffFactor,
    DeviceCount,
    GrowthFactor,
    GrowthInterval,
    SavedState,
    check_scale,
    converted,
)
from autotune_amp.runtime.scaler import VERDICTS, UpdateWindow
from autotune_amp.runtime.status import MoveRecord, from_plain, to_plain

KEY = "autotune_amp"
FORMAT = 2
_RULE = ("growth_factor", "backoff_factor", "growth_interval")


class _GradScalerState(msgspec.Struct):
    scale: object  # checked by `check_scale`
    growth_factor: GrowthFactor
    backoff_factor: BackoffFactor
    growth_interval: GrowthInterval
    growth_tracker: DeviceCount = msgspec.field(name="_growth_tracker")


class _VersionedState(msgspec.Struct):
    format: int


class _Counters(msgspec.Struct):
    totals: Totals
    totals_at_reset: Totals
    epoch: int | None
    flushed_share: Share | None
    num_passes: Whole
    loss_was_finite: bool
    loss: float
    is_off: bool
    pending_requests: list[tuple[RequestKind, str]] = msgspec.field(name="wishes")
    waiting: list[tuple[list[float], list[Whole]]]
    num_unexplained: Whole = 0
    run_id: str | None = None  # id in the run log, if there is one


class _ControllerState(msgspec.Struct):
    policy: dict[str, Any] = msgspec.field(name="steering")
    pinned: list[str]
    history: list[dict[str, Any]]
    counters: _Counters
    excluded_attention: list[Literal["cudnn", "flash", "efficient"]] = []


def save(executor: Executor, window: UpdateWindow) -> dict[str, Any]:
    """Return the state in plain types, for ``torch.load(weights_only=True)``. `window` is the current one."""
    scaler, metrics = executor.scaler, executor.metrics
    return {
        "scale": scaler.current_scale(),
        **{name: getattr(scaler.rule, name) for name in _RULE},
        "_growth_tracker": scaler.current_growth_tracker(),
        KEY: {
            "format": FORMAT,
            "steering": executor.policy.state_dict(),
            "pinned": list(executor.pinned),
            "excluded_attention": list(executor.excluded_attention),
            "history": [to_plain(record) for record in executor.history],
            "counters": {
                "run_id": metrics.run_id,
                "totals": msgspec.to_builtins(metrics.totals),
                "totals_at_reset": msgspec.to_builtins(metrics.totals_at_reset),
                "epoch": metrics.epoch,
                "flushed_share": metrics.flushed_share,
                "num_unexplained": metrics.num_unexplained,
                "num_passes": window.num_passes,
                "loss_was_finite": math.isfinite(float(window.loss_probe)),
                "loss": float(window.loss),
                "is_off": executor.is_off,
                "wishes": [list(request) for request in executor.pending_requests if request[0] != "act"],
                "waiting": [[list(values), list(label)] for values, label in scaler.reader.waiting()],
            },
        },
    }


@dataclass(frozen=True)
class ValidatedState:
    """Validated state, ready for `restore`. `own` and `policy` are None for a plain GradScaler's."""

    scaler: _GradScalerState
    own: _ControllerState | None = None
    policy: SavedState | None = None
    history: Sequence[MoveRecord] = ()


def read(executor: Executor, state: object) -> ValidatedState | None:
    """Validate and return a saved state; None for a disabled GradScaler's. Nothing is changed.

    Raises `FormatError` for anything that is no such state, was written by a newer version or belongs to other rungs,
    and `InvalidRequestError` for a loss scale that cannot work.
    """
    if not isinstance(state, Mapping):
        raise FormatError(
            f"The scaler's state is a {type(state).__name__}; it must be what state_dict() gave.",
            "If the checkpoint has none, do not load one: the controller then starts as its config says.",
        )
    if not state:
        return None
    scaler = converted(state, _GradScalerState)
    check_scale(scaler.scale)
    if (own := state.get(KEY)) is None:
        return ValidatedState(scaler)
    if (version := converted(own, _VersionedState).format) != FORMAT:
        raise FormatError(
            f"The controller's state has format {version}; this version of autotune_amp reads {FORMAT}.",
            "Resume with the version that saved it, or leave the state out: the run then starts as its config says.",
        )
    saved = converted(own, _ControllerState)
    if executor.model is not None:
        modules_named(executor.model.model, saved.pinned)
    for values, numbers in saved.counters.waiting:
        verdicts, (loss, *shares) = values[: len(numbers)], values[len(numbers) :] or (None,)
        if loss is None or not {*verdicts} <= VERDICTS or len(shares) > 1 or any(not 0 <= its <= 1 for its in shares):
            raise FormatError(
                f"The controller's state is damaged: {values} cannot be the verdicts on {len(numbers)} optimizers.",
                "Load an earlier checkpoint.",
            )
    for request, name in saved.counters.pending_requests:
        if request == "act" or (request == "set_precision" and name not in executor.policy.rungs):
            raise FormatError(
                f"The controller's state is damaged: it was asked for {request} {name}; this run's rungs are "
                f"{', '.join(executor.policy.rungs)}.",
                "Load an earlier checkpoint.",
            )
    history = [from_plain(record) for record in saved.history]
    return ValidatedState(scaler, saved, executor.policy.validated(saved.policy), history)


def restore(executor: Executor, window: UpdateWindow, saved: ValidatedState | None) -> None:
    """Restore a state that `read` has validated, into the executor and the current window."""
    metrics, scaler, rule = executor.metrics, executor.scaler, executor.scaler.rule
    if saved is None:
        metrics.resume(None)
        return
    plain, own = saved.scaler, saved.own
    scale = check_scale(plain.scale)
    for name in _RULE:
        setattr(rule, name, getattr(plain, name))
    if own is None or saved.policy is None:
        rule.growth_tracker = plain.growth_tracker
        rule.set(scale)
        metrics.resume(None)
        executor.apply()
        return
    executor.drop_action()
    executor.policy.restore(saved.policy)
    counters = own.counters
    executor.history[:] = saved.history
    executor.pending_requests[:] = counters.pending_requests
    executor.pins_to_come, executor.pinned_model = tuple(own.pinned), None
    executor.excluded_attention = ()
    executor.exclude_attention(own.excluded_attention)
    if executor.model is not None:
        executor.model.pin(own.pinned, only=True)
        executor.model.statistics.save()
    executor.is_off = counters.is_off
    metrics.resume(counters.run_id)
    metrics.totals, metrics.totals_at_reset = counters.totals, counters.totals_at_reset
    metrics.epoch, metrics.flushed_share = counters.epoch, counters.flushed_share
    metrics.num_unexplained = counters.num_unexplained
    window.num_passes = counters.num_passes
    window.loss_probe = 0.0 if counters.loss_was_finite else math.nan
    window.loss = counters.loss
    executor.apply()
    scaler.reader.restore(counters.waiting)
    if counters.waiting:  # the device's scale was this far ahead of the host's; the first loss tells the device
        scaler.place("cpu", rule.bounded(scale), plain.growth_tracker)
