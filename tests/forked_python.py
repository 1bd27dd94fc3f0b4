"""Python processes for tests, forked from one that has imported torch: 0.1 s of a core for a start that takes 2 to 4.

A program sees its own arguments, folder, environment, session, standard streams and exit handlers, and the
`sitecustomize` on the path that its environment names; the kernel shows its marks in its environment. What happens
before `import torch` is left out, and what only the start of an interpreter reads, such as PYTHONHASHSEED, is the
server's, as are CPU affinity, nice value and what the loader read. The keepers that `autotune_amp` starts in it are
forks, too, and its children. Linux alone.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import gc
import importlib
import importlib.util
import json
import multiprocessing.process
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import types
from collections.abc import Iterator, Mapping, Sequence
from importlib.machinery import PathFinder
from pathlib import Path
from typing import IO, Any, NoReturn

# What programs of tests import; nothing of ours, whose modules may look at the environment.
PRELOADED = (
    *("torch", "torch._dynamo", "torch.distributed.fsdp", "numpy", "optuna", "sqlalchemy"),
    *("cloudpickle", "msgspec", "psutil", "rich", "typer"),
)
KEEPER = str(Path(__file__).with_name("forked_keeper.py"))
MARKS, MARK_LENGTH = ("AUTOTUNE_AMP_PROCESS", "AUTOTUNE_AMP_TEST_MARK"), 32
MAX_REQUEST_BYTES, READY = 1 << 17, b"ready"


class ForkedProcess:
    """A process that the fork server started, with the methods of `subprocess.Popen` that tests use."""

    def __init__(self, pid: int, status: int, streams: Sequence[IO[bytes] | None]) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self.stdin, self.stdout, self.stderr = streams
        self._status = status  # a pipe to which the exit status is written once
        self._lock = threading.Lock()

    def poll(self) -> int | None:
        return self._ended_within(0.0)

    def wait(self, timeout: float | None = None) -> int:
        if self._ended_within(timeout) is None:
            raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0.0)
        assert self.returncode is not None
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def _ended_within(self, seconds: float | None) -> int | None:
        with self._lock:
            if self.returncode is None and select.select([self._status], [], [], seconds)[0]:
                self.returncode = int(os.read(self._status, 100) or -signal.SIGKILL)
                os.close(self._status)
        return self.returncode


class Forks:
    """Starts programs as forks of the process at the other end of a channel."""

    def __init__(self, channel: socket.socket) -> None:
        self._channel = channel
        self._lock = threading.Lock()
        self._number = 0  # of the latest request: an answer to one that was interrupted may come later

    def popen(
        self,
        arguments: Sequence[str],
        *,
        stdin: int | None = None,
        stdout: int | None = None,
        stderr: int | None = None,
        cwd: Path | None = None,
        env: Mapping[str, str] | None = None,
        pass_fds: Sequence[int] = (),
    ) -> ForkedProcess:
        """Start `python *arguments`: a script, `-m` with a module or `-c` with a text, then its arguments."""
        ours: list[IO[bytes] | None] = []
        theirs = []
        for number, wanted in enumerate((stdin, stdout, stderr)):
            ours.append(None)
            if wanted == subprocess.PIPE:
                reads, writes = os.pipe()
                theirs.append(reads if number == 0 else writes)
                ours[-1] = os.fdopen(writes, "wb") if number == 0 else os.fdopen(reads, "rb")
            elif wanted == subprocess.DEVNULL:
                theirs.append(os.open(os.devnull, os.O_RDWR))
            elif wanted == subprocess.STDOUT:
                theirs.append(os.dup(theirs[-1]))
            else:
                theirs.append(os.dup(number if wanted is None else wanted))
        status, theirs_status = os.pipe()
        theirs += [*map(os.dup, pass_fds), theirs_status]
        environment = dict(os.environ if env is None else env)
        request = {
            "arguments": list(arguments),
            "cwd": str(cwd or Path.cwd()),
            "env": environment,
            "pass_fds": list(pass_fds),
        }
        try:
            with self._lock:
                self._number += 1
                socket.send_fds(self._channel, [json.dumps({**request, "number": self._number}).encode()], theirs)
                answered = 0
                while answered != self._number:
                    answer = self._channel.recv(100)
                    assert answer, "the fork server has ended"
                    answered, pid = map(int, answer.split())
        finally:
            for descriptor in theirs:
                os.close(descriptor)
        return ForkedProcess(pid, status, ours)

    def run(
        self, arguments: Sequence[str], *, cwd: Path, env: Mapping[str, str], stdin: str = "", timeout: float = 250.0
    ) -> subprocess.CompletedProcess[str]:
        """Run `python *arguments` to its end; with its whole session it is killed when `timeout` seconds are over."""
        with contextlib.ExitStack() as stack:
            given, out, err = (stack.enter_context(tempfile.TemporaryFile("w+")) for _ in range(3))
            given.write(stdin)
            given.seek(0)
            process = self.popen(
                arguments, stdin=given.fileno(), stdout=out.fileno(), stderr=err.fileno(), cwd=cwd, env=env
            )
            try:
                process.wait(timeout)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                raise
            texts = []
            for stream in (out, err):
                stream.seek(0)
                texts.append(stream.read())
        return subprocess.CompletedProcess([sys.executable, *arguments], process.wait(), *texts)

    def popen_keeper(self, command: Sequence[str], *, env: Mapping[str, str], **options: Any) -> ForkedProcess:
        """Start a keeper as a fork, by the command that starts one; a Python program of torch that it keeps is one."""
        _, _, _, *arguments = command  # Python, its option, the keeper's file
        del options["start_new_session"]  # each fork has one
        own = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        return self.popen([KEEPER, json.dumps(dict(env)), *arguments], env=own, **options)


TRUE_POPEN = subprocess.Popen


def forking_popen(forks: Forks) -> Any:
    """Return a `subprocess.Popen` that starts the keepers of `autotune_amp` as forks, and all else as ever."""

    class Popen(TRUE_POPEN):  # type: ignore[type-arg] # generic for a type checker alone
        def __new__(cls, args: Any = (), *_: Any, **options: Any) -> Any:  # named as in `subprocess.Popen`
            parts: list[Any] = [args] if isinstance(args, str | bytes | os.PathLike) else list(args)
            if len(parts) > 2 and parts[1] == "-I" and str(parts[2]).endswith("/processes/keeper.py"):
                return forks.popen_keeper(parts, **options)
            return super().__new__(cls)

    return Popen


class ForkServer(Forks):
    """A process that has imported torch and starts each program that it is asked for as a fork of itself."""

    def __init__(self) -> None:
        channel, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        super().__init__(channel)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, __file__, str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                env={**os.environ, **dict.fromkeys(MARKS, "0" * MARK_LENGTH)},
                stdin=subprocess.DEVNULL,
                start_new_session=True,  # a Ctrl-C at the terminal ends the tests, and so the channel
            )
        assert channel.recv(100) == READY, "the fork server did not start"  # imports are no program's time

    @property
    def pid(self) -> int:
        return self._process.pid

    def close(self) -> None:
        self._channel.close()
        self._process.wait(60)


@contextlib.contextmanager
def forked_programs(server: ForkServer) -> Iterator[None]:
    """Fork the keepers that this process starts meanwhile."""
    subprocess.Popen = forking_popen(server)  # type: ignore[misc]
    try:
        yield
    finally:
        subprocess.Popen = TRUE_POPEN  # type: ignore[misc]


def _serve(channel: socket.socket, mark_addresses: dict[str, int]) -> None:
    """Fork for each request and answer with the number of the fork; write its exit status to the pipe it came with."""
    running: dict[int, tuple[int, int]] = {}  # a process's number and the pipe for its status, by its pidfd
    while True:
        for ready in select.select([channel.fileno(), *running], [], [])[0]:
            if ready in running:
                pid, status = running.pop(ready)
                with contextlib.suppress(BrokenPipeError):  # nobody waits for it
                    os.write(status, str(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])).encode())
                os.close(status)
                os.close(ready)
                continue
            request, descriptors, _, _ = socket.recv_fds(channel, MAX_REQUEST_BYTES, 5)
            if not request:
                return
            asked = json.loads(request)
            number = asked.pop("number")
            pid = os.fork()
            if pid == 0:
                channel.close()
                for descriptor, (_, status) in running.items():
                    os.close(descriptor)
                    os.close(status)
                if asked["arguments"][0] != KEEPER:
                    subprocess.Popen = forking_popen(_own_server(descriptors, mark_addresses))  # type: ignore[misc]
                _become(descriptors, mark_addresses, **asked)
            running[os.pidfd_open(pid)] = pid, descriptors.pop()
            for descriptor in descriptors:
                os.close(descriptor)
            channel.send(f"{number} {pid}".encode())


def _own_server(descriptors: list[int], mark_addresses: dict[str, int]) -> Forks:
    """Fork a server for what this process will start, whose forks are so its descendants; it ends with this process.

    `descriptors` are this process's, which the server closes.
    """
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    if os.fork() == 0:
        ours.close()
        for descriptor in descriptors:
            os.close(descriptor)
        try:
            _serve(theirs, mark_addresses)
        finally:
            os._exit(0)
    theirs.close()
    return Forks(ours)


def _become(
    descriptors: list[int],
    mark_addresses: dict[str, int],
    arguments: list[str],
    cwd: str,
    env: dict[str, str],
    pass_fds: list[int],
) -> None:
    """Turn this process into the one that was asked for; it does not return."""
    os.setsid()
    numbers = [0, 1, 2, *pass_fds]
    for number, descriptor in zip(numbers, descriptors, strict=False):
        os.dup2(descriptor, number)
    for descriptor in set(descriptors).difference(numbers):
        os.close(descriptor)
    sys.stdin = open(0, closefd=False)  # noqa: SIM115 - as long as the process lives
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(env)
    for name, address in mark_addresses.items():
        ctypes.memmove(address, env.get(name, "0" * MARK_LENGTH).encode(), MARK_LENGTH)
    sys.modules["numpy"].random.seed()
    run_python(arguments)


def run_python(arguments: Sequence[str]) -> NoReturn:
    """Do what Python does with its command line, to the end of this process."""
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    tempfile.tempdir = None
    multiprocessing.process.ORIGINAL_DIR = str(Path.cwd())  # type: ignore[attr-defined]
    status = 1
    try:
        _customize_path()
        _run_program(*arguments)
        status = 0
    except SystemExit as ended:
        status = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
        if isinstance(ended.code, str):
            print(ended.code, file=sys.stderr)
    except BaseException as error:
        trace = error.__traceback__
        while trace is not None and trace.tb_next is not None and _is_ours(trace.tb_frame.f_code.co_filename):
            trace = trace.tb_next
        sys.excepthook(type(error), error.with_traceback(trace), trace)
    finally:
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def _is_ours(file: str) -> bool:
    return file in (__file__, "<frozen runpy>")


def _customize_path() -> None:
    """Put the folders of PYTHONPATH first on the path, without this file's, and run the `sitecustomize` of one."""
    own = str(Path(__file__).parent)
    rest = [entry for entry in sys.path if entry != own]
    named = [entry for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry]
    sys.path[:] = ["", *named, *(entry for entry in rest if entry not in named)]
    customized: Any = PathFinder.find_spec("sitecustomize", named)
    if customized is not None:
        sys.modules["sitecustomize"] = module = importlib.util.module_from_spec(customized)
        customized.loader.exec_module(module)


def _run_program(kind: str, *arguments: str) -> None:
    if kind == "-m":
        sys.argv = list(arguments)
        runpy.run_module(arguments[0], run_name="__main__", alter_sys=True)
        return
    sys.modules["__main__"] = main = types.ModuleType("__main__")
    if kind == "-c":
        sys.argv = ["-c", *arguments[1:]]
        exec(compile(arguments[0], "<string>", "exec", dont_inherit=True), vars(main))
        return
    # As the interpreter does, which names a script by its whole path and announces it to audit hooks.
    path = str(Path.cwd() / kind)
    sys.argv = [kind, *arguments]
    sys.path[0] = str(Path(path).resolve().parent)
    main.__file__ = path
    text = Path(path).read_bytes()
    sys.audit("cpython.run_file", path)
    exec(compile(text, path, "exec", dont_inherit=True), vars(main))


if __name__ == "__main__":
    # The kernel shows the environment as it was given, on the stack; what Python sets later is elsewhere.
    _getenv = ctypes.CDLL(None).getenv
    _getenv.restype = ctypes.c_void_p
    _addresses = {name: _getenv(name.encode()) for name in MARKS}
    with socket.socket(fileno=int(sys.argv[1])) as _channel:
        for _name in PRELOADED:
            importlib.import_module(_name)
        gc.collect()
        gc.freeze()
        _channel.send(READY)
        _serve(_channel, _addresses)
