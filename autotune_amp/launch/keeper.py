"""The process between us and a training command: it starts the command, and ends all that came of it.

It does so when the command ends, when the parent says so, and when the parent is gone, killed too. On Linux what a
command leaves behind becomes the keeper's child, however it left, so that nothing can get away. A file of its own that
runs by its path: it must be up within milliseconds.
"""

from __future__ import annotations

import ctypes
import json
import os
import resource
import select
import shutil
import signal
import sys
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

CANNOT_START = 126  # exit status, as a shell has it
END_SECONDS = 30.0  # a process may have to give back the memory of a whole device
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_LOOK_SECONDS = 1.0  # between two looks whether the parent is there, should its pipe be held open by another process


def keep(mark: str, parent: int, folders: Sequence[str], notes: Sequence[str] | None, arguments: Sequence[str]) -> int:
    """Run the command until it ends or is to end; returns its status, negative for a signal's, 0 where it was ended.

    Where the parent is gone and cannot do so itself, what the first path of `notes` says that the command made is moved
    to the folder that is the second, what stays is remembered in the file that is the third, and `folders` are removed.
    """
    woken, wakes = os.pipe()
    os.set_blocking(wakes, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wakes)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    began, command = time.time(), _start(mark, arguments)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # as Slurm ends a job, by a signal to every process: there is work
    from autotune_amp.isolation import marks  # while the command starts

    shared_before = marks.shared_memory()
    status, is_parent_there = None, True
    while status is None:
        ready, _, _ = select.select([0, woken], [], [], _LOOK_SECONDS)
        if 0 in ready:
            is_parent_there = os.read(0, 1) != b""
            break
        if os.getppid() != parent:
            is_parent_there = False
            break
        if woken in ready:
            os.read(woken, 1 << 10)
        status = _reaped(command)
    _end(marks, mark, shared_before)
    if not is_parent_there:
        if notes is not None:
            from autotune_amp.launch.leftovers import remember, set_aside

            noted, aside, memory = map(Path, notes)
            remember(memory, set_aside(noted, aside, began))  # whether data are complete is not known here
        for folder in folders:
            shutil.rmtree(folder, ignore_errors=True)
    return status or 0


def _start(mark: str, arguments: Sequence[str]) -> int:
    parent, pid = os.getpid(), os.fork()
    if pid:
        return pid
    try:
        os.setsid()  # what it sends to its group is not for us
        if sys.platform == "linux":
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
            if os.getppid() != parent:
                os._exit(CANNOT_START)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        for number in (signal.SIGCHLD, signal.SIGPIPE):
            signal.signal(number, signal.SIG_DFL)
        os.environ["AUTOTUNE_AMP_PROCESS"] = mark
        os.execvp(arguments[0], list(arguments))  # noqa: S606 - the user's own command
    except Exception as error:
        os.write(2, f"{arguments[0]} cannot be started: {error}\n".encode())
    finally:
        os._exit(CANNOT_START)


def _reaped(command: int) -> int | None:
    """Reap all children that have ended; returns the command's status if it is among them."""
    status = None
    with suppress(ChildProcessError):
        while True:
            pid, ended = os.waitpid(-1, os.WNOHANG)
            if not pid:
                break
            status = os.waitstatus_to_exitcode(ended) if pid == command else status
    return status


def _end(marks: Any, mark: str, shared_before: Iterable[str]) -> None:
    """Kill all that came of the command at once, without a signal that it could answer, and free what it shared."""
    import psutil

    shared: set[str] = set()
    until = time.monotonic() + END_SECONDS
    num_empty = 0  # looks that found nobody: two, since a process that is just executing a program shows no mark
    while num_empty < 2 and time.monotonic() < until:
        _reaped(0)
        found = {*psutil.Process().children(recursive=True), *marks.marked(mark)}
        num_empty = 0 if found else num_empty + 1
        for process in found:
            with suppress(psutil.Error):
                process.suspend()  # so that none shares more, or answers to another's end
        shared |= marks.shared_memory_of(found).difference(shared_before)
        for process in found:
            with suppress(psutil.Error):
                process.kill()
        time.sleep(0.01)
    for name in shared - marks.shared_memory_of(psutil.process_iter()):
        with suppress(OSError):
            (marks.SHARED_MEMORY / name).unlink()


def main(settings: str, *arguments: str) -> None:
    """Keep a command, and end as it did."""
    known = json.loads(settings)
    sys.path[:] = known["path"]
    status = keep(known["mark"], known["parent"], known["folders"], known["notes"], arguments)
    if status < 0:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        with suppress(OSError):  # SIGKILL has no handler
            signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    raise SystemExit(status)


if __name__ == "__main__":
    main(*sys.argv[1:])
