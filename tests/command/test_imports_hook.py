"""What is done once a module has been imported."""

from __future__ import annotations

import importlib
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from autotune_amp.command.agent.imports import after_import


def test_asking_whether_a_module_is_there_does_not_lose_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "asked_for_first.py").write_text("value = 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    finders = list(sys.meta_path)
    seen: list[int] = []
    after_import("asked_for_first", lambda module: seen.append(module.value))
    assert find_spec("asked_for_first") is not None
    assert seen == []
    importlib.import_module("asked_for_first")
    monkeypatch.delitem(sys.modules, "asked_for_first")
    assert seen == [1]
    assert sys.meta_path == finders
