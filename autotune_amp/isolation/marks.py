"""All that came of one process, whatever session or parent it moved to: found by a mark that it inherited, killed."""

from __future__ import annotations

import contextlib
import re
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import psutil

MARK = "AUTOTUNE_AMP_PROCESS"  # in the environment of the first process; the value is one of a kind
KILL_SECONDS = 5.0
TERMINATE_SECONDS = 1.0
_LOOK_SECONDS = 0.005
SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 - where Linux has it
# A line of /proc/PID/maps, and its inode: the name of a semaphore changes once it is mapped.
_MAPPED = re.compile(rf"^\S+ \S+ \S+ \S+ (\d+) +{SHARED_MEMORY}/", re.MULTILINE)


def marked(mark: str) -> list[psutil.Process]:
    """The living processes that inherited this mark."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            if process.environ().get(MARK) == mark:
                found.append(process)
    return found


def terminate_programs(find: Callable[[], Iterable[psutil.Process]]) -> None:
    """Ask those that are found and run no Python, as a compiler does, to end, and wait for them a moment: killed they
    would leave their temporary files behind. The Pythons stand still for good: one whose compiler ends would start the
    next one."""
    python, until = Path(sys.executable).resolve(), time.monotonic() + TERMINATE_SECONDS
    known: dict[psutil.Process, bool] = {}  # whether it runs Python
    while time.monotonic() < until:
        programs, is_settled = {process.pid for process, is_python in known.items() if not is_python}, True
        for process in find():
            with contextlib.suppress(psutil.Error, OSError):
                is_python, is_new = Path(process.exe()) == python, process not in known
                if is_new and is_python:
                    process.suspend()
                elif is_new and process.ppid() not in programs:  # what one starts that was asked before cleans up
                    process.terminate()
                known[process] = is_python
                if is_new or not (is_python or process.status() == psutil.STATUS_ZOMBIE):
                    is_settled = False  # a new one may have started others before
        if is_settled:
            return
        time.sleep(_LOOK_SECONDS)


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


def shared_memory() -> dict[str, int]:
    """The named pieces of shared memory on this host, with their inodes; none where they are no files."""
    found = {}
    if SHARED_MEMORY.is_dir():
        for path in SHARED_MEMORY.iterdir():
            with contextlib.suppress(OSError):
                found[path.name] = path.stat().st_ino
    return found


def shared_memory_of(processes: Iterable[psutil.Process]) -> set[str]:
    """The names of those that these processes have mapped, or torch in them has made for another to map: semaphores
    and tensors that a killed process leaves behind."""
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
