"""A keeper of a command in a process forked by `forked_python`; a program of Python that it keeps is a fork of it.

Run by `forked_commands` as a program: with the file of its standard input and that of its output, the environment as
JSON, and a keeper's own arguments. All but the start of the program is the real keeper's.
"""

from __future__ import annotations

import atexit
import importlib.util
import json
import multiprocessing.process
import os
import signal
import sys
import tempfile
import threading
import types
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

TESTS = str(Path(__file__).resolve().parents[1])
KEEPER = Path(TESTS).parent / "autotune_amp/launch/keeper.py"


def main(given: str, printed: str, environment: str, settings: str, *arguments: str) -> None:
    """Become the keeper, and say its number first."""
    for number, (file, flags) in enumerate(((given, os.O_RDONLY), (printed, os.O_WRONLY), (printed, os.O_WRONLY))):
        os.dup2(os.open(file, flags), number)
    os.write(1, f"{os.getpid()}\n".encode())
    os.environ.clear()
    os.environ.update(json.loads(environment))
    path, execute = sys.path[1:], os.execvp  # the first entry is this file's folder

    def become(program: str, arguments: list[str]) -> NoReturn:
        if program != sys.executable or not _names_torch(arguments[1:]):
            execute(program, arguments)
        sys.path[:] = path
        run_python(arguments[1:])

    os.execvp = become  # type: ignore[assignment]
    # By its path, as it is run: nothing of the package is there in the program.
    spec: Any = importlib.util.spec_from_file_location("_keeper", KEEPER)
    keeper = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(keeper)
    known = {**json.loads(settings), "parent": os.getppid()}
    keeper.main(json.dumps(known), *arguments)


def _names_torch(arguments: Sequence[str]) -> bool:
    """Whether the program is one that imports torch: another one must not find it imported."""
    kind, *rest = arguments
    if kind in ("-c", "-m"):
        return "torch" in rest[0]
    return not kind.startswith("-") and "torch" in Path(kind).read_text()


def run_python(arguments: Sequence[str]) -> NoReturn:
    """Do what Python does with its command line, to the end of the process."""
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    atexit._clear()
    tempfile.tempdir = None
    multiprocessing.process.ORIGINAL_DIR = str(Path.cwd())  # type: ignore[attr-defined]
    sys.path.insert(0, TESTS)
    import forked_python

    status = 1
    try:
        if arguments[0].startswith("-"):
            forked_python._run(list(arguments))
        else:
            forked_python._run(["-c", ""])  # the path, and what the environment brings in
            _run_file(list(arguments))
        status = 0
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
    except BaseException as error:
        trace = error.__traceback__
        while trace is not None and trace.tb_next is not None and _is_of_tests(trace.tb_frame.f_code.co_filename):
            trace = trace.tb_next
        sys.excepthook(type(error), error.with_traceback(trace), trace)
    finally:
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def _is_of_tests(file: str) -> bool:
    return Path(file).name in ("forked_keeper.py", "forked_python.py", "<frozen runpy>")


def _run_file(arguments: list[str]) -> None:
    """Run a script as the interpreter does, which names it by its whole path and announces it to audit hooks."""
    path = str(Path.cwd() / arguments[0])
    sys.argv = arguments
    sys.path[0] = str(Path(path).resolve().parent)
    module = sys.modules["__main__"] = types.ModuleType("__main__")
    module.__file__ = path
    text = Path(path).read_bytes()
    sys.audit("cpython.run_file", path)
    exec(compile(text, path, "exec", dont_inherit=True), module.__dict__)


if __name__ == "__main__":
    main(*sys.argv[1:])
