"""All that came of one process, whatever session or parent it moved to: found by a mark that it inherited, killed."""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections.abc import Iterable
from pathlib import Path

import psutil

MARK = "AUTOTUNE_AMP_PROCESS"  # in the environment of the first process; the value is one of a kind
KILL_SECONDS = 5.0
_SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 - where Linux has it
_MAPPED = re.compile(rf"^.* ({_SHARED_MEMORY}/[^\n]+?)$", re.MULTILINE)


def marked(mark: str) -> list[psutil.Process]:
    """The living processes that inherited this mark."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            if process.environ().get(MARK) == mark:
                found.append(process)
    return found


def kill_marked(mark: str) -> None:
    """Kill them, and wait until they are gone."""
    until = time.monotonic() + KILL_SECONDS
    num_empty = 0  # looks that found nobody: two, since a process that is just executing a program shows no mark
    while num_empty < 2 and time.monotonic() < until:
        found = marked(mark)
        num_empty = 0 if found else num_empty + 1
        for process in found:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(found, timeout=KILL_SECONDS)


def shared_memory() -> frozenset[str]:
    """The named pieces of shared memory on this host; none where they are no files."""
    return frozenset(os.listdir(_SHARED_MEMORY)) if _SHARED_MEMORY.is_dir() else frozenset()


def shared_memory_of(processes: Iterable[psutil.Process]) -> frozenset[str]:
    """The names of those that these processes hold: semaphores and tensors that nobody unlinks once they are killed."""
    found: set[str] = set()
    if _SHARED_MEMORY.is_dir():
        for process in processes:
            with contextlib.suppress(OSError):
                found.update(
                    os.path.basename(path)  # noqa: PTH119
                    for path in _MAPPED.findall(Path(f"/proc/{process.pid}/maps").read_text())
                )
    return frozenset(found) & shared_memory()
