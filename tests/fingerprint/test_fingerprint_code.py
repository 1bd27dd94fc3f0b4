"""Reading byte code, that of Python versions which are not here too."""

from __future__ import annotations

import opcode

import pytest

from autotune_amp.fingerprint import code
from autotune_amp.fingerprint.code import import_arguments, references

CONST, IMPORT, EXTENDED, CACHE = (*(opcode.opmap[n] for n in ("LOAD_CONST", "IMPORT_NAME", "EXTENDED_ARG")), 0)
SMALL_INT = 251
CONSTANTS = (None, 1, ("a", "b"), "other", *[0] * 252, ("far",))


@pytest.mark.parametrize(
    ("instructions", "expected"),
    [
        ([(CONST, 1), (CONST, 2), (IMPORT, 0)], (1, ("a", "b"))),
        ([(CONST, 3), (SMALL_INT, 2), (CONST, 2), (IMPORT, 0)], (2, ("a", "b"))),  # Python 3.14
        ([(CONST, 3), (SMALL_INT, 0), (CONST, 0), (EXTENDED, 1), (IMPORT, 0)], (0, ())),
        ([(SMALL_INT, 3), (CACHE, 0), (EXTENDED, 1), (CONST, 0), (IMPORT, 0)], (3, ("far",))),
    ],
)
def test_level_and_names_are_what_the_two_instructions_before_load(
    instructions: list[tuple[int, int]], expected: tuple[int, tuple[str, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(code, "_LOAD_SMALL_INT", SMALL_INT)
    data = bytes(byte for instruction in instructions for byte in instruction)
    assert import_arguments(data, CONSTANTS, len(instructions) - 1) == expected


def test_imports_of_real_code() -> None:
    text = "def f():\n import a.b\n from ..c import d, e\n from . import g\n"
    imports = references(compile(text, "shown", "exec")).imports
    assert imports == (("a.b", 0, ()), ("c", 2, ("d", "e")), ("", 1, ("g",)))
