"""Whose code a module is, the user's or a library's; and reading objects without running any of the user's code."""

from __future__ import annotations

import importlib.metadata
import os
import sys
import types
from contextlib import suppress
from functools import cache
from importlib.machinery import PathFinder
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

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


# --- objects: no property, no metaclass, no `__getattr__` of the user's is asked

_get_type = type.__dict__


def mro(cls: type) -> tuple[type, ...]:
    """The bases of a class, itself first."""
    bases: tuple[type, ...] = _get_type["__mro__"].__get__(cls)
    return bases


def class_dict(cls: type) -> dict[str, Any]:
    """What the class itself defines."""
    namespace: dict[str, Any] = _get_type["__dict__"].__get__(cls)
    return namespace


def class_name(cls: type) -> tuple[str, str]:
    """Module and qualified name."""
    module, name = _get_type["__module__"].__get__(cls), _get_type["__qualname__"].__get__(cls)
    return module if isinstance(module, str) else "?", name


def instance_dict(obj: object) -> dict[str, Any]:
    """The attributes set on the object, empty where it has no such dictionary."""
    for base in mro(type(obj)):
        descriptor: Any = class_dict(base).get("__dict__")
        if type(descriptor) in (types.GetSetDescriptorType, types.MemberDescriptorType):  # the latter in modules
            namespace: dict[str, Any] = descriptor.__get__(obj)
            return namespace
    return {}


def slots(obj: object) -> dict[str, Any]:
    """The values in the object's slots; one that a class below shadows stands behind the name of its own class."""
    found: dict[str, Any] = {}
    for base in mro(type(obj)):
        for name, descriptor in class_dict(base).items():
            if type(descriptor) is types.MemberDescriptorType and not name.startswith("__"):
                with suppress(AttributeError):  # an empty slot
                    found[name if name not in found else f"{class_name(base)[1]}.{name}"] = descriptor.__get__(obj)
    return found


def attributes_of(obj: object) -> dict[str, Any]:
    """Slots and dictionary."""
    return slots(obj) | instance_dict(obj)


def is_a(obj: object, *kinds: type) -> bool:
    """``isinstance`` by the real type; ``isinstance`` asks an object's ``__class__``, which may be a property."""
    return issubclass(type(obj), kinds)


def is_opaque(cls: type) -> bool:
    """Whether instances hold data of C or Rust beside attributes and slots, which ``copyreg`` refuses to pickle."""
    offsets = (_get_type[name].__get__(cls) for name in ("__dictoffset__", "__weakrefoffset__"))
    num_slots = sum(
        type(member) is types.MemberDescriptorType for base in mro(cls) for member in class_dict(base).values()
    )
    size = object.__basicsize__ + 8 * (sum(offset > 0 for offset in offsets) + num_slots)
    return bool(_get_type["__basicsize__"].__get__(cls) > size or _get_type["__itemsize__"].__get__(cls))
