"""Trial processes that are no processes: the same server, asked in this one, at the price of no start.

For what a command says and refuses. Nothing keeps the tests' process from what a workload does in it.
"""

from __future__ import annotations

import io
import linecache
import os
import queue
import sys
from collections import deque
from pathlib import Path
from typing import Any
from unittest.mock import patch

import msgspec
import pytest

from autotune_amp.core.job import JobEvent, Result
from autotune_amp.processes import local
from autotune_amp.processes.process import Process, Watcher


def run_jobs_here(patch: pytest.MonkeyPatch) -> None:
    """Have the local backend run its jobs in this process; modules that they import are forgotten afterwards."""
    patch.setattr(local, "Process", ServerHere)
    patch.setattr(local, "can_fork", lambda: False)
    patch.setattr(sys, "path", list(sys.path))


class ServerHere(Process):
    """The parent's side of a server, and behind it the server itself."""

    def __init__(self, mode: str, environment: dict[str, str], watcher: Watcher) -> None:
        from autotune_amp.processes.server import Server

        self.watcher = watcher
        self._events = queue.Queue()
        self._output_chunks = queue.Queue()
        self._tail = deque(maxlen=64)
        self._environment = environment
        self._imported: list[str] = []  # the workload's module, which another test may have by the same name
        self._channel = ChannelHere(self._events)
        self._server: Any = Server(self._channel, is_template=mode == "forked")  # type: ignore[arg-type] # all it needs of a channel
        self._events.put(Result("ready"))

    def is_alive(self) -> bool:
        return True

    def send(self, message: dict[str, Any], data: bytes = b"") -> None:
        self._channel.input = io.BytesIO(data)
        before = set(sys.modules)
        with patch.dict(os.environ, self._environment, clear=True):
            self._server.handle(msgspec.json.decode(msgspec.json.encode(message)))
        if file := str(message.get("target") or "").rpartition(":")[0]:
            new = set(sys.modules) - before
            self._imported += [name for name in new if name.removesuffix("_workload") == Path(file).stem]

    def end(self) -> None:
        for name in self._imported:
            del sys.modules[name]
        linecache.checkcache()


class ChannelHere:
    """What a server reads and writes, in memory."""

    def __init__(self, events: queue.Queue[JobEvent]) -> None:
        self.input = io.BytesIO()
        self._events = events

    def send(self, event: JobEvent) -> None:
        self._events.put(msgspec.json.decode(msgspec.json.encode(event), type=JobEvent))
