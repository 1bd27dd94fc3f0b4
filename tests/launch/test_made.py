"""What runs made, as it is noted and said."""

from __future__ import annotations

from pathlib import Path

from autotune_amp.launch.made import read, summary, write


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
