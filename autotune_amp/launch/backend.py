"""CommandBackend: jobs answered by running a training command; what needs no training runs in a process of its own."""

from __future__ import annotations

import os
import socket
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from autotune_amp.core.job import Deadlines, Job
from autotune_amp.core.outcome import Description, Failure, Fidelity, Measurement
from autotune_amp.core.setting import Setting
from autotune_amp.isolation.local import TRIAL_ENVIRONMENT, Ability, Handle, Opened, Slot, WorkloadBackend
from autotune_amp.isolation.process import Watcher
from autotune_amp.launch import measure
from autotune_amp.launch.frozen_pair import FrozenPair, pair
from autotune_amp.launch.line import LaunchLine
from autotune_amp.launch.ranks import Heard
from autotune_amp.launch.running import Ran, run
from autotune_amp.trial.jobs import Check, Describe, Trial

NUM_DESCRIBED_STEPS = 8
NUM_FROZEN_STEPS = 3
MAX_FROZEN_ENTRIES = 2_000_000


class Answered(NamedTuple):
    """A job that was run when it was asked for."""

    found: Any
    start_seconds: float | None = None

    def result(self) -> Any:
        return self.found


class CommandBackend(WorkloadBackend):
    """Runs a `LaunchLine` once for each trial, filled with its setting; `today` is what the command does today."""

    def __init__(self, line: LaunchLine, local: WorkloadBackend, watcher: Watcher) -> None:
        self._line = line
        self._local = local
        self._watcher = watcher

    @property
    def abilities(self) -> frozenset[Ability]:
        return frozenset({"fidelity"})

    @property
    def slots(self) -> Sequence[Slot]:
        return self._local.slots

    @property
    def is_build_shared(self) -> bool:
        return False

    def load(self, deadline_seconds: float) -> dict[str, Any]:
        return self._local.load(deadline_seconds)

    def open(self, device: str, num_threads: int | None, deadline_seconds: float) -> Opened:
        return self._local.open(device, num_threads, deadline_seconds)

    def submit(self, job: Job[Any]) -> Handle[Any]:
        if isinstance(job, Describe):
            return Answered(self._describe(job))
        if isinstance(job, Check):
            return Answered(self._check(job))
        if isinstance(job, Trial):
            return Answered(self._measure(job), 0.0)
        return self._local.submit(job)

    def close(self) -> None:
        self._local.close()

    def _describe(self, job: Describe) -> Description | Failure:
        ran = self._run(
            self._line.today_setting,
            job.deadlines,
            lambda heard: heard.num_steps >= NUM_DESCRIBED_STEPS,
            seed=0,
            watcher=Watcher(),
        )
        if isinstance(ran.ending, Failure):
            return ran.ending
        return measure.description(
            ran.heard, self._line.name, ran.began, is_strict=not self._line.today_setting.as_found
        )

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

    def _check(self, check: Check) -> Fidelity | Failure:
        """fp32 and the precision on the same weights and batches, no step taken."""
        began, gradients, losses = time.monotonic(), [], []
        with tempfile.TemporaryDirectory(prefix="autotune_amp-") as folder:
            for precision in (check.candidate.precision, "fp32"):
                setting = msgspec.structs.replace(check.candidate, precision=precision, as_found=False)
                left = None if check.deadline_seconds is None else check.deadline_seconds - (time.monotonic() - began)
                kept = Path(folder, precision)
                kept.mkdir()
                ran = self._run(
                    setting,
                    Deadlines(whole_seconds=left),
                    lambda heard: heard.num_frozen_steps >= NUM_FROZEN_STEPS,
                    seed=check.seed,
                    watcher=Watcher(),
                    kept=kept,
                    frozen={"num_steps": NUM_FROZEN_STEPS, "max_entries": MAX_FROZEN_ENTRIES},
                )
                if isinstance(ran.ending, Failure):
                    return check.unchecked(ran.ending)
                gradients.append(ran.heard.gradients)
                first = next(iter(ran.heard.ranks.values()))
                losses.append(tuple(step.losses[-1] or 0.0 for step in first.pace[:NUM_FROZEN_STEPS] if step.losses))
            steps = pair(*gradients)
            if isinstance(steps, str):
                return check.unchecked(steps, "Seed it: the same seed must give the same first weights and batches.")
            return self._local.submit(
                FrozenPair(
                    device="cpu",
                    precision=check.candidate.precision,
                    batch_size=check.candidate.batch_size,
                    steps=steps,
                    losses=(losses[0], losses[1]),
                )
            ).result()

    def _run(
        self,
        setting: Setting,
        deadlines: Deadlines,
        is_enough: Callable[[Heard], bool],
        *,
        seed: int,
        environment: dict[str, str] | None = None,
        watcher: Watcher | None = None,
        memory_limit_bytes: int | None = None,
        kept: Path | None = None,
        **agent: Any,
    ) -> Ran:
        with tempfile.TemporaryDirectory(prefix="autotune_amp-") as folder:
            of_trial = {"seed": seed, "trial_dir": folder, "port": _free_port()}
            return run(
                self._line.filled(setting, of_trial, Path(folder)),
                environment={**os.environ, **TRIAL_ENVIRONMENT, **(environment or {})},
                agent={"seed": seed, **agent},
                folders=[Path(folder)],
                deadlines=deadlines,
                is_enough=is_enough,
                watcher=watcher or self._watcher,
                memory_limit_bytes=memory_limit_bytes,
                kept=kept,
            )


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port: int = found.getsockname()[1]
        return port
