"""CommandBackend: jobs answered by running a training command; what needs no training runs in a process of its own."""

from __future__ import annotations

import os
import socket
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from autotune_amp.core.job import Deadlines, Job
from autotune_amp.core.outcome import Description, Failure, Measurement
from autotune_amp.core.setting import Setting
from autotune_amp.isolation.local import TRIAL_ENVIRONMENT, Ability, Backend, Handle, LocalBackend, Slot
from autotune_amp.isolation.process import Watcher
from autotune_amp.launch import measure
from autotune_amp.launch.line import LaunchLine
from autotune_amp.launch.ranks import Heard
from autotune_amp.launch.running import Ran, run
from autotune_amp.trial.jobs import Describe, Trial

NUM_DESCRIBED_STEPS = 8


class Answered(NamedTuple):
    """A job that was run when it was asked for."""

    found: Any
    start_seconds: float | None = None

    def result(self) -> Any:
        return self.found


class CommandBackend(Backend):
    """Runs a `LaunchLine` once for each trial, filled with its setting; `today` is what the command does today."""

    def __init__(self, line: LaunchLine, today: Setting, local: LocalBackend, watcher: Watcher) -> None:
        self._line = line
        self._today = today
        self._local = local
        self._watcher = watcher

    @property
    def abilities(self) -> frozenset[Ability]:
        return frozenset()

    @property
    def slots(self) -> Sequence[Slot]:
        return self._local.slots

    @property
    def is_build_shared(self) -> bool:
        return False

    def submit(self, job: Job[Any]) -> Handle[Any]:
        if isinstance(job, Describe):
            return Answered(self._describe(job))
        if isinstance(job, Trial):
            return Answered(self._measure(job), 0.0)
        return self._local.submit(job)

    def close(self) -> None:
        self._local.close()

    def _describe(self, job: Describe) -> Description | Failure:
        ran = self._run(self._today, job.deadlines, lambda heard: heard.num_steps >= NUM_DESCRIBED_STEPS, seed=0)
        if isinstance(ran.ending, Failure):
            return ran.ending
        return measure.description(ran.heard, Path(self._line.arguments[-1]).stem, ran.began)

    def _measure(self, trial: Trial) -> Measurement | Failure:
        began = time.monotonic()
        ran = self._run(
            trial.candidate,
            trial.deadlines,
            lambda heard: measure.is_enough(heard, trial, began),
            seed=trial.seed,
            environment=trial.environment,
            memory_limit_bytes=trial.memory_limit_bytes,
        )
        if isinstance(ran.ending, Failure):
            return ran.ending
        return measure.measurement(ran.heard, trial, ran.began, ran.seen.memory_bytes)

    def _run(
        self,
        setting: Setting,
        deadlines: Deadlines,
        is_enough: Callable[[Heard], bool],
        *,
        seed: int,
        environment: dict[str, str] | None = None,
        memory_limit_bytes: int | None = None,
        **agent: Any,
    ) -> Ran:
        with tempfile.TemporaryDirectory(prefix="autotune_amp-") as folder:
            of_trial = {"seed": seed, "trial_dir": folder, "port": _free_port()}
            return run(
                self._line.filled(setting, of_trial, Path(folder)),
                environment={**os.environ, **TRIAL_ENVIRONMENT, **(environment or {})},
                agent={"seed": seed, "guard": {"free": [folder, tempfile.gettempdir()], "started": time.time()}, **agent},
                deadlines=deadlines,
                is_enough=is_enough,
                watcher=self._watcher,
                memory_limit_bytes=memory_limit_bytes,
            )


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port: int = found.getsockname()[1]
        return port
