"""What runs leave, as it is moved, noted and said."""

from __future__ import annotations

import math
import os
import sys
import time
from pathlib import Path

import pytest

from autotune_amp.command.command import Command
from autotune_amp.command.leftovers import (
    created_list_in,
    leftover_notes,
    load_kept,
    save_kept,
    set_aside,
    shortened_list,
    write_kept,
)
from autotune_amp.core.command_template import CommandTemplate
from autotune_amp.core.errors import FormatError
from autotune_amp.processes.program import new_folder


def note(file: Path, *entries: str) -> Path:
    file.write_bytes(b"".join(os.fsencode(entry) + b"\0" for entry in entries))
    return file


def files_below(folder: Path) -> dict[str, str]:
    return {str(path.relative_to(folder)): path.read_text() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory of the user, who has a file in it."""
    folder = tmp_path / "here"
    folder.mkdir()
    (folder / "theirs").write_text("the user's")
    (folder / "runs").mkdir()
    (folder / "runs" / "theirs").write_text("the user's")
    monkeypatch.chdir(folder)
    return folder


def test_what_a_run_made_is_moved_and_data_stay(here: Path, tmp_path: Path) -> None:
    elsewhere, aside = tmp_path / "elsewhere", here / "aside"
    for path, text in {
        here / "runs" / "7" / "events": "2",
        here / "out" / "inner" / "model.pt": "3",
        here / "out" / "data" / "mnist": "4",
        here / "data" / "cifar": "5",
        here / "data" / "model.pt": "6",
        elsewhere / "model.pt": "7",
    }.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    (here / "latest").symlink_to("out")
    leftovers = [
        here / "runs" / "7",
        here / "out",
        here / "data" / "model.pt",
        elsewhere,
        here / "gone",
    ]
    noted = note(
        tmp_path / "noted",
        *(f"-{path}" for path in (*leftovers, here / "out" / "inner", here / "latest")),
        *(f"+{path}" for path in (here / "data", here / "out" / "data", here / "never")),
    )
    assert set_aside(noted, aside, math.inf) == ((str(here / "data"), str(here / "out" / "data")), ())
    outside = str(Path("root", *elsewhere.parts[1:], "model.pt"))
    assert files_below(aside) == {
        "runs/7/events": "2", "out/inner/model.pt": "3", "data/model.pt": "6", outside: "7",
    }  # fmt: skip
    assert (aside / "latest").is_symlink()
    assert not elsewhere.exists()
    assert {name: text for name, text in files_below(here).items() if not name.startswith("aside")} == {
        "theirs": "the user's", "runs/theirs": "the user's", "out/data/mnist": "4", "data/cifar": "5",
    }  # fmt: skip
    moved = {"out/inner", "data/model.pt", "runs/7", "latest", str(elsewhere)}  # of what is gone as a whole, the folder
    (said,) = leftover_notes(aside, (), ())
    assert all(name in said for name in moved)
    assert " aside," in said, "where they are"
    assert leftover_notes(aside, [str(here / "digits")], ())[1].endswith(": digits.")
    assert leftover_notes(tmp_path / "missing", (), ()) == leftover_notes(None, (), ()) == ()


def test_data_that_may_be_half_written_are_moved(here: Path, tmp_path: Path) -> None:
    for name in ("data/a\nb", "data/deep/c", "tokens.cache"):
        (here / name).parent.mkdir(parents=True, exist_ok=True)
        (here / name).write_text("1")
    noted = note(tmp_path / "noted", f"+{here / 'data'}", f"+{here / 'tokens.cache'}")
    os.utime(here / "data/deep/c", (0, 0))  # as what is unpacked has the archive's time
    began = time.time() - 60
    assert set_aside(noted, tmp_path / "aside", began) == ((), ())
    assert set(files_below(tmp_path / "aside")) == {"data/a\nb", "data/deep/c", "tokens.cache"}
    assert set(files_below(here)) == {"theirs", "runs/theirs"}


def test_what_a_run_made_is_moved_by_the_next_search_if_its_keeper_was_killed_too(here: Path, tmp_path: Path) -> None:
    study, run = tmp_path / "study", new_folder()
    study.mkdir()
    run.mkdir()
    note(created_list_in(study, run), f"-{here / 'train.log'}", f"+{here / 'data'}")
    for name in ("train.log", "data"):
        (here / name).write_text("1")
    Command(CommandTemplate.of("python train.py")).keep_in(study)
    assert files_below(study) == {"trial_leftovers/train.log": "1", "trial_leftovers/data": "1", "made.json": "{}"}
    assert not run.exists()


def test_the_user_s_files_in_a_study_are_not_taken_for_lists_of_runs(here: Path, tmp_path: Path) -> None:
    study = tmp_path / "study"
    study.mkdir()
    for name in ("created-notes.txt", "created-20240101-data.csv"):
        (study / name).write_text("the user's")
    Command(CommandTemplate.of("python train.py")).keep_in(study)
    assert files_below(study) == dict.fromkeys(("created-notes.txt", "created-20240101-data.csv"), "the user's")


def test_a_last_entry_that_was_written_in_part_is_ignored(here: Path, tmp_path: Path) -> None:
    listed = tmp_path / "listed"
    listed.write_bytes(os.fsencode(f"-{here / 'log'}\0-{here / 'runs'}"))
    (here / "log").write_text("1")
    assert set_aside(listed, tmp_path / "aside", math.inf) == ((), ())
    assert files_below(tmp_path / "aside") == {"log": "1"}
    assert files_below(here) == {"theirs": "the user's", "runs/theirs": "the user's"}


def test_what_later_runs_made_joins_what_earlier_ones_did(here: Path, tmp_path: Path) -> None:
    aside = tmp_path / "aside"
    for texts in ({"out/a": "1", "out/b": "1", "log": "1"}, {"out/a": "2", "out/c": "2", "log/d": "2"}):
        for name, text in texts.items():
            (here / name).parent.mkdir(exist_ok=True)
            (here / name).write_text(text)
        noted = note(tmp_path / "noted", f"-{here / 'out'}", f"-{here / 'log'}")
        assert set_aside(noted, aside, math.inf) == ((), ())
    assert files_below(aside) == {"out/a": "2", "out/b": "1", "out/c": "2", "log": "1", "log~/d": "2"}


def test_what_cannot_be_moved_stays_and_is_known(here: Path, tmp_path: Path) -> None:
    (here / "model.pt").write_text("1")
    (here / "aside").write_text("a file is in the place of the folder")
    noted = note(tmp_path / "noted", f"-{here / 'model.pt'}")
    model = str(here / "model.pt")
    assert set_aside(noted, here / "aside", math.inf) == ((), (model,)), "it is no data that the next run may change"
    (said,) = leftover_notes(here / "aside", (), (model,))
    assert "model.pt, which could not be moved" in said
    assert set_aside(noted, None, math.inf) == ((model,), ())
    write_kept(noted, [str(here / "model.pt")])
    assert noted.read_bytes() == os.fsencode(f"+{here / 'model.pt'}\0")


def test_a_folder_that_others_made_in_one_of_the_run_s_stays(here: Path, tmp_path: Path) -> None:
    for name in ("logs/ours/model.pt", "logs/others/model.pt"):
        (here / name).parent.mkdir(parents=True)
        (here / name).write_text("1")
    noted = note(tmp_path / "noted", f"-{here / 'logs'}", f"-{here / 'logs' / 'ours'}")
    set_aside(noted, tmp_path / "aside", math.inf)
    assert files_below(tmp_path / "aside") == {"logs/ours/model.pt": "1"}
    assert (here / "logs/others/model.pt").exists()


def test_many_of_one_folder_are_counted() -> None:
    many = [f"/home/me/logs/version_{number}" for number in range(12)]
    assert shortened_list([*many, "/home/me/model.pt"]) == "/home/me/model.pt, 12 in /home/me/logs"
    assert shortened_list(many[:3]) == ", ".join(many[:3])
    assert shortened_list([f"{number}/model.pt" for number in range(9)]).endswith(" and 4 more")
    assert shortened_list([]) == ""


def test_what_was_made_is_known_again_until_somebody_else_changes_it(tmp_path: Path) -> None:
    folder, others = tmp_path / "out", tmp_path / "runs"
    (folder / "inner").mkdir(parents=True)
    (folder / "inner" / "a").write_text("ours")
    others.mkdir()
    (others / "b").write_text("ours")
    save_kept(tmp_path / "made.json", [str(folder), str(others)])
    assert {str(folder), str(others)} <= set(load_kept(tmp_path / "made.json"))
    (others / "b").unlink()
    (others / "c").write_text("the user's own")
    known = load_kept(tmp_path / "made.json")
    assert str(folder) in known
    assert not {str(others), str(others / "b"), str(others / "c")} & set(known)
    os.utime(folder / "inner" / "a", ns=(1, 1))
    assert load_kept(tmp_path / "made.json") == ()


@pytest.mark.skipif(sys.platform == "darwin", reason="its file systems refuse such names")
def test_names_that_are_not_utf_8_are_known_again_and_can_be_shown(tmp_path: Path) -> None:
    folder = tmp_path / "data"
    folder.mkdir()
    name = folder / os.fsdecode(b"caf\xe9")
    name.write_text("ours")
    save_kept(tmp_path / "made.json", [str(folder)])
    assert {str(folder), str(name)} <= set(load_kept(tmp_path / "made.json"))
    assert "caf" in shortened_list([str(name)]).encode().decode()


def test_nothing_is_known_where_nothing_was_remembered(tmp_path: Path) -> None:
    assert load_kept(tmp_path / "made.json") == ()


@pytest.mark.parametrize("content", [b"\xff", b"[" * 100_000, b"3", b'{"a": "b"}', None])
def test_a_damaged_list_of_what_was_made_is_one_error(tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / "made.json"
    os.mkfifo(path) if content is None else path.write_bytes(content)
    with pytest.raises(FormatError, match=r"made\.json is damaged"):
        load_kept(path)
    assert load_kept(tmp_path / "missing") == ()
