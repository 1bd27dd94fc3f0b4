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


def saved(folder: Path, study: str = "quiet-otter") -> Path:
    """A recommendation in ./studies of `folder`."""
    path = folder / "studies" / study / "recommendation.json"
    path.parent.mkdir(parents=True)
    path.write_bytes(SHOWN.read_bytes())
    return path


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize(
    "arguments",
    ["show", "show --json", "export --to env", "--help", pytest.param("probe --json", marks=pytest.mark.slow)],
)
def test_output_that_cannot_be_written_is_one_error(tmp_path: Path, arguments: str, unbuffered: str) -> None:
    saved(tmp_path)
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "autotune_amp", *arguments.split()],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            cwd=tmp_path,
            timeout=120,
            env={**os.environ, "PYTHONUNBUFFERED": unbuffered},
        )
    assert done.returncode == 2
    assert done.stderr.splitlines()[-2].startswith("Error: The output cannot be written")
    assert "Traceback" not in done.stderr


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
def test_an_error_that_nobody_can_be_told_keeps_its_exit_code(tmp_path: Path) -> None:
    with Path("/dev/full").open("w") as full:
        command = [sys.executable, "-m", "autotune_amp", "show", "nope", "--json"]
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=full, cwd=tmp_path, timeout=60)
    assert done.returncode == 2
    assert json.loads(done.stdout)["error"]["kind"] == "format"


def test_control_characters_of_foreign_text_are_escaped_wherever_they_stand(
    here: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    path = saved(here)
    document = json.loads(path.read_bytes())
    foreign = "\x1b]0;mine\x07\x9b31m\r"
    document["search"]["study"] = document["candidates"][0]["status"] = document["versions"]["torch"] = foreign
    document["hardware"]["device"] = document["hardware"]["identity"]["name"] = foreign
    path.write_text(json.dumps(document))
    for arguments in (["show"], ["export", "--to", "torch"], ["export", "--to", "deepspeed"], ["show", foreign]):
        run(arguments)
        said = capfd.readouterr()
        text = said.out + said.err
        assert not {c for c in text if not c.isprintable()} - {"\n"}, arguments


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


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
    assert {"torch", "optuna", "rich", "msgspec", "pydantic", "plotly"}.isdisjoint(modules)
    assert done.stdout.startswith("Usage: autotune-amp ")
    assert max(map(len, done.stdout.splitlines())) <= 80


def test_help_lists_the_commands_and_the_version_is_said(capfd: pytest.CaptureFixture[str]) -> None:
    commands = ["search", "check", "probe", "show", "report", "profile", "export", "apply", "dashboard"]
    for arguments in ([], ["-h"]):
        assert run(arguments) == 0
        lines = [line.split() for line in capfd.readouterr().out.splitlines()]
        assert [words[0] for words in lines if words and words[0] in commands] == commands
    assert run(["--version"]) == 0
    assert capfd.readouterr().out == f"autotune-amp {__version__}\n"


@pytest.mark.parametrize(
    "arguments", ["search --bogus", "search --trials", "search --budget abc", "search a b", "bogus"]
)
def test_a_usage_error_is_said_and_is_a_document_too(arguments: str, capfd: pytest.CaptureFixture[str]) -> None:
    named = arguments.removesuffix(" abc").split()[-1]
    assert run(arguments.split()) == 2
    said = capfd.readouterr()
    first, second = said.err.splitlines()
    assert (said.out, first.startswith("Error: "), named in first) == ("", True, True)
    assert second.startswith("Next step: See `autotune-amp ")
    assert run([*arguments.split(), "--json"]) == 2
    document = json.loads(capfd.readouterr().out)
    assert (document["format"], document["excluded"], document["best"]) == (1, [], None)
    assert (document["error"]["kind"], named in document["error"]["message"]) == ("invalid_request", True)


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize(
    ("arguments", "meant"),
    [
        ("search python train.py --bs 8", "autotune-amp search -- python train.py --bs 8"),
        (
            "search --budget 30 --quiet train.py --bs 8",
            "autotune-amp search --budget 30 --quiet -- python train.py --bs 8",
        ),
        ("search --budget=30 python -m train", "autotune-amp search --budget=30 -- python -m train"),
        ("search train.py", "autotune-amp search -- python train.py"),
        ("run studies/x python train.py", "autotune-amp run studies/x -- python train.py"),
        ("apply python train.py", "autotune-amp apply -- python train.py"),
    ],
)
def test_a_training_command_without_dashes_is_told_where_they_go(
    arguments: str, meant: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert run(arguments.split()) == 2
    said = capfd.readouterr().err
    assert f"`{meant}`" in said.splitlines()[-1]


def test_show_finds_the_recommendation(here: Path, capfd: pytest.CaptureFixture[str]) -> None:
    path = saved(here)
    for given in ("studies/quiet-otter", "studies/quiet-otter/recommendation.json", "studies"):
        assert run(["show", given, "--json"]) == 0
        assert json.loads(capfd.readouterr().out) == json.loads(path.read_bytes())
    for study, seconds in (("older", 8_000), ("latest", 9_000), ("oldest", 7_000)):
        os.utime(saved(here, study), (seconds, seconds))
    os.utime(path, (0, 0))
    assert run(["show"]) == 0
    assert "export studies/latest " in capfd.readouterr().out


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize("given", ["missing", "missing/recommendation.json", ".", "x" * 5000, None])
def test_show_of_nothing(given: str | None, capfd: pytest.CaptureFixture[str]) -> None:
    assert run(["show", *([given] if given else [])]) == 2
    said = capfd.readouterr()
    assert (said.out, said.err.startswith(f"Error: {given or 'studies'} ")) == ("", True)
    assert "Next step: " in said.err


@pytest.mark.parametrize(("arguments", "code"), [(["show"], 0), (["show", "x", "--json"], 2)])
def test_a_reader_that_went_away_or_a_closed_stream_is_no_error(
    arguments: list[str], code: int, tmp_path: Path
) -> None:
    saved(tmp_path)
    command = [sys.executable, "-m", "autotune_amp", *arguments]
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, text=True, cwd=tmp_path, timeout=60)
    os.close(writer)
    assert done.returncode == code
    assert "Traceback" not in done.stderr
    assert "BrokenPipe" not in done.stderr
    assert subprocess.run(["sh", "-c", '"$@" >&- 2>&-', "sh", *command], cwd=tmp_path, timeout=60).returncode == code
