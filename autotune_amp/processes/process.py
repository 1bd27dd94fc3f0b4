"""Parent side of one server process: its messages, its printed output, and how it ends. No torch."""

from __future__ import annotations

import contextlib
import json
import math
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from typing import Any, Protocol

import msgspec

from autotune_amp.core import errors
from autotune_amp.core.documents import decode
from autotune_amp.core.errors import AutotuneAmpError
from autotune_amp.core.job import Deadlines
from autotune_amp.core.outcome import Failure
from autotune_amp.interruption import heed
from autotune_amp.processes.process_tree import KILL_SECONDS, terminate_programs
from autotune_amp.processes.program import Program, new_folder
from autotune_amp.trial.failures import num_oom_kills
from autotune_amp.trial.judge import RunEvidence, judge

_NO_DEADLINES = Deadlines()
TICK_SECONDS = 0.1
ENDED = "it was ended, as nobody waits for it"
_OUTPUT_TAIL_CHARACTERS = 4000
_EXIT_SECONDS = 10.0
MAX_PAUSE_SECONDS = 10.0  # pause without a step, if nothing predicts a step's time
_SIGNAL_SECONDS = 1.0
_SERVER = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from autotune_amp.processes.server import main; main(sys.argv[2])"
)


class Watcher:
    """Interface for events of a backend while it waits. The base class ignores them."""

    def tick(self) -> None:
        """Handle the passing of time; called at least every TICK_SECONDS."""

    def step(self, num_steps: int, step_seconds: float) -> None:
        """Handle a finished training step. `num_steps` is 0 during the warm-up."""

    def activity(self, text: str) -> None:
        """Handle a text about the present activity of the process."""

    def output(self, text: str) -> None:
        """Handle text printed by the user's own code."""

    def is_over(self) -> bool:
        """Whether the result is no longer wanted, so that the job is to be ended."""
        return False

    def ending(self) -> None:
        """Handle that the process and its descendants are about to be killed."""


class Pausable(Protocol):
    """Interface of something that runs beside a process and can be paused."""

    def pause(self) -> None:
        """Pause until `go_on`."""

    def go_on(self) -> None:
        """Continue."""


class ProcessEndedError(Exception):
    """Raised when the process ended, or was ended, before it sent a result."""

    def __init__(self, failure: Failure, so_far: Any = None) -> None:
        super().__init__(failure.message)
        self.failure = failure
        self.so_far = so_far  # its result so far, None for nothing


class Process:
    """Server process under a keeper, with two threads that read its messages and its printed output."""

    def __init__(self, mode: str, environment: dict[str, str], watcher: Watcher) -> None:
        self.watcher = watcher  # receives its events from now on
        self._messages: queue.Queue[dict[str, Any] | None] = queue.Queue()
        self._printed: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._tail: deque[str] = deque(maxlen=64)
        self._num_oom_kills = 0
        arguments, pipe = [sys.executable, "-c", _SERVER, json.dumps(sys.path), mode], subprocess.PIPE
        self._program = Program(arguments, environment, new_folder(), stdin=pipe, stdout=pipe, stderr=pipe)
        self._program.start()
        self._popen: subprocess.Popen[bytes] = self._program.popen
        self._threads = [threading.Thread(target=f, daemon=True) for f in (self._hear, self._overhear)]
        for thread in self._threads:
            thread.start()

    @property
    def pid(self) -> int | None:
        """Return the process ID; None before the process has started and after it has ended."""
        return next((process.pid for process in self._program.processes()), None)

    def is_alive(self) -> bool:
        """Return whether it runs. Messages of a killed process end before the system reports its end."""
        return self._popen.poll() is None and self._threads[0].is_alive()

    def send(self, message: dict[str, Any], data: bytes = b"") -> None:
        """Write a message, followed by raw bytes."""
        assert self._popen.stdin is not None
        try:
            self._popen.stdin.write(msgspec.json.encode(message) + b"\n" + data)
            self._popen.stdin.flush()
        except BrokenPipeError:
            pass  # it died; `wait` reports how

    def send_beside(self, message: dict[str, Any], data: bytes) -> None:
        """Write a message in a thread, without waiting until the process has started and reads it."""
        writer = threading.Thread(target=self.send, args=(message, data), daemon=True)
        self._threads.append(writer)
        writer.start()

    def pause(self) -> None:
        """Stop the process until `go_on`, on systems where it would still end with its parent."""
        self._program.pause()

    def go_on(self) -> None:
        """Let the process continue."""
        self._program.go_on()

    def wait(
        self,
        until: float | None,
        deadlines: Deadlines = _NO_DEADLINES,
        *,
        ends_with_exit: bool = False,
        beside: Pausable | None = None,
    ) -> Any:
        """Return the answer to the last message. Raises `ProcessEndedError` if there is none, whoever ended the
        process.

        `until` is a time on the monotonic clock before which the process has to be ready for its job, which has the
        `deadlines` from then on. A template's children answer and then exit; with `ends_with_exit` wait for the exit
        too. `beside` is paused while the process takes steps, except in a step that takes long: it may wait for
        `beside`.
        """
        answer: dict[str, Any] | None = None
        so_far: Any = None
        is_ready = False
        allowed = limit = goes_on_at = None
        phase = "building the workload"
        self._tail.clear()
        self._num_oom_kills = num_oom_kills()
        while True:
            message = self._next_message()
            now = time.monotonic()
            if message is None:
                raise ProcessEndedError(self._failure(self._end_status(), phase), so_far)
            event = message["event"] if message else None
            if event == "ready":
                is_ready = True
                until = None if deadlines.whole_seconds is None else now + deadlines.whole_seconds
            elif event == "first step":
                phase, allowed = "in the first step", deadlines.first_step_seconds
            elif event == "compiling" and allowed is not None:
                # Half of the rest, since the compiler's cache may have sped up the steps that the deadlines are based
                # on.
                left_seconds = math.inf if until is None else until - now
                allowed = deadlines.compiling_seconds or max(deadlines.first_step_seconds or 0.0, left_seconds / 2)
                phase = "compiling"
            elif event == "phase":
                phase, allowed = message["name"], message.get("seconds")
                self.watcher.activity(phase)
            elif event == "so far":
                so_far = message["value"]
            elif event == "step":
                phase = f"after step {message['number']}" if message["number"] else "warming up"
                allowed = deadlines.step_seconds
                if beside is not None:
                    beside.pause()
                    goes_on_at = now + (MAX_PAUSE_SECONDS if allowed is None else allowed / 2)
                self.watcher.step(message["number"], message["seconds"])
            elif event in ("result", "failed", "error"):
                answer, allowed = message, None
                until = now + _EXIT_SECONDS
            elif event == "exit":
                self._drain_output()
            if event is not None and event != "so far":
                limit = None if allowed is None else now + allowed
            if beside is not None and goes_on_at is not None and now > goes_on_at:
                beside.go_on()
                goes_on_at = None
            overdue = None
            if self.watcher.is_over():
                overdue = ENDED
            elif until is not None and now > until:
                overdue = f"it was still {phase} when its time was up"
            elif limit is not None and now > limit:
                overdue = f"a step took longer than {allowed:.1f} s ({phase})"
            if overdue is not None and ends_with_exit and event != "exit":
                self._kill_child()
            if answer is not None and (not ends_with_exit or event == "exit" or overdue is not None):
                return _value(answer)
            if event == "exit":
                raise ProcessEndedError(self._failure(message["status"], phase), so_far)
            if overdue is not None:
                is_loading = not is_ready and overdue != ENDED
                raise ProcessEndedError(_judged(RunEvidence(overdue=overdue, is_loading=is_loading)), so_far)

    def _next_message(self) -> dict[str, Any] | None:
        """Return the next message, an empty one if none came within a tick, None at the end of the process."""
        self._drain_output()
        heed()
        self.watcher.tick()
        try:
            return self._messages.get(timeout=TICK_SECONDS)
        except queue.Empty:
            return {}

    def _drain_output(self) -> None:
        with contextlib.suppress(queue.Empty):
            while True:
                self.watcher.output(self._printed.get_nowait())

    def _kill_child(self) -> None:
        """Make the template kill its child; a template that does not answer is killed itself."""
        self.send({"cmd": "kill"})
        try:
            while (message := self._messages.get(timeout=KILL_SECONDS)) is not None:
                if message["event"] == "exit":
                    return
        except queue.Empty:
            self._program.end()

    def _failure(self, status: int, phase: str) -> Failure:
        if status == -signal.SIGTERM:  # Slurm ends a job by a signal to every process: ours is on its way
            time.sleep(_SIGNAL_SECONDS)
        evidence = RunEvidence(
            has_ended=True,
            exit_status=status,
            activity=f"before it reported, {phase}",
            output="".join(self._tail)[-_OUTPUT_TAIL_CHARACTERS:] or None,
            is_oom_killed=num_oom_kills() > self._num_oom_kills,
        )
        return _judged(evidence)

    def _end_status(self) -> int:
        self._popen.wait()
        self._drain_output()
        return self._popen.returncode

    def end(self) -> None:
        """Kill the process and all its descendants, including those that left its group, and wait for them."""
        self.watcher.ending()
        terminate_programs(self._program.processes)
        self._program.close()
        for thread in self._threads:
            thread.join(KILL_SECONDS)
        self._drain_output()
        for stream in (self._popen.stdin, self._popen.stdout, self._popen.stderr):
            assert stream is not None
            with contextlib.suppress(BrokenPipeError):
                stream.close()

    def _hear(self) -> None:
        assert self._popen.stdout is not None
        for line in self._popen.stdout:
            with contextlib.suppress(msgspec.MsgspecError):  # an incomplete line of a killed process
                message = decode(line, dict[str, Any])
                if isinstance(message.get("event"), str):
                    self._messages.put(message)
        self._messages.put(None)

    def _overhear(self) -> None:
        assert self._popen.stderr is not None
        while chunk := os.read(self._popen.stderr.fileno(), 1 << 16):
            text = chunk.decode(errors="replace")
            self._tail.append(text)
            self._printed.put(text)


def _judged(evidence: RunEvidence) -> Failure:
    failure = judge(evidence)
    assert failure is not None  # it has ended, or is overdue
    return failure


def _value(answer: dict[str, Any]) -> Any:
    if answer["event"] == "result":
        return answer["value"]
    if answer["event"] == "failed":
        return msgspec.convert(answer["failure"], Failure)
    kind: type[AutotuneAmpError] = getattr(errors, answer["type"])
    raise kind(answer["message"], answer["next_step"])
