"""A training command as the source of a search."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

from autotune_amp.core.hardware import DeviceIdentity
from autotune_amp.core.recommendation import Fingerprint
from autotune_amp.launch.line import LaunchLine
from autotune_amp.search.source import Source, folder_name

if TYPE_CHECKING:
    from autotune_amp.isolation.local import Backend, Isolation, WorkloadBackend
    from autotune_amp.isolation.process import Watcher


class CommandSource(Source):
    """Runs a `LaunchLine` for every trial."""

    def __init__(self, line: LaunchLine) -> None:
        super().__init__("autotune_amp.workloads:workload")  # what probes the device has no part of the user's
        self.line = line
        self.name = folder_name(line.name)

    def backend(
        self, watcher: Watcher, isolation: Isolation | None = None, environment: dict[str, str] | None = None
    ) -> WorkloadBackend:
        from autotune_amp.launch.backend import CommandBackend

        return CommandBackend(self.line, super().backend(watcher, isolation, environment), watcher)

    def fingerprint_by_child(
        self, options: dict[str, Any], identity: DeviceIdentity, backend: Backend, state: dict[str, Any]
    ) -> Fingerprint:
        found = super().fingerprint_by_child(options, identity, backend, state)
        files = [Path(argument) for argument in self.line.arguments if Path(argument).is_file()]
        parts = {"command": " ".join(self.line.arguments)}
        parts |= {f"file {file}": hashlib.sha256(file.read_bytes()).hexdigest()[:16] for file in files}
        digest = hashlib.sha256(repr((found.digest, sorted(parts.items()))).encode()).hexdigest()
        return Fingerprint(digest=digest, parts={**found.parts, **parts}, unknown=found.unknown)
