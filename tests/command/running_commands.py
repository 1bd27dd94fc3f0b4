"""Runs a command in the working directory as a trial does."""

from __future__ import annotations

import os
from contextlib import closing
from typing import Any

from autotune_amp.command.running import CommandRun, CompletedRun
from autotune_amp.core.job import Deadlines
from autotune_amp.processes.local import TRIAL_ENVIRONMENT
from autotune_amp.processes.process import Watcher

_MEASURING = ("deadlines", "is_enough", "watcher", "memory_limit_bytes")  # arguments of `CommandRun.measure`


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
    given = {**usual, **how}
    limits = {name: given.pop(name) for name in _MEASURING if name in given}
    with closing(CommandRun(arguments, **given)) as started:
        return started.measure(**limits)
