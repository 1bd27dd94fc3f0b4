"""Runs a command in the working directory as a trial does."""

from __future__ import annotations

import os
from typing import Any, Literal, NamedTuple

from autotune_amp.command.ranks import RunEvents
from autotune_amp.command.running import CompletedRun, RunFiles, started
from autotune_amp.command.verdict import RunState
from autotune_amp.core.job import Deadlines
from autotune_amp.core.outcome import Failure
from autotune_amp.processes.local import TRIAL_ENVIRONMENT
from autotune_amp.processes.process import Watcher


class EndedRun(NamedTuple):
    """A run and its files, with the names of `CompletedRun` and `RunFiles`."""

    events: RunEvents
    state: RunState
    verdict: Literal["measured"] | Failure
    kept: tuple[str, ...]
    opened: tuple[str, ...]


def run_command(
    arguments: list[str], *, num_steps: int = 8, environment: dict[str, str] | None = None, **how: Any
) -> EndedRun:
    """Until it has taken `num_steps`, unless `how` says otherwise."""
    usual: dict[str, Any] = {
        "environment": {**os.environ, **TRIAL_ENVIRONMENT, **(environment or {})},
        "agent": {},
        "watcher": Watcher(),
    }
    deadlines = how.pop("deadlines", Deadlines(whole_seconds=200.0))
    is_enough = how.pop("is_enough", lambda heard: heard.num_steps >= num_steps)
    limit_bytes = how.pop("memory_limit_bytes", None)
    files: list[RunFiles] = []
    with started(arguments, ended=files.append, **{**usual, **how}) as running:
        completed = running.wait_for_verdict(deadlines, is_enough, limit_bytes)
    assert isinstance(completed, CompletedRun)
    return EndedRun(completed.events, completed.state, completed.verdict, files[0].kept, files[0].opened)
