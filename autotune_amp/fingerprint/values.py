"""How objects of Python's own types are read: containers by content, descriptors by what they hold."""

from __future__ import annotations

import functools
import os
import types
import weakref
from collections import OrderedDict, defaultdict, deque
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Any, TypeAlias

from autotune_amp.fingerprint.code import LEAVES, code_digest, digest, text
from autotune_amp.fingerprint.definitions import class_link, function_link, member
from autotune_amp.fingerprint.peek import attributes_of
from autotune_amp.fingerprint.sources import module_link, note_module

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from autotune_amp.fingerprint.walk import Walk

Handler: TypeAlias = "Callable[[Walk, Any], bytes]"

# A larger container counts by its type, its length and this many elements spread evenly over it, so that a list of a
# million file names does not cost a search its cache. A larger set has no order to sample by: type and length alone.
MAX_ELEMENTS = 1000
NUM_SAMPLED = 100


_PLAIN = frozenset(map(id, (list, tuple, dict, set, frozenset, OrderedDict, deque)))


def sampled(elements: Iterable[Any], length: int) -> Iterable[Any]:
    """All elements of a small container, some of a large one."""
    return elements if length <= MAX_ELEMENTS else islice(elements, 0, None, -(-length // NUM_SAMPLED))


def _kind(walk: Walk, obj: object, length: int) -> bytes:
    """A container without its elements: the user's own class of it may have attributes."""
    link = class_link(walk, type(obj))
    return digest(str(length), link, *(() if id(type(obj)) in _PLAIN else (walk.attributes(attributes_of(obj)),)))


def _sequence(read: type, walk: Walk, obj: Any) -> bytes:
    length = read.__len__(obj)  # type: ignore[attr-defined]
    elements = sampled(read.__iter__(obj), length)  # type: ignore[attr-defined]
    children = [walk.child(f"[{index}]", element) for index, element in enumerate(elements)]
    return digest(
        "sequence",
        class_link(walk, type(obj)),
        text("length", str(length)),
        *children,
        walk.attributes(attributes_of(obj)),
    )


def _set(read: type, walk: Walk, obj: Any) -> bytes:
    length = read.__len__(obj)  # type: ignore[attr-defined]
    elements = read.__iter__(obj) if length <= MAX_ELEMENTS else ()  # type: ignore[attr-defined]
    children = sorted([walk.child("{}", element) for element in elements])
    return digest(
        "set", class_link(walk, type(obj)), text("length", str(length)), *children, walk.attributes(attributes_of(obj))
    )


def _mapping(read: type, walk: Walk, obj: Any) -> bytes:
    """Equal dictionaries are equal here, whatever their order, which is a set's where they were made from one."""
    length = read.__len__(obj)  # type: ignore[attr-defined]
    items = sampled(read.items(obj), length)  # type: ignore[attr-defined]
    children = [
        digest("item", walk.value(key), walk.child(f"[{key!r}]" if type(key) is str else "[...]", value))
        for key, value in items
    ]
    if not issubclass(read, OrderedDict):
        children.sort()
    if read is defaultdict:
        children.append(walk.child(".default_factory", obj.default_factory))
    return digest(
        "mapping",
        class_link(walk, type(obj)),
        text("length", str(length)),
        *children,
        walk.attributes(attributes_of(obj)),
    )


def _of_leaf(read: type, walk: Walk, obj: Any) -> bytes:
    """A subclass of ``int``, ``str`` and the like."""
    return digest("leaf", class_link(walk, type(obj)), LEAVES[id(read)](obj), walk.attributes(attributes_of(obj)))


def _descriptor(walk: Walk, obj: Any) -> bytes:
    return digest("descriptor", text("name", obj.__name__), walk.value(obj.__objclass__))


def _builtin(walk: Walk, obj: Any) -> bytes:
    owner = obj.__self__
    note_module(walk, obj.__module__)
    return digest("builtin", text("name", str(obj.__module__), obj.__qualname__), walk.child(".__self__", owner))


def _cell(walk: Walk, obj: Any) -> bytes:
    try:
        return digest("cell", walk.value(obj.cell_contents))
    except ValueError:
        return text("empty cell")


def _property(walk: Walk, obj: Any) -> bytes:
    return digest("property", *map(partial(member, walk), (obj.fget, obj.fset, obj.fdel)))


def _method(walk: Walk, obj: Any) -> bytes:
    return digest("method", walk.value(obj.__func__), walk.child(".__self__", obj.__self__))


# By `id` of the type, for the reason given at `LEAVES`; the first found along an object's bases reads it.
HANDLERS: dict[int, Handler] = {
    **{id(kind): partial(_sequence, kind) for kind in (list, tuple, deque)},
    **{id(kind): partial(_set, kind) for kind in (set, frozenset)},
    **{id(kind): partial(_mapping, kind) for kind in (dict, OrderedDict, defaultdict, types.MappingProxyType)},
    **{id(kind): partial(_of_leaf, kind) for kind in (int, float, complex, str, bytes, bytearray)},
    **{
        id(kind): _descriptor
        for kind in (
            types.WrapperDescriptorType,
            types.MethodDescriptorType,
            types.GetSetDescriptorType,
            types.MemberDescriptorType,
            types.ClassMethodDescriptorType,
        )
    },
    id(types.BuiltinFunctionType): _builtin,
    id(types.MethodWrapperType): lambda walk, obj: digest(
        "method wrapper", text("name", obj.__name__), walk.value(obj.__self__)
    ),
    id(types.MethodType): _method,
    id(types.FunctionType): function_link,
    id(types.ModuleType): module_link,
    id(type): class_link,
    # The variables that code names are parts of their own.
    id(type(os.environ)): lambda walk, obj: class_link(walk, type(obj)),
    id(types.CodeType): lambda _, obj: code_digest(obj),
    id(types.CellType): _cell,
    id(property): _property,
    id(staticmethod): lambda walk, obj: digest("staticmethod", member(walk, obj.__func__)),
    id(classmethod): lambda walk, obj: digest("classmethod", member(walk, obj.__func__)),
    id(functools._lru_cache_wrapper): lambda walk, obj: digest("lru_cache", member(walk, obj.__wrapped__)),
    id(functools.cached_property): lambda walk, obj: digest("cached_property", member(walk, obj.func)),
    id(weakref.ReferenceType): lambda walk, obj: digest("weakref", walk.value(weakref.ReferenceType.__call__(obj))),
}
