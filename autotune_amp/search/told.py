"""What the study is told of a trial: its parameters, its value, and the user attributes that explain it. Pure."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import msgspec

from autotune_amp.core.outcome import Measurement, Outcome
from autotune_amp.core.setting import Setting
from autotune_amp.numerics.scaler_replay import Replay
from autotune_amp.search.loss_scales import Pair

# What is to be told of a candidate with a pair: the outcome, or the failure it amounts to, and the replay of the pair.
Judge: TypeAlias = Callable[[Setting, Outcome, Pair | None], tuple[Outcome, Replay | None]]


def as_measured(candidate: Setting, outcome: Outcome, pair: Pair | None) -> tuple[Outcome, Replay | None]:  # noqa: ARG001 - a Judge
    """The judge where nothing is calibrated."""
    return outcome, None


def unpinned(candidate: Setting) -> Setting:
    """The candidate of the space that this one is with its pins."""
    return msgspec.structs.replace(candidate, pinned_modules=())


def own_workers(candidate: Setting) -> Setting:
    """The candidate with the user's own number of loader workers; any other is none of the study's."""
    return msgspec.structs.replace(candidate, num_workers=None)


def parameters(candidate: Setting, pair: Pair | None) -> dict[str, Any]:
    """The parameters of a candidate's trial; without `pair` those of the loss scale are left out."""
    found: dict[str, Any] = {"precision": candidate.precision, "batch_size": candidate.batch_size}
    if candidate.precision == "fp16" and pair is not None:
        found["init_scale"], found["growth_interval"] = pair
    return found


def value(outcome: Measurement, replay: Replay | None) -> float:
    """The objective: applied samples per second."""
    return outcome.samples_per_second * (1.0 if replay is None else replay.applied_share)


def described(candidate: Setting) -> dict[str, Any]:
    """What is known when a trial begins."""
    found: dict[str, Any] = {"candidate": str(candidate)}
    # The name says how many, which two sets of pins can have in common.
    return found | {"pinned_modules": list(candidate.pinned_modules)} if candidate.pinned_modules else found


def explained(outcome: Outcome, number: int | None, pair: Pair | None, replay: Replay | None) -> dict[str, Any]:
    """What is known when it has ended; `number` is its record's."""
    if isinstance(outcome, Measurement):
        explained: dict[str, Any] = {}
        if number is not None or pair is None:  # what was measured stands with the trial that measured it
            explained = {"step_seconds": outcome.step_seconds, "peak_memory_bytes": outcome.peak_memory_bytes}
        if outcome.was_cut:
            explained["was_cut"] = True
        if replay is not None and pair is not None:
            explained["snapped_init_scale"] = pair[0]
            explained |= {"applied_share": replay.applied_share, "num_skips": replay.num_skips}
        elif pair is not None:
            explained["is_calibrated"] = False  # the value is an upper bound
    else:
        explained = {"failure": outcome.kind, "reason": outcome.message}
    return explained if number is None else explained | {"record": number}
