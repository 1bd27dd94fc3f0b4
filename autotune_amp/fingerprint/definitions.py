"""The user's functions and classes: each a part of its own, with the globals and closures that it reaches."""

from __future__ import annotations

import os
import sys
from types import BuiltinFunctionType, CellType, FunctionType, ModuleType
from typing import TYPE_CHECKING, Any

from autotune_amp.distributed.launcher import is_from_launcher
from autotune_amp.fingerprint.code import code_digest, digest, references, text
from autotune_amp.fingerprint.origin import module_origin, origin_of
from autotune_amp.fingerprint.peek import class_dict, class_name, instance_dict, is_a, mro
from autotune_amp.fingerprint.sources import import_link, imported_names, note

if TYPE_CHECKING:
    from collections.abc import Iterator

    from autotune_amp.fingerprint.walk import Walk

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


def _references(walk: Walk, function: FunctionType) -> Iterator[bytes]:
    found = references(function.__code__)
    for chain in found.names:
        yield _reference(walk, chain, function.__globals__)
    for name in imported_names(found.imports, str(function.__globals__.get("__package__") or "")):
        yield import_link(walk, name)
    for name in found.environment:
        yield _environment(walk, name)


def _environment(walk: Walk, name: str) -> bytes:
    value = None if is_from_launcher(name) else os.environ.get(name)
    return walk.part(("environment", name), f"environment variable {name}", lambda: walk.value(value))


def _reference(walk: Walk, chain: tuple[str, ...], namespace: dict[str, Any]) -> bytes:
    """What a dotted name stands for: followed through modules, and from there on a value as a whole."""
    name, rest = chain[0], chain[1:]
    if name in _MODULE_NAMES:
        return text("module name", name)
    if name not in namespace:
        return text("not global", name)
    value = namespace[name]
    while is_a(value, ModuleType) and rest:
        origin = origin_of(instance_dict(value))
        note(walk, origin)
        if not origin.is_user:
            return _library_reference(walk, value, rest)
        namespace, name, rest = instance_dict(value), rest[0], rest[1:]
        if name not in namespace:
            return text("no attribute", origin.label, name)
        value = namespace[name]
    if is_definition(value):
        return walk.value(value)
    label = f"global {name} of {origin_of(namespace).label}"
    return walk.part(("global", id(namespace), name), label, lambda: walk.value(value))


def _library_reference(walk: Walk, module: ModuleType, names: tuple[str, ...]) -> bytes:
    """By name, for a library may load it later; unless the user put a function of their own in its place."""
    found: Any = module
    for name in names:
        if not is_a(found, ModuleType):
            break
        found = instance_dict(found).get(name)
    if is_a(found, FunctionType) and origin_of(found.__globals__).is_user:
        return walk.value(found)
    return text("library value", str(instance_dict(module).get("__name__")), *names)


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
