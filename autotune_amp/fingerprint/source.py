"""Digest of code, origin of modules (the user's or a library's), and imports of a source file. Imports nothing."""

from __future__ import annotations

import hashlib
import importlib.metadata
import os
import re
import sys
from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from functools import cache
from importlib.machinery import PathFinder
from importlib.util import resolve_name
from pathlib import Path
from types import CodeType
from typing import NamedTuple

# A *node* is bytes built bottom-up from a tag and the nodes below it: equal content, equal node, in every process. A
# node up to this long is kept as it is; hashing every number would take half of the time.
_SHORT = 64


def digest(tag: str, *children: bytes) -> bytes:
    """Return the node called `tag` with these children, in this order."""
    node = b"".join([tag.encode(), *[b":%d:%b" % (len(child), child) for child in children]])
    return node if len(node) <= _SHORT else hashlib.sha256(node).digest()


def text(tag: str, *values: str) -> bytes:
    """Return a node whose children are strings."""
    return digest(tag, *[value.encode("utf-8", "surrogatepass") for value in values])


def short_hex(node: bytes) -> str:
    """Return 16 hexadecimal digits of a node's hash, the value of a part."""
    return hashlib.sha256(node).hexdigest()[:16]


def code_digest(code: CodeType) -> bytes:
    """Return the digest of instructions, constants and names, with nested code, but not of the position in the file."""
    names = (code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars)
    counts = (code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount, code.co_flags)
    handlers = getattr(code, "co_exceptiontable", b"")  # from Python 3.11 on
    return digest("code", code.co_code, handlers, repr((names, counts)).encode(), *map(_constant, code.co_consts))


def _constant(constant: object) -> bytes:
    if isinstance(constant, CodeType):
        return code_digest(constant)
    if isinstance(constant, (tuple, frozenset)):
        elements = map(_constant, constant)
        return digest(type(constant).__name__, *(elements if isinstance(constant, tuple) else sorted(elements)))
    return text("constant", repr(constant))


_STANDARD_LIBRARY = str(Path(os.__file__).parent)
_INSTALLED = ("site-packages", "dist-packages")
# autotune_amp and torch, even in their own source trees: too large to read, and identified by their version.
_ALWAYS_LIBRARY = frozenset({"autotune_amp", "torch"})

# An import statement: the module after "from", and everything after "import".
_IMPORT = re.compile(r"(?:\bfrom\s+([.\w]+)\s*)?\bimport\b\s*(\((?:[^)#]|#.*)*\)|(?:[^\n;\\]|\\\n)*)")


class Origin(NamedTuple):
    """Origin of a module. `label` is its file in the user's terms: ``train.py``, ``pkg/data.py``.

    `root` is the top-level package, `package` the base of relative imports. `file` is None in a notebook.
    """

    is_user: bool
    is_library: bool  # if neither, it is Python's own
    root: str
    package: str
    label: str
    file: str | None


def origin_of(namespace: Mapping[str, object]) -> Origin:
    """Return the origin of the module with these globals."""
    known = (namespace.get(key) for key in ("__name__", "__file__", "__package__"))
    name, file, package = (value if type(value) is str else None for value in known)
    return _locate(name or "?", file, package)


def module_origin(name: object) -> Origin:
    """Return the origin of a module by name, such as a class's ``__module__``."""
    module = sys.modules.get(name) if isinstance(name, str) else None
    return origin_of({"__name__": name} if module is None else vars(module))


@cache
def _locate(name: str, file: str | None, package: str | None = None) -> Origin:
    root, path = name.partition(".")[0], Path(file or "")
    is_package = path.stem == "__init__"
    if package is None:
        package = name if is_package else name.rpartition(".")[0]
    is_library = root in _ALWAYS_LIBRARY
    if file is None:
        is_user = not is_library and (name == "__main__" or root not in sys.stdlib_module_names)
        return Origin(is_user, is_library, root, package, name, None)
    # The folder on ``sys.path`` that contains the module; ``pip install --target`` leaves metadata in it.
    folder = path.parents[min(name.count(".") + is_package, len(path.parents) - 1)]
    is_library |= not {*_INSTALLED}.isdisjoint(path.parts) or any(folder.glob("*.dist-info"))
    if is_library or file.startswith(_STANDARD_LIBRARY + os.sep):
        return Origin(False, is_library, root, package, name, file)
    depth = 1 if name == "__main__" else name.count(".") + 1 + is_package
    return Origin(True, False, root, package, "/".join(path.parts[-depth:]), file)


@cache
def version(root: str) -> str | None:
    """Return the version of an installed top-level package without importing it, None if unknown."""
    module = sys.modules.get(root)
    stated = vars(module).get("__version__") if module is not None else None
    if isinstance(stated, str):
        return str(stated)
    try:
        return importlib.metadata.version(root)
    except importlib.metadata.PackageNotFoundError:
        return None


def imported_files(source: str, package: str) -> Iterator[Origin]:
    """Yield the user's modules that a source text imports, at the top level or in its functions.

    Text that only resembles an import, or a module in one, is tried too: the result may contain more than is imported.
    """
    for name in imported_names(source):
        with suppress(ImportError):  # relative to nothing
            found = find_module(resolve_name(name, package))
            if found is not None:
                yield found


def imported_names(source: str) -> Iterator[str]:
    """Yield the names of modules that a source text may import, relative ones with their dots."""
    for start, listed in dict.fromkeys(_IMPORT.findall(source)):
        names = re.findall(r"[.\w]+", re.sub(r"#.*", "", listed))
        base = start if start.endswith(".") or not start else f"{start}."
        yield from (start, *(f"{base}{name}" for name in names))


def named_modules(names: Collection[str]) -> Iterator[Origin]:
    """Yield the user's modules that names in code may refer to, alone or in pairs (``from package import module``)."""
    for name in names:
        if (found := find_module(name)) is not None:
            yield found
            yield from filter(None, (find_module(f"{name}.{other}") for other in names))


def find_module(name: str) -> Origin | None:
    """Return the origin of a user's module that may not be imported yet, without importing it or its package."""
    found = _find(name)
    return found[0] if found is not None and found[0].is_user else None


def _find(name: str) -> tuple[Origin, list[str]] | None:
    """Return a module's origin and the folders of its submodules; None if it does not exist or is inside a library."""
    module = sys.modules.get(name)
    if module is not None:
        return origin_of(vars(module)), list(vars(module).get("__path__", ()))
    parent, _, last = name.rpartition(".")
    if not last or name.partition(".")[0] in sys.stdlib_module_names:
        return None
    above = _find(parent) if parent else None
    if parent and (above is None or not above[0].is_user):
        return None
    spec = PathFinder.find_spec(name, above and above[1])
    if spec is None:
        return None
    return _locate(name, spec.origin if spec.has_location else None), list(spec.submodule_search_locations or ())
