"""Standby: a second process that has loaded the workload and waits to take over from the one that runs jobs."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import psutil

from autotune_amp.hardware import host
from autotune_amp.isolation.process import Process, Watcher

MIN_CORES = 4  # with fewer, loading beside a measurement would slow it
MEMORY_FACTOR = 2.0  # of what the first process holds, since loading may hold more for a moment


def has_room(process_bytes: int) -> bool:
    """Whether another process of this size can be loaded beside the one that runs jobs: there are cores for it, and
    memory on this host."""
    cores = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)
    container = host.container_memory()
    free_bytes = host.available_memory_bytes()
    if container is not None:
        free_bytes = min(free_bytes, container.available)
    return len(cores) >= MIN_CORES and free_bytes >= MEMORY_FACTOR * process_bytes


class Standby:
    """Holds at most one process, which loads the workload while another one runs jobs.

    `has_room` says whether a process of so many bytes may be started beside the first.
    """

    def __init__(self, has_room: Callable[[int], bool] = has_room) -> None:
        self._has_room = has_room
        self._environment: dict[str, str] = {}
        self.process: Process | None = None

    def begin(self, beside: Process, environment: dict[str, str], command: dict[str, Any], data: bytes) -> None:
        """Start a process with these variables and have it carry out `command`, with raw bytes behind it.

        Nothing is started where one stands by already, nor where there is no room for one like `beside`.
        """
        if self.process is not None and self.process.is_alive() and self._environment == environment:
            return
        self.close()
        try:
            size_bytes = psutil.Process(beside.pid).memory_info().rss
        except psutil.NoSuchProcess:
            return
        if self._has_room(size_bytes):
            self.process, self._environment = Process("kept", environment, Watcher()), environment
            self.process.send_beside(command, data)

    def take(self, environment: dict[str, str], watcher: Watcher) -> Process | None:
        """Hand over the process, which `watcher` hears from then on; None where none is alive with these variables."""
        if self.process is None or self._environment != environment:
            return None
        if not self.process.is_alive():
            self.close()
            return None
        process, self.process = self.process, None
        process.watcher = watcher
        return process

    def close(self) -> None:
        """End the process."""
        if self.process is not None:
            process, self.process = self.process, None
            process.end()
