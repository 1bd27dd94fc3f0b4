"""Commands that have been described as a search does, with the jobs that they are given then."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from typing import Any

from autotune_amp.command.backend import CommandBackend
from autotune_amp.command.command import Command
from autotune_amp.core.command_template import CommandTemplate
from autotune_amp.core.outcome import Description, Failure
from autotune_amp.core.setting import Setting
from autotune_amp.processes.local import LocalBackend, Payload
from autotune_amp.processes.process import Watcher
from autotune_amp.trial.jobs import Check, Describe, Trial

SECONDS = 200.0
_backends: list[CommandBackend] = []  # the latest, whose command may wait for another setting


def local_backend() -> Iterator[LocalBackend]:
    """The process for the jobs that run no command; as a fixture it serves the tests of a module."""
    payload = Payload(target="autotune_amp.workloads:workload", path=tuple(sys.path))
    with LocalBackend(payload, "kept", Watcher()) as backend:
        yield backend
        end_latest()


def end_latest() -> None:
    """End the run of the command described last, if it waits for another setting."""
    while _backends:
        _backends.pop()._command.end_held()


def described(
    command: list[str],
    local: LocalBackend,
    seconds: float = SECONDS,
    files: Sequence[str] = (),
    *,
    device: str = "cpu",
    is_batch_free: bool = True,
) -> tuple[CommandBackend, Description | Failure]:
    backend = CommandBackend(Command(CommandTemplate.of(command, files=files)), local, Watcher())
    end_latest()
    _backends.append(backend)
    describe = Describe(device=device, baseline_batch_size=8, deadline_seconds=seconds, is_batch_free=is_batch_free)
    return backend, backend.submit(describe).result()


def trial(setting: Setting, **more: Any) -> Trial:
    fields = {"device": "cpu", "num_steps": (5, 20), **more}
    return Trial(candidate=setting, deadline_seconds=SECONDS, **fields)


def fidelity(setting: Setting, device: str = "cpu") -> Check:
    return Check(what="fidelity", candidate=setting, device=device, deadline_seconds=SECONDS)
