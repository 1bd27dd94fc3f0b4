"""`autotune-amp dashboard`: a real server on a free port, asked over HTTP, ended by Ctrl-C."""

from __future__ import annotations

import json
import signal
import sys
import urllib.request
from pathlib import Path

import pytest
from conftest import CommandLine

from autotune_amp.cli import run
from autotune_amp.core.setting import Setting
from autotune_amp.search.ledger import Ledger
from autotune_amp.search.space import Space
from autotune_amp.search.storage.study import Study


def make_study(folder: Path) -> Path:
    folder.mkdir(parents=True)
    at_8 = Setting(precision="fp32", batch_size=8)
    ledger = Ledger(Space(candidates=(at_8,), baseline=at_8), search_id="s1")
    with Study.open(folder / "study.db", folder.name, ledger):
        pass
    return folder


@pytest.mark.slow
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


def test_its_address_is_printed_before_a_browser_opens_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    printed: list[str] = []

    def browse(url: str) -> None:
        printed.append(capfd.readouterr().out)
        assert url in printed[0]
        raise KeyboardInterrupt

    monkeypatch.setattr("autotune_amp.report.dashboard.has_display", lambda: True)
    monkeypatch.setattr("webbrowser.open", browse)
    assert run(["dashboard", str(make_study(tmp_path / "demo")), "--port", "0"]) == 0
    assert len(printed) == 1


def test_what_cannot_be_served_is_an_error_with_the_way_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def error(*arguments: str) -> str:
        assert run(["dashboard", *arguments, "--json"]) == 2
        return " ".join(json.loads(capfd.readouterr().out)["error"].values())

    monkeypatch.chdir(tmp_path)
    assert "study.db" in error()
    Path("notes.db").write_text("no database, but long enough to be looked at" * 40)
    assert error("notes.db").startswith("study ")
    assert [path.name for path in tmp_path.iterdir()] == ["notes.db"]
    demo = str(make_study(tmp_path / "demo"))
    monkeypatch.setitem(sys.modules, "optuna_dashboard", None)
    assert "autotune_amp[dashboard]" in error(demo)
