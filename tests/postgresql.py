"""A real PostgreSQL server in a folder of its own, on a free port; and a wire to it that can be cut."""

from __future__ import annotations

import contextlib
import os
import pwd
import select
import shutil
import socket
import subprocess
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest

PASSWORD = "hunter2"
TICK_SECONDS = 0.05
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

    def url(self, port: int | None = None, password: str = PASSWORD, database: str = "postgres") -> str:
        return f"postgresql://amp:{password}@127.0.0.1:{port or self.port}/{database}"

    def make_database(self, name: str) -> str:
        """An empty one; returns its URL."""
        with psycopg.connect(self.url(), autocommit=True) as connection:
            connection.execute(f"CREATE DATABASE {name}")
        return self.url(database=name)

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
        self._threads: list[threading.Thread] = []
        self.port = 0
        self.mend()

    def mend(self) -> None:
        self._is_cut = threading.Event()
        listener = socket.create_server(("127.0.0.1", self.port))
        self.port = listener.getsockname()[1]
        self._run(self._accept, listener)

    def cut(self) -> None:
        self._is_cut.set()
        while self._threads:  # each may start another before it sees that
            self._threads.pop().join()

    def _run(self, work: Callable[..., None], *arguments: Any) -> None:
        thread = threading.Thread(target=work, args=arguments)
        thread.start()
        self._threads.append(thread)

    def _accept(self, listener: socket.socket) -> None:
        listener.settimeout(TICK_SECONDS)
        with listener:
            while not self._is_cut.is_set():
                with contextlib.suppress(TimeoutError):
                    self._run(self._pass_on, listener.accept()[0])

    def _pass_on(self, client: socket.socket) -> None:
        server = socket.create_connection(("127.0.0.1", self._server_port))
        with client, server:
            others = {client: server, server: client}
            while not self._is_cut.is_set():
                for ready in select.select(list(others), [], [], TICK_SECONDS)[0]:
                    data = b""
                    with contextlib.suppress(OSError):
                        data = ready.recv(1 << 16)
                    if not data:
                        return
                    others[ready].sendall(data)
