"""One run of a training command: started with the agent in it, heard until it has said enough, ended with all of it."""

from __future__ import annotations

import contextlib
import json
import math
import os
import queue
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import psutil

from autotune_amp.core.errors import RunnerError
from autotune_amp.core.job import Deadlines
from autotune_amp.core.outcome import Failure
from autotune_amp.interruption import heed
from autotune_amp.isolation.marks import KILL_SECONDS, kill_marked
from autotune_amp.isolation.process import TICK_SECONDS, Watcher
from autotune_amp.launch import keeper
from autotune_amp.launch.advice import advised
from autotune_amp.launch.listening import Gone, Listener
from autotune_amp.launch.made import read, remember, write
from autotune_amp.launch.ranks import Heard
from autotune_amp.launch.startable import require_startable
from autotune_amp.launch.verdict import Seen, verdict
from autotune_amp.trial.failures import num_oom_kills

INJECTED = Path(__file__).parent / "agent" / "path"
_MEMORY_SECONDS = 0.5  # between two looks at all its processes and their memory
_GROWTH = 1.1  # of what is resident, from which on it is looked at closely again
_GRACE_SECONDS = 2.0  # after the first error: the rank that is its cause may say so later
_STACK_SECONDS = 2.0  # for the stacks of ranks that hang
_NUM_KEPT_CHUNKS = 256
# Of the folder for temporary files; a socket's path has 107 bytes (103 on macOS), and what is made in the run's own
# folder, multiprocessing's sockets among them, takes 60 of them.
_MAX_PATH_BYTES = 40


class Ran(NamedTuple):
    """How a run ended: when it was started (monotonic), what was heard, what was seen from outside, the verdict.

    `made` is what this run and those before it left outside of their own folders, `opened` the files of code and
    settings that this run read.
    """

    began: float
    heard: Heard
    seen: Seen
    ending: Literal["measured"] | Failure
    made: tuple[str, ...] = ()
    opened: tuple[str, ...] = ()


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
    folders: Sequence[Path] = (),
    made: Sequence[str] = (),
    memory: Path | None = None,
) -> Ran:
    """Start the command in the working directory, hear its processes, and kill them all once the verdict stands.

    `agent` are the settings of the agent beside its socket; what it writes goes to the folder `kept`, else it is
    removed. Nothing that was there may be changed by the command but what is in `folders` and what runs before it have
    `made`; what is made by the end is written to the file `memory`, of a run that is interrupted or killed too. Should
    this process be killed, `folders` are removed. Raises `WorkloadError` where it cannot be started.
    """
    require_startable(arguments, environment.get("PATH"))
    own = Path(tempfile.mkdtemp(prefix="autotune_amp-", dir=_parent_folder(tempfile.gettempdir())))
    try:
        noted = own / "made"
        write(noted, made)
        settings = {
            "folder": str(kept or own),
            "socket": str(own / "socket"),
            "guard": {"free": [str(own), *map(str, folders)], "made": str(noted), "opened": str(own / "opened")},
            **agent,
        }
        for_keeper = {
            "folders": [str(own), *map(str, folders), *([str(kept)] if kept else [])],
            "notes": None if memory is None else [str(noted), str(memory)],
        }
        command = _Command(arguments, environment, settings, own, for_keeper, watcher)
        try:
            ran = command.until(deadlines, is_enough, memory_limit_bytes)
        finally:
            command.end()
            left = read(noted)
            if memory is not None:
                remember(memory, left)
        return ran._replace(made=left, opened=_opened(own / "opened"))
    finally:
        shutil.rmtree(own, ignore_errors=True)


def _opened(noted: Path) -> tuple[str, ...]:
    """Return the files that the processes of a run noted."""
    content = noted.read_bytes() if noted.exists() else b""
    return tuple(dict.fromkeys(os.fsdecode(path) for path in content.split(b"\0") if path))


def _parent_folder(temporary: str) -> str:
    """Where the run's folder is made: the sockets that are made in it allow no long path."""
    return temporary if len(os.fsencode(temporary)) <= _MAX_PATH_BYTES else "/tmp"  # noqa: S108 - a folder of its own


class _Command:
    def __init__(
        self,
        arguments: Sequence[str],
        environment: Mapping[str, str],
        agent: Mapping[str, Any],
        folder: Path,
        for_keeper: Mapping[str, Any],
        watcher: Watcher,
    ) -> None:
        self._watcher = watcher
        self._heard = Heard()
        self._tail: deque[str] = deque(maxlen=_NUM_KEPT_CHUNKS)
        self._mark = uuid.uuid4().hex
        self._listener = Listener(agent["socket"])
        self._memory_bytes, self._looked_at_bytes, self._memory_at = 0, 0, 0.0
        self._unobserved_seconds = 0.0
        self._num_kills_before = num_oom_kills()
        settings = {
            "mark": self._mark,
            "parent": os.getpid(),
            "path": sys.path,
            **for_keeper,
        }
        path = os.pathsep.join(filter(None, [str(INJECTED), environment.get("PYTHONPATH")]))
        self._began = time.monotonic()
        try:
            self._popen = subprocess.Popen(  # noqa: S603 - our own program, and the user's own command
                [sys.executable, "-I", keeper.__file__, json.dumps(settings), *arguments],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                env={
                    **environment,
                    "PYTHONPATH": path,
                    "AUTOTUNE_AMP_AGENT": json.dumps(agent),
                    "TMPDIR": str(folder),  # what launchers leave behind there goes with it
                    "MLFLOW_TRACKING_URI": f"file://{folder}/mlruns",  # it has no switch that turns it off, nor has
                    "TRACKIO_DIR": f"{folder}/trackio",
                },
                start_new_session=True,  # Ctrl-C at the terminal is ours to handle
            )
        except OSError as error:
            self._listener.close()
            raise RunnerError(
                f"A trial process cannot be started: {error}.", "Check the limits on processes and memory."
            ) from error
        self._reader = threading.Thread(target=self._read, daemon=True, name="autotune-amp output")
        self._reader.start()

    def until(self, deadlines: Deadlines, is_enough: Callable[[Heard], bool], memory_limit_bytes: int | None) -> Ran:
        """Wait until the verdict stands."""
        has_asked, since = False, None
        while True:
            self._take_in()
            now = time.monotonic()
            seen = self._look(now, memory_limit_bytes)
            found = verdict(
                self._heard, seen, deadlines, is_enough=is_enough(self._heard), memory_limit_bytes=memory_limit_bytes
            )
            if found is None:
                since = None  # what looked like an end was a pause
            if isinstance(found, Failure) and self._popen.poll() is None:
                since = since or now
                if found.kind == "timeout" and not has_asked:
                    has_asked = True
                    self._listener.ask("dump")
                grace = _STACK_SECONDS if found.kind == "timeout" else _GRACE_SECONDS
                if self._heard.refused is None and found.kind != "oom" and now - since < grace:
                    continue
            if found is not None:
                ending = advised(found) if isinstance(found, Failure) else found
                return Ran(self._began, self._heard, seen, ending)

    def _take_in(self) -> None:
        """What came within a tick."""
        num_before = self._heard.num_steps
        heed()
        self._watcher.tick()
        with contextlib.suppress(queue.Empty):
            message = self._listener.heard.get(timeout=TICK_SECONDS)
            while True:
                if isinstance(message, Gone):
                    self._heard.gone(message.pid)
                else:
                    self._heard.hear(message)
                message = self._listener.heard.get_nowait()
        if self._heard.num_steps > num_before:
            self._watcher.step(self._heard.num_steps, self._heard.step_seconds or 0.0)

    def _look(self, now: float, memory_limit_bytes: int | None) -> Seen:
        if now - self._memory_at > _MEMORY_SECONDS:
            self._memory_at = now
            with contextlib.suppress(psutil.NoSuchProcess):
                processes = psutil.Process(self._popen.pid).children(recursive=True)
                resident_bytes = _total(processes, _resident_bytes)
                limit_bytes = math.inf if memory_limit_bytes is None else memory_limit_bytes
                if resident_bytes > min(limit_bytes, _GROWTH * self._looked_at_bytes):
                    self._looked_at_bytes, self._memory_bytes = resident_bytes, _total(processes, _own_bytes)
                self._unobserved_seconds = 0.0 if self._heard.pythons else _python_seconds(processes)
        status = self._popen.poll()
        if status is not None:
            self._reader.join(KILL_SECONDS)
            self._hear_the_rest()
        return Seen(
            seconds=now - self._began,
            seconds_since_step=now - (self._heard.last_time or self._began),
            memory_bytes=self._memory_bytes,
            unobserved_seconds=self._unobserved_seconds,
            status=status,
            printed="".join(self._tail),
            is_oom_killed=num_oom_kills() > self._num_kills_before,
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
        """Have the keeper kill the command and all that came of it."""
        self._watcher.ending()
        assert self._popen.stdin is not None
        assert self._popen.stdout is not None
        with contextlib.suppress(BrokenPipeError):  # it ended by itself
            self._popen.stdin.write(b".")
            self._popen.stdin.close()
        try:
            self._popen.wait(keeper.END_SECONDS + KILL_SECONDS)
        except subprocess.TimeoutExpired:
            self._popen.kill()
            self._popen.wait()
        if self._popen.returncode == -signal.SIGKILL:  # as the keeper ends if the command was killed, or itself
            kill_marked(self._mark)
        self._listener.close()
        self._reader.join(KILL_SECONDS)
        self._popen.stdout.close()

    def _read(self) -> None:
        assert self._popen.stdout is not None
        while chunk := os.read(self._popen.stdout.fileno(), 1 << 16):
            self._tail.append(chunk.decode(errors="replace"))


def _total(processes: Sequence[psutil.Process], bytes_of: Callable[[psutil.Process], int]) -> int:
    """Of those that are still there."""
    total = 0
    for process in processes:
        with contextlib.suppress(psutil.Error):
            total += bytes_of(process)
    return total


def _resident_bytes(process: psutil.Process) -> int:
    """Its memory with pages that others map too: at least what it is."""
    return int(process.memory_info().rss)


def _own_bytes(process: psutil.Process) -> int:
    """Its memory, pages that several map counted as its share. The kernel goes through all pages for that, and a
    training whose memory it looks at waits: every half second made one a third slower."""
    found = process.memory_full_info()
    return int(getattr(found, "pss", found.rss))


def _python_seconds(processes: Sequence[psutil.Process]) -> float:
    """For how long the oldest Python among them has run."""
    ages = [0.0]
    for process in processes:
        with contextlib.suppress(psutil.Error):
            if Path(process.exe()).name.startswith("python"):
                ages.append(time.time() - process.create_time())
    return max(ages)
