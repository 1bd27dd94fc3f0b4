"""Commands that are run as a search runs them, but for the start of Python: their processes are forks of one that has
imported torch.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import signal
import subprocess
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from forked_python import ForkServer

from autotune_amp.launch import running

PROGRAM = str(Path(__file__).with_name("forked_keeper.py"))


class ForkedKeeper:
    """Stand-in for `subprocess.Popen` of a keeper."""

    def __init__(self, server: ForkServer, command: Sequence[str], env: Mapping[str, str]) -> None:
        _, _, _, *arguments = command  # Python, its option, the keeper's file
        given, giving = os.pipe()
        printed, printing = os.pipe()
        files = [f"/proc/{os.getpid()}/fd/{number}" for number in (given, printing)]
        program = [PROGRAM, *files, json.dumps(dict(env)), *arguments]
        self.stdin, self.stdout = os.fdopen(giving, "wb"), os.fdopen(printed, "rb", buffering=0)
        self.returncode: int | None = None
        self._is_up = threading.Event()

        def run() -> None:
            own = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
            done = server.run(program, cwd=Path.cwd(), env=own, timeout=1000.0)
            self.returncode = done.returncode
            if not self._is_up.is_set():
                os.write(printing, f"0\n{done.stderr}".encode())

        self._thread = threading.Thread(target=run, daemon=True)
        self._thread.start()
        self.pid = int(self.stdout.readline())
        self._is_up.set()
        os.close(given)
        os.close(printing)
        assert self.pid, self.stdout.read()

    def poll(self) -> int | None:
        return self.returncode

    def wait(self, timeout: float | None = None) -> int | None:
        self._thread.join(timeout)
        if self.returncode is None:
            raise subprocess.TimeoutExpired("keeper", timeout or 0.0)
        return self.returncode

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)


@functools.cache
def wait_until_up(server: ForkServer) -> None:
    """Have it import torch first: a command's deadlines are none of its own."""
    server.run(["-c", ""], cwd=Path.cwd(), env={})


@contextlib.contextmanager
def forked_commands(server: ForkServer) -> Iterator[None]:
    """Within it, a keeper is forked, and the command where it is a program of this Python that names torch."""

    wait_until_up(server)

    def popen(command: Sequence[str], *, env: Mapping[str, str], **_: Any) -> ForkedKeeper:
        return ForkedKeeper(server, command, env)

    stand_in = SimpleNamespace(**{**vars(subprocess), "Popen": popen})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(running, "subprocess", stand_in)
        yield
