"""Finding and killing all descendants of a process, whatever their session or parent, by an inherited variable."""

from __future__ import annotations

import contextlib
import re
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import psutil

MARK = "AUTOTUNE_AMP_PROCESS"  # variable in the first process's environment; its value is unique
KILL_SECONDS = 5.0
TERMINATE_SECONDS = 1.0
_LOOK_SECONDS = 0.005
SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 - where Linux has it
# A line of /proc/PID/maps with its inode; the name will not do, since a semaphore's changes once it is mapped.
_MAPPED = re.compile(rf"^\S+ \S+ \S+ \S+ (\d+) +{SHARED_MEMORY}/", re.MULTILINE)


def marked(mark: str) -> list[psutil.Process]:
    """Return the living processes that inherited this mark."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            if process.environ().get(MARK) == mark:
                found.append(process)
    return found


def terminate_programs(find: Callable[[], Iterable[psutil.Process]]) -> None:
    """Ask the found processes that are not Python, such as compilers, to end, and wait briefly for them.

    If killed they would leave temporary files behind. Python processes are suspended for good, since one whose compiler
    ends would start the next one.
    """
    python, until = Path(sys.executable).resolve(), time.monotonic() + TERMINATE_SECONDS
    known: dict[psutil.Process, bool] = {}  # whether each runs Python
    while time.monotonic() < until:
        programs, is_settled = {process.pid for process, is_python in known.items() if not is_python}, True
        for process in find():
            with contextlib.suppress(psutil.Error, OSError):
                is_python, is_new = Path(process.exe()) == python, process not in known
                if is_new and is_python:
                    process.suspend()
                elif is_new and process.ppid() not in programs:  # a program asked before ends its own
                    process.terminate()
                known[process] = is_python
                if is_new or not (is_python or process.status() == psutil.STATUS_ZOMBIE):
                    is_settled = False  # it may have started others before
        if is_settled:
            return
        time.sleep(_LOOK_SECONDS)


def kill_marked(mark: str) -> None:
    """Kill all processes with this mark, and wait until they are gone."""
    until = time.monotonic() + KILL_SECONDS
    num_empty = 0  # consecutive looks that found none: two, since a process just executing a program shows no mark
    while num_empty < 2 and time.monotonic() < until:
        found = marked(mark)
        num_empty = 0 if found else num_empty + 1
        for process in found:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(found, timeout=KILL_SECONDS)


def shared_memory() -> dict[str, int]:
    """Return the named pieces of shared memory on this host, with their inodes; empty if they are not files."""
    found = {}
    if SHARED_MEMORY.is_dir():
        for path in SHARED_MEMORY.iterdir():
            with contextlib.suppress(OSError):
                found[path.name] = path.stat().st_ino
    return found


def shared_memory_of(processes: Iterable[psutil.Process]) -> set[str]:
    """Return the names of shared memory that these processes have mapped or created through torch.

    Such semaphores and tensors are left behind by a killed process.
    """
    pieces = shared_memory()
    inodes: set[str] = set()
    pids: set[str] = set()
    if pieces:
        for process in processes:
            pids.add(str(process.pid))
            with contextlib.suppress(OSError):
                inodes.update(_MAPPED.findall(Path(f"/proc/{process.pid}/maps").read_text()))
    return {
        name
        for name, inode in pieces.items()
        if str(inode) in inodes or (name.startswith("torch_") and name.split("_")[1] in pids)
    }
