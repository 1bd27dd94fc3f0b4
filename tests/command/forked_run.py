"""`autotune-amp` with these arguments; the program of Python that it puts in its place begins in this process.

Run by `ForkServer.run` as a program, for `autotune-amp run`: the command has torch without importing it anew.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

TESTS = str(Path(__file__).resolve().parents[1])


def main() -> None:
    """Run the command line."""
    path = sys.path[1:]  # the first entry is this file's folder

    def become(program: str, arguments: Sequence[str], environment: dict[str, str]) -> NoReturn:
        assert program == sys.executable
        os.environ.clear()
        os.environ.update(environment)
        sys.path[:] = [TESTS, *path]
        for name in [name for name in sys.modules if name.partition(".")[0] == "autotune_amp"]:
            del sys.modules[name]
        import forked_python

        forked_python.run_python(arguments[1:])

    os.execvpe = become  # type: ignore[assignment]
    from autotune_amp.cli import main as command_line

    command_line()


if __name__ == "__main__":
    main()
