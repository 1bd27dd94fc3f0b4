"""Runs of a command that load at the same time, and wait to train one after the other.

A start often takes a minute, nearly all of it imports, weights and data. Several runs load in little more time than
one, where the host has a core for each of their ranks and memory for all. Each is a process of its own that trains
alone, so it measures what a run by itself does.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Iterable, Mapping
from contextlib import ExitStack

from autotune_amp.command.messages import Loaded
from autotune_amp.command.ranks import RunEvents
from autotune_amp.command.running import CommandRun, CompletedRun
from autotune_amp.core.errors import RunnerError
from autotune_amp.core.outcome import Failure
from autotune_amp.core.text import count
from autotune_amp.hardware import host
from autotune_amp.interruption import heed
from autotune_amp.processes.process import TICK_SECONDS, Watcher

MAX_TOGETHER = 8  # the runs of a confirmation and one more, or as many of a search as can be foreseen
# A loading run may take this times the seconds of one that loaded alone, at least so many, and this times its memory.
_PATIENCE, _MIN_PATIENCE_SECONDS, _MEMORY_MARGIN = 3.0, 30.0, 1.25
_CONTEXT_BYTES = 1 << 30  # at most, of a process on a CUDA device in addition to what its allocator reserves


def num_fitting(completed: CompletedRun) -> int:
    """Return how many runs like this one fit beside each other into the cores, the host and the device, at most
    `MAX_TOGETHER`.

    One of them trains, and the others hold what they have loaded.
    """
    events = completed.events
    num_in_memory = int(host.free_memory_bytes() / (_MEMORY_MARGIN * max(1, completed.state.memory_bytes)))
    limits = [MAX_TOGETHER, host.usable_cores() // events.world, num_in_memory]
    for loaded in events.of(Loaded):
        if loaded.device != "cpu":
            used_bytes = loaded.used_bytes - loaded.reserved_bytes + _MEMORY_MARGIN * _peak_bytes(events, loaded)
            limits.append(1 + int((loaded.total_bytes - used_bytes) / _held_bytes(loaded)))
    return max(1, min(limits))


def is_crowded(completed: CompletedRun, num_held: int) -> bool:
    """Return whether a run came so near to the limit of a device that the memory of the held runs may have slowed it.

    The allocator then frees and asks again, and libraries choose algorithms that need less memory.
    """
    return any(
        _MEMORY_MARGIN * _peak_bytes(completed.events, loaded) + num_held * _held_bytes(loaded) > loaded.total_bytes
        for loaded in completed.events.of(Loaded)
        if num_held and loaded.device != "cpu"
    )


def _peak_bytes(events: RunEvents, loaded: Loaded) -> int:
    """Return the largest number of bytes that the allocator of a process reserved."""
    rank = events.ranks.get(loaded.pid)
    return (rank and rank.reserved_memory_bytes) or loaded.reserved_bytes


def _held_bytes(loaded: Loaded) -> int:
    """Return the bytes on its device of a process that waits."""
    return _CONTEXT_BYTES + loaded.reserved_bytes


class RunsTogether:
    """Holder of loaded runs that wait to train, each by a key that says what it runs.

    `unloaded` are the failures of runs that did not load beside others. `failure` is the one because of which each run
    loads alone.
    """

    def __init__(self, closed: Callable[[CommandRun], object]) -> None:
        self._closed = closed  # called with each run that was closed without training
        self._runs: dict[Hashable, CommandRun] = {}
        self.loading_seconds: float | None = None  # of a run alone
        self.num_fitting = 1  # how many may load at the same time
        self.failure: Failure | None = None
        self.unloaded: dict[Hashable, Failure] = {}

    def observe(self, completed: CompletedRun) -> None:
        """Learn from a run that ran alone whether and how long others may load together."""
        loaded = completed.events.first(Loaded)
        if loaded is not None and self.loading_seconds is None:
            self.loading_seconds = loaded.time - completed.began
            self.num_fitting = num_fitting(completed)

    def load(self, starts: Mapping[Hashable, Callable[[], CommandRun]], watcher: Watcher, limit_seconds: float) -> None:
        """Start these runs, given by key, as far as they are not there, and wait until they have loaded. Close others.

        One that fails to load beside the others, or not within `limit_seconds`, is closed, and its key is in `unloaded`
        from then on.
        """
        self._close(key for key in list(self._runs) if key not in starts)
        assert self.loading_seconds is not None
        patience = max(_MIN_PATIENCE_SECONDS, _PATIENCE * self.loading_seconds)
        until = time.monotonic() + min(patience, limit_seconds)
        loading: dict[Hashable, CommandRun] = {}
        for key, start in starts.items():
            if key not in self._runs:
                self.unloaded.pop(key, None)
                try:
                    self._runs[key] = loading[key] = start()
                except (RunnerError, RuntimeError, OSError):  # no more processes or threads: fewer load together
                    if not loading:
                        raise
                    break
        watcher.activity(f"loading {count(len(loading), 'run')} of the command together")
        while loading:
            heed()
            watcher.tick()
            for key, run in list(loading.items()):
                outcome = run.loading_outcome()
                if outcome is None and time.monotonic() > until:
                    outcome = Failure(kind="timeout", message="it did not load in time")
                if isinstance(outcome, Failure):
                    self.unloaded[key] = outcome
                    self._close([key])
                if outcome is not None:
                    del loading[key]
            time.sleep(TICK_SECONDS if loading else 0.0)

    def __contains__(self, key: Hashable) -> bool:
        return key in self._runs

    def __len__(self) -> int:
        return len(self._runs)

    def held_bytes(self) -> int:
        """Return the host's memory that all runs that wait use, in bytes."""
        return sum(run.held_bytes() for run in self._runs.values())

    def take(self, key: Hashable) -> CommandRun | None:
        """Remove and return a run; None if it was not loaded."""
        return self._runs.pop(key, None)

    def close(self) -> None:
        """End all runs that wait."""
        self._close(list(self._runs))

    def _close(self, keys: Iterable[Hashable]) -> None:
        with ExitStack() as stack:  # each is closed, whatever closing another one raises
            for key in keys:
                run = self._runs.pop(key)
                stack.callback(self._closed, run)
                stack.callback(run.close)
