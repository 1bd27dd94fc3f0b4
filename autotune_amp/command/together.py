"""Runs of a command that load at the same time, and wait to train one after the other.

A start often takes a minute, nearly all of it imports, weights and data. Several runs load in little more time than
one, where the host has a core for each of their ranks and memory for all. Each is a process of its own that trains
alone, so it measures what a run by itself does.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Hashable, Iterable, Mapping

from autotune_amp.command.messages import Loaded
from autotune_amp.command.running import CommandRun, CompletedRun
from autotune_amp.core.outcome import Failure
from autotune_amp.hardware import host
from autotune_amp.interruption import heed
from autotune_amp.processes.process import TICK_SECONDS, Watcher

MAX_TOGETHER = 8  # the runs of a confirmation and one more, or as many of a search as can be foreseen
# A loading run may take this times the seconds of one that loaded alone, and the memory of this times its peak.
_PATIENCE, _MEMORY_MARGIN = 3.0, 1.25
_CONTEXT_BYTES = 1 << 30  # at most, of a process on a CUDA device in addition to what its allocator reserves


def num_fitting(completed: CompletedRun) -> int:
    """Return how many runs like this one fit beside each other into the cores, the host and the device, at most
    `MAX_TOGETHER`.

    One of them trains, and the others hold what they have loaded.
    """
    events = completed.events
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    container = host.container_memory()
    free_bytes = host.available_memory_bytes()
    if container is not None:
        free_bytes = min(free_bytes, container.available)
    num_in_memory = int(free_bytes / (_MEMORY_MARGIN * max(1, completed.state.memory_bytes)))
    limits = [MAX_TOGETHER, cores // events.world, num_in_memory]
    for loaded in events.of(Loaded):
        if loaded.total_bytes:
            rank = events.ranks.get(loaded.pid)
            peak_bytes = (rank and rank.reserved_memory_bytes) or loaded.reserved_bytes
            used_bytes = loaded.used_bytes - loaded.reserved_bytes + _MEMORY_MARGIN * peak_bytes
            limits.append(1 + int((loaded.total_bytes - used_bytes) / (_CONTEXT_BYTES + loaded.reserved_bytes)))
    return max(1, min(limits))


class RunsTogether:
    """Holder of loaded runs that wait to train, each by a key that says what it runs.

    `unloaded` are the keys of runs that failed to load beside others.
    """

    def __init__(self) -> None:
        self._runs: dict[Hashable, CommandRun] = {}
        self.loading_seconds: float | None = None  # of a run alone
        self.num_fitting = 1  # how many may load at the same time; 1 after a run failed because others were beside it
        self.unloaded: set[Hashable] = set()

    def observe(self, completed: CompletedRun) -> None:
        """Learn from a run that ran alone whether and how long others may load together."""
        loaded = completed.events.first(Loaded)
        if loaded is not None and self.loading_seconds is None:
            self.loading_seconds = loaded.time - completed.began
            self.num_fitting = num_fitting(completed)

    def load(self, starts: Mapping[Hashable, Callable[[], CommandRun]], watcher: Watcher) -> None:
        """Start these runs, given by key, and wait until they have loaded. Other runs that were held are closed.

        One that fails to load beside the others is closed, and its key is in `unloaded` from then on.
        """
        self._close(key for key in list(self._runs) if key not in starts)
        assert self.loading_seconds is not None
        until = time.monotonic() + _PATIENCE * self.loading_seconds
        loading = {}
        for key, start in starts.items():
            if key not in self._runs:
                self._runs[key] = loading[key] = start()
        watcher.activity(f"loading {len(loading)} runs of the command together")
        while loading:
            heed()
            watcher.tick()
            for key, run in list(loading.items()):
                outcome = run.loading_outcome()
                if isinstance(outcome, Failure) or (outcome is None and time.monotonic() > until):
                    self.unloaded.add(key)
                    self._close([key])
                if outcome is not None or key not in self._runs:
                    del loading[key]
            time.sleep(TICK_SECONDS if loading else 0.0)

    def __contains__(self, key: Hashable) -> bool:
        return key in self._runs

    def __len__(self) -> int:
        return len(self._runs)

    def take(self, key: Hashable) -> CommandRun | None:
        """Remove and return a run; None if it was not loaded."""
        return self._runs.pop(key, None)

    def close(self) -> None:
        """End all runs that wait."""
        self._close(list(self._runs))

    def _close(self, keys: Iterable[Hashable]) -> None:
        for key in keys:
            self._runs.pop(key).close()
