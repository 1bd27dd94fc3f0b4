"""The language of the code: one meaning for a class name, and docstrings that begin with a verb or a noun."""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

PACKAGE = Path(__file__).parents[1] / "autotune_amp"
RIDDLES = ("What", "That", "Of", "Those")  # a docstring that begins so names no subject
MAX_SHARED_NAMES = 6


def definitions() -> Iterator[tuple[Path, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef]]:
    for path in sorted(PACKAGE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                yield path.relative_to(PACKAGE), node


def test_few_class_names_serve_twice() -> None:
    names = Counter(node.name for _, node in definitions() if isinstance(node, ast.ClassDef))
    assert len([name for name, num in names.items() if num > 1]) <= MAX_SHARED_NAMES


def test_docstrings_begin_with_a_verb_or_a_noun() -> None:
    found = ((path, getattr(node, "name", ""), ast.get_docstring(node)) for path, node in definitions())
    assert [f"{path}: {name}" for path, name, text in found if text and text.split()[0] in RIDDLES] == []
