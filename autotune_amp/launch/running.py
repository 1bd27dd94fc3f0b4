"""One run of a training command: started with the agent in it, heard until it has said enough, and ended with all it started."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import shutil
import signal
import subprocess
import tempfile
import threading
import time
import uuid
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import psutil

from autotune_amp.core.errors import WorkloadError
from autotune_amp.core.job import Deadlines
from autotune_amp.core.outcome import Failure
from autotune_amp.isolation.marks import KILL_SECONDS, MARK, kill_marked
from autotune_amp.isolation.process import TICK_SECONDS, Watcher
from autotune_amp.launch.listening import Gone, Listener
from autotune_amp.launch.ranks import Heard
from autotune_amp.launch.verdict import Seen, verdict

INJECTED = Path(__file__).parent / "agent" / "path"
_MEMORY_SECONDS = 0.5  # between two looks at the memory of all its processes
_GRACE_SECONDS = 2.0  # after the first error: the rank that is its cause may say so later
_STACK_SECONDS = 2.0  # for the stacks of ranks that hang
_NUM_KEPT_CHUNKS = 256


class Ran(NamedTuple):
    """How a run ended: when it was started (monotonic), what was heard, what was seen from outside, the verdict."""

    began: float

    heard: Heard
    seen: Seen
    ending: Literal["measured"] | Failure


def run(
    arguments: Sequence[str],
    *,
    environment: Mapping[str, str],
    agent: Mapping[str, Any],
    deadlines: Deadlines,
    is_enough: Callable[[Heard], bool],
    watcher: Watcher,
    memory_limit_bytes: int | None = None,
    kept: Path | None = None,
) -> Ran:
    """Start the command in the working directory, hear its processes, and kill them all once the verdict stands.

    `agent` are the settings of the agent beside its socket; what it writes goes to the folder `kept`, else it is removed. Raises `WorkloadError` where it cannot be started.
    """
    folder = Path(tempfile.mkdtemp(prefix="autotune_amp-"))
    try:
        command = _Command(arguments, environment, {"folder": str(kept or folder), **agent}, folder, watcher)
        try:
            return command.until(deadlines, is_enough, memory_limit_bytes)
        finally:
            command.end()
    finally:
        shutil.rmtree(folder, ignore_errors=True)


class _Command:
    def __init__(
        self,
        arguments: Sequence[str],
        environment: Mapping[str, str],
        agent: Mapping[str, Any],
        folder: Path,
        watcher: Watcher,
    ) -> None:
        self._watcher = watcher
        self._heard = Heard()
        self._tail: deque[str] = deque(maxlen=_NUM_KEPT_CHUNKS)
        self._printed: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._mark = uuid.uuid4().hex
        self._listener = Listener(str(folder / "socket"))
        self._memory_bytes, self._memory_at = 0, 0.0
        settings = {"socket": str(folder / "socket"), **agent}
        path = os.pathsep.join(filter(None, [str(INJECTED), environment.get("PYTHONPATH")]))
        self._began = time.monotonic()
        try:
            self._popen = subprocess.Popen(  # noqa: S603 - the user's own command
                list(arguments),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                env={
                    **environment,
                    MARK: self._mark,
                    "PYTHONPATH": path,
                    "AUTOTUNE_AMP_AGENT": json.dumps(settings),
                    "TMPDIR": str(folder),  # what launchers leave behind there goes with it
                },
                start_new_session=True,  # Ctrl-C at the terminal is ours to handle
            )
        except OSError as error:
            self._listener.close()
            raise WorkloadError(
                f"{arguments[0]!r} cannot be started: {error}.", "Give the command as it is typed at the prompt."
            ) from error
        self._reader = threading.Thread(target=self._read, daemon=True, name="autotune-amp output")
        self._reader.start()

    def until(self, deadlines: Deadlines, is_enough: Callable[[Heard], bool], memory_limit_bytes: int | None) -> Ran:
        """Wait until the verdict stands."""
        has_asked, since = False, None
        while True:
            self._take_in()
            now = time.monotonic()
            seen = self._look(now)
            found = verdict(
                self._heard, seen, deadlines, is_enough=is_enough(self._heard), memory_limit_bytes=memory_limit_bytes
            )
            if isinstance(found, Failure) and self._popen.poll() is None:
                since = since or now
                if found.kind == "timeout" and not has_asked:
                    has_asked = True
                    self._listener.ask("dump")
                grace = _STACK_SECONDS if found.kind == "timeout" else _GRACE_SECONDS
                if self._heard.refused is None and found.kind != "oom" and now - since < grace:
                    continue
            if found is not None:
                return Ran(self._began, self._heard, seen, found)

    def _take_in(self) -> None:
        """What came within a tick."""
        num_before = self._heard.num_steps
        self._watcher.tick()
        with contextlib.suppress(queue.Empty):
            message = self._listener.heard.get(timeout=TICK_SECONDS)
            while True:
                if isinstance(message, Gone):
                    self._heard.gone(message.pid)
                else:
                    self._heard.hear(message)
                message = self._listener.heard.get_nowait()
        with contextlib.suppress(queue.Empty):
            while True:
                self._watcher.output(self._printed.get_nowait())
        if self._heard.num_steps > num_before:
            self._watcher.step(self._heard.num_steps, self._heard.step_seconds or 0.0)

    def _look(self, now: float) -> Seen:
        if now - self._memory_at > _MEMORY_SECONDS:
            self._memory_bytes, self._memory_at = _resident_bytes(self._popen.pid), now
        status = self._popen.poll()
        if status is not None:
            self._reader.join(KILL_SECONDS)
            self._hear_the_rest()
        return Seen(
            seconds=now - self._began,
            seconds_since_step=now - (self._heard.last_time or self._began),
            memory_bytes=self._memory_bytes,
            status=status,
            printed="".join(self._tail),
        )

    def _hear_the_rest(self) -> None:
        with contextlib.suppress(queue.Empty):
            while True:
                message = self._listener.heard.get(timeout=0.05)
                if isinstance(message, Gone):
                    self._heard.gone(message.pid)
                else:
                    self._heard.hear(message)

    def end(self) -> None:
        """Kill the command and all that came of it."""
        self._watcher.ending()
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._popen.pid, signal.SIGKILL)
        self._popen.wait()
        kill_marked(self._mark)
        self._listener.close()
        self._reader.join(KILL_SECONDS)
        assert self._popen.stdout is not None
        self._popen.stdout.close()

    def _read(self) -> None:
        assert self._popen.stdout is not None
        while chunk := os.read(self._popen.stdout.fileno(), 1 << 16):
            text = chunk.decode(errors="replace")
            self._tail.append(text)
            self._printed.put(text)


def _resident_bytes(pid: int) -> int:
    """Memory of a process and its descendants, pages that several of them map counted once for each share."""
    total = 0
    with contextlib.suppress(psutil.Error):
        parent = psutil.Process(pid)
        for process in (parent, *parent.children(recursive=True)):
            with contextlib.suppress(psutil.Error):
                found = process.memory_full_info()
                total += getattr(found, "pss", found.rss)
    return total
