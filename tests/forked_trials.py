"""Python processes for tests that speak with them while they run, forked from one that has imported torch.

A fork takes 0.1 s of a core where a start takes 2 to 4; `forked_python` does the same for programs that are run to
their end. A trial process is as one that was started: arguments, environment, session, standard streams and the mark by
which all that came of it is found. `AUTOTUNE_AMP_PROCESS` is in the environment that the kernel shows of it.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import functools
import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import traceback
import types
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO

MARK, MARK_LENGTH = "AUTOTUNE_AMP_PROCESS", 32
# What trial processes import, without what is ours: a module of ours may look at the environment.
PRELOADED = ("torch", "torch._dynamo", "torch.distributed.fsdp", "numpy", "cloudpickle", "msgspec", "psutil")
MAX_BYTES = 1 << 17


class Forking:
    """A process that has imported torch, and starts others as forks of itself."""

    def __init__(self) -> None:
        self._channel, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._lock = threading.Lock()  # slots start their processes in threads of their own
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, __file__, str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                env={**os.environ, MARK: "0" * MARK_LENGTH},
                stdin=subprocess.DEVNULL,
            )

    @property
    def pid(self) -> int:
        return self._process.pid

    def popen(
        self,
        arguments: Sequence[str],
        *,
        stdin: int | None = None,
        stdout: int | None = None,
        stderr: int | None = None,
        env: Mapping[str, str] | None = None,
        start_new_session: bool = False,
    ) -> Forked:
        """Start `python -c TEXT ...` or `python FILE ...` as `subprocess.Popen` would."""
        del start_new_session  # each has one
        ours: list[IO[bytes] | None] = []
        theirs = []
        for number, wanted in enumerate((stdin, stdout, stderr)):
            if wanted is None:
                theirs.append(os.dup(number))
                ours.append(None)
                continue
            assert wanted == subprocess.PIPE
            reads, writes = os.pipe()
            theirs.append(reads if number == 0 else writes)
            ours.append(os.fdopen(writes, "wb") if number == 0 else os.fdopen(reads, "rb"))
        status, theirs_status = os.pipe()
        theirs.append(theirs_status)
        # The parent whose end a trial process is told of is the one that it is forked from.
        told = [str(self.pid) if argument == str(os.getpid()) else argument for argument in arguments[1:]]
        asked = {"arguments": told, "cwd": str(Path.cwd()), "env": dict(os.environ if env is None else env)}
        try:
            with self._lock:
                socket.send_fds(self._channel, [json.dumps(asked).encode()], theirs)
                pid = int(self._channel.recv(100))
        finally:
            for descriptor in theirs:
                os.close(descriptor)
        return Forked(pid, status, *ours)

    def close(self) -> None:
        self._channel.close()
        self._process.wait(60)


@functools.cache
def forking() -> Forking:
    """The one of this process, until it ends."""
    from conftest import standing

    started = Forking()
    standing.add(started.pid)
    atexit.register(started.close)
    return started


@contextlib.contextmanager
def forked_trials() -> Iterator[None]:
    """Trial processes that start meanwhile are forked."""
    import pytest

    from autotune_amp.isolation import process

    with pytest.MonkeyPatch.context() as patch:
        if "VIRTUAL_GPU" not in os.environ:  # whose machine is chosen when torch is imported
            by_fork = types.SimpleNamespace(Popen=forking().popen, PIPE=subprocess.PIPE)
            patch.setattr(process, "subprocess", by_fork)
        yield


class Forked:
    """What is used of `subprocess.Popen`, of a process that is no child of ours."""

    def __init__(
        self, pid: int, status: int, stdin: IO[bytes] | None, stdout: IO[bytes] | None, stderr: IO[bytes] | None
    ) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self.stdin, self.stdout, self.stderr = stdin, stdout, stderr
        self._status = status  # the exit status is written there once

    def poll(self) -> int | None:
        return self._ended_within(0.0)

    def wait(self, timeout: float | None = None) -> int:
        if self._ended_within(timeout) is None:
            raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0.0)
        assert self.returncode is not None
        return self.returncode

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)

    def _ended_within(self, seconds: float | None) -> int | None:
        if self.returncode is None and select.select([self._status], [], [], seconds)[0]:
            self.returncode = int(os.read(self._status, 100) or -signal.SIGKILL)
            os.close(self._status)
        return self.returncode


def _serve(channel: socket.socket) -> None:
    """Fork for each request; write the exit status of each fork where it asked for it."""
    for name in PRELOADED:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()
    running: dict[int, tuple[int, int]] = {}  # by a descriptor of the process: its number, where its status goes
    while True:
        for ready in select.select([channel.fileno(), *running], [], [])[0]:
            if ready in running:
                pid, status = running.pop(ready)
                os.write(status, str(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])).encode())
                os.close(status)
                os.close(ready)
                continue
            asked, descriptors, _, _ = socket.recv_fds(channel, MAX_BYTES, 4)
            if not asked:
                return
            pid = os.fork()
            if pid == 0:
                channel.close()
                for descriptor, (_, status) in running.items():
                    os.close(descriptor)
                    os.close(status)
                _become(descriptors, **json.loads(asked))
            running[os.pidfd_open(pid)] = pid, descriptors.pop()
            for descriptor in descriptors:
                os.close(descriptor)
            channel.send(str(pid).encode())


def _become(descriptors: list[int], arguments: list[str], cwd: str, env: dict[str, str]) -> None:
    """Turn this process into the one that was asked for; it does not return."""
    status = 1
    try:
        os.setsid()
        for number, descriptor in enumerate(descriptors[:3]):
            os.dup2(descriptor, number)
        for descriptor in descriptors:
            os.close(descriptor)
        os.chdir(cwd)
        os.environ.clear()
        os.environ.update(env)
        if MARK in env:
            ctypes.memmove(_MARK_ADDRESS, env[MARK].encode(), MARK_LENGTH)
        tempfile.tempdir = None
        _run(arguments)
        status = 0
    except SystemExit as ended:
        status = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def _run(arguments: list[str]) -> None:
    if arguments[0] == "-c":
        sys.argv = ["-c", *arguments[2:]]
        sys.modules["__main__"] = main = types.ModuleType("__main__")
        exec(compile(arguments[1], "<string>", "exec"), vars(main))
    else:
        sys.argv = arguments
        sys.path[0] = str(Path(arguments[0]).parent)
        runpy.run_path(arguments[0], run_name="__main__")


if __name__ == "__main__":
    # Where the kernel reads it: on the stack, as it was given; what Python sets later is elsewhere.
    _getenv = ctypes.CDLL(None).getenv
    _getenv.restype = ctypes.c_void_p
    _MARK_ADDRESS = _getenv(MARK.encode())
    with socket.socket(fileno=int(sys.argv[1])) as _channel:
        _serve(_channel)
