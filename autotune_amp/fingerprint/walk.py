"""Walks a workload and digests what it would run, without running any of it.

No factory is called, and no method of a user's class: objects are read through their dictionaries and slots. What
counts: code, constants, defaults, closures and globals of the functions and classes that are reached, and the source
files they stand in; settings, shapes and dtypes of live objects; versions of libraries. What does not: values of
tensors, comments, line numbers, the working directory. What Python itself cannot pickle (a lock, an open file, a
generator) has no content that could be compared; it is named among the unknown.

Not seen: files that a factory opens, attributes looked up by a computed name, environment variables whose name is not
written in the code.
"""

from __future__ import annotations

from collections import deque
from functools import partial
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import TYPE_CHECKING, Any

from autotune_amp.fingerprint.code import LEAVES, digest, short_hex, text
from autotune_amp.fingerprint.definitions import (
    class_digest,
    class_label,
    class_link,
    function_digest,
    function_label,
    is_library_function,
)
from autotune_amp.fingerprint.instances import instance
from autotune_amp.fingerprint.live import live_handlers
from autotune_amp.fingerprint.origin import module_origin
from autotune_amp.fingerprint.peek import attributes_of, class_name, is_a, mro
from autotune_amp.fingerprint.values import HANDLERS

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Mapping

    from autotune_amp.fingerprint.values import Handler


def workload_parts(workload: object) -> tuple[dict[str, str], tuple[str, ...]]:
    """What makes the workload: a digest by part name, and what of it cannot be known (empty: everything can).

    `workload` is an object with attributes, or a function that returns one and is not called. A name is what a user
    would call the part: ``workload.loss (function loss of train.py)``, ``global LEARNING_RATE of train.py``. A value
    that begins with ``=`` is no digest but the thing itself, a library's version.
    """
    walk = Walk()
    if is_a(workload, FunctionType, BuiltinFunctionType, MethodType, type, partial):
        walk.root("workload", workload)
    else:
        walk.part("workload", "workload", lambda: class_link(walk, type(workload)))
        for name, value in attributes_of(workload).items():
            walk.root(f"workload.{name}", value)
    walk.run()
    return walk.parts, tuple(walk.unknown)


class Walk:
    """One walk. Parts wait in a queue, so that what the workload itself names is named after it."""

    def __init__(self) -> None:
        self.parts: dict[str, str] = {}
        self.unknown: dict[str, None] = {}
        self.imported: set[str] = set()
        self.class_links: dict[int, tuple[type, bytes]] = {}  # holds the class, so that its id stays its own
        self._handlers: dict[int, Handler] = HANDLERS | live_handlers()
        self._queue: deque[tuple[str, Callable[[], bytes]]] = deque()
        self._names: dict[Hashable, str] = {}
        self._taken: set[str] = set()
        self._start("")

    def _start(self, name: str) -> None:
        self._path = [name]
        self._shapes: list[bytes] = []
        self._digests: dict[int, tuple[object, bytes]] = {}  # holds the object, likewise
        self._depths: dict[int, int] = {}

    def run(self) -> None:
        """Digest every part that is reached."""
        while self._queue:
            name, work = self._queue.popleft()
            self._start(name)
            try:
                self.parts[name] = short_hex(work())
            except RecursionError:
                self.unknown[f"{name} cannot be known: it is nested too deeply"] = None
            if self._shapes:
                self.parts[f"{name}: shapes"] = short_hex(digest("shapes", *self._shapes))

    def part(self, key: Hashable, name: str, work: Callable[[], bytes]) -> bytes:
        """A link to the part of its own that `key` stands for; queued where it is new."""
        if key not in self._names:
            unique, number = name, 2
            while unique in self._taken:
                unique, number = f"{name} #{number}", number + 1
            self._taken.add(unique)
            self._names[key] = unique
            self._queue.append((unique, work))
        return text("part", self._names[key])

    def root(self, name: str, value: Any) -> None:
        """Make an attribute of the workload a part, which is the function or class itself where it is one."""
        work: Callable[[], bytes] = partial(self.value, value)
        if id(value) in self._names:
            self.part(name, name, work)
        elif is_a(value, FunctionType) and not is_library_function(value):
            self.part(id(value), f"{name} ({function_label(value)})", partial(function_digest, self, value))
        elif is_a(value, type) and module_origin(class_name(value)[0]).is_user:
            self.part(id(value), f"{name} ({class_label(value)})", partial(class_digest, self, value))
        else:
            self.part(name, name, work)

    def value(self, obj: Any) -> bytes:
        """The digest of any object."""
        leaf = LEAVES.get(id(type(obj)))
        if leaf is not None:
            return leaf(obj)
        key = id(obj)
        if key in self._digests:
            return self._digests[key][1]
        if key in self._depths:
            return text("cycle", str(len(self._depths) - self._depths[key]))
        self._depths[key] = len(self._depths)
        try:
            found = self._handler(type(obj))(self, obj)
        finally:
            del self._depths[key]
        self._digests[key] = (obj, found)
        return found

    def _handler(self, cls: type) -> Handler:
        for base in mro(cls):
            handler = self._handlers.get(id(base))
            if handler is not None:
                return handler
        return instance

    def child(self, step: str, obj: Any, read: Handler | None = None) -> bytes:
        """The digest of an object one `step` further, which names it if it cannot be known."""
        self._path.append(step)
        found = self.value(obj) if read is None else read(self, obj)
        self._path.pop()
        return found

    def shape(self, described: bytes) -> bytes:
        """Put a tensor's shape among the part's shapes; returns its number there."""
        self._shapes.append(described)
        return text("shape", str(len(self._shapes)))

    def attributes(self, named: Mapping[str, Any]) -> bytes:
        """The digest of attributes, whatever order they were set in."""
        children = (
            digest("attribute", text("name", name), self.child(f".{name}", named[name])) for name in sorted(named)
        )
        return digest("attributes", *children)

    def unknowable(self, obj: object, why: str) -> bytes:
        """Note that this object cannot be compared."""
        module, name = class_name(type(obj))
        kind = name if module == "builtins" else f"{module}.{name}"
        self.unknown[f"{''.join(self._path)} cannot be known: {kind} {why}"] = None
        return text("unknown")
