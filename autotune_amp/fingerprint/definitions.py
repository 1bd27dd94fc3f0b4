"""The user's functions, classes and source files: what code they hold, and the globals and closures they reach."""

from __future__ import annotations

import dis
import os
import sys
import warnings
from functools import partial
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import BuiltinFunctionType, CellType, CodeType, FunctionType, ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from autotune_amp.distributed.ranks import is_from_launcher
from autotune_amp.fingerprint.origin import (
    Origin,
    class_dict,
    class_name,
    find_module,
    instance_dict,
    is_a,
    module_origin,
    mro,
    origin_of,
    version,
)
from autotune_amp.fingerprint.walk import code_digest, digest, short_hex, text

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from _typeshed import ReadableBuffer

    from autotune_amp.fingerprint.walk import Walk

Import: TypeAlias = tuple[str, int, tuple[str, ...]]
_IMPORT_NAME = dis.opmap["IMPORT_NAME"]

# What `torch.compile` sets on what it returns.
COMPILED_FROM = "_torchdynamo_orig_callable"

# Names that a module has without the user's doing, some of them paths.
_MODULE_NAMES = frozenset(
    {"__annotations__", "__builtins__", "__cached__", "__debug__", "__doc__", "__file__", "__loader__", "__name__"}
    | {"__package__", "__path__", "__spec__"}
)


def is_definition(value: object) -> bool:
    """Whether the value is a function, class or module, which is linked to, rather than data."""
    return is_a(value, FunctionType, BuiltinFunctionType, ModuleType, type)


def _of_module(kind: str, name: str, module: object) -> str:
    return f"{kind} {name.replace('.<locals>', '')} of {module_origin(module).label}"


# --- functions


def is_library_function(function: FunctionType) -> bool:
    """Whether a library's version says all there is to know: a function of its own that is found by its name.

    A library's wrapper around a function of the user's carries the user's module.
    """
    if origin_of(function.__globals__).is_user or module_origin(function.__module__).is_user:
        return False
    found: Any = instance_dict(sys.modules.get(function.__module__))
    for step in function.__qualname__.split("."):
        found = (class_dict(found) if is_a(found, type) else found).get(step)
        if not is_a(found, type):
            break
    return found is function


def function_label(function: FunctionType) -> str:
    """The function as a message names it: ``function loss of train.py``."""
    return _of_module("function", function.__qualname__, function.__module__)


def function_link(walk: Walk, function: FunctionType) -> bytes:
    """A link: by name into a library, or to a part of the user's."""
    if is_library_function(function):
        note(walk, origin_of(function.__globals__))
        return text("library", function.__module__, function.__qualname__)
    return walk.part(id(function), function_label(function), lambda: function_digest(walk, function))


def function_digest(walk: Walk, function: FunctionType) -> bytes:
    """Code, defaults, closure and what it refers to; of a library's wrapper, what it wraps."""
    own, code = instance_dict(function), function.__code__
    if "hooked" in own:  # torch wraps an optimizer class's `step` when its first instance is made
        return member(walk, own["__wrapped__"])
    cells = dict(zip(code.co_freevars, function.__closure__ or (), strict=True))
    if COMPILED_FROM in own:
        return compiled(walk, own[COMPILED_FROM], cells["self"].cell_contents if "self" in cells else None)
    origin = origin_of(function.__globals__)
    note(walk, origin)
    if origin.is_user:
        body = digest("user code", code_digest(code), *_references(walk, function))
    else:
        body = text("library code", origin.label, code.co_name)
    return digest(
        "function",
        body,
        walk.child("'s defaults", function.__defaults__),
        walk.child("'s defaults", function.__kwdefaults__),
        *(_closure(walk, name, cell, function) for name, cell in cells.items()),
        walk.attributes({name: value for name, value in own.items() if name != "__wrapped__"}),
    )


def compiled(walk: Walk, original: object, context: object) -> bytes:
    """What `torch.compile` returned: what it compiles, and its settings that are plain."""
    settings = instance_dict(context)
    config = settings.get("compiler_config") or {}
    plain = {name: value for name, value in config.items() if type(value) in (bool, int)}
    chosen = (settings.get("fullgraph"), settings.get("_dynamic"), plain)
    return digest("compiled", walk.value(original), walk.value(chosen))


def _closure(walk: Walk, name: str, cell: CellType, function: FunctionType) -> bytes:
    try:
        content = cell.cell_contents
    except ValueError:
        return text("empty cell", name)
    if is_definition(content):
        return digest("cell", text("name", name), walk.value(content))
    outer = function.__qualname__.rpartition(".<locals>")[0] or function.__qualname__
    label = f"closure {name} of {outer.replace('.<locals>', '')}"
    return walk.part(id(cell), label, lambda: walk.value(content))


class Mentioned(NamedTuple):
    """What code, with the code nested in it, may refer to outside itself.

    `names` holds attributes as well as globals, so that more counts than is used. `imports` are (module, level, names)
    of the import statements inside it; `environment` names the environment variables that it may read.
    """

    names: dict[str, None]
    imports: dict[Import, None]
    environment: dict[str, None]


def mentioned(code: CodeType) -> Mentioned:
    """What `code` mentions, each once, in order of appearance."""
    found = Mentioned({}, {}, {})
    waiting = [code]
    for current in waiting:
        found.names.update(dict.fromkeys(current.co_names))
        if _IMPORT_NAME in current.co_code[::2]:
            found.imports.update(dict.fromkeys(_imports(current)))
        if "environ" in current.co_names or "getenv" in current.co_names:
            strings = (c for c in current.co_consts if isinstance(c, str))
            found.environment.update(dict.fromkeys(c for c in strings if c.isidentifier() and c == c.upper()))
        waiting += [constant for constant in current.co_consts if isinstance(constant, CodeType)]
    return found


def _imports(code: CodeType) -> Iterator[Import]:
    """The import statements of this code; the two instructions before each load its level and its names."""
    loaded: list[Any] = []
    for instruction in dis.get_instructions(code):
        if instruction.opname == "IMPORT_NAME":
            yield instruction.argval, loaded[-2], loaded[-1] or ()
        elif instruction.opname != "EXTENDED_ARG":
            loaded.append(instruction.argval)


def _references(walk: Walk, function: FunctionType) -> Iterator[bytes]:
    found = mentioned(function.__code__)
    yield from _globals(walk, function.__globals__, found.names, set())
    for name in imported_names(found.imports, str(function.__globals__.get("__package__") or "")):
        yield import_link(walk, name)
    for name in found.environment:
        yield _environment(walk, name)


def _environment(walk: Walk, name: str) -> bytes:
    value = None if is_from_launcher(name) else os.environ.get(name)
    return walk.part(("environment", name), f"environment variable {name}", lambda: walk.value(value))


def _globals(walk: Walk, namespace: dict[str, Any], names: dict[str, None], seen: set[int]) -> Iterator[bytes]:
    """What a module's globals of these names hold, and those of the modules among them.

    A library's count by its version; but for functions of the user's that were put in their place.
    """
    seen.add(id(namespace))
    origin = origin_of(namespace)
    for name in names:
        if name not in namespace or name in _MODULE_NAMES:
            continue
        value = namespace[name]
        if is_a(value, ModuleType):
            inner = instance_dict(value)
            note(walk, origin_of(inner))
            if id(inner) not in seen:
                yield from _globals(walk, inner, names, seen)
        elif not origin.is_user and not (is_a(value, FunctionType) and origin_of(value.__globals__).is_user):
            continue
        elif is_definition(value):
            yield digest("global", text("name", name), walk.value(value))
        else:
            label = f"global {name} of {origin.label}"
            yield walk.part(("global", id(namespace), name), label, partial(walk.value, value))


# --- classes


def class_label(cls: type) -> str:
    """The class as a message names it: ``class Net of train.py``."""
    module, name = class_name(cls)
    return _of_module("class", name, module)


def class_link(walk: Walk, cls: type) -> bytes:
    """A link: by name into a library, or to a part of the user's."""
    known = walk.class_links.get(id(cls))
    if known is not None:
        return known[1]
    module, name = class_name(cls)
    origin = module_origin(module)
    if origin.is_user:
        link = walk.part(id(cls), class_label(cls), lambda: class_digest(walk, cls))
    else:
        note(walk, origin)
        link = text("library", module, name)
        if replaced := _replaced_methods(cls):
            link = digest("patched", link, *(text("name", name) + walk.value(found) for name, found in replaced))
    walk.class_links[id(cls)] = (cls, link)
    return link


def _replaced_methods(cls: type) -> list[tuple[str, FunctionType]]:
    """Functions of the user's that were put into a library's class, by name."""
    found = {
        name: value
        for base in reversed(mro(cls))
        for name, value in class_dict(base).items()
        if type(value) is FunctionType and _is_written_by_user(value)
    }
    return sorted(found.items())


def _is_written_by_user(function: FunctionType) -> bool:
    """Not what a library generates, as for a named tuple: its module has no file."""
    origin = origin_of(function.__globals__)
    return origin.is_user and (origin.file is not None or origin.root == "__main__")


def class_digest(walk: Walk, cls: type) -> bytes:
    """Bases, metaclass and what the class holds, its methods among it."""
    note(walk, module_origin(class_name(cls)[0]))
    bases = type.__dict__["__bases__"].__get__(cls)
    members = [
        digest("member", text("name", name), walk.child(f".{name}", value, member))
        for name, value in sorted(class_dict(cls).items())
        if _is_member(name, value)
    ]
    return digest("class", class_link(walk, type(cls)), *(class_link(walk, base) for base in bases), *members)


def member(walk: Walk, value: Any) -> bytes:
    """What a class holds: its functions are not parts of their own."""
    if type(value) is FunctionType and not is_library_function(value):
        return function_digest(walk, value)
    return walk.value(value)


def _is_member(name: str, value: object) -> bool:
    """Whether the user put it into the class: not documentation, annotations or Python's bookkeeping."""
    if name == "_abc_impl":
        return False
    is_special = name.startswith("__") and name.endswith("__")
    return not is_special or is_a(value, FunctionType, classmethod, staticmethod, property)


# --- modules and files


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
        for imported in imported_names(mentioned(code).imports, package) if code is not None else ():
            import_link(walk, imported)
    return text("module", origin.label)


def imported_names(imports: Iterable[Import], package: str) -> Iterator[str]:
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
