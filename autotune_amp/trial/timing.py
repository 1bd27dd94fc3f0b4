"""Timing optimizer steps: warm up, measure until the interval is narrow, cut what is hopeless."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable

import msgspec
import torch

from autotune_amp.hardware.matmul import synchronize
from autotune_amp.statistics import trimmed_interval
from autotune_amp.trial.step import Training

NUM_STEPS_BEFORE_CUT = 5
DEADLINE_SHARE = 0.6
# Warm-up steps that are all so many times over the cut end the trial at once: bf16 or fp16 that is merely emulated.
HOPELESS_RATIO = 1.6
# From 65536 down to 1, and a few more: after that the loss scale is not what is wrong.
MAX_SCALE_SEARCH_STEPS = 20

Report = Callable[[int, float], None]


class NonFiniteError(Exception):
    """The loss, or every gradient while the loss scale was searched, was not finite."""


class Timing(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds of optimizer steps; `data_seconds` is the share of a mean step that waited for `next()`."""

    first_step_seconds: float
    raw_step_seconds: tuple[float, ...]
    data_seconds: float
    num_skips: int
    last_loss: float
    was_cut: bool


def time_steps(training: Training, report: Report) -> Timing:
    """Warm up and measure as `training.spec` says; `report` hears of every step (its number, its seconds).

    Raises `NonFiniteError` for a loss that is not finite, and where the loss scaler skips every step.
    """
    spec = training.spec
    timer = _StepTimer(training)
    began = time.perf_counter()
    first_step_seconds = timer.time(1)
    report(0, first_step_seconds)
    warm_up_seconds = _warm_up(training, timer, report)
    if spec.cut_step_seconds and min(warm_up_seconds) > HOPELESS_RATIO * spec.cut_step_seconds:
        return timer.result(first_step_seconds, warm_up_seconds, was_cut=True)
    timer.start_measuring()
    started = time.perf_counter()
    steps: list[float] = []
    was_cut = False
    group = spec.num_steps_per_report
    scale = training.loss_scale()
    num_skips = 0
    while len(steps) < spec.num_steps[1]:
        seconds = timer.time(group)
        steps += [seconds] * group
        report(len(steps), seconds)
        new_scale = training.loss_scale()
        num_skips += _num_backoffs(training, scale, new_scale)
        scale = new_scale
        median = statistics.median(steps)
        if spec.cut_step_seconds and len(steps) >= NUM_STEPS_BEFORE_CUT and median > spec.cut_step_seconds:
            was_cut = True
            break
        now = time.perf_counter()
        is_late = spec.measure_seconds is not None and now - started > spec.measure_seconds
        # A few steps reported are worth more than many cut off by the parent's deadline.
        is_late |= spec.deadline_seconds is not None and now - began > DEADLINE_SHARE * spec.deadline_seconds
        if is_late or (len(steps) >= spec.num_steps[0] and _is_narrow(steps[::group], spec.interval_share)):
            break
    if num_skips >= len(steps):
        raise NonFiniteError(f"the loss scaler skipped all {len(steps)} measured steps")
    return timer.result(first_step_seconds, steps, num_skips=num_skips, was_cut=was_cut)


def _warm_up(training: Training, timer: _StepTimer, report: Report) -> list[float]:
    """The remaining warm-up steps, and under fp16 as many more as the scale needs to come down; seconds of each."""
    spec = training.spec
    steps: list[float] = []
    while True:
        scale = training.loss_scale()
        steps.append(timer.time(1))
        report(0, steps[-1])
        is_skipping = _num_backoffs(training, scale, training.loss_scale()) > 0
        num_done = 1 + len(steps)
        if num_done >= spec.num_warmup_steps and not is_skipping:
            return steps
        if num_done >= spec.num_warmup_steps + MAX_SCALE_SEARCH_STEPS:
            raise NonFiniteError(
                f"gradients still overflow at a loss scale of {training.loss_scale():g} after {num_done} steps"
            )


def _num_backoffs(training: Training, before: float | None, after: float | None) -> int:
    if before is None or after is None or training.scaler is None or not 0 < after < before:
        return 0
    return round(math.log(after / before) / math.log(training.scaler.get_backoff_factor()))


def _is_narrow(steps: list[float], share: float) -> bool:
    if len(steps) < 2:
        return False
    low, high = trimmed_interval(steps)
    return (high - low) / 2 <= share * (high + low) / 2


class _StepTimer:
    """Runs whole optimizer steps, or composes their time from fewer micro-batches and one update."""

    def __init__(self, training: Training) -> None:
        self._training = training
        self._num_micro = training.spec.num_timed_micro_batches
        self._repeats = training.spec.candidate.accumulation_steps / self._num_micro
        self.start_measuring()
        self.last_loss = math.nan

    def start_measuring(self) -> None:
        """Forget what warm-up counted."""
        self.data_seconds = 0.0
        self.num_measured_steps = 0

    def result(
        self, first_step_seconds: float, steps: list[float], *, num_skips: int = 0, was_cut: bool = False
    ) -> Timing:
        """What was measured since `start_measuring`."""
        return Timing(
            first_step_seconds=first_step_seconds,
            raw_step_seconds=tuple(steps),
            data_seconds=self.data_seconds / self.num_measured_steps,
            num_skips=num_skips,
            last_loss=self.last_loss,
            was_cut=was_cut,
        )

    def time(self, num_steps: int) -> float:
        """Mean seconds of one optimizer step over `num_steps` taken between two synchronisations."""
        training, device = self._training, self._training.device
        synchronize(device)
        micro_seconds = update_seconds = 0.0
        losses = []
        last = time.perf_counter()
        for _ in range(num_steps):
            for _ in range(self._num_micro):
                asked = time.perf_counter()
                batch = training.next_batch()
                self.data_seconds += (time.perf_counter() - asked) * self._repeats
                losses.append(training.forward_backward(batch))
            if self._repeats > 1:
                synchronize(device)
                micro_seconds, last = micro_seconds + time.perf_counter() - last, time.perf_counter()
            training.update()
            if self._repeats > 1:
                synchronize(device)
                update_seconds, last = update_seconds + time.perf_counter() - last, time.perf_counter()
        synchronize(device)
        update_seconds += time.perf_counter() - last
        self.num_measured_steps += num_steps
        self._check(losses)
        return (micro_seconds * self._repeats + update_seconds) / num_steps

    def _check(self, losses: list[torch.Tensor]) -> None:
        values = torch.stack([loss.float() for loss in losses])
        if not bool(torch.isfinite(values).all()):
            bad = values[~torch.isfinite(values)][0].item()
            raise NonFiniteError(f"the loss became {bad}")
        self.last_loss = float(values[-1])
