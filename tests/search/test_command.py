"""A command as a source: what its answer depends on."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from autotune_amp.core.launch_line import LaunchLine
from autotune_amp.core.recommendation import Fingerprint
from autotune_amp.search import command
from autotune_amp.search.command import fingerprint_parts, sources


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


def test_a_changed_command_is_told_as_it_was_typed(folder: Path) -> None:
    line = LaunchLine.of("python train.py --bs {batch_size=8} '{precision:bf16=--half x|fp32=}'")
    other = LaunchLine.of("python train.py --bs {batch_size=16} {precision=fp32}", values={"bf16": "bfloat16"})
    before, after = (Fingerprint(digest="", parts=fingerprint_parts(each)[0]) for each in (line, other))
    typed = "command changed from python train.py --bs '{batch_size=8}' '{precision:bf16=--half x|fp32=}' to "
    assert before.differences(after) == (
        f"{typed}python train.py --bs '{{batch_size=16}}' '{{precision=fp32}}'", "--value bf16 is new"
    )  # fmt: skip
    (folder / "part.py").write_text("x = 1")
    changed = Fingerprint(digest="", parts=fingerprint_parts(other)[0])
    assert after.differences(changed) == ("file part.py changed",)


def test_a_large_file_is_not_read(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "MAX_READ_BYTES", 3)
    path = folder / "train.bin"
    path.write_bytes(b"12345")
    os.utime(path, ns=(0, 1))
    before = command._digest(path)
    os.utime(path, ns=(0, 2))
    assert command._digest(path) != before
