"""The process between us and a program that we start: it starts the program, and ends all that came of it.

It does so when the program ends, when the parent asks for it, and when the parent is gone, killed too. On Linux what a
program leaves behind becomes the keeper's child, whatever session or environment it has, so that nothing can get away.
A file of its own that runs by its path: it must be up within milliseconds.
"""

from __future__ import annotations

import ctypes
import importlib
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
# What the parent asks for by signals: to end the program, to have it stand still, to let it go on.
END, PAUSE, GO_ON = signal.SIGUSR1, signal.SIGTSTP, signal.SIGCONT
_ORPHANED = signal.SIGUSR2  # from the kernel, where the thread that started this process is gone
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_EXIT_SECONDS = 10.0  # in which a process is gone whose first thread is
_LOOK_SECONDS = 1.0  # between two looks whether the parent is there, where no signal tells


def keep(
    mark: str, parent: int, folders: Sequence[str], when_orphaned: Sequence[Any] | None, arguments: Sequence[str]
) -> int:
    """Run the program until it ends or is to end; returns its status, negative for a signal's, 0 where it was ended.

    Where the parent is gone and cannot do so itself, `when_orphaned` is called, a function by its module and its name
    with its arguments, and `folders` are removed.
    """
    woken, wakes = os.pipe()
    os.set_blocking(wakes, False)
    signal.set_wakeup_fd(wakes)
    for number in (signal.SIGCHLD, END, PAUSE, GO_ON, _ORPHANED):
        signal.signal(number, lambda *_: None)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, _ORPHANED, 0, 0, 0)
    program = _start(mark, arguments)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # as Slurm ends a job, by a signal to every process: there is work
    _leave_streams()
    from autotune_amp.isolation import marks  # while the program starts

    shared_before = marks.shared_memory()
    status, is_asked, is_orphaned = None, False, False
    while status is None and not (is_asked or is_orphaned) and os.getppid() == parent:
        if woken in select.select([woken], [], [], _LOOK_SECONDS)[0]:
            for asked in os.read(woken, 1 << 10):
                is_asked |= asked == END
                is_orphaned |= asked == _ORPHANED
                if asked in (PAUSE, GO_ON):
                    os.kill(program, signal.SIGSTOP if asked == PAUSE else GO_ON)
        status = _reaped(program)
    _end(marks, mark, shared_before)
    until = time.monotonic() + _EXIT_SECONDS
    while is_orphaned and os.getppid() == parent and time.monotonic() < until:
        time.sleep(0.01)
    if os.getppid() != parent:
        if when_orphaned is not None:
            module, name, *given = when_orphaned
            getattr(importlib.import_module(module), name)(*given)
        for folder in folders:
            shutil.rmtree(folder, ignore_errors=True)
    return status or 0


def _leave_streams() -> None:
    """Let go of the program's input and output, which end with it; errors of our own are told beside its errors."""
    with Path(os.devnull).open("r+b") as null:
        for number in (0, 1):
            os.dup2(null.fileno(), number)


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
        for number in (signal.SIGCHLD, signal.SIGPIPE, END, PAUSE, GO_ON, _ORPHANED):
            signal.signal(number, signal.SIG_DFL)
        os.environ["AUTOTUNE_AMP_PROCESS"] = mark
        os.execvp(arguments[0], list(arguments))  # noqa: S606 - the user's own command
    except Exception as error:
        os.write(2, f"{arguments[0]} cannot be started: {error}\n".encode())
    finally:
        os._exit(CANNOT_START)


def _reaped(program: int) -> int | None:
    """Reap all children that have ended; returns the program's status if it is among them."""
    status = None
    with suppress(ChildProcessError):
        while True:
            pid, ended = os.waitpid(-1, os.WNOHANG)
            if not pid:
                break
            status = os.waitstatus_to_exitcode(ended) if pid == program else status
    return status


def _end(marks: Any, mark: str, shared_before: Iterable[str]) -> None:
    """Kill all that came of the program at once, without a signal that it could answer, and free what it shared."""
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
    """Keep a program, and end as it did."""
    known = json.loads(settings)
    sys.path[:] = known["path"]
    status = keep(known["mark"], known["parent"], known["folders"], known["when_orphaned"], arguments)
    if status < 0:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        with suppress(OSError):  # SIGKILL has no handler
            signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    raise SystemExit(status)


if __name__ == "__main__":
    main(*sys.argv[1:])
