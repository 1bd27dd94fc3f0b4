"""One walk over a workload: digests of plain values and of code, and the parts that a fingerprint is made of.

A *node* is bytes built bottom-up from a tag and the nodes below it: equal content gives an equal node in every process.
Nothing that differs between processes enters: no address, no ``hash()``, no set order, no path.
"""

from __future__ import annotations

import hashlib
import marshal
import opcode
import warnings
from collections import deque
from contextlib import suppress
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import CodeType
from typing import TYPE_CHECKING, Any, TypeAlias

from autotune_amp.fingerprint.origin import imported_files, version

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterator, Mapping

    from _typeshed import ReadableBuffer

    from autotune_amp.fingerprint.origin import Origin

# A node up to this long stands for itself; hashing every number would be half of the time.
_SHORT = 64


def digest(tag: str, *children: bytes) -> bytes:
    """The node called `tag` with these children, in this order."""
    node = b"".join([tag.encode(), *[b":%d:%b" % (len(child), child) for child in children]])
    return node if len(node) <= _SHORT else hashlib.sha256(node).digest()


def short_hex(node: bytes) -> str:
    """A node as a part's value: 16 hexadecimal digits."""
    return hashlib.sha256(node).hexdigest()[:16]


def text(tag: str, *values: str) -> bytes:
    """A node whose children are strings."""
    return digest(tag, *[value.encode("utf-8", "surrogatepass") for value in values])


# Python 3.13 puts both into every class body: a line number, and names in an order that changes between processes.
_VOLATILE_IN_CLASS_BODY = ("__firstlineno__", "__static_attributes__")
_EXTENDED_ARG, _LOAD_CONST, _STORE_NAME = (opcode.opmap[name] for name in ("EXTENDED_ARG", "LOAD_CONST", "STORE_NAME"))


# By `id` of the exact type: looking a type up by its hash could run a user's metaclass. The unbound methods read a
# subclass's content without running what it overrides.
LEAVES: dict[int, Callable[..., bytes]] = {
    id(type(None)): lambda _: b"None",
    id(bool): lambda value: b"bool %d" % value,
    id(int): lambda value: text("int", int.__format__(value, "x")),
    id(float): lambda value: text("float", float.__repr__(value)),
    id(complex): lambda value: text("complex", complex.__repr__(value)),
    id(str): lambda value: text("str", str.__str__(value)),
    id(bytes): lambda value: digest("bytes", bytes(value)),
}


def code_digest(code: CodeType) -> bytes:
    """What the code does: its instructions, constants and names, with nested code; not where it stands."""
    # Version 0 of the format writes neither references nor interning, which depend on what else the process holds.
    return digest("code", marshal.dumps(_bare(code), 0))


def _bare(constant: object) -> Any:
    """A constant as data that has one order and no place. Code is itself without its lines, file and specialisation."""
    if isinstance(constant, CodeType):
        if _VOLATILE_IN_CLASS_BODY[0] in constant.co_names:
            return ("class body", *_class_body(constant))
        constants = tuple([_bare(c) for c in constant.co_consts])
        return constant.replace(co_consts=constants, co_filename="", co_firstlineno=1, co_linetable=b"")
    if isinstance(constant, frozenset):
        return ("frozenset", *sorted(marshal.dumps(_bare(element), 0) for element in constant))
    if isinstance(constant, slice):  # a constant from Python 3.14 on, which version 0 cannot write
        return ("slice", constant.start, constant.stop, constant.step)
    return tuple([_bare(c) for c in constant]) if isinstance(constant, tuple) else constant


def _class_body(code: CodeType) -> Iterator[object]:
    """A class body by its instructions with their constants, without the constants that change by themselves."""
    previous: object = None
    for index in range(0, len(code.co_code), 2):
        operation, argument = code.co_code[index], _argument(code.co_code, index)
        if operation == _STORE_NAME and code.co_names[argument] in _VOLATILE_IN_CLASS_BODY:
            previous = None
        yield previous
        previous = (operation, _bare(code.co_consts[argument]) if operation == _LOAD_CONST else argument)
    yield from (previous, code.co_names, code.co_freevars, code.co_cellvars)


def _argument(instructions: bytes, index: int) -> int:
    """The argument of the instruction at `index`, with the higher bytes that stand before it."""
    argument, shift = instructions[index + 1], 8
    while index >= 2 and instructions[index - 2] == _EXTENDED_ARG:
        index -= 2
        argument |= instructions[index + 1] << shift
        shift += 8
    return argument


class _Reader(SourceFileLoader):
    """Takes the code that Python keeps of an imported file where it is up to date; keeps none itself."""

    def set_data(self, path: str, data: ReadableBuffer, *, _mode: int = 0) -> None:
        """Write nothing."""


Handler: TypeAlias = "Callable[[Walk, Any], bytes]"


class Walk:
    """One walk. Parts wait in a queue, so that what the workload itself names is named after it."""

    def __init__(self, handler_of: Callable[[type], Handler]) -> None:
        self.parts: dict[str, str] = {}
        self.unknown: dict[str, None] = {}
        self._handler_of = handler_of
        self._queue: deque[tuple[str, Callable[[], bytes]]] = deque()
        self._named: dict[Hashable, tuple[str, object]] = {}  # holds what a part reads, so that its id stays its own
        self._num_named: dict[str, int] = {}
        self._start("")

    def _start(self, name: str) -> None:
        self._path = [name]
        self._num_tensors = 0
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

    def part(self, key: Hashable, name: str, work: Callable[[], bytes]) -> bytes:
        """A link to the part of its own that `key` stands for; queued where it is new."""
        if key not in self._named:
            number = self._num_named[name] = self._num_named.get(name, 0) + 1
            unique = name if number == 1 else f"{name} #{number}"
            self._named[key] = (unique, work)
            self._queue.append((unique, work))
        return text("part", self._named[key][0])

    def is_part(self, key: Hashable) -> bool:
        """Whether `key` stands for a part already."""
        return key in self._named

    def note(self, origin: Origin) -> None:
        """Make a part of a user's source file, or of a library's version; Python's own is in `versions()`."""
        if origin.is_user and origin.file is not None:
            self.part(("source", origin.file), f"source file {origin.label}", lambda: self._file(origin))
        elif origin.kind == "library" and f"version of {origin.root}" not in self.parts:
            known = version(origin.root)
            self.parts[f"version of {origin.root}"] = f"={known}" if known else short_hex(self._file(origin))

    def _file(self, origin: Origin) -> bytes:
        """A library's file by its bytes; a user's source by its code, without comments; its imports are noted."""
        try:
            content = Path(str(origin.file)).read_bytes()
        except OSError as error:
            self.unknown[f"source file {origin.label} cannot be known: {error.strerror}"] = None
            return text("unknown")
        if origin.is_user:
            for imported in imported_files(content.decode("utf-8", "replace"), origin.package):
                self.note(imported)
            # A template that is no Python, or a binary; Python has warned of the user's source where it imported it.
            with suppress(SyntaxError, ValueError), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                code = _Reader("", str(origin.file)).get_code("")
                if code is not None:
                    return code_digest(code)
        return digest("file", content)

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
            found = self._handler_of(type(obj))(self, obj)
        finally:
            del self._depths[key]
        self._digests[key] = (obj, found)
        return found

    def child(self, step: str, obj: Any) -> bytes:
        """The digest of an object one `step` further, which names it if it cannot be known."""
        self._path.append(step)
        found = self.value(obj)
        self._path.pop()
        return found

    def tensor(self, described: bytes) -> bytes:
        """The digest of a tensor by its number in this part, so that tied weights show."""
        self._num_tensors += 1
        return digest("tensor", described, b"%d" % self._num_tensors)

    def attributes(self, named: Mapping[str, Any]) -> bytes:
        """The digest of attributes, whatever order they were set in."""
        children = [text("name", name) + self.child(f".{name}", named[name]) for name in sorted(named)]
        return digest("attributes", *children)

    def unknowable(self, obj: object, why: str) -> bytes:
        """Note that this object cannot be compared."""
        cls = type(obj)
        kind = cls.__qualname__ if cls.__module__ == "builtins" else f"{cls.__module__}.{cls.__qualname__}"
        self.unknown[f"{''.join(self._path)} cannot be known: {kind} {why}"] = None
        return text("unknown")
