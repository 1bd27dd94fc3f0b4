"""Whose code a module is, the user's or a library's, and what a source file imports; nothing is imported for it."""

from __future__ import annotations

import importlib.metadata
import os
import re
import sys
from functools import cache
from importlib.machinery import PathFinder
from importlib.util import resolve_name
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping

_STANDARD_LIBRARY = str(Path(os.__file__).parent)
_INSTALLED = ("site-packages", "dist-packages")
# Ours, and torch even where it is built in its own source tree: far too much to read, and both say their version.
_ALWAYS_LIBRARY = frozenset({"autotune_amp", "torch"})

# An import statement: the module after "from", and all that stands behind "import".
_IMPORT = re.compile(r"(?:\bfrom\s+([.\w]+)\s*)?\bimport\b\s*(\((?:[^)#]|#.*)*\)|(?:[^\n;\\]|\\\n)*)")


class Origin(NamedTuple):
    """Where a module comes from. `label` is its file as a user would name it: ``train.py``, ``pkg/data.py``.

    `root` is the top-level package, `package` what relative imports start at. `file` is None for what has none: a
    notebook, an interpreter's prompt.
    """

    kind: str  # user, library or standard
    root: str
    package: str
    label: str
    file: str | None

    @property
    def is_user(self) -> bool:
        """Whether the user wrote it."""
        return self.kind == "user"


def origin_of(namespace: Mapping[str, object]) -> Origin:
    """The origin of the module whose globals these are."""
    name, file, package = (namespace.get(key) for key in ("__name__", "__file__", "__package__"))
    return _locate(
        name if type(name) is str else "?",
        file if type(file) is str else None,
        package if type(package) is str else None,
    )


def module_origin(name: object) -> Origin:
    """The origin of a module by name, as classes give it."""
    module = sys.modules.get(name) if isinstance(name, str) else None
    return origin_of({"__name__": name} if module is None else vars(module))


@cache
def _locate(name: str, file: str | None, package: str | None = None) -> Origin:
    root, path = name.partition(".")[0], Path(file or "")
    is_package = path.stem == "__init__"
    if package is None:
        package = name if is_package else name.rpartition(".")[0]
    if file is None:
        is_standard = name != "__main__" and root in sys.stdlib_module_names
        kind = "library" if root in _ALWAYS_LIBRARY else "standard" if is_standard else "user"
        return Origin(kind, root, package, name, None)
    # The folder on ``sys.path`` that the module was found in; ``pip install --target`` leaves metadata in it.
    folder = path.parents[min(name.count(".") + is_package, len(path.parents) - 1)]
    is_installed = not {*_INSTALLED}.isdisjoint(path.parts) or any(folder.glob("*.dist-info"))
    if root in _ALWAYS_LIBRARY or is_installed:
        return Origin("library", root, package, name, file)
    if file.startswith(_STANDARD_LIBRARY + os.sep):
        return Origin("standard", root, package, name, file)
    depth = 1 if name == "__main__" else name.count(".") + 1 + is_package
    return Origin("user", root, package, "/".join(path.parts[-depth:]), file)


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


def imported_files(source: str, package: str) -> Iterator[Origin]:
    """The user's modules that a source text imports, now or when one of its functions is called.

    What only looks like an import, or like a module in one, is tried too: more may be found than is imported.
    """
    for start, listed in dict.fromkeys(_IMPORT.findall(source)):
        names = re.findall(r"[.\w]+", re.sub(r"#.*", "", listed))
        base = start if start.endswith(".") or not start else f"{start}."
        for name in (start, *(f"{base}{name}" for name in names)):
            try:
                found = find_module(resolve_name(name, package))
            except ImportError:  # relative to nothing
                continue
            if found is not None and found.is_user:
                yield found


def named_modules(names: Collection[str]) -> Iterator[Origin]:
    """The modules that names in code may be, alone or two together, as in ``from package import module``."""
    for name in names:
        found = find_module(name)
        within = (find_module(f"{name}.{other}") for other in names) if found is not None and found.is_user else ()
        yield from filter(None, (found, *within))


def find_module(name: str) -> Origin | None:
    """The origin of a module that may not be imported yet, without importing it or its package; None: not there."""
    folders: list[str] | None = None
    parts = name.split(".")
    for depth in range(1, len(parts) + 1):
        dotted = ".".join(parts[:depth])
        module = sys.modules.get(dotted)
        if module is not None:
            if depth == len(parts):
                return origin_of(vars(module))
            folders = list(vars(module).get("__path__", ()))
            continue
        if not all(parts) or parts[0] in sys.stdlib_module_names:
            return None
        spec = PathFinder.find_spec(dotted, folders)
        if spec is None:
            return None
        if depth == len(parts):
            return _locate(name, spec.origin if spec.has_location else None)
        folders = list(spec.submodule_search_locations or ())
    return None
