"""One walk over a workload: digests of plain values and of code, and the parts that a fingerprint is made of.

A *node* is bytes built bottom-up from a tag and the nodes below it: equal content gives an equal node in every process.
Nothing that differs between processes enters: no address, no ``hash()``, no set order, no line number, no path.
"""

from __future__ import annotations

import hashlib
import marshal
import opcode
from collections import deque
from types import CodeType
from typing import TYPE_CHECKING, Any, TypeAlias

from autotune_amp.fingerprint.origin import class_name

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterator, Mapping

# A node up to this long stands for itself; hashing every number would be half of the time.
_SHORT = 64

# Longer strings and bytes count by their length and by pieces spread evenly over them.
_LONG = 1 << 20
_PIECES, _PIECE = 64, 1024

# Python 3.13 puts both into every class body: a line number, and names in an order that changes between processes.
_VOLATILE_IN_CLASS_BODY = ("__firstlineno__", "__static_attributes__")

_OP = opcode.opmap
_EXTENDED_ARG, _LOAD_CONST, _STORE_NAME = (_OP[name] for name in ("EXTENDED_ARG", "LOAD_CONST", "STORE_NAME"))


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


def _bytes(tag: str, data: bytes) -> bytes:
    if len(data) <= _LONG:
        return digest(tag, data)
    starts = (index * (len(data) - _PIECE) // (_PIECES - 1) for index in range(_PIECES))
    return digest(f"long {tag} {len(data)}", *(data[start : start + _PIECE] for start in starts))


# By `id` of the exact type: looking a type up by its hash could run a user's metaclass. The unbound methods read a
# subclass's content without running what it overrides.
LEAVES: dict[int, Callable[..., bytes]] = {
    id(type(None)): lambda _: b"None",
    id(type(...)): lambda _: b"Ellipsis",
    id(type(NotImplemented)): lambda _: b"NotImplemented",
    id(bool): lambda value: b"bool %d" % value,
    id(int): lambda value: text("int", int.__format__(value, "x")),
    id(float): lambda value: text("float", float.__repr__(value)),
    id(complex): lambda value: text("complex", complex.__repr__(value)),
    id(str): lambda value: _bytes("str", str.encode(value, "utf-8", "surrogatepass")),
    id(bytes): lambda value: _bytes("bytes", bytes(value)),
    id(bytearray): lambda value: _bytes("bytearray", bytes(value)),
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
        constants = tuple([_bare(c) if isinstance(c, (CodeType, frozenset)) else c for c in constant.co_consts])
        return constant.replace(co_consts=constants, co_filename="", co_firstlineno=1, co_linetable=b"")
    if isinstance(constant, frozenset):
        return ("frozenset", *sorted(marshal.dumps(_bare(element), 0) for element in constant))
    return constant


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


Handler: TypeAlias = "Callable[[Walk, Any], bytes]"


class Walk:
    """One walk. Parts wait in a queue, so that what the workload itself names is named after it."""

    def __init__(self, handler_of: Callable[[type], Handler]) -> None:
        self.parts: dict[str, str] = {}
        self.unknown: dict[str, None] = {}
        self.imported: set[str] = set()
        self.class_links: dict[int, tuple[type, bytes]] = {}  # holds the class, so that its id stays its own
        self._handler_of = handler_of
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

    def is_part(self, key: Hashable) -> bool:
        """Whether `key` stands for a part already."""
        return key in self._names

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
