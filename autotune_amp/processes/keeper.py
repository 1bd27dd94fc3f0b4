"""Keeper: the process between a parent and a program, which starts the program and kills all its descendants.

It kills them when the program ends, when the parent asks for it, and when the parent is gone, even if killed. It makes
the folder for temporary files itself before the program starts, so that no folder is left without a keeper. On Linux,
orphaned descendants of the program become the keeper's children, whatever their session or environment, so that none
can escape. This file is run by its path, since the keeper must be up within milliseconds.
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
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

CANNOT_START = 126  # exit status of a program that cannot be started, as in a shell
END_SECONDS = 30.0  # a process may have to free the memory of a whole device
# Signals from the parent: end the program, pause it, start it or let it continue.
END, PAUSE, GO_ON = signal.SIGUSR1, signal.SIGTSTP, signal.SIGCONT
# Signals that end every process of a job, as Slurm and a terminal send them: clean-up is still due.
_OF_THE_JOB = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
_ORPHANED = signal.SIGUSR2  # from the kernel, when the thread that started this process is gone
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_EXIT_SECONDS = 10.0  # a process is gone within this time after its first thread
_LOOK_SECONDS = 1.0  # between two checks that the parent exists, if no signal tells


def keep(
    mark: str, parent: int, folders: Sequence[str], when_orphaned: Sequence[Any] | None, arguments: Sequence[str]
) -> int:
    """Make the first of `folders`, run a program once `GO_ON` comes, until it ends or has to be ended; return its exit
    status, negative for a signal, 0 if it was ended.

    `mark` is the value of the variable by which the program's descendants are found, `parent` the parent's process id.
    If the parent is gone and cannot clean up itself, call `when_orphaned` (a module, the name of a function in it, and
    the function's arguments) and remove `folders`.
    """
    woken, wakes = os.pipe()
    os.set_blocking(wakes, False)
    signal.set_wakeup_fd(wakes)
    for number in (signal.SIGCHLD, END, PAUSE, GO_ON, _ORPHANED):
        signal.signal(number, lambda *_: None)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, _ORPHANED, 0, 0, 0)
    handlers = {number: signal.signal(number, signal.SIG_IGN) for number in _OF_THE_JOB}
    Path(folders[0]).mkdir(mode=0o700)  # which tells the parent that its signals are heard
    program: int | None = None
    process_tree: Any = None
    shared_before: Iterable[str] = ()
    status, is_asked, is_orphaned = None, False, False
    while status is None and not (is_asked or is_orphaned) and os.getppid() == parent:
        if woken in select.select([woken], [], [], _LOOK_SECONDS)[0]:
            for asked in os.read(woken, 1 << 10):
                is_asked |= asked == END
                is_orphaned |= asked == _ORPHANED
                if program is not None and asked in (PAUSE, GO_ON):
                    os.kill(program, signal.SIGSTOP if asked == PAUSE else GO_ON)
                elif asked == GO_ON and not is_asked:
                    program = _start(mark, arguments, handlers)
                    _leave_streams()
                    from autotune_amp.processes import process_tree  # imported while the program starts

                    shared_before = process_tree.shared_memory()
        status = None if program is None else _reaped(program)
    if program is not None:
        _end(process_tree, mark, shared_before)
    until = time.monotonic() + _EXIT_SECONDS
    while is_orphaned and os.getppid() == parent and time.monotonic() < until:
        time.sleep(0.01)
    if os.getppid() != parent:
        if when_orphaned is not None and program is not None:
            module, name, *given = when_orphaned
            getattr(importlib.import_module(module), name)(*given)
        for folder in folders:
            shutil.rmtree(folder, ignore_errors=True)
    return status or 0


def _leave_streams() -> None:
    """Detach from the program's input and output, which then close with it; the keeper's errors go to its stderr."""
    with Path(os.devnull).open("r+b") as null:
        for number in (0, 1):
            os.dup2(null.fileno(), number)


def _start(mark: str, arguments: Sequence[str], handlers: Mapping[signal.Signals, Any]) -> int:
    """Start the program with the given signal handlers of its own, and return its process id."""
    parent, pid = os.getpid(), os.fork()
    if pid:
        return pid
    try:
        os.setsid()  # signals to the program's process group must not reach the keeper
        if sys.platform == "linux":
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
            if os.getppid() != parent:
                os._exit(CANNOT_START)
        for number in (signal.SIGCHLD, signal.SIGPIPE, END, PAUSE, GO_ON, _ORPHANED):
            signal.signal(number, signal.SIG_DFL)
        for of_the_job, handler in handlers.items():
            signal.signal(of_the_job, handler)  # ignored still if the parent ignores it
        os.environ["AUTOTUNE_AMP_PROCESS"] = mark
        os.execvp(arguments[0], list(arguments))  # noqa: S606 - the user's own command
    except Exception as error:
        os.write(2, f"{arguments[0]} cannot be started: {error}\n".encode())
    finally:
        os._exit(CANNOT_START)


def _reaped(program: int) -> int | None:
    """Reap all children that have ended; return the program's exit status if it is among them, else None."""
    status = None
    with suppress(ChildProcessError):
        while True:
            pid, ended = os.waitpid(-1, os.WNOHANG)
            if not pid:
                break
            status = os.waitstatus_to_exitcode(ended) if pid == program else status
    return status


def _end(process_tree: Any, mark: str, shared_before: Iterable[str]) -> None:
    """Kill all descendants of the program at once, by a signal that they cannot handle, and free their shared memory.

    `shared_before` are the names of shared memory that existed before, which is kept.
    """
    import psutil

    shared: set[str] = set()
    until = time.monotonic() + END_SECONDS
    num_empty = 0  # rounds that found no process; two, since one that is just executing a program shows no mark
    while num_empty < 2 and time.monotonic() < until:
        _reaped(0)
        found = {*psutil.Process().children(recursive=True), *process_tree.marked(mark)}
        num_empty = 0 if found else num_empty + 1
        for process in found:
            with suppress(psutil.Error):
                process.suspend()  # so that none shares more memory, or reacts to another's end
        shared |= process_tree.shared_memory_of(found).difference(shared_before)
        for process in found:
            with suppress(psutil.Error):
                process.kill()
        time.sleep(0.01)
    for name in shared - process_tree.shared_memory_of(psutil.process_iter()):
        with suppress(OSError):
            (process_tree.SHARED_MEMORY / name).unlink()


def main(settings: str, *arguments: str) -> None:
    """Run a program under this keeper, and exit with the status or the signal of the program."""
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
