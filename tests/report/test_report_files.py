"""report.html as a file: kept up to date by searches, drawn again by the command, never over what is not ours."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from unittest.mock import Mock

import made_study
import msgspec
import pytest
from made_run_log import made_run, sample
from report_samples import record

from autotune_amp.api import recommend_config
from autotune_amp.cli import run
from autotune_amp.core.outcome import Failure, Record
from autotune_amp.report.files import follow_run, update_report, write_report
from autotune_amp.runtime.run_log import RunLog

MADE, RECORDS = made_study.made(), made_study.records()


def test_a_report_is_kept_up_to_date_and_no_more(tmp_path: Path) -> None:
    study, notes = made_study.write(tmp_path), list[str]()
    report = study / "report.html"
    update_report(study, notes.append, pytest.fail)
    assert notes == [f"Report: {report.as_posix()}"]
    update_report(study, notes.append, pytest.fail)
    assert len(notes) == 1
    newer = report.stat().st_mtime_ns + 1
    os.utime(study / "recommendation.json", ns=(newer, newer))
    update_report(study, notes.append, pytest.fail)
    assert len(notes) == 2


@pytest.mark.parametrize(
    ("error", "why"), [(ValueError("ours"), "ValueError: ours"), (KeyboardInterrupt(), "interrupted")]
)
def test_what_hinders_a_report_costs_a_warning(
    error: BaseException, why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    study, warnings = made_study.write(tmp_path), list[str]()
    monkeypatch.setattr("autotune_amp.report.search_page.search_page", Mock(side_effect=error))
    update_report(study, pytest.fail, warnings.append)
    (told,) = warnings
    assert [
        word for word in (f"not written ({why})", f"autotune-amp report {study}", "--out") if word not in told
    ] == []
    assert sorted(path.name for path in study.iterdir()) == ["outcomes.jsonl", "recommendation.json"]
    monkeypatch.setattr("autotune_amp.api._search", Mock(return_value=MADE))
    with pytest.warns(RuntimeWarning, match="not written"):
        assert recommend_config(out=str(tmp_path), quiet=True) is MADE


def test_a_recommendation_that_was_sent_alone_is_drawn_as_far_as_it_goes(tmp_path: Path) -> None:
    MADE.save(tmp_path / "sent.json")
    page = write_report(tmp_path / "sent.json").read_text()
    assert "fp16, batch size 64" in page
    assert "No chart of throughput" in page


# --- a search that recommended nothing -----------------------------------------------------------------------------


def unfinished(folder: Path, records: list[Record]) -> Path:
    """A study without a recommendation."""
    folder.mkdir(parents=True)
    (folder / "outcomes.jsonl").write_bytes(b"".join(msgspec.json.encode(r) + b"\n" for r in records))
    return folder


def test_what_failed_is_drawn_where_nothing_was_recommended(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    made_study.write(tmp_path / "studies")
    nan = Failure(kind="nonfinite", message="the loss was nan", details="Traceback <here>")
    broken = unfinished(tmp_path / "studies/broken", [*RECORDS, record(nan, 1), record(nan, 2, "bf16")])
    os.utime(tmp_path / "studies/made/recommendation.json", (0, 0))
    monkeypatch.chdir(tmp_path)
    assert run(["report"]) == 0
    assert capsys.readouterr().out == "studies/broken/report.html\n"
    page = (broken / "report.html").read_text()
    assert "broken: nothing was recommended" in page
    assert "after 2 trials, 2 failed" in page, "of the last search in the folder"
    assert page.count("<td>the loss was nan</td>") == 2
    assert "Traceback &lt;here&gt;" in page


def test_what_was_measured_and_ruled_out_is_drawn_too(tmp_path: Path) -> None:
    page = write_report(unfinished(tmp_path / "ruled_out", RECORDS)).read_text()
    assert "the others were excluded" in page
    assert page.count('<figure class="chart">') == 4, "throughput, memory, the course, fidelity"


# --- where it is written -------------------------------------------------------------------------------------------


def test_another_file_is_written_where_it_is_asked_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    study, log = made_study.write(tmp_path), made_run(tmp_path / "run.log")
    for given in (study, log):
        out = tmp_path / f"{given.stem}-page.html"
        assert run(["report", str(given), "--out", str(out), "--json"]) == 0
        assert json.loads(capsys.readouterr().out) == {"format": 1, "report": out.as_posix()}
        assert out.exists()
    assert not (study / "report.html").exists()
    for out in (tmp_path, tmp_path / "no/such.html"):
        assert run(["report", str(study), "--out", str(out)]) == 2
        told = capsys.readouterr().err
        assert (str(out) in told, "--out" in told) == (True, True)
    assert run(["report", str(unfinished(tmp_path / "empty", []))]) == 2
    assert "no outcome" in capsys.readouterr().err


def test_a_page_that_is_not_of_its_kind_is_left_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    study = made_study.write(tmp_path)
    report = write_report(study)
    before = report.read_bytes()
    assert run(["report", str(made_run(study / "report.jsonl"))]) == 2
    assert "no report of a training run" in capsys.readouterr().err
    assert report.read_bytes() == before
    report.write_text("<html>the user's own</html>")
    warnings = list[str]()
    os.utime(report, (0, 0))
    update_report(study, pytest.fail, warnings.append)
    assert run(["report", str(study)]) == 2
    for told in (capsys.readouterr().err, *warnings):
        assert "no report of a search" in told
    assert report.read_text() == "<html>the user's own</html>"


def test_nothing_is_drawn_with_before_it_is_needed() -> None:
    program = (
        "import sys, autotune_amp.api; assert not {'plotly', 'rich', 'autotune_amp.report.document'} & set(sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", program]).returncode == 0


# --- a page that follows a run -------------------------------------------------------------------------------------


def test_a_run_is_followed_as_it_grows_until_ctrl_c(tmp_path: Path) -> None:
    log, pages = made_run(tmp_path / "run.jsonl"), list[str]()
    grown = iter([True, False, True, None])

    def pause(seconds: float) -> None:
        pages.append((tmp_path / "run.html").read_text())
        grows = next(grown)
        if grows is None:
            raise KeyboardInterrupt
        if grows:
            RunLog(log).write(sample(700 + len(pages), 64.0, 9))

    with pytest.raises(KeyboardInterrupt):
        list(follow_run(log, pause=pause))
    assert [page == before for before, page in pairwise(pages)] == [False, True, False], "drawn where it has grown"
    assert all('http-equiv="refresh"' in page for page in pages)
    assert 'http-equiv="refresh"' not in (tmp_path / "run.html").read_text(), "the last one stays"


def test_only_a_run_log_can_be_followed(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert run(["report", str(tmp_path), "--follow"]) == 2
    assert "run_log=" in capfd.readouterr().err
