"""Standby processes: they load the workload and wait to replace the process that runs jobs."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import psutil

from autotune_amp.core.errors import AutotuneAmpError
from autotune_amp.core.outcome import Failure
from autotune_amp.hardware import host
from autotune_amp.processes.process import Process, ProcessEndedError, Watcher

MIN_CORES = 4  # with fewer, loading beside another process would slow it down
MEMORY_FACTOR = 2.0  # a standby process needs this times the memory of the first: loading may take more for a moment
MAX_PROCESSES = 2  # with the process that runs jobs these are the three of a confirmation


def room_for(process_bytes: int) -> int:
    """Return how many more processes of this size fit into this host's memory; 0 with fewer than `MIN_CORES` cores."""
    if host.usable_cores() < MIN_CORES:
        return 0
    return int(host.free_memory_bytes() / (MEMORY_FACTOR * max(1, process_bytes)))


_ANSWERS = ("ready", "standing by")


class Standby:
    """Holder of standby processes, which load the workload while another process runs jobs.

    They are paused while that one times steps. In a virtual machine two processes that touch new memory pages wait for
    each other, whatever their priorities: on an H200's host a batch took 515 ms while a process loaded, and 4 ms
    afterwards (studies/real_card). `room_for(num_bytes)` returns how many more processes of that size fit into memory.
    After one that could not load, none has room: it had too little of the GPU's memory, say, for a model that is there.
    """

    def __init__(self, room_for: Callable[[int], int] = room_for) -> None:
        self._room_for = room_for
        self.num_wanted = 0  # number of processes to load before the next trial runs
        self._environment: dict[str, str] = {}
        self._is_loaded: dict[Process, bool] = {}  # whether each process has loaded, the oldest first
        self._could_not_load = False

    @property
    def processes(self) -> list[Process]:
        """Return the processes that stand by or are still loading."""
        return list(self._is_loaded)

    def begin(
        self, beside: Process, environment: dict[str, str], command: dict[str, Any], data: bytes, number: int = 1
    ) -> None:
        """Start processes with these variables until `number` stand by, if memory has room for more of the size of
        `beside`, the process that runs jobs.

        Each is sent `command`, followed by the raw bytes `data`.
        """
        if self._environment != environment:
            self.close()
        for process in self.processes:
            if not process.is_alive():
                self._end(process)
        self._environment = environment
        missing = min(number, MAX_PROCESSES) - len(self._is_loaded)
        for _ in range(min(missing, self._num_fitting(beside)) if missing > 0 else 0):
            process = Process("kept", environment, Watcher())
            process.send_in_background(command, data)
            self._is_loaded[process] = False

    def has_room(self, process: Process) -> bool:
        """Return whether all processes of a confirmation, each of this size, can be loaded together."""
        for loading in self.processes:
            if loading.num_unread >= len(_ANSWERS):
                self._has_loaded(loading, None)
        return self._num_fitting(process) >= MAX_PROCESSES

    def take(self, environment: dict[str, str], watcher: Watcher, until: float | None) -> Process | None:
        """Remove and return a loaded process, reporting to `watcher` from now on; None if none has these variables.

        Raises `ProcessEndedError` if it has not loaded by `until`.
        """
        if self._environment != environment:
            return None
        for process in self.processes:
            process.watcher = watcher
            if self._has_loaded(process, until):
                del self._is_loaded[process]
                return process
        return None

    def load(self, watcher: Watcher, until: float | None) -> None:
        """Wait until all processes have loaded. One that has not by `until` is ended."""
        self.num_wanted = 0
        for process in self.processes:
            process.watcher = watcher
            with contextlib.suppress(ProcessEndedError):
                self._has_loaded(process, until)

    def resume(self) -> None:
        """Resume loading, which `Process.wait` pauses."""
        for process in self.processes:
            process.resume()

    def close(self) -> None:
        """End the processes."""
        for process in self.processes:
            self._end(process)

    def _num_fitting(self, process: Process) -> int:
        """Return how many more processes of the size of `process` fit into memory, 0 if it has ended."""
        pid = None if self._could_not_load else process.pid
        try:
            return 0 if pid is None else self._room_for(psutil.Process(pid).memory_info().rss)
        except psutil.NoSuchProcess:
            return 0

    def _end(self, process: Process) -> None:
        del self._is_loaded[process]
        process.end()

    def _has_loaded(self, process: Process, until: float | None) -> bool:
        """Wait for a process to load and return whether it did. A process that cannot load is ended."""
        if self._is_loaded[process] and process.is_alive():
            return True
        try:
            has_failed = any(isinstance(process.wait(until), Failure) for _ in _ANSWERS)
            self._could_not_load |= has_failed
            self._is_loaded[process] = process.is_alive() and not has_failed
        except ProcessEndedError as ended:
            if ended.failure.kind == "timeout":
                self._end(process)
                raise
            self._is_loaded[process] = False
        except AutotuneAmpError:
            self._is_loaded[process], self._could_not_load = False, True
        if not self._is_loaded[process]:
            self._end(process)
            return False
        return True
