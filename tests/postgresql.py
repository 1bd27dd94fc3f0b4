"""A real PostgreSQL server in a folder of its own, on a free port; and a wire to it that can be cut."""

from __future__ import annotations

import contextlib
import os
import pwd
import shutil
import socket
import subprocess
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

PASSWORD = "hunter2"
_FOUND = shutil.which("initdb") or next(map(str, Path("/usr/lib/postgresql").glob("*/bin/initdb")), None)


class Server:
    """Of user `amp` with `PASSWORD`; it refuses to run as root, and is somebody else's there."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._user = next(name for name in ("postgres", "nobody") if _is_user(name)) if os.getuid() == 0 else None
        if self._user is not None:
            shutil.chown(folder, self._user)
        (folder / "password").write_text(PASSWORD)
        self._call("initdb", "-D", "data", "-U", "amp", "-A", "scram-sha-256", "--pwfile", "password", "-N")
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port = free.getsockname()[1]

    def start(self) -> None:
        options = f"-h 127.0.0.1 -p {self.port} -k {self._folder} -F"
        self._call("pg_ctl", "-D", "data", "-o", options, "-l", "log", "-w", "start")

    def stop(self) -> None:
        self._call("pg_ctl", "-D", "data", "-m", "immediate", "-w", "stop")

    def url(self, port: int | None = None, password: str = PASSWORD) -> str:
        return f"postgresql://amp:{password}@127.0.0.1:{port or self.port}/postgres"

    def _call(self, program: str, *arguments: str) -> None:
        assert _FOUND is not None
        command = [str(Path(_FOUND).parent / program), *arguments]
        done = subprocess.run(command, cwd=self._folder, user=self._user, stdout=subprocess.DEVNULL, timeout=120)
        assert done.returncode == 0, (self._folder / "log").read_text() if program == "pg_ctl" else program


def _is_user(name: str) -> bool:
    with contextlib.suppress(KeyError):
        return bool(pwd.getpwnam(name))
    return False


@contextlib.contextmanager
def server() -> Iterator[Server]:
    """One that is started; skips the test where there is no PostgreSQL."""
    if _FOUND is None:
        pytest.skip("no PostgreSQL server is installed")
    # Another user must get there; what a session of tests has for temporary files is its own.
    folder = Path(tempfile.mkdtemp(prefix="amp-pg-", dir="/tmp" if os.getuid() == 0 else None))
    try:
        made = Server(folder)
        made.start()
        try:
            yield made
        finally:
            made.stop()
    finally:
        shutil.rmtree(folder)


class Wire:
    """Passes bytes on between `port` and a server's, until it is cut; then it refuses whoever comes."""

    def __init__(self, server_port: int) -> None:
        self._server_port = server_port
        self._listener: socket.socket | None = None
        self._open: list[socket.socket] = []
        self._threads: list[threading.Thread] = []
        self.port = 0
        self.mend()

    def mend(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", self.port))
        self.port = self._listener.getsockname()[1]
        self._run(self._accept, self._listener)

    def cut(self) -> None:
        assert self._listener is not None
        for end in (self._listener, *self._open):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            end.close()
        for thread in self._threads:
            thread.join()
        self._open, self._threads = [], []

    def _run(self, work: object, *arguments: object) -> None:
        thread = threading.Thread(target=work, args=arguments)  # type: ignore[arg-type]
        self._threads.append(thread)
        thread.start()

    def _accept(self, listener: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while True:
                ends = listener.accept()[0], socket.create_connection(("127.0.0.1", self._server_port))
                self._open += ends
                self._run(self._pass_on, *ends)
                self._run(self._pass_on, *reversed(ends))

    def _pass_on(self, one: socket.socket, other: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := one.recv(1 << 16):
                other.sendall(data)
        with contextlib.suppress(OSError):
            other.shutdown(socket.SHUT_WR)
