"""Parent side of a trial: start, deadline, kill, classify. No torch here, and no accelerator."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, TypeAlias

import msgspec
import psutil

from autotune_amp import errors
from autotune_amp.errors import AutotuneAmpError, BudgetTooSmallError, RunnerError, WorkloadError
from autotune_amp.trial.outcome import Failure, Measurement, Outcome
from autotune_amp.trial.spec import TrialSpec

Isolation: TypeAlias = Literal["fork", "kept", "fresh"]

# Experiment trackers that can be turned off by a variable: a trial is no run of the user's.
TRACKERS_OFF = {
    "WANDB_MODE": "disabled",
    "COMET_MODE": "DISABLED",
    "NEPTUNE_MODE": "debug",
    "SWANLAB_MODE": "disabled",
    "CLEARML_OFFLINE_MODE": "1",
    "DISABLE_MLFLOW_INTEGRATION": "TRUE",
    "TRACKIO_DISABLED": "1",
}
TICK_SECONDS = 0.1
_OUTPUT_TAIL_CHARACTERS = 4000
_EXIT_SECONDS = 10.0
_SERVER = "import json, sys; sys.path[:] = json.loads(sys.argv[1]); from autotune_amp.trial.server import main; main(sys.argv[2])"


class Payload(msgspec.Struct, frozen=True, kw_only=True):
    """How a trial process gets the workload: a target to import, or packed bytes; with the caller's import path."""

    target: str | None
    packed: bytes = b""
    path: tuple[str, ...]


def can_fork() -> bool:
    """Whether trials can be forked: on Linux, where fork, pidfd and the parent-death signal are sound."""
    return sys.platform == "linux" and hasattr(os, "pidfd_open")


class Watcher:
    """What a runner tells while it waits; the base class ignores it."""

    def tick(self) -> None:
        """Called at least every TICK_SECONDS."""

    def step(self, num_steps: int, step_seconds: float) -> None:
        """The trial finished a step; `num_steps` is 0 while it warms up."""

    def output(self, text: str) -> None:
        """The user's own code printed something."""


class Runner:
    """Runs calls for one workload in processes of their own.

    `isolation`: ``fork`` forks each call from a template that holds the workload; ``kept`` lets one worker answer
    call after call until one fails; ``fresh`` starts a process for each. `environment` is laid over the caller's.
    Use as a context manager: on the way out every process is dead.
    """

    def __init__(
        self, payload: Payload, isolation: Isolation, watcher: Watcher, environment: dict[str, str] | None = None
    ) -> None:
        self._payload = payload
        self._isolation = isolation
        self._watcher = watcher
        self._environment = {**os.environ, **TRACKERS_OFF, "AUTOTUNE_AMP_TRIAL": "1", **(environment or {})}
        self._process: _Process | None = None
        self._num_threads = 1

    def __enter__(self) -> Runner:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End every process."""
        if self._process is not None:
            process, self._process = self._process, None
            process.end()

    @property
    def isolation(self) -> Isolation:
        return self._isolation

    def keep(self) -> None:
        """Go on with one kept worker in place of forks."""
        self.close()
        self._isolation = "kept"

    def load(self, deadline_seconds: float) -> dict[str, Any]:
        """Start the process and import or unpack the workload; returns the torch state found after it.

        Raises `WorkloadError` where the workload cannot be loaded, with the user's own traceback.
        """
        state: dict[str, Any] = self._load(time.monotonic() + deadline_seconds)
        return state

    def open(self, num_threads: int, deadline_seconds: float) -> str | None:
        """Call the user's function once; returns why trials cannot be forked from that process, None if they can."""
        self._num_threads = num_threads
        reason: str | None = self._open(time.monotonic() + deadline_seconds)
        return reason

    def ask(self, what: str, args: dict[str, Any], deadline_seconds: float) -> Any:
        """Call ``probe``, ``fingerprint`` or ``describe``; a `Failure` comes back as itself, our errors are raised."""
        return self._call(what, args, _Deadlines(whole=time.monotonic() + deadline_seconds))

    def run(self, spec: TrialSpec) -> Outcome:
        """Run one trial; never raises for what the workload does."""
        deadlines = _Deadlines(
            whole=None if spec.deadline_seconds is None else time.monotonic() + spec.deadline_seconds,
            first_step_seconds=spec.first_step_deadline_seconds,
            step_seconds=spec.step_deadline_seconds,
        )
        try:
            value = self._call("trial", msgspec.to_builtins(spec), deadlines)
        except BudgetTooSmallError:  # a fresh process, loading it again
            return Failure(kind="timeout", message="it was still loading the workload when its time was up")
        except AutotuneAmpError as error:
            return Failure(kind="workload_error", message=error.message, details=error.next_step)
        if isinstance(value, Failure):
            return value
        outcome: Outcome = msgspec.convert(value, type=Measurement | Failure)
        return outcome

    def _call(self, what: str, args: dict[str, Any], deadlines: _Deadlines) -> Any:
        try:
            process = self._ready_process(deadlines)
            process.send({"cmd": "call", "what": what, "args": args})
            value = process.wait(deadlines, ends_with_exit=self._isolation == "fork")
        except _ProcessEnded as ended:
            self.close()
            return ended.failure
        except BaseException:
            self.close()
            raise
        if self._isolation == "fresh" or (self._isolation == "kept" and _is_failure(value)):
            self.close()
        return value

    def _ready_process(self, deadlines: _Deadlines) -> _Process:
        if self._process is None or not self._process.is_alive():
            self.close()
            self._load(deadlines.whole)
            self._open(deadlines.whole)
        assert self._process is not None
        return self._process

    def _load(self, deadline: float | None) -> Any:
        mode = "template" if self._isolation == "fork" else "worker"
        self._process = _Process(mode, self._environment, self._watcher)
        command = {
            "cmd": "load",
            "target": self._payload.target,
            "path": self._payload.path,
            "num_packed_bytes": len(self._payload.packed),
        }
        return self._expect(command, self._payload.packed, deadline)

    def _open(self, deadline: float | None) -> Any:
        return self._expect({"cmd": "open", "num_threads": self._num_threads}, b"", deadline)

    def _expect(self, command: dict[str, Any], data: bytes, deadline: float | None) -> Any:
        assert self._process is not None
        try:
            self._process.send(command, data)
            value = self._process.wait(_Deadlines(whole=deadline))
        except _ProcessEnded as ended:
            value = ended.failure
        if isinstance(value, Failure):
            self.close()
            if value.kind == "timeout":
                raise BudgetTooSmallError(
                    "The budget ended before the workload was loaded.",
                    "Give a --budget of several times what importing and calling it takes.",
                )
            details = f"\n{value.details.rstrip()}" if value.details else ""
            raise WorkloadError(
                f"{self._payload.target or 'The workload'} cannot be loaded: {value.message}.{details}",
                "Mend it until it can be imported and called on its own.",
            )
        return value


class _Deadlines(msgspec.Struct, kw_only=True):
    """`whole` is a time on the monotonic clock; the others are seconds from the last sign of life."""

    whole: float | None = None
    first_step_seconds: float | None = None
    step_seconds: float | None = None


class _ProcessEnded(Exception):
    """The process ended, or was ended, before it answered."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.message)
        self.failure = failure


class _Process:
    """One server process and the two threads that read what it says and what it prints."""

    def __init__(self, mode: str, environment: dict[str, str], watcher: Watcher) -> None:
        self._mode = mode
        self._watcher = watcher
        self._messages: queue.Queue[dict[str, Any] | None] = queue.Queue()
        self._printed: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._tail: deque[str] = deque(maxlen=64)
        self._num_oom_kills = _count_oom_kills()
        try:
            self._popen = subprocess.Popen(
                [sys.executable, "-c", _SERVER, json.dumps(sys.path), mode],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                env=environment,
                start_new_session=True,  # Ctrl-C at the terminal is ours to handle
            )
        except OSError as error:
            raise RunnerError(
                f"A trial process cannot be started: {error}.", "Check the limits on processes and memory."
            ) from error
        self._threads = [threading.Thread(target=self._hear), threading.Thread(target=self._overhear)]
        for thread in self._threads:
            thread.start()

    def is_alive(self) -> bool:
        return self._popen.poll() is None

    def send(self, message: dict[str, Any], data: bytes = b"") -> None:
        assert self._popen.stdin is not None
        try:
            self._popen.stdin.write(msgspec.json.encode(message) + b"\n" + data)
            self._popen.stdin.flush()
        except BrokenPipeError:
            pass  # it died; `wait` says how

    def wait(self, deadlines: _Deadlines, *, ends_with_exit: bool = False) -> Any:
        """The answer to the last message; raises `_ProcessEnded` if there is none, whoever ended the process.

        A template's children answer and then exit; `ends_with_exit` waits for that too.
        """
        answer: Any = None
        is_answered = False
        limit = None
        phase = "building the workload"
        while True:
            message = self._next_message()
            now = time.monotonic()
            if message is False:
                overdue = _overdue(now, deadlines.whole, limit)
                if overdue is None:
                    continue
                if is_answered:
                    self._kill_for(deadlines, True, "ending")
                    return _raised(answer)
                raise _ProcessEnded(self._kill_for(deadlines, overdue == "whole", phase))
            if message is None:
                raise _ProcessEnded(self._classify_exit(self._end_status(), phase))
            event = message["event"]
            if event == "phase":
                phase = f"in the {message['phase']}" if message["phase"] == "first step" else message["phase"]
                if message["phase"] == "first step" and deadlines.first_step_seconds is not None:
                    limit = now + deadlines.first_step_seconds
            elif event == "step":
                phase = f"after step {message['number']}" if message["number"] else "warming up"
                self._watcher.step(message["number"], message["seconds"])
                limit = None if deadlines.step_seconds is None else now + deadlines.step_seconds
            elif event in ("result", "failed", "error"):
                answer, is_answered, limit = _answer(message), True, None
                if not ends_with_exit:
                    return _raised(answer)
                deadlines.whole = now + _EXIT_SECONDS
            elif event == "exit":
                self._drain_output()
                if is_answered:
                    return _raised(answer)
                raise _ProcessEnded(self._classify_exit(message["status"], phase))

    def _next_message(self) -> dict[str, Any] | None | Literal[False]:
        """The next message, None at the end of the process, False if nothing came within a tick."""
        self._drain_output()
        self._watcher.tick()
        try:
            return self._messages.get(timeout=TICK_SECONDS)
        except queue.Empty:
            return False

    def _drain_output(self) -> None:
        with contextlib.suppress(queue.Empty):
            while True:
                self._watcher.output(self._printed.get_nowait())

    def _kill_for(self, deadlines: _Deadlines, is_whole: bool, phase: str) -> Failure:
        if self._mode == "template":
            self.send({"cmd": "kill"})
            with contextlib.suppress(queue.Empty):
                while (message := self._messages.get(timeout=5)) is not None:
                    if message["event"] == "exit":
                        break
        if is_whole:
            return Failure(kind="timeout", message=f"it was still {phase} when its time was up")
        limit = deadlines.first_step_seconds if phase == "in the first step" else deadlines.step_seconds
        return Failure(kind="timeout", message=f"a step took longer than {limit:.1f} s ({phase})")

    def _classify_exit(self, status: int, phase: str) -> Failure:
        details = "".join(self._tail)[-_OUTPUT_TAIL_CHARACTERS:] or None
        if status == -signal.SIGKILL and _count_oom_kills() > self._num_oom_kills:
            return Failure(kind="oom", message=f"the kernel ended it for want of memory, {phase}", details=details)
        if status < 0:
            name = signal.Signals(-status).name
            what = "segmentation fault" if name == "SIGSEGV" else f"signal {name}"
            return Failure(kind="crash", message=f"its process died of {what}, {phase}", details=details)
        return Failure(
            kind="crash", message=f"its process exited with status {status} before it reported, {phase}", details=details
        )

    def _end_status(self) -> int:
        self._popen.wait()
        self._drain_output()
        return self._popen.returncode

    def end(self) -> None:
        """Kill the process, its group and whatever else descends from it; returns when all of it is gone."""
        family = _family(self._popen.pid)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._popen.pid, signal.SIGKILL)
        for process in family:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        self._popen.wait()
        psutil.wait_procs(family, timeout=5)
        for thread in self._threads:
            thread.join()
        self._drain_output()
        for stream in (self._popen.stdin, self._popen.stdout, self._popen.stderr):
            assert stream is not None
            with contextlib.suppress(BrokenPipeError):
                stream.close()

    def _hear(self) -> None:
        assert self._popen.stdout is not None
        for line in self._popen.stdout:
            if line.strip():
                with contextlib.suppress(json.JSONDecodeError):  # the remains of a killed writer's line
                    self._messages.put(json.loads(line))
        self._messages.put(None)

    def _overhear(self) -> None:
        assert self._popen.stderr is not None
        while chunk := os.read(self._popen.stderr.fileno(), 1 << 16):
            text = chunk.decode(errors="replace")
            self._tail.append(text)
            self._printed.put(text)


def _overdue(now: float, whole: float | None, limit: float | None) -> Literal["whole", "step"] | None:
    if whole is not None and now > whole:
        return "whole"
    return "step" if limit is not None and now > limit else None


def _answer(message: dict[str, Any]) -> Any:
    if message["event"] == "result":
        return message["value"]
    if message["event"] == "failed":
        return msgspec.convert(message["failure"], Failure)
    kind: type[AutotuneAmpError] = getattr(errors, message["type"])
    return kind(message["message"], message["next_step"])


def _raised(answer: Any) -> Any:
    if isinstance(answer, AutotuneAmpError):
        raise answer
    return answer


def _is_failure(value: Any) -> bool:
    return isinstance(value, Failure) or (isinstance(value, dict) and value.get("outcome") == "failure")


def _family(pid: int) -> list[psutil.Process]:
    try:
        family: list[psutil.Process] = psutil.Process(pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return []
    return family


def _count_oom_kills() -> int:
    """The kernel's count of processes it ended for want of memory, 0 where it keeps none."""
    with contextlib.suppress(OSError, StopIteration):
        lines = Path("/proc/vmstat").read_text().splitlines()
        return int(next(line for line in lines if line.startswith("oom_kill ")).split()[1])
    return 0
