"""A process that says what a script has it say, on a clock of its own."""

from __future__ import annotations

import math
from collections import deque
from types import SimpleNamespace
from typing import Any

import pytest

from autotune_amp.core.job import Deadlines, FirstStep, JobEvent
from autotune_amp.core.outcome import Failure
from autotune_amp.processes import process
from autotune_amp.processes.process import Process, ProcessEndedError, Watcher

FIRST = FirstStep()
DEADLINES = Deadlines(whole_seconds=40.0, first_step_seconds=10.0, step_seconds=2.0)


class Script(Process):
    """Says each message so many seconds after the one before; then it goes on without a word, or has ended."""

    def __init__(self, *messages: tuple[float, JobEvent]) -> None:
        self.now = 0.0
        self.left = deque(messages)
        self.sent: list[str] = []
        self.status = 0
        self.watcher = Watcher()
        self.printed = "last words"
        self._tail = deque()

    def _next_event(self) -> JobEvent | None:
        seconds, message = self.left[0] if self.left else (math.inf, None)
        if seconds > 0.5:  # a tick
            self.now += 0.5
            if message is not None:
                self.left[0] = seconds - 0.5, message
            return None
        self.now += seconds
        self.left.popleft()
        return message

    def _drain_output(self, seconds: float = 0.0) -> None:
        self._tail = deque([self.printed])

    def _kill_child(self) -> None:
        self.sent.append("kill")

    def _end_status(self) -> int:
        return self.status

    def waited(self, until: float | None, monkeypatch: pytest.MonkeyPatch, **options: Any) -> Any:
        monkeypatch.setattr(process, "time", SimpleNamespace(monotonic=lambda: self.now))
        return self.wait(until, DEADLINES, **options)

    def failure(self, until: float | None, monkeypatch: pytest.MonkeyPatch, **options: Any) -> Failure:
        with pytest.raises(ProcessEndedError) as caught:
            self.waited(until, monkeypatch, **options)
        return caught.value.failure
