"""`autotune-amp` as a user starts it: help, wrong requests, a finished recommendation, a reader that went away."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from autotune_amp import __version__
from autotune_amp.cli import run

SHOWN = Path(__file__).parent / "golden/study/recommendation.json"


def process(*arguments: str, folder: Path, **options: str) -> subprocess.CompletedProcess[str]:
    """`autotune-amp` in a process of its own, in `folder`."""
    command = [sys.executable, "-m", "autotune_amp", *arguments]
    return subprocess.run(command, capture_output=True, text=True, cwd=folder, timeout=60, env=os.environ | options)


def saved(folder: Path, study: str = "quiet-otter") -> Path:
    """A recommendation in ./studies of `folder`."""
    path = folder / "studies" / study / "recommendation.json"
    path.parent.mkdir(parents=True)
    path.write_bytes(SHOWN.read_bytes())
    return path


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


# --- help and version ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("arguments", [["--help"], ["search", "--help"]])
def test_help_answers_and_imports_nothing_heavy(arguments: list[str], tmp_path: Path) -> None:
    code = (
        f"import sys; sys.argv = ['autotune-amp', *{arguments}]\n"
        "from autotune_amp.cli import main\n"
        "try: main()\n"
        "except SystemExit: print(*sys.modules, file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path, timeout=60)
    modules = done.stderr.split()
    assert "autotune_amp.cli" in modules
    assert {"torch", "optuna", "rich", "msgspec", "pydantic"}.isdisjoint(modules)
    assert done.stdout.startswith("Usage: autotune-amp ")
    assert max(map(len, done.stdout.splitlines())) <= 80


@pytest.mark.parametrize("arguments", [[], ["-h"]])
def test_help_lists_the_commands(arguments: list[str], capfd: pytest.CaptureFixture[str]) -> None:
    assert run(arguments) == 0
    lines = [line.split() for line in capfd.readouterr().out.splitlines()]
    commands = ["search", "probe", "show", "report", "profile", "export", "dashboard"]
    assert [words[0] for words in lines if words and words[0] in commands] == commands


def test_version(capfd: pytest.CaptureFixture[str]) -> None:
    assert run(["--version"]) == 0
    assert capfd.readouterr().out == f"autotune-amp {__version__}\n"


# --- wrong requests ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["search", "--bogus"], "--bogus"),
        (["search", "--budget", "abc"], "--budget"),
        (["search", "--trials"], "--trials"),
        (["search", "a", "b"], "b"),
        (["bogus"], "bogus"),
    ],
)
def test_a_usage_error_is_said_and_is_a_document_too(
    arguments: list[str], named: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert run(arguments) == 2
    said = capfd.readouterr()
    first, second = said.err.splitlines()
    assert (said.out, first.startswith("Error: "), named in first) == ("", True, True)
    assert second.startswith("Next step: See `autotune-amp ")
    assert run([*arguments, "--json"]) == 2
    document = json.loads(capfd.readouterr().out)
    assert sorted(document) == ["best", "error", "excluded", "format"]
    assert (document["format"], document["excluded"], document["best"]) == (1, [], None)
    assert (document["error"]["kind"], named in document["error"]["message"]) == ("invalid_request", True)


# --- show ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("given", ["studies/quiet-otter", "studies/quiet-otter/recommendation.json", "studies", None])
def test_show_finds_the_recommendation(given: str | None, here: Path, capfd: pytest.CaptureFixture[str]) -> None:
    path = saved(here)
    assert run(["show", *([given] if given else []), "--json"]) == 0
    assert json.loads(capfd.readouterr().out) == json.loads(path.read_bytes())


def test_show_without_a_folder_takes_the_latest(here: Path, capfd: pytest.CaptureFixture[str]) -> None:
    for study, seconds in (("older", 8_000), ("latest", 9_000), ("oldest", 7_000)):
        os.utime(saved(here, study), (seconds, seconds))
    assert run(["show"]) == 0
    assert "export studies/latest " in capfd.readouterr().out


@pytest.mark.parametrize(("content", "word"), [("{", "damaged"), ('{"format": 2}', "format 2"), ("[]", "damaged")])
def test_show_of_a_file_that_cannot_be_read(
    content: str, word: str, here: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    saved(here).write_text(content)
    assert run(["show", "--json"]) == 2
    error = json.loads(capfd.readouterr().out)["error"]
    assert (error["kind"], word in error["message"]) == ("format", True)


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize("given", ["missing", "missing/recommendation.json", ".", "x" * 5000, None])
def test_show_of_nothing(given: str | None, capfd: pytest.CaptureFixture[str]) -> None:
    assert run(["show", *([given] if given else [])]) == 2
    said = capfd.readouterr()
    assert (said.out, said.err.startswith(f"Error: {given or 'studies'} ")) == ("", True)
    assert "Next step: " in said.err


# --- standard output that is poor, or that nobody reads ------------------------------------------------------------


def test_standard_output_in_ascii_gets_every_row(tmp_path: Path) -> None:
    path = saved(tmp_path)
    path.write_text(path.read_text().replace('"name": "', '"name": "caf\u00e9 ', 1), "utf-8")
    done = process("show", folder=tmp_path, PYTHONIOENCODING="ascii")
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(("arguments", "code"), [(["show"], 0), (["show", "x", "--json"], 2)])
def test_a_reader_that_went_away_is_no_error(arguments: list[str], code: int, tmp_path: Path) -> None:
    saved(tmp_path)
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "autotune_amp", *arguments]
    done = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, text=True, cwd=tmp_path, timeout=60)
    os.close(writer)
    assert done.returncode == code
    assert "Traceback" not in done.stderr
    assert "BrokenPipe" not in done.stderr


def test_closed_streams_are_no_error(tmp_path: Path) -> None:
    saved(tmp_path)
    shell = f"{sys.executable} -m autotune_amp show >&- 2>&-"
    assert subprocess.run(["sh", "-c", shell], cwd=tmp_path, timeout=60).returncode == 0
