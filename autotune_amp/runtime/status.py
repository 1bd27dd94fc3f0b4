"""What the controller tells of itself: its moves, and where a run stands."""

from __future__ import annotations

import json
import math
import os
from dataclasses import asdict, dataclass
from pathlib import Path

from autotune_amp.core.config import AmpConfig
from autotune_amp.core.recommendation import write_atomically
from autotune_amp.core.setting import Precision


@dataclass(frozen=True)
class MoveRecord:
    """A move of the controller: at which update, what, why, and the config from then on.

    `kind` is one of demotion, promotion, revert, pin, rescale, not_precision, advice (what an advisory controller
    would have done), by_hand, stop.
    """

    update: int
    kind: str
    before: Precision
    after: Precision
    reason: str
    config: AmpConfig


@dataclass(frozen=True)
class Status:
    """Where a run stands. Updates are optimizer steps tried; `num_steps` of them were taken, `num_skips` were not: of
    several optimizers in one update, by at least one.

    `step_seconds` is the median time between updates in the current precision, None before the second. `amp_share` is
    the share of steps taken in bf16 or fp16. `forward_max` is the largest magnitude that the observers of `attach`
    saw since it was called, None without. `peak_memory_bytes` is the device's, or this process's own on a CPU.
    """

    precision: Precision
    is_enabled: bool
    is_advisory: bool
    pinned_modules: tuple[str, ...]
    scale: float
    num_updates: int
    num_steps: int
    num_skips: int
    skip_share: float
    amp_share: float
    step_seconds: float | None
    peak_memory_bytes: int
    forward_max: float | None
    history: tuple[MoveRecord, ...]


def to_plain(record: MoveRecord) -> dict[str, object]:
    """A record in plain types, the config as its JSON document, as checkpoints and stats files hold it."""
    return asdict(record) | {"config": record.config.to_json()}


def from_plain(record: dict[str, object]) -> MoveRecord:
    """What `to_plain` gave."""
    fields = record | {"config": AmpConfig.from_json(str(record["config"]))}
    return MoveRecord(**fields)  # type: ignore[arg-type] # a document that to_plain wrote


def write_status(status: Status, path: str | os.PathLike[str]) -> None:
    """Write it as a JSON document, atomically."""
    document = asdict(status) | {"history": [to_plain(record) for record in status.history]}
    forward_max = status.forward_max
    if forward_max is not None and not math.isfinite(forward_max):
        document["forward_max"] = None  # JSON has neither NaN nor infinity
    write_atomically(Path(path), json.dumps(document, indent=2, allow_nan=False) + "\n")
