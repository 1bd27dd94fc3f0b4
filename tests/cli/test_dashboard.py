"""`autotune-amp dashboard`: a real server on a free port, asked over HTTP, ended by Ctrl-C."""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import urllib.request
from pathlib import Path

import pytest
from conftest import CommandLine

from autotune_amp.cli import run
from autotune_amp.core.errors import FormatError
from autotune_amp.core.setting import Setting
from autotune_amp.report.dashboard import study_database
from autotune_amp.search.ledger import Ledger
from autotune_amp.search.space import Space
from autotune_amp.search.study import Study

AT_8 = Setting(precision="fp32", batch_size=8)
SPACE = Space(candidates=(AT_8,), baseline=AT_8)


def make_study(folder: Path) -> Path:
    folder.mkdir(parents=True)
    with Study.open(folder / "study.db", folder.name, Ledger(SPACE, search_id="s1")):
        pass
    return folder


def test_it_serves_the_study_until_ctrl_c(cli: CommandLine) -> None:
    make_study(cli.folder / "studies" / "demo")
    process = cli.start("dashboard", "studies/demo", "--port", "0", "--no-browser", "--json")
    assert process.stdout is not None
    url = json.loads(process.stdout.readline())["url"]
    with urllib.request.urlopen(f"{url.removesuffix('dashboard/')}api/studies", timeout=30) as answer:
        studies = json.load(answer)["study_summaries"]
    assert [study["study_name"] for study in studies] == ["demo"]
    with urllib.request.urlopen(url, timeout=30) as answer:
        assert b"<html" in answer.read()
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=30)
    assert (process.returncode, out, err) == (0, "", "")


def test_without_a_folder_it_is_the_latest_study(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("first", "second"):
        (tmp_path / "studies" / name).mkdir(parents=True)
        (tmp_path / "studies" / name / "study.db").touch()
    os.utime("studies/second/study.db", (1.0, 1.0))
    assert study_database(None) == Path("studies/first/study.db")
    assert study_database(Path("studies/second")) == study_database(Path("studies/second/study.db"))


def test_without_the_extra_it_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "optuna_dashboard", None)
    assert run(["dashboard", str(make_study(tmp_path / "demo")), "--json"]) == 2
    error = json.loads(capfd.readouterr().out)["error"]
    assert error["next_step"] == "Run `pip install 'autotune_amp[dashboard]'`."


def test_a_port_that_is_taken_is_named(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert run(["dashboard", str(make_study(tmp_path / "demo")), "--port", str(port), "--json"]) == 2
    assert json.loads(capfd.readouterr().out)["error"]["message"].startswith(f"Port {port} cannot be used: Address")


def test_a_folder_without_a_study_is_an_error_and_what_is_no_study_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(FormatError, match=r"studies holds no study\.db"):
        study_database(None)
    with pytest.raises(FormatError, match="--storage"):
        study_database(tmp_path)
    (tmp_path / "notes.db").write_text("no database, but long enough to be looked at" * 40)
    assert run(["dashboard", "notes.db", "--json"]) == 2
    assert json.loads(capfd.readouterr().out)["error"]["kind"] == "study"
    assert [path.name for path in tmp_path.iterdir()] == ["notes.db"]
