"""All that came of one process, whatever session or parent it moved to: found by a mark that it inherited, killed."""

from __future__ import annotations

import contextlib
import time

import psutil

MARK = "AUTOTUNE_AMP_PROCESS"  # in the environment of the first process; the value is one of a kind
KILL_SECONDS = 5.0


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
