"""The user's source files, libraries' versions, and modules imported inside functions."""

from __future__ import annotations

import warnings
from importlib.machinery import SourceFileLoader
from pathlib import Path
from typing import TYPE_CHECKING

from autotune_amp.fingerprint.code import code_digest, digest, references, short_hex, text
from autotune_amp.fingerprint.origin import Origin, find_module, module_origin, origin_of, version
from autotune_amp.fingerprint.peek import instance_dict

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import CodeType, ModuleType

    from _typeshed import ReadableBuffer

    from autotune_amp.fingerprint.code import Import
    from autotune_amp.fingerprint.walk import Walk


def note(walk: Walk, origin: Origin) -> None:
    """Make a part of a user's source file, or of a library's version; Python's own is in `versions()`."""
    if origin.is_standard:
        return
    if origin.is_user:
        if origin.file is not None:
            walk.part(("source", origin.file), f"source file {origin.label}", lambda: _file_digest(walk, origin))
        return
    name = f"version of {origin.root}"
    if name not in walk.parts:
        known = version(origin.root)
        walk.parts[name] = f"={known}" if known is not None else short_hex(_file_digest(walk, origin))


def note_module(walk: Walk, name: object) -> None:
    """Note where a module of this name comes from."""
    if isinstance(name, str):
        note(walk, module_origin(name))


def module_link(walk: Walk, module: ModuleType) -> bytes:
    """The digest of a module as a value: the user's by its file, a library's by its version."""
    origin = origin_of(instance_dict(module))
    note(walk, origin)
    return text("module", origin.label)


def import_link(walk: Walk, name: str) -> bytes:
    """A module that is imported inside a function: its file and, since it may not be loaded, those that it imports."""
    origin = find_module(name)
    if origin is None:
        return text("no module", name)
    if name not in walk.imported:
        walk.imported.add(name)
        note(walk, origin)
        code = _code(origin) if origin.is_user else None
        package = name if Path(origin.label).stem == "__init__" else name.rpartition(".")[0]
        for imported in imported_names(references(code).imports, package) if code is not None else ():
            import_link(walk, imported)
    return text("module", origin.label)


def imported_names(imports: tuple[Import, ...], package: str) -> Iterator[str]:
    """The full names of the modules in import statements; ``from package import name`` may name two."""
    for module, level, names in imports:
        start = package.rsplit(".", level - 1)[0] if level else ""
        base = f"{start}.{module}".strip(".")
        yield base
        if _is_user_package(base):
            yield from (f"{base}.{name}" for name in names if find_module(f"{base}.{name}") is not None)


def _is_user_package(name: str) -> bool:
    origin = find_module(name)
    return origin is not None and origin.is_user and (origin.file is None or Path(origin.file).stem == "__init__")


def _file_digest(walk: Walk, origin: Origin) -> bytes:
    """A file without its comments, blank lines and formatting; one that is no Python source counts by its bytes."""
    code = _code(origin) if origin.is_user else None
    if code is not None:
        return code_digest(code)
    try:
        return digest("file", Path(origin.file or "").read_bytes())
    except OSError as error:
        walk.unknown[f"source file {origin.label} cannot be known: {error.strerror}"] = None
        return text("unknown")


class _Reader(SourceFileLoader):
    """Takes the code that Python keeps of an imported file where it is up to date; keeps none itself."""

    def set_data(self, path: str, data: ReadableBuffer, *, _mode: int = 0) -> None:
        """Write nothing."""


def _code(origin: Origin) -> CodeType | None:
    """The file's code, None where it has none."""
    if origin.file is None:
        return None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return _Reader("", origin.file).get_code("")
    except (SyntaxError, ValueError, OSError):
        return None
