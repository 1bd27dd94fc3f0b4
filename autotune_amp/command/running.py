"""Run of a training command: start it with the agent, observe it until the verdict, then kill all its processes.

Several runs may be started together and be held before their first training step, so that their imports, models and
data load at the same time; each trains alone once it is let go (`CommandRun.measure`).
"""

from __future__ import annotations

import contextlib
import errno
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
from msgspec.structs import replace

from autotune_amp.command.leftovers import CLEAR_UP, created_list_in, read_entries, save_kept, set_aside, write_kept
from autotune_amp.command.listening import Listener
from autotune_amp.command.messages import Hello, Loaded, Refused
from autotune_amp.command.ranks import RunEvents
from autotune_amp.command.startable import require_startable, with_agent_on_path
from autotune_amp.command.verdict import RunState, verdict, with_advice
from autotune_amp.core.errors import RunnerError
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
# A held run has loaded once its processes have used less than this share of a core for so long.
_QUIET_SHARE, _QUIET_SECONDS = 0.1, 0.5
_NUM_OUTPUT_CHUNKS = 256  # of up to 64 KiB that are kept of the output


class CompletedRun(NamedTuple):
    """Result of a run: its start time `began` (monotonic, seconds), messages, last state of the processes, and verdict.

    Of the files created outside of the run's own folders, `kept` are data that stay there (of this run and earlier
    ones), and `stuck` are others that could not be moved. `opened` are the files of code and settings that it read.
    """

    began: float
    events: RunEvents
    state: RunState
    verdict: Literal["measured"] | Failure
    kept: tuple[str, ...] = ()
    stuck: tuple[str, ...] = ()
    opened: tuple[str, ...] = ()


class CommandRun:
    """Run of a command that has been started in the working directory. End it with `close`.

    `folder` is for temporary files of the run (see `new_folder`), with an empty folder `TRIAL_DIR` and `files` (text by
    path) in it; it is removed at the end, also if this process is killed. `agent` are further settings of the agent
    (see `agent.arm`), which writes its files to the folder `output`, if given. The command must not change existing
    files except in `folder`, in the parent of `output`, and in the data that earlier runs have `kept`. Files that it
    creates elsewhere are moved to the folder `aside` at the end, also if the run is interrupted or killed. Data that
    were complete at the first step stay; their paths are written to the file `memory` in the study's folder. A run that
    `is_held` waits before its first training step for `measure`. Raises `WorkloadError` if the command cannot be
    started, and `RunnerError` if its files cannot be written.
    """

    def __init__(
        self,
        arguments: Sequence[str],
        *,
        environment: Mapping[str, str],
        agent: Mapping[str, Any],
        folder: Path | None = None,
        files: Mapping[str, str] | None = None,
        output: Path | None = None,
        kept: Sequence[str] = (),
        memory: Path | None = None,
        aside: Path | None = None,
        is_held: bool = False,
    ) -> None:
        require_startable(arguments, environment.get("PATH"), files or ())
        arguments = with_agent_on_path(arguments, INJECTED, files)
        self._folder = folder or new_folder()
        self._made_list = self._folder / "made" if memory is None else created_list_in(memory.parent, self._folder)
        self._opened_list = self._folder / "opened"
        self._aside, self._memory = aside, memory
        self._is_held = is_held
        self._is_running = False
        self.kept: tuple[str, ...] = ()
        self.created_folders: tuple[str, ...] = ()  # outside of its own folder; they may hold files of other runs
        self.stuck: tuple[str, ...] = ()
        self._events = RunEvents()
        self._latest_output: deque[str] = deque(maxlen=_NUM_OUTPUT_CHUNKS)
        self._memory_bytes, self._resident_bytes_at_check, self._memory_check_time = 0, 0, 0.0
        self._unobserved_seconds = 0.0
        self._is_waiting = False  # whether every rank waits to train
        self._computed_before: tuple[float, float] | None = None  # a time, and the CPU seconds of the processes then
        self._num_kills_before = num_oom_kills()
        writable = [self._folder] if output is None else [self._folder, output.parent]
        guarded = {"free": list(map(str, writable)), "made": str(self._made_list), "opened": str(self._opened_list)}
        socket = str(self._folder / "socket")
        settings = {
            "folder": str(output or self._folder),
            "guard": guarded,
            "is_held": is_held,
            **agent,
            "socket": socket,
        }
        keeps_leftovers = memory is not None and aside is not None
        clear_up = [*CLEAR_UP, str(self._made_list), str(aside), str(memory)] if keeps_leftovers else None
        self._program = Program(
            arguments,
            {
                **environment,
                "PYTHONPATH": os.pathsep.join(filter(None, [str(INJECTED), environment.get("PYTHONPATH")])),
                "AUTOTUNE_AMP_AGENT": json.dumps(settings),
                "MLFLOW_TRACKING_URI": f"file://{self._folder}/mlruns",  # these trackers cannot be turned off
                "MLFLOW_ALLOW_FILE_STORE": "true",  # else newer versions of MLflow refuse that address
                "TRACKIO_DIR": f"{self._folder}/trackio",
            },
            self._folder,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            folders=writable[1:],
            when_orphaned=clear_up,
        )
        try:
            (self._folder / TRIAL_DIR).mkdir()
            for path, text in (files or {}).items():
                Path(path).write_bytes(text.encode())
            self._listener = Listener(socket)
            self._began = time.monotonic()
            write_kept(self._made_list, kept)
            self._program.start()
            self._reader = threading.Thread(target=self._read_output, daemon=True, name="autotune-amp output")
            self._reader.start()
            self._is_running = True
        except BaseException as error:
            self.close()
            self._made_list.unlink(missing_ok=True)
            if not isinstance(error, OSError):
                raise
            folders = sorted({str(self._folder.parent), str(self._made_list.parent)} - {str(self._folder)})
            is_full = error.errno in (errno.ENOSPC, errno.EDQUOT)
            raise RunnerError(
                f"The files of a trial cannot be written in {' or '.join(folders)}: {error}.",
                f"{'Free some space there' if is_full else 'Fix this'}, or set TMPDIR to a folder of another disk.",
            ) from error

    def loading_outcome(self) -> Literal["loaded"] | Failure | None:
        """Return whether the held run has loaded, or why it has failed; None while it is loading.

        It has loaded once every rank waits, and none of its processes works any more, such as workers that fetch data.
        """
        self._receive_messages(0.0)
        state = self._read_state(time.monotonic(), None)
        found = verdict(self._events, state, Deadlines(), is_enough=False, memory_limit_bytes=None)
        if isinstance(found, Failure):
            return found
        ranks = {loaded.pid: loaded.world for loaded in self._events.of(Loaded)}
        has_all_ranks = len(ranks) >= max(self._events.world, *ranks.values(), 1)
        self._is_waiting = has_all_ranks and self._is_quiet()
        return "loaded" if self._is_waiting else None

    def held_bytes(self) -> int:
        """Return the host's memory that the run's processes use, in bytes. Reading it delays them."""
        return int(_total(self._program.processes(), _proportional_bytes))

    def measure(
        self,
        deadlines: Deadlines,
        is_enough: Callable[[RunEvents], bool],
        watcher: Watcher,
        memory_limit_bytes: int | None = None,
    ) -> CompletedRun:
        """Let the run train, receive its messages until `verdict` returns a result, then kill all its processes.

        For a run that was held, `whole_seconds` counts from now, and the first step is due as if it had just loaded.
        """
        if self._is_held:
            deadlines = _plus(deadlines, self._go())
        try:
            completed = self._wait_for_verdict(deadlines, is_enough, watcher, memory_limit_bytes)
        finally:
            watcher.ending()
            self._end()
        opened = tuple(dict.fromkeys(read_entries(self._opened_list)))
        return completed._replace(kept=self.kept, stuck=self.stuck, opened=opened)

    def close(self) -> None:
        """Kill all processes of the run, and remove its folder."""
        try:
            if self._is_running:
                self._end()
        finally:
            self._program.close()
            assert self._program.popen.stdout is not None
            self._program.popen.stdout.close()

    def _end(self) -> None:
        self._is_running = False
        try:
            self._program.end()
            self._listener.close()
            self._reader.join(KILL_SECONDS)
        finally:  # also after a second Ctrl-C
            created = [entry[1:] for entry in read_entries(self._made_list) if entry[0] == "-"]
            self.created_folders = tuple(path for path in created if Path(path).is_dir())
            self.kept, self.stuck = set_aside(self._made_list, self._aside, self._data_until)
            if self._memory is not None:
                save_kept(self._memory, self.kept, self.stuck)
            self._made_list.unlink(missing_ok=True)

    def _is_quiet(self) -> bool:
        """Whether the processes have hardly computed since a call at least `_QUIET_SECONDS` ago."""
        before, now = self._computed_before, time.monotonic()
        if before is not None and now - before[0] < _QUIET_SECONDS:
            return False
        self._computed_before = now, _total(self._program.processes(), _cpu_seconds)
        if before is None:
            return False
        seconds, cpu_seconds = now - before[0], self._computed_before[1] - before[1]
        return 0 <= cpu_seconds < _QUIET_SHARE * seconds  # negative if a process has ended meanwhile

    def _go(self) -> float:
        """Let the held processes train, and return the seconds in which they had loaded.

        From now on the run counts as begun that long ago: the time in which it was held is left out.
        """
        loading_seconds = max(loaded.time for loaded in self._events.of(Loaded)) - self._began
        self._began = time.monotonic() - loading_seconds
        self._num_kills_before = num_oom_kills()
        self._is_waiting = False
        self._listener.send_go()
        return loading_seconds

    def _wait_for_verdict(
        self,
        deadlines: Deadlines,
        is_enough: Callable[[RunEvents], bool],
        watcher: Watcher,
        memory_limit_bytes: int | None,
    ) -> CompletedRun:
        """Wait until `verdict` returns a result; return the completed run.

        After a failure, ranks get `RankGrace` to send their own errors; after a timeout, their stacks.
        """
        has_requested_stacks, grace = False, RankGrace()
        while True:
            num_before = self._events.num_steps
            heed()
            watcher.tick()
            self._receive_messages(TICK_SECONDS)
            if self._events.num_steps > num_before:
                watcher.step(self._events.num_measured_steps, self._events.step_seconds or 0.0)
            now = time.monotonic()
            state = self._read_state(now, memory_limit_bytes)
            result = verdict(
                self._events, state, deadlines, is_enough=is_enough(self._events), memory_limit_bytes=memory_limit_bytes
            )
            failure = result if isinstance(result, Failure) else None
            if failure is not None and failure.kind == "timeout" and not has_requested_stacks:
                has_requested_stacks = True
                self._listener.send_request("dump")
            is_over = grace.is_over(failure, now)
            may_send_more = self._program.wait(0) is None and self._events.first(Refused) is None
            if result is None or (failure is not None and may_send_more and not is_over):
                continue
            return CompletedRun(self._began, self._events, state, result if failure is None else with_advice(failure))

    @property
    def _data_until(self) -> float:
        """Return the time (seconds since the epoch) from which on data that a run wrote may be incomplete.

        That is its first optimizer step, else its start. A run that waits to train has completed its data: it is now.
        """
        if self._is_waiting:
            return time.time()
        steps = [rank.steps[0].time for rank in self._events.ranks.values() if rank.steps]
        return time.time() - (time.monotonic() - min(steps, default=self._began))

    def _receive_messages(self, seconds: float) -> None:
        """Wait at most `seconds` for a message, and add all that have arrived."""
        with contextlib.suppress(queue.Empty):
            self._events.add(self._listener.messages.get(timeout=seconds))
            while True:
                self._events.add(self._listener.messages.get_nowait())

    def _read_state(self, now: float, memory_limit_bytes: int | None) -> RunState:
        if now - self._memory_check_time > _MEMORY_SECONDS:
            self._memory_check_time = now
            processes = self._program.processes()
            resident_bytes = int(_total(processes, _resident_bytes))
            limit_bytes = math.inf if memory_limit_bytes is None else memory_limit_bytes
            if resident_bytes > min(limit_bytes, _MEMORY_GROWTH * self._resident_bytes_at_check):
                self._resident_bytes_at_check = resident_bytes
                self._memory_bytes = int(_total(processes, _proportional_bytes))
            self._unobserved_seconds = 0.0 if self._events.of(Hello) else _oldest_python_seconds(processes)
        status = self._program.wait(0)
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

    def _read_output(self) -> None:
        assert self._program.popen.stdout is not None
        while chunk := os.read(self._program.popen.stdout.fileno(), 1 << 16):
            self._latest_output.append(chunk.decode(errors="replace"))


def _plus(deadlines: Deadlines, seconds: float) -> Deadlines:
    """Return the deadlines with those that count from the start of a run later by `seconds`."""
    whole, first = deadlines.whole_seconds, deadlines.first_step_seconds
    return replace(
        deadlines,
        whole_seconds=None if whole is None else whole + seconds,
        first_step_seconds=None if first is None else first + seconds,
    )


def _total(processes: Sequence[psutil.Process], value_of: Callable[[psutil.Process], float]) -> float:
    """Return the sum of `value_of` over the processes that still exist."""
    total = 0.0
    for process in processes:
        with contextlib.suppress(psutil.Error):
            total += value_of(process)
    return total


def _cpu_seconds(process: psutil.Process) -> float:
    """Return the CPU seconds that a process has used."""
    times = process.cpu_times()
    return float(times.user + times.system)


def _resident_bytes(process: psutil.Process) -> int:
    """Return the resident memory of a process in bytes: an upper bound of `_proportional_bytes` that is fast
    to read.
    """
    return int(process.memory_info().rss)


def _proportional_bytes(process: psutil.Process) -> int:
    """Return the proportional set size (PSS) of a process in bytes: shared pages are divided among their processes.

    To read it, the kernel visits all pages while the process waits: every half second, it made training a third slower.
    """
    try:
        memory = process.memory_full_info()
    except psutil.AccessDenied:  # on macOS only root may read it
        return _resident_bytes(process)
    return int(getattr(memory, "pss", memory.rss))


def _oldest_python_seconds(processes: Sequence[psutil.Process]) -> float:
    """Return the age of the oldest Python process in seconds, 0 if there is none."""
    ages = [0.0]
    for process in processes:
        with contextlib.suppress(psutil.Error):
            if Path(process.exe()).name.startswith("python"):
                ages.append(time.time() - process.create_time())
    return max(ages)
