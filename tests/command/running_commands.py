"""Runs a command in the working directory as a trial does."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import closing
from typing import Any

from autotune_amp.command.ranks import RunEvents
from autotune_amp.command.running import CommandRun, CompletedRun
from autotune_amp.core.job import Deadlines
from autotune_amp.processes.local import TRIAL_ENVIRONMENT
from autotune_amp.processes.process import Watcher


def run_command(
    arguments: list[str],
    *,
    num_steps: int = 8,
    environment: dict[str, str] | None = None,
    deadlines: Deadlines | None = None,
    is_enough: Callable[[RunEvents], bool] | None = None,
    watcher: Watcher | None = None,
    **how: Any,
) -> CompletedRun:
    """Until `is_enough`, by default once it has taken `num_steps`; `how` are further arguments of `CommandRun`."""
    whole_environment = {**os.environ, **TRIAL_ENVIRONMENT, **(environment or {})}
    with closing(CommandRun(arguments, **{"environment": whole_environment, "agent": {}, **how})) as started:
        return started.measure(
            deadlines or Deadlines(whole_seconds=200.0),
            is_enough or (lambda heard: heard.num_steps >= num_steps),
            watcher or Watcher(),
        )
