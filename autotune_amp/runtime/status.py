"""What the controller tells of itself: moves, where a run stands, metrics for TensorBoard and the run log."""

from __future__ import annotations

import json
import math
import os
import time
import uuid
from collections import deque
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import psutil
import torch

from autotune_amp.core.config import AmpConfig
from autotune_amp.core.dimensions import Precision
from autotune_amp.core.recommendation import write_atomically
from autotune_amp.hardware.device import device_of
from autotune_amp.precision.modes import MODES
from autotune_amp.runtime.policy import Policy
from autotune_amp.runtime.policy_state import converted
from autotune_amp.runtime.run_log import BeginLine, MoveLine, RunLog, SampleLine
from autotune_amp.runtime.scaler import LossScaler, Ranks

SAMPLE_EVERY = 64  # updates between looks at the gradients' and activations' magnitudes, and between lines
_SAMPLE_AT = 8  # early in the run, but after the loss scale has settled


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


def from_plain(record: Mapping[str, object]) -> MoveRecord:
    """What `to_plain` gave. Raises `InvalidRequestError` for anything else."""
    return converted({**record, "config": AmpConfig.from_json(str(record.get("config")))}, MoveRecord)


def write_status(status: Status, path: str | os.PathLike[str]) -> None:
    """Write it as a JSON document, atomically."""
    document = asdict(status) | {"history": [to_plain(record) for record in status.history]}
    forward_max = status.forward_max
    if forward_max is not None and not math.isfinite(forward_max):
        document["forward_max"] = None  # JSON has neither NaN nor infinity
    write_atomically(Path(path), json.dumps(document, indent=2, allow_nan=False) + "\n")


def peak_memory_bytes(device: torch.device) -> int:
    """The most memory that this process's tensors took on an accelerator; on a CPU, what the process holds now."""
    if device.type in ("cuda", "xpu"):
        return int(getattr(torch, device.type).max_memory_allocated(device))
    return _held_memory_bytes(device)


def available_memory_bytes(device: torch.device) -> int:
    """What this process may hold on the device in all: what is free and what it already holds."""
    return device_of(device.type).memory(str(device)).available + _held_memory_bytes(device)


def _held_memory_bytes(device: torch.device) -> int:
    if device.type in ("cuda", "xpu"):
        return int(getattr(torch, device.type).memory_reserved(device))
    if device.type == "mps":
        return int(torch.mps.driver_allocated_memory())
    return int(psutil.Process().memory_info().rss)


class Metrics:
    """Of the updates that `policy` counts `num_steps` were taken, `num_amp_steps` of those in bf16 or fp16."""

    def __init__(
        self,
        config: AmpConfig,
        policy: Policy,
        scaler: LossScaler,
        ranks: Ranks,
        *,
        writer: Any,
        run_log: str | os.PathLike[str] | None,
    ) -> None:
        self.num_steps = self.num_amp_steps = 0
        self.run_id: str | None = None  # as in the log, and in every checkpoint from then on
        self.run_log = None if run_log is None else RunLog(run_log, checks=ranks.rank == 0)
        self._config = config
        self._policy = policy
        self._scaler = scaler
        self._ranks = ranks
        self._writer = writer
        self._precision = config.precision
        self._last_update: float | None = None
        self.seconds: deque[float] = deque(maxlen=101)  # between updates since the last move

    def begin_rung(self, precision: Precision) -> None:
        """From now on updates are in `precision`."""
        self._precision = precision
        self.seconds.clear()
        self._last_update = None

    def resume(self, run_id: str | None) -> None:
        """The run goes on from a checkpoint, which knows its id in the log."""
        self.run_id = run_id
        if self.run_log is not None:
            self.run_log.has_begun = False

    @property
    def wants_sample(self) -> bool:
        """Whether the magnitudes of the next update are looked at."""
        return self._policy.num_updates % SAMPLE_EVERY == _SAMPLE_AT

    def begin_update(self, *, was_taken: bool) -> None:
        """An update was judged, before the policy hears of it."""
        self._begin_log()
        judged_at = time.perf_counter()
        if self._last_update is not None:
            self.seconds.append(judged_at - self._last_update)
        self._last_update = judged_at
        self.num_steps += was_taken
        self.num_amp_steps += was_taken and MODES[self._precision].uses_autocast

    def end_update(self, loss: float | None) -> None:
        """The policy has counted the update: write what is due. `loss` is None where nobody saw it."""
        policy = self._policy
        is_sampled = policy.num_updates % SAMPLE_EVERY == 0
        if self._writer is not None and is_sampled:
            values = {"scale": self._scaler.target, "skips": policy.num_skips, "rung": policy.rung}
            for name, value in (values | {"steps": self.num_steps}).items():
                self._writer.add_scalar(f"autotune_amp/{name}", value, policy.num_updates)
        if self.run_log is not None and (is_sampled or self.run_log.scale != self._scale_in_use):
            is_known = loss is not None and math.isfinite(loss)
            self.run_log.write(SampleLine(**self._standing(), loss=loss if is_known else None))

    def log_move(self, record: MoveRecord) -> None:
        """Write a move."""
        self._begin_log()
        if self.run_log is not None:
            said = {name: getattr(record, name) for name in ("kind", "before", "after", "reason")}
            self.run_log.write(MoveLine(**self._standing(), **said, pinned_modules=record.config.pinned_modules))

    @property
    def _scale_in_use(self) -> float | None:
        return self._scaler.rule.scale if self._scaler.is_scaling else None

    def _standing(self) -> dict[str, Any]:
        return {
            "update": self._policy.num_updates,
            "num_steps": self.num_steps,
            "num_skips": self._policy.num_skips,
            "precision": self._precision,
            "scale": self._scale_in_use,
        }

    def _begin_log(self) -> None:
        """Only now: by its first update a run knows its ranks and has loaded its checkpoint."""
        run_log, ranks = self.run_log, self._ranks
        if run_log is None or run_log.has_begun:
            return
        if ranks.rank != 0:
            self.run_log = None  # another rank writes it
            return
        self.run_id = self.run_id or uuid.uuid4().hex
        begin = BeginLine(
            **self._standing(),
            run_id=self.run_id,
            is_resumed=self._policy.num_updates > 0,
            time=datetime.now(timezone.utc).isoformat(timespec="seconds"),
            device=str(ranks.device),
            rank=ranks.rank,
            num_ranks=ranks.num_ranks,
            config=self._config,
        )
        run_log.write(begin)
