"""Digests of plain values and of code, and what code refers to. Pure: reads objects, runs nothing of the user's.

A *node* is bytes built bottom-up from a tag and the nodes below it: equal content gives an equal node in every process.
Nothing that differs between processes enters: no address, no ``hash()``, no set order, no line number, no path.
"""

from __future__ import annotations

import hashlib
import marshal
import opcode
import re
import sys
from types import CodeType
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

# A node up to this long stands for itself; hashing every number would be half of the time.
_SHORT = 64

# Longer strings and bytes count by their length and by pieces spread evenly over them.
_LONG = 1 << 20
_PIECES, _PIECE = 64, 1024

# Python 3.13 puts both into every class body: a line number, and names in an order that changes between processes.
_VOLATILE_IN_CLASS_BODY = ("__firstlineno__", "__static_attributes__")

_OP = opcode.opmap
_EXTENDED_ARG = _OP["EXTENDED_ARG"]
_LOAD_CONST = _OP["LOAD_CONST"]
_LOAD_SMALL_INT = _OP.get("LOAD_SMALL_INT", -1)  # Python 3.14: the argument is the number
_STORE_NAME = _OP["STORE_NAME"]
_IMPORT_NAME = _OP["IMPORT_NAME"]
# These keep a flag in the lowest bit of their argument.
_FLAGGED = [_OP[name] for name, since in (("LOAD_GLOBAL", 11), ("LOAD_ATTR", 12)) if sys.version_info >= (3, since)]


def _any_of(*names: str) -> bytes:
    codes = bytes(_OP[name] for name in names if _OP.get(name, 256) < 256)  # later versions keep old names above 255
    return b"[" + re.escape(codes) + b"]"


# A global and the attributes that follow it, or an import; 0 is an inline cache, which stands between instructions.
_REFERENCE = re.compile(
    b"%b(?:[\0%b]*%b)*|%b"
    % (
        _any_of("LOAD_GLOBAL", "LOAD_NAME", "LOAD_FROM_DICT_OR_GLOBALS"),
        re.escape(bytes([_EXTENDED_ARG])),
        _any_of("LOAD_ATTR", "LOAD_METHOD"),
        re.escape(bytes([_IMPORT_NAME])),
    ),
    re.DOTALL,
)


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


Import: TypeAlias = tuple[str, int, tuple[str, ...]]


class References(NamedTuple):
    """What code refers to outside itself.

    `names` are dotted chains that begin with a global (``("helpers", "WIDTH")``); `imports` are (module, level, names)
    of the import statements inside it; `environment` names the environment variables that it may read.
    """

    names: tuple[tuple[str, ...], ...]
    imports: tuple[Import, ...]
    environment: tuple[str, ...]


def references(code: CodeType) -> References:
    """What `code` and the code nested in it refer to, each once, in order of appearance."""
    names: dict[tuple[str, ...], None] = {}
    imports: dict[Import, None] = {}
    environment: dict[str, None] = {}
    waiting = [code]
    for current in waiting:
        instructions = current.co_code
        operations = instructions[::2]
        for match in _REFERENCE.finditer(operations):
            start = match.start()
            if operations[start] == _IMPORT_NAME:
                imports[_import(current, start)] = None
            else:
                steps = [i for i in range(start, match.end()) if operations[i] not in (0, _EXTENDED_ARG)]
                names[tuple([_name(current, step) for step in steps])] = None
        if "environ" in current.co_names or "getenv" in current.co_names:
            strings = (c for c in current.co_consts if isinstance(c, str))
            environment |= dict.fromkeys(c for c in strings if c.isidentifier() and c == c.upper())
        waiting += [constant for constant in current.co_consts if isinstance(constant, CodeType)]
    return References(tuple(names), tuple(imports), tuple(environment))


def _name(code: CodeType, position: int) -> str:
    argument = _argument(code.co_code, 2 * position)
    return code.co_names[argument >> 1 if code.co_code[2 * position] in _FLAGGED else argument]


def _import(code: CodeType, position: int) -> Import:
    level, names = import_arguments(code.co_code, code.co_consts, position)
    return _name(code, position), level, names


def import_arguments(instructions: bytes, constants: Sequence[Any], position: int) -> tuple[int, tuple[str, ...]]:
    """Level and names of the import at `position`, counted in instructions: what the two before it load."""
    before = [i for i in range(position) if instructions[2 * i] not in (0, _EXTENDED_ARG)]
    level, names = (_loaded(instructions, constants, i) for i in before[-2:])
    return level, names or ()


def _loaded(instructions: bytes, constants: Sequence[Any], position: int) -> Any:
    argument = _argument(instructions, 2 * position)
    return argument if instructions[2 * position] == _LOAD_SMALL_INT else constants[argument]
