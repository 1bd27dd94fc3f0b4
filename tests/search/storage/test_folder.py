from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scripted_backend import candidate

from autotune_amp.core.errors import FormatError, StudyBusyError, StudyError
from autotune_amp.core.outcome import Failure, Record
from autotune_amp.core.recommendation import Fingerprint
from autotune_amp.search.source import folder_name, study_name
from autotune_amp.search.storage.folder import StudyFolder

CHECKED = {"outcome": "accumulation", "verdict": "mean", "reason": "", "next_step": "", "batch_size": 4} | {
    "num_micro_batches": 2
}


def record(number: int, search_id: str = "abc-1") -> Record:
    tried, died = candidate("fp32", 4), Failure(kind="crash", message="it\ndied \U0001f600 “so”")
    return Record(search_id=search_id, number=number, candidate=tried, purpose="search", outcome=died, seconds=1.5)


@given(cut=st.integers(1, 200))
def test_a_line_cut_anywhere_costs_only_itself(tmp_path_factory: pytest.TempPathFactory, cut: int) -> None:
    with StudyFolder(str(tmp_path_factory.mktemp("cut")), "one") as folder:
        folder.append(record(1))
        folder.append(record(2))
        path = folder.path / "outcomes.jsonl"
        data = path.read_bytes()
        path.write_bytes(data[: -min(cut, len(data) // 2 - 1)])
        assert folder.records() == [record(1)]
    with folder:
        folder.append(record(3))
        assert folder.records() == [record(1), record(3)]


def test_a_damaged_line_does_not_hide_which_searches_there_are(tmp_path: Path) -> None:
    """An answer that is cached needs no records."""
    digest = "0" * 64
    cached = Mock(fingerprint=Fingerprint(digest=digest, parts={}), search=Mock(search_id="000000000000-1"))
    with StudyFolder(str(tmp_path), "one") as folder:
        folder.append(record(1, "000000000000-1"))
        with (folder.path / "outcomes.jsonl").open("ab") as file:
            file.write(b"{damaged\n")
        assert not folder.has_later_search(cached)
        folder.append(record(2, "000000000000-2"))
        assert folder.has_later_search(cached)


def test_search_ids_go_on_or_begin_anew(tmp_path: Path) -> None:
    with StudyFolder(str(tmp_path), "one") as folder:
        one, other = (Fingerprint(digest=digit * 64, parts={}) for digit in "01")
        assert folder.search_id(one, is_fresh=False) == "000000000000-1"
        folder.append(record(1, "000000000000-1"))
        assert folder.search_id(one, is_fresh=False) == "000000000000-1"
        assert folder.search_id(one, is_fresh=True) == "000000000000-2"
        assert folder.search_id(other, is_fresh=False) == "111111111111-1"
        assert folder.records("another") == []


@pytest.mark.parametrize(
    ("saved_id", "was_interrupted", "is_resumed"),
    [("d" * 12 + "-1", True, True), ("d" * 12 + "-1", False, False), ("another-1", False, True)],
)
def test_a_finished_search_with_parts_that_cannot_be_known_is_not_gone_on_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, saved_id: str, *, was_interrupted: bool, is_resumed: bool
) -> None:
    saved = Mock(**{"search.was_interrupted": was_interrupted, "search.search_id": saved_id})
    monkeypatch.setattr(StudyFolder, "cached", lambda _: saved)
    with StudyFolder(str(tmp_path), "one") as folder:
        folder.append(record(1, "d" * 12 + "-1"))
        for unknown, number in (((), 1), (("an open file",), 1 if is_resumed else 2)):
            now = Fingerprint(digest="d" * 64, parts={}, unknown=unknown)
            assert folder.search_id(now, is_fresh=False) == "d" * 12 + f"-{number}"


def test_the_latest_search_of_a_folder_is_gone_on_with(tmp_path: Path) -> None:
    with StudyFolder(str(tmp_path), "demo") as folder:
        for number in (1, 2, 3):
            search_id = folder.search_id(Fingerprint(digest="d" * 64, parts={}), is_fresh=number > 1)
            folder.append(record(number, search_id))
        assert folder.search_id(Fingerprint(digest="d" * 64, parts={}), is_fresh=False) == search_id == "d" * 12 + "-3"


@pytest.mark.parametrize(("records", "has_later"), [((), False), ((1, 2), False), ((1, 2, 3), True)])
def test_a_search_that_was_begun_after_the_finished_one_is_seen(
    tmp_path: Path, records: tuple[int, ...], *, has_later: bool
) -> None:
    finished = Mock(fingerprint=Fingerprint(digest="d" * 64, parts={}), **{"search.search_id": "d" * 12 + "-2"})
    with StudyFolder(str(tmp_path), "demo") as folder:
        for number in records:
            folder.append(record(number, "d" * 12 + f"-{number}"))
        assert folder.has_later_search(finished) == has_later


def test_a_folder_is_used_by_one_search_at_a_time(tmp_path: Path) -> None:
    with StudyFolder(str(tmp_path), "one"):
        with pytest.raises(StudyBusyError, match="Another search"), StudyFolder(str(tmp_path), "one"):
            pass
        (tmp_path / "file").write_text("")
        with pytest.raises(StudyError, match="cannot be used"), StudyFolder(str(tmp_path / "file"), "two"):
            pass
    with StudyFolder(str(tmp_path), "one"):
        pass


def test_a_folder_that_cannot_be_looked_into_is_one_error(tmp_path: Path) -> None:
    with pytest.raises(StudyError, match="cannot be used"):
        StudyFolder(str(tmp_path), "n" * 300).cached()


def test_what_ends_with_nothing_measured_leaves_no_folder(tmp_path: Path) -> None:
    with StudyFolder(str(tmp_path / "studies"), "misspelt") as folder:
        assert folder.path.is_dir()
    assert not folder.path.exists()
    folder.path.mkdir()
    with folder:
        pass
    assert folder.path.is_dir(), "a folder of the user's own stays"


def test_a_damaged_line_is_named(tmp_path: Path) -> None:
    with StudyFolder(str(tmp_path), "one") as folder:
        folder.append(record(1))
        with (folder.path / "outcomes.jsonl").open("a") as file:
            file.write('{"format": 1}\n')
        with pytest.raises(FormatError, match="line 2 is damaged"):
            folder.records()


def test_names_of_studies() -> None:
    assert [study_name(f"some/where/train.py:{name}") for name in ("workload", "tiny")] == ["train", "train-tiny"]
    assert study_name("package.module:make.it") == "module-make.it"


@given(st.text())
def test_any_name_becomes_one_folder(name: str) -> None:
    made = folder_name(name)
    assert made
    assert Path("studies", made).parent == Path("studies")
    assert made not in (".", "..")


def test_a_search_id_of_another_form_is_not_gone_on_with(tmp_path: Path) -> None:
    with StudyFolder(str(tmp_path), "one") as folder:
        for end in ("2shares-1", "not a number", "9" * 5000):
            folder.append(msgspec.structs.replace(record(1), search_id="d" * 12 + "-" + end))
        assert folder.search_id(Fingerprint(digest="d" * 64, parts={}), is_fresh=False) == "d" * 12 + "-1"


def test_a_folder_that_is_deleted_in_mid_search_is_one_error(tmp_path: Path) -> None:
    with StudyFolder(str(tmp_path), "one") as folder:
        shutil.rmtree(folder.path)
        assert folder.records() == []
        with pytest.raises(StudyError, match="cannot be written"):
            folder.append(record(1))


@pytest.mark.parametrize("change", [{"environment": {"LD_PRELOAD": "x"}}, {"outcome": CHECKED}, {"number": -1}])
def test_a_line_that_no_search_writes_is_damaged(tmp_path: Path, change: dict[str, Any]) -> None:
    with StudyFolder(str(tmp_path), "one") as folder:
        line = json.loads(msgspec.json.encode(record(1)))
        (folder.path / "outcomes.jsonl").write_text(json.dumps(line | change) + "\n")
        with pytest.raises(FormatError, match="line 1 is damaged"):
            folder.records()
