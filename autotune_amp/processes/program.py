"""Program that runs under a keeper, which kills all its descendants at the end, even if this process is killed."""

from __future__ import annotations

import contextlib
import fcntl
import getpass
import json
import os
import select
import shutil
import socket
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil

from autotune_amp.core.errors import RunnerError
from autotune_amp.processes import keeper
from autotune_amp.processes.process_tree import KILL_SECONDS, kill_marked

# Longest path of the folder for temporary files. A socket's path has 107 bytes at most (103 on macOS), of which names
# inside a program's own folder, such as those of multiprocessing's sockets, take 60.
_MAX_PATH_BYTES = 40
_START_SECONDS = 120.0  # for the keeper, an interpreter without torch: 0.1 s on an idle machine


class Program:
    """Program that runs under a keeper, with a folder of its own for temporary files.

    The keeper is started at once and makes `folder` (see `new_folder`); `start` starts the program, whose streams are
    those of `popen`, the keeper's process. If this process ends first, the keeper calls `when_orphaned` (a module, the
    name of a function in it, and the function's arguments) if the program was started, then removes `folder` and the
    further `folders`. The program starts in `working_directory`, by default that of this process. Raises `RunnerError`
    if no process can be started.
    """

    def __init__(
        self,
        arguments: Sequence[str],
        environment: Mapping[str, str],
        folder: Path,
        *,
        folders: Sequence[Path] = (),
        when_orphaned: Sequence[Any] | None = None,
        working_directory: Path | None = None,
        stdin: int,
        stdout: int,
        stderr: int,
    ) -> None:
        self._mark = uuid.uuid4().hex
        self._folder = folder
        self._connection, other_end = socket.socketpair()
        with other_end:  # standard streams may be closed here, and the keeper has its own as 0 to 2
            keepers_end = socket.socket(fileno=fcntl.fcntl(other_end, fcntl.F_DUPFD_CLOEXEC, 3))
        settings = {
            "connection": keepers_end.fileno(),
            "mark": self._mark,
            "parent": os.getpid(),
            "path": import_path(),
            "folders": [str(folder), *map(str, folders)],  # the keeper makes the first
            "when_orphaned": when_orphaned,
        }
        try:
            with keepers_end:
                self.popen: subprocess.Popen[bytes] = subprocess.Popen(  # noqa: S603 - the keeper, with the program to start
                    [sys.executable, "-I", keeper.__file__, json.dumps(settings), *arguments],
                    env={**_inductor_cache_variable(), **environment, "TMPDIR": str(folder)},
                    pass_fds=[keepers_end.fileno()],
                    cwd=working_directory,
                    start_new_session=True,  # Ctrl-C at the terminal is handled by this process alone
                    stdin=stdin,
                    stdout=stdout,
                    stderr=stderr,
                )
        except OSError as error:
            self._connection.close()
            raise RunnerError(
                f"A trial process cannot be started: {error}.", "Check the limits on processes and memory."
            ) from error
        try:
            self._wait_until_ready()
        except BaseException:
            self.close()
            raise

    def _wait_until_ready(self) -> None:
        """Wait until the keeper has made the folder. Raises `RunnerError` if it does not."""
        if not self._is_readable(_START_SECONDS):
            raise RunnerError(
                f"The process that starts a trial did not make {self._folder} within {_START_SECONDS:.0f} s.",
                "Search while the machine is less busy, or set TMPDIR to a folder on a local disk.",
            )
        if self._connection.recv(1) != keeper.READY:
            raise RunnerError(
                f"The process that starts a trial ended with status {self.popen.wait()} before it made {self._folder}.",
                f"Make {self._folder.parent} writable, or set TMPDIR to a writable one, whose path has at most "
                f"{_MAX_PATH_BYTES} bytes.",
            )

    def start(self) -> None:
        """Start the program."""
        self._request(keeper.START)

    def processes(self) -> list[psutil.Process]:
        """Return the running processes of the program: its own first, then its descendants."""
        with contextlib.suppress(psutil.NoSuchProcess):
            return psutil.Process(self.popen.pid).children(recursive=True)
        return []

    def pause(self) -> None:
        """Pause the program until `resume`.

        Only on Linux: elsewhere a paused program would outlive this process, so nothing is done.
        """
        if sys.platform == "linux":
            self._request(keeper.PAUSE)

    def resume(self) -> None:
        """Continue a program after `pause`."""
        if sys.platform == "linux":
            self._request(keeper.RESUME)

    def wait(self, seconds: float | None = None) -> int | None:
        """Wait until the program and all its descendants have ended, at most this long, and return its exit status.

        It is negative for a signal and 0 if the program was ended; None if the program still runs.
        """
        if not self._is_readable(seconds):
            return None
        try:
            status = self._connection.recv(16, socket.MSG_PEEK)  # the message stays to be read again
        except ConnectionResetError:
            status = b""
        return int(status or self.popen.wait())  # the keeper's own where it failed or was killed

    def end(self) -> None:
        """Have the keeper kill the program and its descendants, and wait until they are gone. The folder stays."""
        self._request(keeper.END)
        if self.wait(keeper.END_SECONDS + KILL_SECONDS) is None or self.popen.poll() is not None:
            self._kill_all()

    def close(self) -> None:
        """Have the keeper end the program and remove its folder, and wait until both are gone.

        After Ctrl-C while this waits, the keeper does it all the same. Call nothing else afterwards.
        """
        self._request(keeper.REMOVE)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.popen.wait(keeper.END_SECONDS + KILL_SECONDS)
        if self.popen.returncode != 0:  # the keeper hangs, has failed or was killed
            self._kill_all()
            shutil.rmtree(self._folder, ignore_errors=True)
        self._connection.close()

    def _is_readable(self, seconds: float | None) -> bool:
        """Wait until the keeper has sent something or ended, at most this long, and return whether it has."""
        poller = select.poll()  # `select.select` refuses descriptors from 1024 on
        poller.register(self._connection, select.POLLIN)
        return bool(poller.poll(None if seconds is None else 1000 * seconds))

    def _request(self, request: bytes) -> None:
        with contextlib.suppress(ConnectionError):  # the keeper was killed
            self._connection.sendall(request)

    def _kill_all(self) -> None:
        self.popen.kill()
        self.popen.wait()
        kill_marked(self._mark)


def import_path() -> list[str]:
    """Return the import path of this process as text: Python code may add a `Path`, which JSON cannot represent."""
    return [str(entry) for entry in sys.path]


def new_folder() -> Path:
    """Return a path for the folder of a program, which does not exist yet.

    It is short enough for sockets in it, unless the default for temporary files has a long path and /tmp is not
    writable.
    """
    parent, tmp = tempfile.gettempdir(), "/tmp"  # noqa: S108 - the folder is the program's own
    if len(os.fsencode(parent)) > _MAX_PATH_BYTES and os.access(tmp, os.W_OK):
        parent = tmp
    return Path(parent, f"amp-{uuid.uuid4().hex[:12]}")


@contextlib.contextmanager
def temporary_folder() -> Iterator[Path]:
    """Yield a new folder, which is removed at the end of the context, also if this process is killed meanwhile."""
    folder = new_folder()
    null = subprocess.DEVNULL
    program = Program((), os.environ, folder, stdin=null, stdout=null, stderr=null)
    try:
        yield folder
    finally:
        program.close()


def _inductor_cache_variable() -> dict[str, str]:
    """Return the variable that keeps the cache of torch's compiler in the usual place.

    By default the cache is below TMPDIR, and would be removed with the folder of the program.
    """
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # a container's user without a name, for which torch uses the same text
        user = f"uid_{os.getuid()}"
    return {"TORCHINDUCTOR_CACHE_DIR": str(Path(tempfile.gettempdir(), f"torchinductor_{user}"))}
