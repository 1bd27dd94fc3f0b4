"""Whose code a module is: the user's, whose content counts, or a library's, whose version counts."""

from __future__ import annotations

import importlib.metadata
import os
import sys
from functools import cache
from importlib.machinery import PathFinder
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Mapping

_STANDARD_LIBRARY = str(Path(os.__file__).parent)
_INSTALLED = ("site-packages", "dist-packages")
# Ours, and torch even where it is built in its own source tree: far too much to read, and both say their version.
_ALWAYS_LIBRARY = frozenset({"autotune_amp", "torch"})


class Origin(NamedTuple):
    """Where a module comes from. `label` is its file as a user would name it: ``train.py``, ``pkg/data.py``.

    `root` is the top-level package. `file` is None for what has none: a notebook, an interpreter's prompt.
    """

    is_user: bool
    is_standard: bool
    root: str
    label: str
    file: str | None


def origin_of(namespace: Mapping[str, object]) -> Origin:
    """The origin of the module whose globals these are."""
    name, file = namespace.get("__name__"), namespace.get("__file__")
    return locate(name if type(name) is str else "?", file if type(file) is str else None)


def module_origin(name: object) -> Origin:
    """The origin of a module by name, as classes give it."""
    module = sys.modules.get(name) if isinstance(name, str) else None
    return origin_of({"__name__": name} if module is None else vars(module))


@cache
def locate(name: str, file: str | None) -> Origin:
    """The origin of module `name` read from `file`."""
    root = name.partition(".")[0]
    if root in _ALWAYS_LIBRARY:
        return Origin(False, False, root, name, file)
    if file is None:
        is_standard = name != "__main__" and root in sys.stdlib_module_names
        return Origin(not is_standard, is_standard, root, name, None)
    path = Path(file)
    if any(part in _INSTALLED for part in path.parts) or _is_target_folder(_root_folder(name, path)):
        return Origin(False, False, root, name, file)
    if file.startswith(_STANDARD_LIBRARY + os.sep):
        return Origin(False, True, root, name, file)
    depth = 1 if name == "__main__" else name.count(".") + 1 + (path.stem == "__init__")
    return Origin(True, False, root, "/".join(path.parts[-depth:]), file)


def _root_folder(name: str, path: Path) -> Path:
    """The folder on ``sys.path`` that the module was found in."""
    return path.parents[min(name.count(".") + (path.stem == "__init__"), len(path.parents) - 1)]


@cache
def _is_target_folder(folder: Path) -> bool:
    """Whether ``pip install --target`` made the folder: packages lie in it beside their metadata."""
    try:
        return any(entry.name.endswith(".dist-info") for entry in os.scandir(folder))
    except OSError:
        return False


@cache
def version(root: str) -> str | None:
    """The version of an installed top-level package, None where none can be found. It is not imported for this."""
    module = sys.modules.get(root)
    stated = vars(module).get("__version__") if module is not None else None
    if isinstance(stated, str):
        return str(stated)
    try:
        return importlib.metadata.version(root)
    except importlib.metadata.PackageNotFoundError:
        return None


def find_module(name: str) -> Origin | None:
    """The origin of a module that may not be imported yet, without importing it or its package; None: not there."""
    module = sys.modules.get(name)
    if module is not None:
        return origin_of(vars(module))
    folders: list[str] | None = None
    parts = name.split(".")
    for depth in range(1, len(parts) + 1):
        dotted = ".".join(parts[:depth])
        parent = sys.modules.get(dotted)
        if parent is not None:
            folders = list(vars(parent).get("__path__", ()))
            continue
        if parts[0] in sys.stdlib_module_names:
            return locate(name, None)
        spec = PathFinder.find_spec(dotted, folders)
        if spec is None:
            return None
        if depth == len(parts):
            return locate(name, spec.origin if spec.has_location else None)
        folders = list(spec.submodule_search_locations or ())
    return None
