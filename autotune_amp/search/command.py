"""Source of a search that is a training command."""

from __future__ import annotations

import hashlib
import os
import shlex
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from autotune_amp.core.errors import InvalidRequestError
from autotune_amp.core.hardware import DeviceIdentity
from autotune_amp.core.launch_line import LaunchLine
from autotune_amp.core.recommendation import Fingerprint
from autotune_amp.launch.leftovers import leftover_notes
from autotune_amp.search.source import Source, folder_name

if TYPE_CHECKING:
    from autotune_amp.isolation.local import Backend, Isolation, Slot, WorkloadBackend
    from autotune_amp.isolation.process import Watcher
    from autotune_amp.isolation.standby import Standby
    from autotune_amp.launch.command import Command


MAX_READ_BYTES = 1 << 24  # files larger than this (data, checkpoints) are hashed by size and modification time
MAX_SOURCES, MAX_FOLDERS = 500, 500
_NO_SOURCES = {"site-packages", "dist-packages", "node_modules", "studies", "__pycache__"}


def sources(arguments: Sequence[str]) -> tuple[list[Path], bool]:
    """Return the files that a command may run or read, and whether the list is complete.

    They are the files that it names, and every Python file and shell script beside and below its scripts (for ``python
    -m``, the working directory), since it is unknown in advance which of them it runs.
    """
    values = [value for argument in arguments for value in (argument, argument.partition("=")[2]) if value]
    found = dict.fromkeys(Path(value) for value in values if _is_file(value))
    folders = {path.parent for path in found if path.suffix in (".py", ".sh")}
    folders |= {Path()} if "-m" in arguments else set()
    num_folders = 0
    for folder in sorted(folders):
        for inside, below, names in os.walk(folder):
            below[:] = sorted(name for name in below if name not in _NO_SOURCES and not name.startswith("."))
            own = (Path(inside, name) for name in sorted(names) if name.endswith((".py", ".sh")))
            found |= dict.fromkeys(path for path in own if path.is_file())
            num_folders += 1
            if len(found) > MAX_SOURCES or num_folders > MAX_FOLDERS:
                return list(found)[:MAX_SOURCES], False
    return list(found), True


def _is_file(value: str) -> bool:
    try:
        return Path(value).is_file()
    except (OSError, ValueError):  # a text that is no path
        return False


def _digest(file: Path) -> str:
    found = file.stat()
    if found.st_size > MAX_READ_BYTES:
        return f"{found.st_size} bytes of {found.st_mtime_ns}"
    return hashlib.sha256(file.read_bytes()).hexdigest()[:16]


def fingerprint_parts(line: LaunchLine) -> tuple[dict[str, str], bool]:
    """Return a command's fingerprint parts (without the machine), and whether all of its `sources` are in them."""
    files, are_all = sources(line.arguments)
    parts = {"command": f"={shlex.join(line.arguments)}"}
    parts |= {f"--value {name}": f"={word}" for name, word in line.values.items()}
    return parts | {f"file {file}": _digest(file) for file in (*files, *map(Path, line.files))}, are_all


class CommandSource(Source):
    """Source whose trials run a command, described by a `LaunchLine`."""

    def __init__(self, line: LaunchLine) -> None:
        super().__init__("autotune_amp.workloads:workload")  # the probe of the device runs no code of the user
        self._line = line
        self.name = folder_name(line.name)

    @property
    def launch_line(self) -> LaunchLine:
        """Return the command, with the placeholders found once it was observed."""
        return self.command.line

    @cached_property
    def command(self) -> Command:
        """Return the command together with what its runs have shown so far."""
        from autotune_amp.launch.command import Command

        return Command(self._line)

    def backend(
        self,
        watcher: Watcher,
        isolation: Isolation | None = None,
        environment: dict[str, str] | None = None,
        slot: Slot | None = None,
        standby: Standby | None = None,  # noqa: ARG002 - it is the command that is started again
    ) -> WorkloadBackend:
        """Return a backend that starts the command for each trial, one after the other, since runs may write the same
        files.

        Raises `InvalidRequestError` for a slot beside others.
        """
        if slot is not None and slot.name is not None:
            raise InvalidRequestError(
                "The trials of a command run one after the other, and on the ranks that it starts itself.",
                "Leave --devices, --slots and --ranks out, or give a function that returns a Workload.",
            )
        from autotune_amp.launch.backend import CommandBackend

        return CommandBackend(self.command, super().backend(watcher, isolation, environment), watcher, environment)

    def keep_in(self, folder: Path) -> None:
        """Move files that trials leave to a subfolder of the study's folder."""
        self.command.keep_in(folder)

    def warnings(self) -> tuple[str, ...]:
        """Return notes that name the files that trials left and where they are now."""
        return leftover_notes(self.command.aside, self.command.kept)

    def fingerprint_by_child(
        self, options: dict[str, Any], identity: DeviceIdentity, backend: Backend, state: dict[str, Any]
    ) -> Fingerprint:
        """Return the fingerprint, including the command and the files that it names."""
        found = super().fingerprint_by_child(options, identity, backend, state)
        parts, are_all = fingerprint_parts(self._line)
        digest = hashlib.sha256(repr((found.digest, sorted(parts.items()))).encode()).hexdigest()
        unknown = () if are_all else (f"beside the script lie more than {MAX_SOURCES} files that it may run",)
        return Fingerprint(digest=digest, parts={**found.parts, **parts}, unknown=(*found.unknown, *unknown))
