"""Runs a command in the working directory as a trial does."""

from __future__ import annotations

import os
from typing import Any

from autotune_amp.command.running import CompletedRun, run
from autotune_amp.core.job import Deadlines
from autotune_amp.processes.local import TRIAL_ENVIRONMENT
from autotune_amp.processes.process import Watcher


def run_command(
    arguments: list[str], *, num_steps: int = 8, environment: dict[str, str] | None = None, **how: Any
) -> CompletedRun:
    """Until it has taken `num_steps`, unless `how` says otherwise."""
    usual: dict[str, Any] = {
        "environment": {**os.environ, **TRIAL_ENVIRONMENT, **(environment or {})},
        "agent": {},
        "deadlines": Deadlines(whole_seconds=200.0),
        "is_enough": lambda heard: heard.num_steps >= num_steps,
        "watcher": Watcher(),
    }
    return run(arguments, **{**usual, **how})
