"""Run edited copies of source files in place of the originals, which stay unchanged on disk.

Name, ``__file__``, ``sys.path`` and imports from the same folder are those of the original. Python reads source files
in two ways. Imports, ``python -m`` and the children of multiprocessing use `SourceFileLoader` and `io.open_code`, which
are patched. ``python train.py`` reads the file in C, but raises an audit event right before that, with ``sys.path`` and
``sys.argv`` ready: a hook runs the edited text in ``__main__`` instead. An exception in the hook ends Python as if the
file had raised it.
"""

from __future__ import annotations

import io
import linecache
import os
import sys
from importlib.machinery import SourceFileLoader
from typing import Any


def arm(overlay: dict[str, str]) -> None:
    """Install the hooks. `overlay` maps the real path of each original to the path of its edited copy."""
    texts = {}
    for path, copy in overlay.items():
        with open(copy, "rb") as file:
            texts[path] = file.read()
    _patch_source_loader(texts)
    _patch_open_code(texts)
    sys.addaudithook(_MainScriptHook(texts))


class _MainScriptHook:
    """Audit hook that runs the edited text in place of the file in ``python FILE``."""

    __cantrace__ = True  # let debuggers and coverage trace the code run by the hook

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
        exec(_compile(text, path), main)  # noqa: S102 - the user's own program
        raise SystemExit(0)  # else Python would run the file itself


def _patch_source_loader(texts: dict[str, bytes]) -> None:
    original = SourceFileLoader.get_code

    def get_code(loader: SourceFileLoader, name: str) -> Any:
        path = loader.get_filename(name)
        text = texts.get(os.path.realpath(path))
        # Byte code is neither read from the original's cache nor written to it.
        return original(loader, name) if text is None else _compile(text, path)

    SourceFileLoader.get_code = get_code  # type: ignore[assignment, method-assign]


def _patch_open_code(texts: dict[str, bytes]) -> None:
    original = io.open_code

    def open_code(path: str) -> Any:
        text = texts.get(os.path.realpath(path))
        return original(path) if text is None else io.BytesIO(text)

    io.open_code = open_code


def _compile(text: bytes, path: str) -> Any:
    lines = io.TextIOWrapper(io.BytesIO(text), errors="replace").readlines()
    linecache.cache[path] = (len(text), None, lines, path)  # tracebacks show the edited text
    return compile(text, path, "exec", dont_inherit=True)
