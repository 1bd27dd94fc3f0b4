"""Edited copies of files, run in place of the originals before anything is written.

Everything but the text is the original's: name, ``__file__``, folder on ``sys.path``, modules that it imports from
beside itself. A file's code is read in two ways. Imports, ``python -m`` and the children of multiprocessing go through
Python code (`SourceFileLoader`, `io.open_code`), which is patched. ``python train.py`` reads the file in C, under any
launcher; but right before that, with ``sys.path`` and ``sys.argv`` ready, it raises an audit event, and the hook runs
the edited text in ``__main__`` instead. An exception in the hook ends Python as if the file had raised it.
"""

from __future__ import annotations

import io
import linecache
import os
import sys
from importlib.machinery import SourceFileLoader
from typing import Any


def arm(overlay: dict[str, str]) -> None:
    """Run other text in place of files: `overlay` maps the real path of each file to the file that holds its text."""
    texts = {}
    for path, copy in overlay.items():
        with open(copy, "rb") as file:
            texts[path] = file.read()
    _overlay_loader(texts)
    _overlay_open(texts)
    sys.addaudithook(_Main(texts))


class _Main:
    """Audit hook that runs the edited text in place of the file in ``python FILE``."""

    __cantrace__ = True  # debuggers and coverage see the code that runs in the hook

    def __init__(self, texts: dict[str, bytes]) -> None:
        self._texts = texts

    def __call__(self, event: str, arguments: Any) -> None:
        if event != "cpython.run_file":
            return
        path = arguments[0]
        text = self._texts.get(os.path.realpath(path))
        if text is None:
            return
        main = sys.modules["__main__"].__dict__
        main.update(__file__=path, __cached__=None, __loader__=SourceFileLoader("__main__", path))
        exec(_code(text, path), main)  # noqa: S102 - it is the user's own program
        raise SystemExit(0)  # else Python would run the file itself


def _overlay_loader(texts: dict[str, bytes]) -> None:
    original = SourceFileLoader.get_code

    def get_code(loader: SourceFileLoader, name: str) -> Any:
        path = loader.get_filename(name)
        text = texts.get(os.path.realpath(path))
        # Byte code is neither read from the original's cache nor written to it.
        return original(loader, name) if text is None else _code(text, path)

    SourceFileLoader.get_code = get_code  # type: ignore[assignment, method-assign]


def _overlay_open(texts: dict[str, bytes]) -> None:
    original = io.open_code

    def open_code(path: str) -> Any:
        text = texts.get(os.path.realpath(path))
        return original(path) if text is None else io.BytesIO(text)

    io.open_code = open_code


def _code(text: bytes, path: str) -> Any:
    lines = io.TextIOWrapper(io.BytesIO(text), errors="replace").readlines()
    linecache.cache[path] = (len(text), None, lines, path)  # tracebacks show what runs
    return compile(text, path, "exec", dont_inherit=True)
