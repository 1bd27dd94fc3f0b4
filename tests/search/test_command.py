"""A command as a source: what its answer depends on."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from autotune_amp.search import command
from autotune_amp.search.command import sources


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory, with a script in it."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("import part")
    (tmp_path / "part.py").write_text("")
    return tmp_path


def test_what_it_names_and_what_lies_beside_it(folder: Path) -> None:
    (folder / "cfg.yaml").write_text("")
    (folder / ".#train.py").symlink_to("nobody@nowhere:1")
    (folder / "gone.py").symlink_to("nowhere.py")
    found, are_all = sources(["python", "train.py", "--config=cfg.yaml", "bash -c '" + 300 * "x" + "/y'", "a\0b"])
    assert are_all
    assert {path.name for path in found} == {"train.py", "part.py", "cfg.yaml"}


def test_a_large_file_is_not_read(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "MAX_READ_BYTES", 3)
    path = folder / "train.bin"
    path.write_bytes(b"12345")
    os.utime(path, ns=(0, 1))
    before = command._digest(path)
    os.utime(path, ns=(0, 2))
    assert command._digest(path) != before
