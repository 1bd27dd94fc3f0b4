"""Keeper: a process between a parent and a program, which starts the program and kills all its descendants.

It kills them when the program ends, when the parent asks for it, and when the parent has ended or was killed. It makes
the folder for temporary files itself, so that there is always a keeper to remove it. On Linux,
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
# Signals that Slurm or a terminal sends to every process of a job. The keeper ignores them, to clean up afterwards.
_JOB_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
_ORPHANED = signal.SIGUSR2  # sent by the kernel when the thread that started this process has ended
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_EXIT_SECONDS = 10.0  # a process ends within this time after its main thread
_PARENT_CHECK_SECONDS = 1.0  # interval of checking that the parent exists, where no signal reports its end


def keep(
    mark: str, parent: int, folders: Sequence[str], when_orphaned: Sequence[Any] | None, arguments: Sequence[str]
) -> int:
    """Make the first of `folders`, start the program on the signal `GO_ON`, and wait until it ends or has to be ended.

    Return its exit status, negative for a signal, 0 if it was ended. `mark` is the value of the environment variable by
    which the program's descendants are found, `parent` the parent's process id. If the parent has ended, call
    `when_orphaned` (a module, the name of a function in it, and the function's arguments) and remove `folders`.
    """
    wakeup_read, wakeup_write = os.pipe()
    os.set_blocking(wakeup_write, False)
    signal.set_wakeup_fd(wakeup_write)
    for number in (signal.SIGCHLD, END, PAUSE, GO_ON, _ORPHANED):
        signal.signal(number, lambda *_: None)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, _ORPHANED, 0, 0, 0)
    handlers = {number: signal.signal(number, signal.SIG_IGN) for number in _JOB_SIGNALS}
    Path(folders[0]).mkdir(mode=0o700)  # the parent waits for it before it sends signals
    program: int | None = None
    process_tree: Any = None
    shared_before: Iterable[str] = ()
    status, is_end_requested, is_orphaned = None, False, False
    while status is None and not (is_end_requested or is_orphaned) and os.getppid() == parent:
        if wakeup_read in select.select([wakeup_read], [], [], _PARENT_CHECK_SECONDS)[0]:
            for signal_number in os.read(wakeup_read, 1 << 10):
                is_end_requested |= signal_number == END
                is_orphaned |= signal_number == _ORPHANED
                if program is not None and signal_number in (PAUSE, GO_ON):
                    os.kill(program, signal.SIGSTOP if signal_number == PAUSE else GO_ON)
                elif signal_number == GO_ON and not is_end_requested:
                    program = _start(mark, arguments, handlers)
                    _detach_streams()
                    from autotune_amp.processes import process_tree  # imported while the program starts

                    shared_before = process_tree.shared_memory()
        status = None if program is None else _reap_children(program)
    if program is not None:
        _kill_descendants(process_tree, mark, shared_before)
    until = time.monotonic() + _EXIT_SECONDS
    while is_orphaned and os.getppid() == parent and time.monotonic() < until:
        time.sleep(0.01)
    if os.getppid() != parent:
        if when_orphaned is not None and program is not None:
            module, name, *function_arguments = when_orphaned
            getattr(importlib.import_module(module), name)(*function_arguments)
        for folder in folders:
            shutil.rmtree(folder, ignore_errors=True)
    return status or 0


def _detach_streams() -> None:
    """Close the program's input and output here, so that they close with the program. Keep stderr for errors."""
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
        for number, handler in handlers.items():
            signal.signal(number, handler)  # ignored still if the parent ignores it
        os.environ["AUTOTUNE_AMP_PROCESS"] = mark
        os.execvp(arguments[0], list(arguments))  # noqa: S606 - the user's own command
    except Exception as error:
        os.write(2, f"{arguments[0]} cannot be started: {error}\n".encode())
    finally:
        os._exit(CANNOT_START)


def _reap_children(program: int) -> int | None:
    """Reap all children that have ended; return the program's exit status if it is among them, else None."""
    status = None
    with suppress(ChildProcessError):
        while True:
            pid, wait_status = os.waitpid(-1, os.WNOHANG)
            if not pid:
                break
            status = os.waitstatus_to_exitcode(wait_status) if pid == program else status
    return status


def _kill_descendants(process_tree: Any, mark: str, shared_before: Iterable[str]) -> None:
    """Kill all descendants of the program at once, by a signal that they cannot handle, and free their shared memory.

    `shared_before` are the names of shared memory that existed before, which is kept.
    """
    import psutil

    shared_names: set[str] = set()
    until = time.monotonic() + END_SECONDS
    num_empty = (
        0  # consecutive rounds without a process: two, since a process that is executing a program shows no mark
    )
    while num_empty < 2 and time.monotonic() < until:
        _reap_children(0)
        processes = {*psutil.Process().children(recursive=True), *process_tree.find_marked_processes(mark)}
        num_empty = 0 if processes else num_empty + 1
        for process in processes:
            with suppress(psutil.Error):
                process.suspend()  # so that it does not share more memory, or react to the end of another one
        shared_names |= process_tree.shared_memory_of(processes).difference(shared_before)
        for process in processes:
            with suppress(psutil.Error):
                process.kill()
        time.sleep(0.01)
    for name in shared_names - process_tree.shared_memory_of(psutil.process_iter()):
        with suppress(OSError):
            (process_tree.SHARED_MEMORY / name).unlink()


def main(settings: str, *arguments: str) -> None:
    """Run a program under this keeper, and exit with the status or the signal of the program."""
    options = json.loads(settings)
    sys.path[:] = options["path"]
    status = keep(options["mark"], options["parent"], options["folders"], options["when_orphaned"], arguments)
    if status < 0:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        with suppress(OSError):  # SIGKILL has no handler
            signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    raise SystemExit(status)


if __name__ == "__main__":
    main(*sys.argv[1:])
