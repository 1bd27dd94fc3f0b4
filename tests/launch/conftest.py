"""What tests of runs share."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from running_commands import RunCommand

from autotune_amp.core.job import Deadlines
from autotune_amp.isolation.local import TRIAL_ENVIRONMENT
from autotune_amp.isolation.process import Watcher
from autotune_amp.launch.running import Ran, run


@pytest.fixture
def run_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunCommand:
    """Runs a command in the test's folder as a trial does, until it has taken as many steps."""
    monkeypatch.chdir(tmp_path)

    def started(
        arguments: list[str], *, num_steps: int = 8, environment: dict[str, str] | None = None, **how: object
    ) -> Ran:
        return run(
            arguments,
            **{
                "environment": {**os.environ, **TRIAL_ENVIRONMENT, **(environment or {})},
                "agent": {},
                "deadlines": Deadlines(whole_seconds=200.0),
                "is_enough": lambda heard: heard.num_steps >= num_steps,
                "watcher": Watcher(),
                **how,
            },
        )

    return started
