"""One run of a training command: started with the agent in it, observed until the verdict stands, ended with all its
processes.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import queue
import subprocess
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import psutil

from autotune_amp.command.advice import advised
from autotune_amp.command.leftovers import CLEAR_UP, entries_of, remember, set_aside, write
from autotune_amp.command.listening import Listener
from autotune_amp.command.messages import Hello, Refused
from autotune_amp.command.ranks import RunEvents
from autotune_amp.command.startable import require_startable
from autotune_amp.command.verdict import RunState, verdict
from autotune_amp.core.job import Deadlines
from autotune_amp.core.outcome import Failure
from autotune_amp.interruption import heed
from autotune_amp.processes.process import TICK_SECONDS, Watcher
from autotune_amp.processes.process_tree import KILL_SECONDS
from autotune_amp.processes.program import Program, new_folder
from autotune_amp.processes.ranks import RankGrace
from autotune_amp.trial.failures import num_oom_kills

INJECTED = Path(__file__).parent / "agent" / "path"
TRIAL_DIR = "trial"
_MEMORY_SECONDS = 0.5  # between two checks of the memory of all processes
_GROWTH = 1.1  # growth of resident memory at which the exact memory is read again
_NUM_KEPT_CHUNKS = 256


class CompletedRun(NamedTuple):
    """Result of a run: start time (monotonic), messages, state as seen from outside, verdict.

    `kept` are the data that this run and earlier ones made outside of their own folders and that stay there, `stuck`
    the other files that it made there and that could not be moved, `opened` the files of code and settings that it
    read.
    """

    began: float
    events: RunEvents
    state: RunState
    verdict: Literal["measured"] | Failure
    kept: tuple[str, ...] = ()
    stuck: tuple[str, ...] = ()
    opened: tuple[str, ...] = ()


def run(
    arguments: Sequence[str],
    *,
    environment: Mapping[str, str],
    agent: Mapping[str, Any],
    deadlines: Deadlines,
    is_enough: Callable[[RunEvents], bool],
    watcher: Watcher,
    folder: Path | None = None,
    files: Mapping[str, str] | None = None,
    memory_limit_bytes: int | None = None,
    output: Path | None = None,
    kept: Sequence[str] = (),
    memory: Path | None = None,
    aside: Path | None = None,
) -> CompletedRun:
    """Start the command in the working directory, receive its messages, and kill all its processes once the verdict
    stands.

    `folder` is the run's own for temporary files (see `new_folder`). It is made with an empty folder `TRIAL_DIR` in it,
    and with these `files`, by their paths; it is removed at the end, also if this process is killed. `agent` are the
    settings of the agent besides its socket. Files that the agent writes go to the folder `output`, if given. The
    command must not change any existing file except in `folder`, beside `output`, and in the data that earlier runs
    have `kept`. Files that it makes elsewhere are moved to the folder `aside` at the end, also if the run is
    interrupted or killed, except for data that were complete at its first step; the paths of these are written to the
    file `memory`. Raises `WorkloadError` if the command cannot be started.
    """
    require_startable(arguments, environment.get("PATH"))
    own = folder or new_folder()
    free = [own] if output is None else [own, output.parent]
    noted = own / "made"
    settings = {
        "folder": str(output or own),
        "socket": str(own / "socket"),
        "guard": {"free": list(map(str, free)), "made": str(noted), "opened": str(own / "opened")},
        **agent,
    }
    is_left = memory is not None and aside is not None
    orphaned = [*CLEAR_UP, str(noted), str(aside), str(memory), time.time()] if is_left else None
    command = _Command(arguments, environment, settings, own, watcher, folders=free[1:], when_orphaned=orphaned)
    try:
        write(noted, kept)
        (own / TRIAL_DIR).mkdir()
        for path, text in (files or {}).items():
            Path(path).write_text(text)
        command.start()
        try:
            ran = command.until(deadlines, is_enough, memory_limit_bytes)
        finally:
            try:
                command.end()
            finally:  # a second Ctrl-C while it ends leaves no file unnamed
                kept, stuck = set_aside(noted, aside, command.first_step_time)
                if memory is not None:
                    remember(memory, kept)
        return ran._replace(kept=kept, stuck=stuck, opened=tuple(dict.fromkeys(entries_of(own / "opened"))))
    finally:
        command.close()


class _Command:
    def __init__(
        self,
        arguments: Sequence[str],
        environment: Mapping[str, str],
        agent: Mapping[str, Any],
        folder: Path,
        watcher: Watcher,
        **when_killed: Any,
    ) -> None:
        self._watcher = watcher
        self._events = RunEvents()
        self._tail: deque[str] = deque(maxlen=_NUM_KEPT_CHUNKS)
        self._socket = agent["socket"]
        self._memory_bytes, self._looked_at_bytes, self._memory_at = 0, 0, 0.0
        self._unobserved_seconds = 0.0
        self._num_kills_before = num_oom_kills()
        path = os.pathsep.join(filter(None, [str(INJECTED), environment.get("PYTHONPATH")]))
        self._program = Program(
            arguments,
            {
                **environment,
                "PYTHONPATH": path,
                "AUTOTUNE_AMP_AGENT": json.dumps(agent),
                "MLFLOW_TRACKING_URI": f"file://{folder}/mlruns",  # neither can be turned off
                "TRACKIO_DIR": f"{folder}/trackio",
            },
            folder,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            **when_killed,
        )

    def start(self) -> None:
        """Start the command, and threads that receive its messages and its output."""
        self._listener = Listener(self._socket)
        self._began = time.monotonic()
        self._program.start()
        self._reader = threading.Thread(target=self._read, daemon=True, name="autotune-amp output")
        self._reader.start()

    def until(
        self, deadlines: Deadlines, is_enough: Callable[[RunEvents], bool], memory_limit_bytes: int | None
    ) -> CompletedRun:
        """Wait until the verdict on the run stands, and return the result of the run."""
        has_asked, grace = False, RankGrace()
        while True:
            self._take_in()
            now = time.monotonic()
            state = self._look(now, memory_limit_bytes)
            found = verdict(
                self._events, state, deadlines, is_enough=is_enough(self._events), memory_limit_bytes=memory_limit_bytes
            )
            failure = found if isinstance(found, Failure) else None
            if failure is not None and failure.kind == "timeout" and not has_asked:
                has_asked = True
                self._listener.ask("dump")
            is_over = grace.is_over(failure, now)
            may_report = self._program.popen.poll() is None and self._events.first(Refused) is None
            if found is None or (failure is not None and may_report and not is_over):
                continue
            return CompletedRun(self._began, self._events, state, found if failure is None else advised(failure))

    @property
    def first_step_time(self) -> float:
        """Return the time of the first optimizer step in seconds since the epoch; without a step, that of the command's
        start.
        """
        steps = [rank.steps[0].time for rank in self._events.ranks.values() if rank.steps]
        return time.time() - (time.monotonic() - min(steps, default=self._began))

    def _take_in(self) -> None:
        """Wait at most a tick for messages, and add those that have arrived."""
        num_before = self._events.num_steps
        heed()
        self._watcher.tick()
        with contextlib.suppress(queue.Empty):
            self._events.add(self._listener.messages.get(timeout=TICK_SECONDS))
            while True:
                self._events.add(self._listener.messages.get_nowait())
        if self._events.num_steps > num_before:
            self._watcher.step(self._events.num_steps, self._events.step_seconds or 0.0)

    def _look(self, now: float, memory_limit_bytes: int | None) -> RunState:
        if now - self._memory_at > _MEMORY_SECONDS:
            self._memory_at = now
            processes = self._program.processes()
            resident_bytes = _total(processes, _resident_bytes)
            limit_bytes = math.inf if memory_limit_bytes is None else memory_limit_bytes
            if resident_bytes > min(limit_bytes, _GROWTH * self._looked_at_bytes):
                self._looked_at_bytes, self._memory_bytes = resident_bytes, _total(processes, _own_bytes)
            self._unobserved_seconds = 0.0 if self._events.of(Hello) else _python_seconds(processes)
        status = self._program.popen.poll()
        if status is not None:
            self._reader.join(KILL_SECONDS)
            self._hear_the_rest()
        return RunState(
            seconds=now - self._began,
            seconds_since_step=now - (self._events.last_step_time or self._began),
            memory_bytes=self._memory_bytes,
            unobserved_seconds=self._unobserved_seconds,
            status=status,
            printed="".join(self._tail),
            is_oom_killed=num_oom_kills() > self._num_kills_before,
        )

    def _hear_the_rest(self) -> None:
        with contextlib.suppress(queue.Empty):
            while True:
                self._events.add(self._listener.messages.get(timeout=0.05))

    def end(self) -> None:
        """Have the supervisor kill the command and all processes that it started."""
        self._watcher.ending()
        self._program.end()
        self._listener.close()
        self._reader.join(KILL_SECONDS)

    def close(self) -> None:
        """Remove the folder of the run, whose program has ended or was not started."""
        self._program.close()
        assert self._program.popen.stdout is not None
        self._program.popen.stdout.close()

    def _read(self) -> None:
        assert self._program.popen.stdout is not None
        while chunk := os.read(self._program.popen.stdout.fileno(), 1 << 16):
            self._tail.append(chunk.decode(errors="replace"))


def _total(processes: Sequence[psutil.Process], bytes_of: Callable[[psutil.Process], int]) -> int:
    """Return the sum of `bytes_of` over the processes that still exist."""
    total = 0
    for process in processes:
        with contextlib.suppress(psutil.Error):
            total += bytes_of(process)
    return total


def _resident_bytes(process: psutil.Process) -> int:
    """Return the resident memory of a process, including pages shared with others: an upper bound of `_own_bytes`."""
    return int(process.memory_info().rss)


def _own_bytes(process: psutil.Process) -> int:
    """Return the memory of a process, in which a page that several processes share counts by the process's share of it.

    For this the kernel visits all pages, and the training process waits meanwhile: reading it every half second made a
    training run a third slower.
    """
    found = process.memory_full_info()
    return int(getattr(found, "pss", found.rss))


def _python_seconds(processes: Sequence[psutil.Process]) -> float:
    """Return the seconds for which the oldest Python process among `processes` has run."""
    ages = [0.0]
    for process in processes:
        with contextlib.suppress(psutil.Error):
            if Path(process.exe()).name.startswith("python"):
                ages.append(time.time() - process.create_time())
    return max(ages)
