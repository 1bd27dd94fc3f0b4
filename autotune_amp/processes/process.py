"""Server process as its parent sees it: its messages, its printed output, and how it ended. Imports no torch."""

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
from collections.abc import Sequence
from typing import Any

import msgspec

from autotune_amp.core.documents import decode
from autotune_amp.core.job import (
    ChildExit,
    Compilation,
    Deadlines,
    EndOfEvents,
    FirstStep,
    JobEvent,
    PartialResult,
    Phase,
    Ready,
    RequestError,
    RequestFailure,
    Result,
    StepDone,
)
from autotune_amp.core.outcome import Failure
from autotune_amp.interruption import heed
from autotune_amp.processes.process_tree import KILL_SECONDS, terminate_programs
from autotune_amp.processes.program import Program, import_path, new_folder
from autotune_amp.trial.failures import num_oom_kills
from autotune_amp.trial.judge import failure_from_exit

_NO_DEADLINES = Deadlines()
_DECODER: msgspec.json.Decoder[JobEvent] = msgspec.json.Decoder(JobEvent)
TICK_SECONDS = 0.1
ENDED = "it was ended: its result is not needed any more"
MAX_OUTPUT_CHUNKS = 256  # of up to 64 KiB that wait to be printed; a process that prints more has to wait
_OUTPUT_TAIL_CHARACTERS = 4000
_EXIT_SECONDS = 10.0  # time for a forked child to exit after its answer
MAX_PAUSE_SECONDS = 10.0  # longest pause of a standby process without a step, if steps have no deadline
_SIGNAL_SECONDS = 1.0  # after a signal to the whole job, this process gets its own within this time
_SERVER = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from autotune_amp.processes.server import main; main(sys.argv[2])"
)


class Watcher:
    """Interface that receives the events of a running job. This base class ignores them."""

    def tick(self) -> None:
        """Do periodic work; called at least every TICK_SECONDS while a backend waits."""

    def step(self, num_steps: int, step_seconds: float) -> None:
        """Handle a finished training step. `num_steps` is 0 during the warm-up."""

    def activity(self, text: str) -> None:
        """Handle a description of the present phase of the job, such as "evaluating"."""

    def output(self, text: str) -> None:
        """Handle text printed by the user's own code."""

    def is_over(self) -> bool:
        """Whether the result is no longer wanted, so that the job is to be ended."""
        return False

    def ending(self) -> None:
        """Handle the event that the process and its descendants are about to be killed."""


class ProcessEndedError(Exception):
    """Raised when the process ended, or was ended, before it sent a result."""

    def __init__(self, failure: Failure, so_far: Any = None) -> None:
        super().__init__(failure.message)
        self.failure = failure
        self.so_far = so_far  # its partial result, None without one


class Process:
    """Server process under a keeper, with two threads that read its messages and its printed output."""

    def __init__(self, mode: str, environment: dict[str, str], watcher: Watcher) -> None:
        self.watcher = watcher  # receives its events from now on
        self._events: queue.Queue[JobEvent] = queue.Queue()
        self._output_chunks: queue.Queue[str] = queue.Queue(MAX_OUTPUT_CHUNKS)
        self._is_ending = False
        self._tail: deque[str] = deque(maxlen=64)
        self._num_oom_kills = 0
        arguments, pipe = [sys.executable, "-c", _SERVER, json.dumps(import_path()), mode], subprocess.PIPE
        self._program = Program(arguments, environment, new_folder(), stdin=pipe, stdout=pipe, stderr=pipe)
        self._program.start()
        self._popen: subprocess.Popen[bytes] = self._program.popen
        self._threads = [threading.Thread(target=f, daemon=True) for f in (self._read_events, self._read_output)]
        for thread in self._threads:
            thread.start()

    @property
    def pid(self) -> int | None:
        """Return the process ID; None before the process has started and after it has ended."""
        return next((process.pid for process in self._program.processes()), None)

    def is_alive(self) -> bool:
        """Return whether the process runs and its messages are read. The messages of a killed process end first."""
        return self._program.wait(0) is None and self._threads[0].is_alive()

    @property
    def num_unread(self) -> int:
        """Return the number of events that it has sent and `wait` has not handled yet."""
        return self._events.qsize()

    def send(self, message: dict[str, Any], data: bytes = b"") -> None:
        """Write a message, followed by raw bytes."""
        assert self._popen.stdin is not None
        try:
            self._popen.stdin.write(msgspec.json.encode(message) + b"\n")
            self._popen.stdin.write(data)  # not joined with the line, which would copy a whole model
            self._popen.stdin.flush()
        except BrokenPipeError:
            pass  # the process has ended; `wait` reports how

    def send_in_background(self, message: dict[str, Any], data: bytes) -> None:
        """Write a message in a thread, without waiting until the process has started and reads it."""
        writer = threading.Thread(target=self.send, args=(message, data), daemon=True)
        self._threads.append(writer)
        writer.start()

    def pause(self) -> None:
        """Pause the process until `resume`, on systems where a paused process ends with its parent too."""
        self._program.pause()

    def resume(self) -> None:
        """Let the process continue."""
        self._program.resume()

    def wait(
        self,
        until: float | None,
        deadlines: Deadlines = _NO_DEADLINES,
        *,
        ends_with_exit: bool = False,
        beside: Sequence[Process] = (),
    ) -> Any:
        """Return the answer to the last message. Raises `ProcessEndedError` if the process ends first, or is ended
        here.

        The process has to be ready for its job before `until`, a time on the monotonic clock; then the job's
        `deadlines` apply. With `ends_with_exit` the answer comes from a template's child: wait for its exit too.
        Those in `beside` are paused while the process takes steps, but not during a long step, which may wait for them.
        """
        answer: Result | RequestFailure | RequestError | None = None
        so_far: Any = None
        is_ready = False
        allowed_seconds = step_deadline = resume_beside_at = None
        phase = "building the workload"
        self._tail.clear()
        self._num_oom_kills = num_oom_kills()
        while True:
            event = self._next_event()
            now = time.monotonic()
            match event:
                case EndOfEvents():
                    raise ProcessEndedError(self._failure(self._end_status(), phase), so_far)
                case Ready():
                    is_ready = True
                    until = None if deadlines.whole_seconds is None else now + deadlines.whole_seconds
                case FirstStep():
                    phase, allowed_seconds = "in the first step", deadlines.first_step_seconds
                case Compilation() if allowed_seconds is not None:
                    # Half of the remaining time: the deadlines are based on steps that the compiler's cache may have
                    # sped up.
                    left_seconds = math.inf if until is None else until - now
                    allowed_seconds = deadlines.compiling_seconds or max(
                        deadlines.first_step_seconds or 0.0, left_seconds / 2
                    )
                    phase = "compiling"
                case Phase():
                    phase, allowed_seconds = event.name, event.seconds
                    self.watcher.activity(phase)
                case PartialResult():
                    so_far = event.value
                case StepDone():
                    phase = f"after step {event.number}" if event.number else "warming up"
                    allowed_seconds = deadlines.step_seconds
                    for process in beside:
                        process.pause()
                    resume_beside_at = now + (MAX_PAUSE_SECONDS if allowed_seconds is None else allowed_seconds / 2)
                    self.watcher.step(event.number, event.seconds)
                case Result() | RequestFailure() | RequestError():
                    answer, allowed_seconds = event, None
                    until = now + _EXIT_SECONDS
                case ChildExit():
                    self._drain_output()
            if event is not None and not isinstance(event, PartialResult):
                step_deadline = None if allowed_seconds is None else now + allowed_seconds
            if resume_beside_at is not None and now > resume_beside_at:
                for process in beside:
                    process.resume()
                resume_beside_at = None
            overdue = None
            if self.watcher.is_over():
                overdue = ENDED
            elif until is not None and now > until:
                overdue = f"it was still {phase} when its time was up"
            elif step_deadline is not None and now > step_deadline:
                overdue = f"a step took longer than {allowed_seconds:.1f} s ({phase})"
            has_exited = isinstance(event, ChildExit)
            if overdue is not None and ends_with_exit and not has_exited:
                self._kill_child()
            if answer is not None and (not ends_with_exit or has_exited or overdue is not None):
                self._drain_output()
                return _value_or_error(answer)
            if isinstance(event, ChildExit):
                raise ProcessEndedError(self._failure(event.status, phase), so_far)
            if overdue is not None:
                is_loading = not is_ready and overdue != ENDED
                raise ProcessEndedError(Failure(kind="timeout", message=overdue, is_loading=is_loading), so_far)

    def _next_event(self) -> JobEvent | None:
        """Return the next event, None if none came within a tick."""
        self._drain_output(TICK_SECONDS)
        heed()
        self.watcher.tick()
        try:
            return self._events.get(timeout=TICK_SECONDS)
        except queue.Empty:
            return None

    def _drain_output(self, seconds: float = KILL_SECONDS) -> None:
        """Pass the printed text that waits to the watcher. After `seconds`, leave the rest of it for the next call."""
        until = time.monotonic() + seconds
        for _ in range(self._output_chunks.qsize()):
            self.watcher.output(self._output_chunks.get_nowait())
            if time.monotonic() > until:
                return

    def _kill_child(self) -> None:
        """Have the template kill its child; kill the template itself if it does not answer."""
        self.send({"cmd": "kill"})
        try:
            while not isinstance(self._events.get(timeout=KILL_SECONDS), (ChildExit, EndOfEvents)):
                pass
        except queue.Empty:
            self._program.end()

    def _failure(self, status: int, phase: str) -> Failure:
        if status == -signal.SIGTERM:  # Slurm signals every process of a job: wait for the signal to this one
            time.sleep(_SIGNAL_SECONDS)
        return failure_from_exit(
            status,
            "".join(self._tail)[-_OUTPUT_TAIL_CHARACTERS:] or None,
            activity=f"before it reported, {phase}",
            is_oom_killed=num_oom_kills() > self._num_oom_kills,
        )

    def _end_status(self) -> int:
        status = self._program.wait()
        assert status is not None
        self._drain_output()
        return status

    def end(self) -> None:
        """Kill the process and all its descendants, including those that left its group, and wait for them."""
        self.watcher.ending()
        try:
            terminate_programs(self._program.processes)
        finally:  # after Ctrl-C too: the process is suspended
            self._is_ending = True
            self._program.close()
        for thread in self._threads:
            thread.join(KILL_SECONDS)
        self._drain_output()
        for stream in (self._popen.stdin, self._popen.stdout, self._popen.stderr):
            assert stream is not None
            with contextlib.suppress(BrokenPipeError):
                stream.close()

    def _read_events(self) -> None:
        assert self._popen.stdout is not None
        for line in self._popen.stdout:
            with contextlib.suppress(msgspec.MsgspecError):  # an incomplete line of a killed process
                self._events.put(decode(line, _DECODER))
        self._events.put(EndOfEvents())

    def _read_output(self) -> None:
        """Queue the printed text. While the queue is full, wait, or drop the text once the process has been ended."""
        assert self._popen.stderr is not None
        while chunk := os.read(self._popen.stderr.fileno(), 1 << 16):
            text = chunk.decode(errors="replace")
            self._tail.append(text)
            while not self._has_queued(text) and not self._is_ending:
                pass

    def _has_queued(self, text: str) -> bool:
        """Whether there was room for printed text in the queue within a tick."""
        try:
            self._output_chunks.put(text, timeout=TICK_SECONDS)
        except queue.Full:
            return False
        return True


def _value_or_error(answer: Result | RequestFailure | RequestError) -> Any:
    match answer:
        case Result():
            return answer.value
        case RequestFailure():
            return answer.failure
        case RequestError():
            raise answer.exception()
