"""What an error says beside what went wrong: a next step that is another sentence than the error."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import autotune_amp

ROOT = Path(autotune_amp.__file__).parent
VERBS = {"give", "pass", "name", "use", "make", "fix", "must"}


def words(text: ast.expr) -> set[str]:
    return set(re.findall(r"[a-z_0-9]{3,}", ast.unparse(text).lower())) - VERBS


def test_a_next_step_is_never_the_error_again() -> None:
    told_twice = []
    for path in sorted(ROOT.rglob("*.py")):
        for call in ast.walk(ast.parse(path.read_text())):
            if not (isinstance(call, ast.Call) and ast.unparse(call.func).endswith("Error") and len(call.args) > 1):
                continue
            message, next_step = call.args[:2]
            if isinstance(next_step, (ast.Constant, ast.JoinedStr)) and not words(next_step) - words(message):
                told_twice.append(f"{path.relative_to(ROOT)}:{call.lineno}: {ast.unparse(next_step)}")
    assert told_twice == []
