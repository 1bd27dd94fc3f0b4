"""What runs made, as it is noted and said."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from autotune_amp.core.errors import FormatError
from autotune_amp.launch.made import read, remember, remembered, summary, write


def test_what_is_there_is_read_a_folder_without_what_it_holds(tmp_path: Path) -> None:
    (tmp_path / "folder" / "inner").mkdir(parents=True)
    (tmp_path / "a\nfile").touch()
    (tmp_path / "folder2").touch()
    paths = [str(tmp_path / name) for name in ("folder/inner", "folder", "a\nfile", "gone", "folder2", "folder2")]
    write(tmp_path / "noted", paths)
    assert read(tmp_path / "noted") == tuple(str(tmp_path / name) for name in ("a\nfile", "folder", "folder2"))


def test_many_of_one_folder_are_counted() -> None:
    many = [f"/home/me/logs/version_{number}" for number in range(12)]
    assert summary([*many, "/home/me/model.pt"]) == ("/home/me/model.pt", "12 in /home/me/logs")
    assert summary(many[:3]) == tuple(many[:3])
    assert summary([]) == ()


def test_what_was_made_is_known_again_until_somebody_else_changes_it(tmp_path: Path) -> None:
    folder, others = tmp_path / "out", tmp_path / "runs"
    (folder / "inner").mkdir(parents=True)
    (folder / "inner" / "a").write_text("ours")
    others.mkdir()
    (others / "b").write_text("ours")
    remember(tmp_path / "made.json", [str(folder), str(others)])
    assert {str(folder), str(others)} <= set(remembered(tmp_path / "made.json"))
    (others / "b").unlink()
    (others / "c").write_text("the user's own")
    known = remembered(tmp_path / "made.json")
    assert str(folder) in known
    assert not {str(others), str(others / "b"), str(others / "c")} & set(known)
    os.utime(folder / "inner" / "a", ns=(1, 1))
    assert remembered(tmp_path / "made.json") == ()


def test_nothing_is_known_where_nothing_was_remembered(tmp_path: Path) -> None:
    assert remembered(tmp_path / "made.json") == ()


@pytest.mark.parametrize("content", [b"\xff", b"[" * 100_000, b"3", b'{"a": "b"}', None])
def test_a_damaged_list_of_what_was_made_is_one_error(tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / "made.json"
    os.mkfifo(path) if content is None else path.write_bytes(content)
    with pytest.raises(FormatError, match=r"made\.json is damaged"):
        remembered(path)
    assert remembered(tmp_path / "missing") == ()
