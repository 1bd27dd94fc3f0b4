"""Keeper: a process between a parent and a program, which starts the program and kills all its descendants.

It makes the folder for the program's temporary files. It kills the descendants when the program ends or the parent asks
for it, and stays until the parent asks it to remove the folder. If the parent has ended or was killed, it does all that
by itself, so that nothing is left at whatever moment the parent is interrupted. On Linux, orphaned descendants of the
program become the keeper's children, whatever their session or environment, so that none can escape. This file is run
by its path, since the keeper must be up within milliseconds.
"""

from __future__ import annotations

import ctypes
import importlib
import json
import os
import select
import shutil
import signal
import socket
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

CANNOT_START = 126  # exit status of a program that cannot be started, as in a shell
END_SECONDS = 30.0  # a process may have to free the memory of a whole device
START, PAUSE, RESUME, END, REMOVE = b"s", b"p", b"c", b"e", b"r"  # requests of the parent, which are one byte each
READY = b"."  # sent when the folder is there; the program's exit status follows as text when the program has ended
# Signals that Slurm or a terminal sends to every process of a job. The keeper ignores them, to clean up afterwards.
_JOB_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
_PARENT_SIGNAL = signal.SIGUSR2  # sent by the kernel when the parent's thread that started this process has ended
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_PARENT_CHECK_SECONDS = 1.0  # interval of checking that the parent exists, where nothing reports its end


def keep(
    connection: socket.socket,
    mark: str,
    parent: int,
    folders: Sequence[str],
    when_orphaned: Sequence[Any] | None,
    arguments: Sequence[str],
) -> None:
    """Make the first of `folders`, then do what the parent requests through `connection`, until `REMOVE` or its end.

    The program is started on `START` and ended on `END`. Its exit status, negative for a signal and 0 if it was ended,
    is sent once all its descendants have been killed. `REMOVE` ends it too, and removes the first folder. `mark` is the
    value of the environment variable by which the program's descendants are found, `parent` the parent's process id. If
    the parent has ended or closed the connection, all `folders` are removed; before that `when_orphaned` (a module, the
    name of a function in it, and the function's arguments) is called if the program was started and not yet ended on
    request.
    """
    wakeup_read, wakeup_write = os.pipe()
    poller = select.poll()
    for descriptor in (wakeup_read, connection.fileno()):
        poller.register(descriptor, select.POLLIN)
    os.set_blocking(wakeup_write, False)
    signal.set_wakeup_fd(wakeup_write)
    for number in (signal.SIGCHLD, _PARENT_SIGNAL):
        signal.signal(number, lambda *_: None)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, _PARENT_SIGNAL, 0, 0, 0)
    handlers = {number: signal.signal(number, signal.SIG_IGN) for number in _JOB_SIGNALS}
    Path(folders[0]).mkdir(mode=0o700)
    _send(connection, READY)
    program: int | None = None
    process_tree: Any = None
    shared_before: Iterable[str] = ()
    has_ended = is_orphaned = False
    request: bytes | None = None
    while request != REMOVE and not is_orphaned:
        readable = [descriptor for descriptor, _ in poller.poll(1000 * _PARENT_CHECK_SECONDS)]
        if wakeup_read in readable:
            os.read(wakeup_read, 1 << 10)
        request = _received(connection) if connection.fileno() in readable else None
        is_orphaned = request == b"" or os.getppid() != parent
        if request == END:
            when_orphaned = None  # from now on that is the parent's to do
        if has_ended:
            _reap_children(0)
            continue
        if request == START:
            program = _start(mark, arguments, handlers, connection)
            _close_streams(0, 1)
            from autotune_amp.processes import process_tree  # imported while the program starts

            shared_before = process_tree.shared_memory()
        elif program is not None and request in (PAUSE, RESUME):
            os.kill(program, signal.SIGSTOP if request == PAUSE else signal.SIGCONT)
        status = None if program is None else _reap_children(program)
        if status is not None or request in (END, REMOVE) or is_orphaned:
            has_ended = True
            if program is not None:
                _kill_descendants(process_tree, mark, shared_before)
            _close_streams(2)
            _send(connection, str(status or 0).encode())
    if is_orphaned and program is not None and when_orphaned is not None:
        module, name, *function_arguments = when_orphaned
        getattr(importlib.import_module(module), name)(*function_arguments)
    for folder in folders if is_orphaned else folders[:1]:
        shutil.rmtree(folder, ignore_errors=True)


def _received(connection: socket.socket) -> bytes:
    """Return the parent's next request, b"" if the parent has closed the connection."""
    try:
        return connection.recv(1)
    except ConnectionResetError:  # it had not read the status
        return b""


def _send(connection: socket.socket, message: bytes) -> None:
    """Send a message to the parent, if it still listens."""
    with suppress(BrokenPipeError):
        connection.sendall(message)


def _close_streams(*numbers: int) -> None:
    """Close standard streams of this process, so that they end with the program. Keep stderr for errors until then."""
    with Path(os.devnull).open("r+b") as null:
        for number in numbers:
            os.dup2(null.fileno(), number)


def _start(
    mark: str, arguments: Sequence[str], handlers: Mapping[signal.Signals, Any], connection: socket.socket
) -> int:
    """Start the program with the given signal handlers and without `connection`, and return its process id."""
    parent, pid = os.getpid(), os.fork()
    if pid:
        return pid
    try:
        connection.close()
        os.setsid()  # signals to the program's process group must not reach the keeper
        if sys.platform == "linux":
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
            if os.getppid() != parent:
                os._exit(CANNOT_START)
        for number in (signal.SIGCHLD, signal.SIGPIPE, _PARENT_SIGNAL):
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
    """Kill all descendants of the program at once, by a signal that they cannot handle, and free their shared memory
    and their locks of builds. Keepers among them do so with their own programs, and are waited for.

    `shared_before` are the names of shared memory that existed before, which is kept.
    """
    import psutil

    shared_names: set[str] = set()
    locks: set[Path] = set()
    until = time.monotonic() + END_SECONDS
    num_empty = (
        0  # consecutive rounds without a process: two, since a process that is executing a program shows no mark
    )
    while num_empty < 2 and time.monotonic() < until:
        _reap_children(0)
        processes = {*psutil.Process().children(recursive=True), *process_tree.find_marked_processes(mark)}
        num_empty = 0 if processes else num_empty + 1
        processes = {process for process in processes if not _is_keeper(process)}
        for process in processes:
            with suppress(psutil.Error):
                process.suspend()  # so that it does not share more memory, or react to the end of another one
        shared_names |= process_tree.shared_memory_of(processes).difference(shared_before)
        locks |= process_tree.build_locks_of(processes)
        for process in processes:
            with suppress(psutil.Error):
                process.kill()
        time.sleep(0.01)
    shared_names -= process_tree.shared_memory_of(psutil.process_iter())
    for path in (*(process_tree.SHARED_MEMORY / name for name in shared_names), *locks):
        with suppress(OSError):
            path.unlink()


def _is_keeper(process: Any) -> bool:
    """Whether a process is a keeper, which clears up once its parent has ended."""
    import psutil

    with suppress(psutil.Error):
        return __file__ in process.cmdline()[:3]
    return False


def main(settings: str, *arguments: str) -> None:
    """Run a program under this keeper."""
    options = json.loads(settings)
    # An editable install may be found by an import hook alone, which this isolated process does not have.
    sys.path[:] = [*options["path"], str(Path(__file__).parents[2])]
    with socket.socket(fileno=options["connection"]) as connection:
        keep(connection, options["mark"], options["parent"], options["folders"], options["when_orphaned"], arguments)


if __name__ == "__main__":
    main(*sys.argv[1:])
