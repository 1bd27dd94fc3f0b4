"""Pythons for tests, forked from one that has imported torch: 0.05 s of a core for a start that takes 2 by itself.

What a program sees is as in a process of its own: arguments, folder, environment, standard streams, exit handlers, and
`sitecustomize` where it is on the path that its environment names. Only what happens before `import torch` is left out.
"""

from __future__ import annotations

import atexit
import importlib
import importlib.util
import json
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Sequence
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

# What programs of tests import; nothing of ours, whose modules may look at the environment.
PRELOADED = ("torch", "torch._dynamo", "optuna", "sqlalchemy", "cloudpickle", "msgspec", "psutil", "rich", "typer")
WRITES = os.O_WRONLY | os.O_CREAT | os.O_APPEND


class ForkServer:
    """A process that has imported torch and runs each program that it is asked for in a fork of its own."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    @property
    def pid(self) -> int:
        return self._process.pid

    def run(
        self,
        arguments: Sequence[str],
        *,
        cwd: Path,
        env: dict[str, str],
        stdin: str = "",
        timeout: float = 200.0,
    ) -> subprocess.CompletedProcess[str]:
        """Run `python *arguments` to its end: a script, `-m` with a module or `-c` with a text, then its arguments."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with tempfile.TemporaryDirectory(prefix="amp-") as folder:
            given, out, err = (Path(folder) / name for name in ("in", "out", "err"))
            given.write_text(stdin)
            streams = [str(path) for path in (given, out, err)]
            request = {"arguments": list(arguments), "cwd": str(cwd), "env": env, "streams": streams}
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
            pid = int(self._process.stdout.readline())
            late = threading.Timer(timeout, os.killpg, (pid, signal.SIGKILL))
            late.daemon = True
            late.start()
            status = int(self._process.stdout.readline())
            late.cancel()
            texts = (out.read_text(), err.read_text())
        return subprocess.CompletedProcess([sys.executable, *arguments], status, *texts)

    def close(self) -> None:
        with self._process:
            pass  # the end of its standard input is its own


def _serve() -> None:
    """Answer each request with the child's number, then its exit status, on a line each."""
    for name in PRELOADED:
        importlib.import_module(name)

    for line in sys.stdin:
        pid = os.fork()
        if pid == 0:
            _become(**json.loads(line))
        print(pid, flush=True)
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        print(status, flush=True)


def _become(arguments: list[str], cwd: str, env: dict[str, str], streams: list[str]) -> None:
    """Turn this process into the one that was asked for; it does not return."""
    os.setsid()
    for number, (path, flags) in enumerate(zip(streams, (os.O_RDONLY, WRITES, WRITES), strict=True)):
        os.dup2(os.open(path, flags, 0o600), number)
    sys.stdin = open(0, closefd=False)  # noqa: SIM115 - as long as the process lives
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(env)
    tempfile.tempdir = None
    atexit._clear()
    status = 1
    try:
        _run(arguments)
        status = 0
    except SystemExit as ended:
        status = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
        if isinstance(ended.code, str):
            print(ended.code, file=sys.stderr)
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def _run(arguments: list[str]) -> None:
    """Do what Python does with its command line, from the path on."""
    own = str(Path(__file__).parent)
    rest = [entry for entry in sys.path if entry != own]
    named = [entry for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry]
    sys.path[:] = ["", *named, *(entry for entry in rest if entry not in named)]
    customized: Any = PathFinder.find_spec("sitecustomize", named)
    if customized is not None:
        sys.modules["sitecustomize"] = module = importlib.util.module_from_spec(customized)
        customized.loader.exec_module(module)
    kind, *more = arguments
    if kind == "-m":
        sys.argv = more
        runpy.run_module(more[0], run_name="__main__", alter_sys=True)
    elif kind == "-c":
        sys.argv = ["-c", *more[1:]]
        exec(compile(more[0], "<string>", "exec"), {"__name__": "__main__"})
    else:
        sys.argv = arguments
        sys.path[0] = str(Path(kind).resolve().parent)
        runpy.run_path(kind, run_name="__main__")


if __name__ == "__main__":
    _serve()
