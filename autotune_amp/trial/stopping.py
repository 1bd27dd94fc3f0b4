"""When a trial has measured enough: pure, so that a recorded trial can be played back by the same rule. No torch."""

from __future__ import annotations

import math
from statistics import median
from typing import TYPE_CHECKING, Literal

from autotune_amp.core.intervals import trimmed_interval

if TYPE_CHECKING:
    from collections.abc import Sequence

    from autotune_amp.trial.jobs import Trial

NUM_STEPS_BEFORE_CUT = 5
DEADLINE_SHARE = 0.6
# Warm-up steps that are all so many times over the cut end the trial at once: bf16 or fp16 that is merely emulated.
HOPELESS_RATIO = 1.6
# A fast card takes the least number of steps in tens of ms: in less time than its clocks take to settle.
LEAST_ACCELERATOR_SECONDS = 0.25


def is_hopeless(spec: Trial, warmup_step_seconds: Sequence[float]) -> bool:
    """Whether the warm-up after the first step, one step at least, says enough."""
    return bool(spec.cut_step_seconds) and min(warmup_step_seconds) > HOPELESS_RATIO * (spec.cut_step_seconds or 0.0)


def stop(
    spec: Trial,
    group_seconds: Sequence[float],
    *,
    is_whole: bool,
    is_most: bool,
    measure_seconds: float,
    measuring_seconds: float,
    training_seconds: float,
) -> Literal["cut", "enough"] | None:
    """Why measuring ends here, None where it goes on.

    `group_seconds` are the mean step seconds of each `spec.num_steps_per_report` steps timed so far; `is_whole` says
    that they are as many as are asked for at the least, `is_most` at the most. They may take `measure_seconds` and took
    `measuring_seconds`, of `training_seconds` since the first step began.
    """
    deadline_seconds = math.inf if spec.deadline_seconds is None else spec.deadline_seconds
    # A few steps reported are worth more than many cut off by the parent's deadline.
    is_overdue = measuring_seconds > measure_seconds or training_seconds > DEADLINE_SHARE * deadline_seconds
    if spec.device != "cpu" and measuring_seconds < LEAST_ACCELERATOR_SECONDS and not is_overdue:
        return None
    num_steps = len(group_seconds) * spec.num_steps_per_report
    if spec.cut_step_seconds and num_steps >= NUM_STEPS_BEFORE_CUT and median(group_seconds) > spec.cut_step_seconds:
        return "cut"
    is_enough = is_overdue or is_most or (is_whole and _is_narrow(group_seconds, spec.interval_share))
    return "enough" if is_enough else None


def _is_narrow(steps: Sequence[float], share: float) -> bool:
    if len(steps) < 2:
        return False
    low, high = trimmed_interval(steps)
    return (high - low) / 2 <= share * (high + low) / 2
