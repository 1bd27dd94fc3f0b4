"""A program of ours or of the user's, started under a keeper that ends all that came of it, ourselves killed or not."""

from __future__ import annotations

import contextlib
import getpass
import json
import os
import signal
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil

from autotune_amp.core.errors import RunnerError
from autotune_amp.isolation import keeper
from autotune_amp.isolation.marks import KILL_SECONDS, kill_marked

# Of the folder for temporary files; a socket's path has 107 bytes (103 on macOS), and what is made in a program's own
# folder, multiprocessing's sockets among them, takes 60 of them.
_MAX_PATH_BYTES = 40


class Program:
    """A program that runs under a keeper, with temporary files in a folder of its own.

    `popen` is the keeper: its status is the program's, its streams are the program's. `folder` is for temporary files;
    whoever makes it removes it after `end`, the keeper does where we are gone, with the further `folders`, and calls
    `when_orphaned` before, a function by its module and its name with its arguments. Raises `RunnerError` where no
    process can be started.
    """

    def __init__(
        self,
        arguments: Sequence[str],
        environment: Mapping[str, str],
        folder: Path,
        *,
        folders: Sequence[Path] = (),
        when_orphaned: Sequence[Any] | None = None,
        stdin: int,
        stdout: int,
        stderr: int,
    ) -> None:
        self._mark = uuid.uuid4().hex
        settings = {
            "mark": self._mark,
            "parent": os.getpid(),
            "path": sys.path,
            "folders": [str(folder), *map(str, folders)],
            "when_orphaned": when_orphaned,
        }
        try:
            self.popen: subprocess.Popen[bytes] = subprocess.Popen(  # noqa: S603 - our own program, and what it is to start
                [sys.executable, "-I", keeper.__file__, json.dumps(settings), *arguments],
                env={**_compilers_cache(), **environment, "TMPDIR": str(folder)},
                start_new_session=True,  # Ctrl-C at the terminal is ours to handle
                stdin=stdin,
                stdout=stdout,
                stderr=stderr,
            )
        except OSError as error:
            raise RunnerError(
                f"A trial process cannot be started: {error}.", "Check the limits on processes and memory."
            ) from error

    def processes(self) -> list[psutil.Process]:
        """The program, first, and all that came of it."""
        with contextlib.suppress(psutil.NoSuchProcess):
            return psutil.Process(self.popen.pid).children(recursive=True)
        return []

    def pause(self) -> None:
        """Have the program stand still until `go_on`, where it would not outlive our own death so."""
        if sys.platform == "linux":
            self.popen.send_signal(keeper.PAUSE)

    def go_on(self) -> None:
        """Let the program run on."""
        if sys.platform == "linux":
            self.popen.send_signal(keeper.GO_ON)

    def end(self) -> None:
        """Have the keeper kill the program and all that came of it, and wait until they are gone."""
        self.popen.send_signal(keeper.END)
        try:
            self.popen.wait(keeper.END_SECONDS + KILL_SECONDS)
        except subprocess.TimeoutExpired:
            self.popen.kill()
            self.popen.wait()
        if self.popen.returncode in (-signal.SIGKILL, -keeper.END):  # so ends the keeper too, if it was killed itself
            kill_marked(self._mark)


def make_folder() -> Path:
    """Make a folder for the temporary files of a program; the sockets that are made in it allow no long path."""
    usual = tempfile.gettempdir()
    parent = usual if len(os.fsencode(usual)) <= _MAX_PATH_BYTES else "/tmp"  # noqa: S108 - a folder of its own
    return Path(tempfile.mkdtemp(prefix="amp-", dir=parent))


def _compilers_cache() -> dict[str, str]:
    """Where torch keeps what it compiled, which is below TMPDIR and so gone with the program, unless told otherwise."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # a container's user without a name; torch says it so
        user = f"uid_{os.getuid()}"
    return {"TORCHINDUCTOR_CACHE_DIR": str(Path(tempfile.gettempdir(), f"torchinductor_{user}"))}
