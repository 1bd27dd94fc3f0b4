"""Run a training command once: start it with the agent, observe it until the verdict, then kill all its processes."""

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

from autotune_amp.command.advice import with_advice
from autotune_amp.command.leftovers import CLEAR_UP, read_entries, save_kept, set_aside, write_kept
from autotune_amp.command.listening import Listener
from autotune_amp.command.messages import Hello, Refused, Switched
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

INJECTED = Path(__file__).parent / "agent" / "path"  # put on PYTHONPATH, so that Python loads the agent on startup
TRIAL_DIR = "trial"  # the folder in a run's own folder that `{trial_dir}` stands for
_MEMORY_SECONDS = 0.5  # between two checks of the memory of all processes
_MEMORY_GROWTH = 1.1  # read the exact memory again once resident memory has grown by this factor: it is slow to read
_NUM_OUTPUT_CHUNKS = 256  # of up to 64 KiB that are kept of the output


class RunFiles(NamedTuple):
    """Files of a run that has ended.

    Of those created outside of the run's own folders, `kept` are data that stay there (of this run and earlier ones),
    and `stuck` are others that could not be moved. `opened` are the files of code and settings that it read.
    """

    kept: tuple[str, ...] = ()
    stuck: tuple[str, ...] = ()
    opened: tuple[str, ...] = ()


class CompletedRun(NamedTuple):
    """Result of a run: its start time `began` (monotonic, seconds), messages, last state of the processes, and verdict.

    `is_switched`: its processes had run another setting before, and `began` is the time of the switch. `files` are
    known once the processes have ended.
    """

    began: float
    events: RunEvents
    state: RunState
    verdict: Literal["measured"] | Failure
    is_switched: bool = False
    files: RunFiles = RunFiles()


def run(
    arguments: Sequence[str],
    *,
    deadlines: Deadlines,
    is_enough: Callable[[RunEvents], bool],
    memory_limit_bytes: int | None = None,
    **start: Any,
) -> CompletedRun:
    """Start the command as `RunningCommand.start` does, receive its messages until `verdict` returns a result, then
    kill all its processes.
    """
    running = RunningCommand.start(arguments, **start)
    try:
        completed = running.wait_for_verdict(deadlines, is_enough, memory_limit_bytes)
    finally:
        files = running.end()
    return completed._replace(files=files)


class RunningCommand:
    """Processes of one run, with the threads that receive their messages and output."""

    def __init__(
        self,
        arguments: Sequence[str],
        *,
        environment: Mapping[str, str],
        agent: Mapping[str, Any],
        watcher: Watcher,
        folder: Path,
        output: Path | None,
        memory: Path | None,
        aside: Path | None,
    ) -> None:
        writable = [folder] if output is None else [folder, output.parent]
        self._folder, self._memory, self._aside = folder, memory, aside
        self._made_list = folder / "made"
        self._socket = str(folder / "socket")
        settings = {
            "folder": str(output or folder),
            "socket": self._socket,
            "guard": {
                "free": list(map(str, writable)),
                "made": str(self._made_list),
                "opened": str(folder / "opened"),
            },
            **agent,
        }
        keeps_leftovers = memory is not None and aside is not None
        clear_up_call = [*CLEAR_UP, str(self._made_list), str(aside), str(memory), time.time()]
        self._watcher = watcher
        self._events = RunEvents()
        self._first_step_time: float | None = None  # of the first setting
        self._run_seconds = 0.0  # of the first setting, until it was held
        self._is_switched = False
        self._latest_output: deque[str] = deque(maxlen=_NUM_OUTPUT_CHUNKS)
        self._memory_bytes, self._resident_bytes_at_check, self._memory_check_time = 0, 0, 0.0
        self._unobserved_seconds = 0.0
        self._num_kills_before = num_oom_kills()
        path = os.pathsep.join(filter(None, [str(INJECTED), environment.get("PYTHONPATH")]))
        self._program = Program(
            arguments,
            {
                **environment,
                "PYTHONPATH": path,
                "AUTOTUNE_AMP_AGENT": json.dumps(settings),
                "MLFLOW_TRACKING_URI": f"file://{folder}/mlruns",  # these trackers cannot be turned off
                "TRACKIO_DIR": f"{folder}/trackio",
            },
            folder,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            folders=writable[1:],
            when_orphaned=clear_up_call if keeps_leftovers else None,
        )

    @classmethod
    def start(
        cls,
        arguments: Sequence[str],
        *,
        environment: Mapping[str, str],
        agent: Mapping[str, Any],
        watcher: Watcher,
        folder: Path | None = None,
        files: Mapping[str, str] | None = None,
        output: Path | None = None,
        kept: Sequence[str] = (),
        memory: Path | None = None,
        aside: Path | None = None,
    ) -> RunningCommand:
        """Start the command in the working directory, and threads that receive its messages and output.

        `folder` is for temporary files of the run (see `new_folder`), with an empty folder `TRIAL_DIR` and `files`
        (text by path) in it; it is removed at the end, also if this process is killed. `agent` are further settings of
        the agent (see `agent.arm`), which writes its files to the folder `output`, if given. The command must not
        change existing files except in `folder`, in the parent of `output`, and in the data that earlier runs have
        `kept`. Files that it creates elsewhere are moved to the folder `aside` at the end, also if the run is
        interrupted or killed. Data that were complete at the first step stay; their paths are written to the file
        `memory`. Raises `WorkloadError` if the command cannot be started.
        """
        require_startable(arguments, environment.get("PATH"))
        running = cls(
            arguments,
            environment=environment,
            agent=agent,
            watcher=watcher,
            folder=folder or new_folder(),
            output=output,
            memory=memory,
            aside=aside,
        )
        try:
            running._begin(files or {}, kept)
        except BaseException:
            running._close()
            raise
        return running

    def _begin(self, files: Mapping[str, str], kept: Sequence[str]) -> None:
        write_kept(self._made_list, kept)
        (self._folder / TRIAL_DIR).mkdir()
        for path, text in files.items():
            Path(path).write_text(text)
        self._listener = Listener(self._socket)
        self._began = time.monotonic()
        self._program.start()
        self._reader = threading.Thread(target=self._read_output, daemon=True, name="autotune-amp output")
        self._reader.start()

    def wait_for_verdict(
        self, deadlines: Deadlines, is_enough: Callable[[RunEvents], bool], memory_limit_bytes: int | None
    ) -> CompletedRun:
        """Wait until `verdict` returns a result; return the completed run.

        After a failure, ranks get `RankGrace` to send their own errors; after a timeout, their stacks.
        """
        has_requested_stacks, grace = False, RankGrace()
        while True:
            self._receive_messages()
            now = time.monotonic()
            state = self._read_state(now, memory_limit_bytes)
            result = verdict(
                self._events,
                state,
                deadlines,
                is_enough=not self._is_switching and is_enough(self._events),
                memory_limit_bytes=memory_limit_bytes,
            )
            if self._is_switching and result is None:
                result = self._switching_failure(now)
            failure = result if isinstance(result, Failure) else None
            if failure is not None and failure.kind == "timeout" and not has_requested_stacks:
                has_requested_stacks = True
                self._listener.send_request("dump")
            is_over = grace.is_over(failure, now)
            may_send_more = self._program.poll() is None and self._events.first(Refused) is None
            if result is None or (failure is not None and may_send_more and not is_over):
                continue
            return CompletedRun(
                self._began,
                self._events,
                state,
                result if failure is None else with_advice(failure),
                is_switched=self._is_switched,
            )

    def hold(self) -> None:
        """Stop the training at its next batch, until `switch`."""
        if self._first_step_time is None:
            self._first_step_time, self._run_seconds = self.first_step_time, time.monotonic() - self._began
        self._watcher.ending()
        self._listener.send_request("hold")

    def switch(
        self,
        batch_size: int | None,
        outside: Mapping[str, Any],
        deadlines: Deadlines,
        is_enough: Callable[[RunEvents], bool],
        watcher: Watcher,
        memory_limit_bytes: int | None,
    ) -> CompletedRun:
        """Let the training go on with other values after `hold` (see `agent.outside.switching`), and wait for the
        verdict on them. If it cannot switch, or not in the time that the first setting took, the verdict is a failure
        of the kind ``unsupported``.
        """
        self._receive_last_messages()
        self._began, self._events, self._is_switched = time.monotonic(), self._events.without_steps(), True
        self._memory_bytes, self._resident_bytes_at_check, self._memory_check_time = 0, 0, 0.0
        self._watcher = watcher
        self._listener.send_request(f"switch {json.dumps({'batch_size': batch_size, 'outside': outside})}")
        return self.wait_for_verdict(deadlines, is_enough, memory_limit_bytes)

    @property
    def _is_switching(self) -> bool:
        """Whether the agent has not yet said that it switched."""
        return self._is_switched and not any(each.problem is None for each in self._events.of(Switched))

    def _switching_failure(self, now: float) -> Failure | None:
        """Return the failure of a switch that was refused or takes too long; None while it may succeed."""
        problem = next((each.problem for each in self._events.of(Switched)), None)
        if problem is None and now - self._began > self._run_seconds:
            problem = "it did not come to its next batch"
        return None if problem is None else Failure(kind="unsupported", message=f"it cannot switch: {problem}")

    @property
    def first_step_time(self) -> float:
        """Return the time of the first optimizer step of the first setting (seconds since the epoch); without a step,
        the command's start.
        """
        if self._first_step_time is not None:
            return self._first_step_time
        steps = [rank.steps[0].time for rank in self._events.ranks.values() if rank.steps]
        return time.time() - (time.monotonic() - min(steps, default=self._began))

    def _receive_messages(self) -> None:
        """Wait at most `TICK_SECONDS` for a message, and add all that have arrived. Raises KeyboardInterrupt after
        Ctrl-C.
        """
        num_before = self._events.num_steps
        heed()
        self._watcher.tick()
        with contextlib.suppress(queue.Empty):
            self._events.add(self._listener.messages.get(timeout=TICK_SECONDS))
            while True:
                self._events.add(self._listener.messages.get_nowait())
        if self._events.num_steps > num_before:
            self._watcher.step(self._events.num_steps, self._events.step_seconds or 0.0)

    def _read_state(self, now: float, memory_limit_bytes: int | None) -> RunState:
        # While it switches, a process also has pages of the file with its state.
        if now - self._memory_check_time > _MEMORY_SECONDS and not self._is_switching:
            self._memory_check_time = now
            processes = self._program.processes()
            resident_bytes = _total(processes, _resident_bytes)
            limit_bytes = math.inf if memory_limit_bytes is None else memory_limit_bytes
            if resident_bytes > min(limit_bytes, _MEMORY_GROWTH * self._resident_bytes_at_check):
                self._resident_bytes_at_check = resident_bytes
                self._memory_bytes = _total(processes, _proportional_bytes)
            self._unobserved_seconds = 0.0 if self._events.of(Hello) else _oldest_python_seconds(processes)
        status = self._program.poll()
        if status is not None:
            self._reader.join(KILL_SECONDS)
            self._receive_last_messages()
        return RunState(
            seconds=now - self._began,
            seconds_since_step=now - (self._events.last_step_time or self._began),
            memory_bytes=self._memory_bytes,
            unobserved_seconds=self._unobserved_seconds,
            status=status,
            printed="".join(self._latest_output),
            is_oom_killed=num_oom_kills() > self._num_kills_before,
        )

    def _receive_last_messages(self) -> None:
        with contextlib.suppress(queue.Empty):
            while True:
                self._events.add(self._listener.messages.get(timeout=0.05))

    def end(self) -> RunFiles:
        """Kill the command and all processes that it started, move the files that it created, and remove the run's
        folder.
        """
        try:
            try:
                self._watcher.ending()
                self._program.end()
                self._listener.close()
                self._reader.join(KILL_SECONDS)
            finally:  # also after a second Ctrl-C
                kept, stuck = set_aside(self._made_list, self._aside, self.first_step_time)
                if self._memory is not None:
                    save_kept(self._memory, kept)
            return RunFiles(kept, stuck, tuple(dict.fromkeys(read_entries(self._folder / "opened"))))
        finally:
            self._close()

    def _close(self) -> None:
        self._program.close()
        assert self._program.popen.stdout is not None
        self._program.popen.stdout.close()

    def _read_output(self) -> None:
        assert self._program.popen.stdout is not None
        while chunk := os.read(self._program.popen.stdout.fileno(), 1 << 16):
            self._latest_output.append(chunk.decode(errors="replace"))


def _total(processes: Sequence[psutil.Process], bytes_of: Callable[[psutil.Process], int]) -> int:
    """Return the sum of `bytes_of` over the processes that still exist."""
    total = 0
    for process in processes:
        with contextlib.suppress(psutil.Error):
            total += bytes_of(process)
    return total


def _resident_bytes(process: psutil.Process) -> int:
    """Return the resident memory of a process in bytes: an upper bound of `_proportional_bytes` that is fast
    to read.
    """
    return int(process.memory_info().rss)


def _proportional_bytes(process: psutil.Process) -> int:
    """Return the proportional set size (PSS) of a process in bytes: shared pages are divided among their processes.

    To read it, the kernel visits all pages while the process waits: every half second, it made training a third slower.
    """
    memory = process.memory_full_info()
    return int(getattr(memory, "pss", memory.rss))


def _oldest_python_seconds(processes: Sequence[psutil.Process]) -> float:
    """Return the age of the oldest Python process in seconds, 0 if there is none."""
    ages = [0.0]
    for process in processes:
        with contextlib.suppress(psutil.Error):
            if Path(process.exe()).name.startswith("python"):
                ages.append(time.time() - process.create_time())
    return max(ages)
