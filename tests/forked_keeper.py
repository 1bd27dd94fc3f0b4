"""A keeper in a process forked by `forked_python`; a program of Python that it keeps is a fork of it.

Run by `forked_python` as a program: with the environment as JSON, then a keeper's own arguments. All but the start of
the program is the real keeper's.
"""

from __future__ import annotations

import importlib.util
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

TESTS = str(Path(__file__).resolve().parent)
KEEPER = Path(TESTS).parent / "autotune_amp/processes/keeper.py"


def main(environment: str, settings: str, *arguments: str) -> None:
    """Become the keeper."""
    os.environ.clear()
    os.environ.update(json.loads(environment))
    path, execute = sys.path[1:], os.execvp  # the first entry is this file's folder

    def become(program: str, arguments: list[str]) -> NoReturn:
        if program != sys.executable or not _names_torch(arguments[1:]):
            execute(program, arguments)
        sys.path[:] = [TESTS, *path]
        import forked_python

        forked_python.run_python(arguments[1:])

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
        return "torch" in rest[0] or "processes.server" in rest[0]
    return not kind.startswith("-") and "torch" in Path(kind).read_text()


if __name__ == "__main__":
    main(*sys.argv[1:])
