"""Finding and killing all descendants of a process, whatever their session or parent, by an inherited variable."""

from __future__ import annotations

import contextlib
import os
import re
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import psutil

MARK = "AUTOTUNE_AMP_PROCESS"  # environment variable with a unique value, which all descendants inherit
KILL_SECONDS = 5.0
TERMINATE_SECONDS = 1.0
_POLL_SECONDS = 0.005
SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 - where Linux has it
# A line of /proc/PID/maps with its inode. It is not found by name, since a semaphore is renamed once it is mapped.
_MAPPED = re.compile(rf"^\S+ \S+ \S+ \S+ (\d+) +{SHARED_MEMORY}/", re.MULTILINE)


def find_marked_processes(mark: str) -> list[psutil.Process]:
    """Return the living processes that inherited this mark."""
    processes = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            if process.environ().get(MARK) == mark:
                processes.append(process)
    return processes


def terminate_programs(find: Callable[[], Iterable[psutil.Process]]) -> None:
    """Terminate the processes of `find` that are not Python, such as compilers, and wait briefly for them.

    Killed compilers leave temporary files behind. Python processes are suspended and stay so, since one whose compiler
    ends would start the next one.
    """
    python, until = Path(sys.executable).resolve(), time.monotonic() + TERMINATE_SECONDS
    is_python_by_process: dict[psutil.Process, bool] = {}  # whether each runs Python
    while time.monotonic() < until:
        programs, is_settled = (
            {process.pid for process, is_python in is_python_by_process.items() if not is_python},
            True,
        )
        for process in find():
            with contextlib.suppress(psutil.Error, OSError):
                is_python, is_new = Path(process.exe()) == python, process not in is_python_by_process
                if is_new and is_python:
                    process.suspend()
                elif is_new and process.ppid() not in programs:  # a terminated program ends its own children
                    process.terminate()
                is_python_by_process[process] = is_python
                if is_new or not (is_python or process.status() == psutil.STATUS_ZOMBIE):
                    is_settled = False  # it may have started others before
        if is_settled:
            return
        time.sleep(_POLL_SECONDS)


def kill_marked(mark: str) -> None:
    """Kill all processes with this mark, and wait until they are gone."""
    until = time.monotonic() + KILL_SECONDS
    num_empty = 0  # consecutive searches without result: two, since a process that is executing a program shows no mark
    while num_empty < 2 and time.monotonic() < until:
        processes = find_marked_processes(mark)
        num_empty = 0 if processes else num_empty + 1
        for process in processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(processes, timeout=KILL_SECONDS)


def build_locks_of(processes: Iterable[psutil.Process]) -> set[Path]:
    """Return the lock files of the builds of torch's C++ extensions that these processes are making.

    A killed process leaves its lock behind, and every later process waits for it without end.
    """
    folder = os.environ.get("TORCH_EXTENSIONS_DIR")
    opened = set[Path]()
    for process in processes:
        with contextlib.suppress(psutil.Error, OSError):
            opened.update(Path(each.path) for each in process.open_files())
    return {
        path
        for path in opened
        if path.name == "lock"
        and ("torch_extensions" in path.parts or (folder and path.is_relative_to(Path(folder).resolve())))
    }


def shared_memory() -> dict[str, int]:
    """Return the names of shared memory on this host with their inodes; empty where shared memory is no file."""
    inodes = {}
    if SHARED_MEMORY.is_dir():
        for path in SHARED_MEMORY.iterdir():
            with contextlib.suppress(OSError):
                inodes[path.name] = path.stat().st_ino
    return inodes


def shared_memory_of(processes: Iterable[psutil.Process]) -> set[str]:
    """Return the names of shared memory that these processes have mapped or created through torch.

    A killed process leaves such semaphores and tensors behind.
    """
    pieces = shared_memory()
    inodes: set[str] = set()
    pids: set[str] = set()
    if pieces:
        for process in processes:
            pids.add(str(process.pid))
            with contextlib.suppress(OSError):
                inodes.update(_MAPPED.findall(Path(f"/proc/{process.pid}/maps").read_text(errors="replace")))
    return {
        name
        for name, inode in pieces.items()
        if str(inode) in inodes or (name.startswith("torch_") and name.split("_")[1] in pids)
    }
