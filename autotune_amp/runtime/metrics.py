"""Counts and times of a run, and their reporting to the run log and the sinks."""

from __future__ import annotations

import logging
import math
import os
import sys
import time
import uuid
from collections import deque
from collections.abc import Sequence
from datetime import datetime, timezone
from statistics import median
from typing import Annotated, Any

import msgspec
import psutil
import torch

from autotune_amp.core.config import AmpConfig
from autotune_amp.core.documents import Whole
from autotune_amp.core.evidence import MeasuredFlops
from autotune_amp.core.precisions import Precision
from autotune_amp.hardware import cuda
from autotune_amp.hardware.nvml import GpuSensors
from autotune_amp.runtime.gpu_sampler import GpuSampler
from autotune_amp.runtime.policy import Policy
from autotune_amp.runtime.run_log import BeginLine, MoveLine, RunLog, SampleLine
from autotune_amp.runtime.scaler import BAD_LOSS, CLEAN, LaggedReader, LossScaler, Ranks, UpdateResult
from autotune_amp.runtime.sinks import Sink, SinkThread
from autotune_amp.runtime.status import BEFORE, MOVE, PINNED_MODULES, REASON, MoveRecord, metric_values

log = logging.getLogger("autotune_amp.runtime")

Seconds = Annotated[float, msgspec.Meta(ge=0, le=sys.float_info.max)]

SAMPLE_EVERY = 64  # updates between samples of gradient and activation magnitudes, and between lines of the log
_SAMPLE_AT = 8  # early in the run, but after the loss scale has settled


class Totals(msgspec.Struct, kw_only=True):
    """Counts of updates. Steps taken, and seconds between updates, are by precision.

    Those of the loss scale count the updates in which the loss was scaled, and those after which the scale grew or
    backed off.
    """

    num_updates: Whole = 0
    num_steps: dict[Precision, Whole] = {}
    seconds: dict[Precision, Seconds] = {}
    num_overflows: Whole = 0
    num_bad_batches: Whole = 0
    num_moves: Whole = 0
    num_scaler_updates: Whole = 0
    num_growths: Whole = 0
    num_backoffs: Whole = 0

    @property
    def num_all_steps(self) -> int:
        """Return the number of steps taken in any precision."""
        return sum(self.num_steps.values())

    @property
    def num_skips(self) -> int:
        """Return the number of updates without a step."""
        return self.num_overflows + self.num_bad_batches

    def since(self, before: Totals) -> Totals:
        """Return the counts since `before`; a precision without new ones is left out."""
        changes: dict[str, Any] = {}
        for field in self.__struct_fields__:
            now, then = getattr(self, field), getattr(before, field)
            if isinstance(now, dict):
                new = {name: value - then.get(name, 0) for name, value in now.items()}
                changes[field] = {name: value for name, value in new.items() if value}
            else:
                changes[field] = now - then
        return Totals(**changes)

    def copy(self) -> Totals:
        """Return an independent copy."""
        return self.since(Totals())


class MetricsRecorder:
    """Counts of updates for the status, reported to the run log and the sinks. Only rank 0 reports."""

    def __init__(
        self,
        config: AmpConfig,
        policy: Policy,
        scaler: LossScaler,
        ranks: Ranks,
        *,
        sinks: Sequence[Sink],
        run_log: str | os.PathLike[str] | None,
        measured_flops: MeasuredFlops | None = None,
    ) -> None:
        self.totals = Totals()  # of the whole run, including the time before a checkpoint
        self.totals_at_reset = Totals()
        self.epoch: int | None = None
        self.flushed_share: float | None = None
        self.num_gradient_entries = 0  # of the parameters that this process trains
        self.run_id: str | None = None  # the run's id in its log and its checkpoints
        self.run_log = None if run_log is None else RunLog(run_log, checks=ranks.rank == 0)
        self.sink_threads = [SinkThread(sink) for sink in sinks]
        self._config = config
        self._policy = policy
        self._scaler = scaler
        self._ranks = ranks
        self._loss: float | None = None
        self._precision: Precision = config.precision
        self._rung = 0
        self._has_begun = False
        self._reported_scale: float | None = None
        self._reported_update = 0
        self.num_unexplained = 0  # non-finite losses since the last step, counted as bad batches
        self._last_update: float | None = None
        self._seconds: deque[float] = deque(maxlen=101)  # between updates since the last move
        self._tokens: deque[int] = deque(maxlen=101)  # in each of these updates
        self._measured_flops = measured_flops
        self._window_tokens: int | torch.Tensor = 0  # of the present window
        self._unjudged_tokens: deque[int | None] = deque()  # of windows without a verdict; None if the reader has them
        self._token_reader = LaggedReader()
        fp32_plans = (plan for plan in config.plans if plan.precision == "fp32")
        self._fp32_memory_bytes = next((plan.peak_memory_bytes for plan in fp32_plans), None)
        self._gpu_sampler: GpuSampler | None = None  # from the first update on

    @property
    def gpu_sensors(self) -> GpuSensors:
        """Return the newest readings of the GPU's sensors, which are those of a few seconds ago."""
        return GpuSensors() if self._gpu_sampler is None else self._gpu_sampler.newest

    def begin_rung(self, precision: Precision, rung: int) -> None:
        """Count later updates for `precision`."""
        self._precision, self._rung = precision, rung
        self._seconds.clear()
        self._tokens.clear()
        self._last_update = None

    def count_tokens(self, num_tokens: int | torch.Tensor) -> None:
        """Add real tokens to the present window. A tensor on an accelerator is read with the window's verdict, without
        an additional wait.
        """
        if isinstance(num_tokens, torch.Tensor) and num_tokens.device.type != "cpu":
            num_tokens = num_tokens.float()
        else:
            num_tokens = int(num_tokens)  # of a number of NumPy too
        self._window_tokens = self._window_tokens + num_tokens

    def discard_window(self) -> None:
        """Forget the tokens of a window that was discarded."""
        self._window_tokens = 0

    def end_window(self) -> None:
        """Keep the tokens of a window until its verdict is known."""
        tokens, self._window_tokens = self._window_tokens, 0
        if isinstance(tokens, torch.Tensor):
            self._token_reader.push([tokens], ())
        self._unjudged_tokens.append(tokens if isinstance(tokens, int) else None)

    def resume(self, run_id: str | None) -> None:
        """Continue the run `run_id` from a checkpoint, or with None a run without an id."""
        self.run_id = run_id
        self._has_begun = False

    def reset(self) -> None:
        """Restart the status's counts; the run log and the sinks keep counting."""
        self.totals_at_reset = self.totals.copy()

    @property
    def wants_sample(self) -> bool:
        """Whether to sample the magnitudes of the next update."""
        return self._policy.num_updates % SAMPLE_EVERY == _SAMPLE_AT

    def begin_update(self, result: UpdateResult, *, is_overflow: bool) -> None:
        """Count an update before the policy observes it. `is_overflow`: its watched forward pass overflowed.

        Earlier updates of the same burst, which were not watched, count as overflows then too.
        """
        self._begin()
        if self._gpu_sampler is not None:
            self._gpu_sampler.start()
        totals, precision = self.totals, self._precision
        ended_at = time.perf_counter() if result.ended_at is None else result.ended_at
        num_tokens = self._unjudged_tokens.popleft() if self._unjudged_tokens else 0
        if num_tokens is None:
            num_tokens = int(self._token_reader.pop()[0][0])
        if self._last_update is not None:
            # If only this verdict was late, the first time is of the host and the second of the device, so that the
            # difference may be negative.
            self._seconds.append(max(0.0, ended_at - self._last_update))
            self._tokens.append(num_tokens)
            totals.seconds[precision] = totals.seconds.get(precision, 0.0) + self._seconds[-1]
        self._last_update = ended_at
        totals.num_updates += 1
        if result.worst == CLEAN:
            self.num_unexplained = 0
            totals.num_steps[precision] = totals.num_steps.get(precision, 0) + 1
        elif result.worst == BAD_LOSS and not is_overflow:
            totals.num_bad_batches += 1
            self.num_unexplained += 1
        else:
            totals.num_overflows += 1
            if is_overflow:
                self.explain_by_overflow()
        if result.lost_share is not None:
            self.flushed_share = result.lost_share

    def count_scaler_update(self, scale_before: float) -> None:
        """Count an update of the loss scale, once the policy has observed it."""
        if self._scaler.is_scaling:
            totals, scale = self.totals, self._scaler.rule.scale
            totals.num_scaler_updates += 1
            totals.num_growths += scale > scale_before
            totals.num_backoffs += scale < scale_before

    def explain_by_overflow(self) -> None:
        """Count this burst's non-finite losses as overflows of the forward pass instead of bad batches."""
        self.totals.num_bad_batches -= self.num_unexplained
        self.totals.num_overflows += self.num_unexplained
        self.num_unexplained = 0

    def end_update(self, result: UpdateResult, *, knows_loss: bool) -> None:
        """Report due changes once the policy has counted the update."""
        self._loss = result.loss if knows_loss and math.isfinite(result.loss) else None
        is_sampled = self._policy.num_updates % SAMPLE_EVERY == 0
        if self._scale_has_changed:
            grew = f"{self._scaler.rule.growth_interval} steps without overflow"
            self.report_scale(grew if result.worst == CLEAN else "an overflow")
        elif is_sampled:
            self._report(SampleLine)

    def report_scale(self, cause: str) -> None:
        """Report the loss scale and the cause of its change, if it changed."""
        if self._has_begun and self._scale_has_changed:
            self._log_scale(cause)
            self._report(SampleLine)

    def log_move(self, record: MoveRecord) -> None:
        """Report a move."""
        self._begin()
        self.totals.num_moves += 1
        if self._scale_has_changed:
            self._log_scale(record.kind)
        self._report(
            MoveLine,
            kind=record.kind,
            before=record.before,
            after=record.after,
            reason=record.reason,
            pinned_modules=record.config.pinned_modules,
        )

    def current_readings(self, totals: Totals | None = None) -> dict[str, Any]:
        """Return the present fields of `Readings`. Counts are those of `totals`, or with None of the whole run."""
        totals, scale, sensors = totals or self.totals, self._scale_in_use, self.gpu_sensors
        flushed_share, num_entries = None if scale is None else self.flushed_share, self.num_gradient_entries
        flushed_entries = None if flushed_share is None or not num_entries else round(flushed_share * num_entries)
        peak_bytes, fp32_bytes = peak_memory_bytes(self._ranks.device), self._fp32_memory_bytes
        return {
            "update": self._policy.num_updates,
            "epoch": self.epoch,
            "precision": self._precision,
            "rung": self._rung,
            "scale": scale,
            "growth_tracker": None if scale is None else self._scaler.rule.growth_tracker,
            "num_steps": totals.num_all_steps,
            "num_skips": totals.num_skips,
            "num_overflows": totals.num_overflows,
            "num_bad_batches": totals.num_bad_batches,
            "num_moves": totals.num_moves,
            "num_scaler_updates": totals.num_scaler_updates,
            "num_growths": totals.num_growths,
            "num_backoffs": totals.num_backoffs,
            "flushed_share": flushed_share,
            "flushed_entries": flushed_entries,
            "elapsed_seconds": sum(totals.seconds.values()),
            "step_seconds": median(self._seconds) if self._seconds else None,
            "tokens_per_second": self._tokens_per_second,
            "mfu": self._mfu,
            "loss": self._loss,
            "peak_memory_bytes": peak_bytes,
            "saved_memory_bytes": None if fp32_bytes is None else fp32_bytes - peak_bytes,
            "temperature_celsius": sensors.temperature_celsius,
            "sm_clock_mhz": sensors.sm_clock_mhz,
            "power_watts": sensors.power_watts,
            "throttling": None if sensors.slowdowns is None else int(bool(sensors.slowdowns)),
        }

    def close(self) -> None:
        """Report the last update of the run, wait briefly for the sinks, and end the readings of the GPU."""
        if self._has_begun and self._reported_update != self._policy.num_updates:
            self._report(SampleLine)
        for sink_thread in self.sink_threads:
            sink_thread.close()
        if self._gpu_sampler is not None:
            self._gpu_sampler.close()

    @property
    def _tokens_per_second(self) -> float | None:
        """Return the tokens of all ranks per second since the last move, None if none were counted."""
        seconds = sum(self._seconds)
        return self._ranks.num_ranks * sum(self._tokens) / seconds if seconds and any(self._tokens) else None

    @property
    def _mfu(self) -> float | None:
        """Return the share of the machine's own rate in the present precision that a median step attains."""
        flops = self._measured_flops
        rate = None if flops is None else flops.machine_flops_per_second.get(self._precision)
        if flops is None or rate is None or not self._seconds:
            return None
        # Every rung trains on as many samples in a step.
        return flops.flops_per_sample * self._config.effective_batch_size / (rate * median(self._seconds))

    @property
    def _scale_in_use(self) -> float | None:
        return self._scaler.rule.scale if self._scaler.is_scaling else None

    @property
    def _scale_has_changed(self) -> bool:
        return self._reported_scale != self._scale_in_use

    def _log_scale(self, cause: str) -> None:
        scales = self._reported_scale, self._scale_in_use
        log.debug("update %d: loss scale %s -> %s: %s", self._policy.num_updates, *scales, cause)

    def _report(self, event: type[BeginLine | SampleLine | MoveLine], /, **fields: Any) -> None:
        """Make a line of this event, with `fields` in addition to the present readings, if anyone is told."""
        self._reported_scale, self._reported_update = self._scale_in_use, self._policy.num_updates
        self.num_unexplained = 0  # a count that was reported must not decrease
        if self.run_log is None and not self.sink_threads:
            return
        line = event(run_id=self.run_id or "", **self.current_readings(), **fields)
        if self.run_log is not None:
            self.run_log.write(line)
        if not self.sink_threads or isinstance(line, BeginLine):
            return
        values = metric_values(line)
        if isinstance(line, MoveLine):
            values |= {MOVE: line.kind, BEFORE: line.before, REASON: line.reason}
            values[PINNED_MODULES] = ", ".join(line.pinned_modules)
        for sink_thread in self.sink_threads:
            sink_thread.send(dict(values))

    def _begin(self) -> None:
        """Write the first line at the first update: by then the run knows its ranks and its device, and has loaded
        its checkpoint.
        """
        if self._has_begun:
            return
        self._has_begun = True
        ranks = self._ranks
        if self._gpu_sampler is None and ranks.device.type == "cuda" and (gpu := cuda.uuid(ranks.device)) is not None:
            self._gpu_sampler = GpuSampler(gpu, str(ranks.device))
        # Without a process group by now it is a run of its own, whatever rank its launcher gave it.
        rank = ranks.rank if ranks.are_many else 0
        if rank != 0:
            self.run_log, self.sink_threads = None, []  # rank 0 reports
        self._reported_scale = self._scale_in_use
        if self.run_log is None:
            return
        self.run_id = self.run_id or uuid.uuid4().hex
        self._report(
            BeginLine,
            is_resumed=self._policy.num_updates > 0,
            time=datetime.now(timezone.utc).isoformat(timespec="seconds"),
            device=str(ranks.device),
            rank=rank,
            num_ranks=ranks.num_ranks,
            config=self._config,
        )


def peak_memory_bytes(device: torch.device) -> int:
    """Return the peak memory of this process's tensors on an accelerator, or on a CPU the process's present memory."""
    if device.type in ("cuda", "xpu"):
        return int(getattr(torch, device.type).max_memory_allocated(device))
    return held_memory_bytes(device)


def held_memory_bytes(device: torch.device) -> int:
    """Return the memory that this process holds on the device, with what its allocator keeps for later."""
    if device.type in ("cuda", "xpu"):
        return int(getattr(torch, device.type).memory_reserved(device))
    if device.type == "mps":
        return int(torch.mps.driver_allocated_memory())
    return int(psutil.Process().memory_info().rss)
