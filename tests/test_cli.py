from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from autotune_amp import __version__
from autotune_amp.core.config import AmpConfig
from autotune_amp.core.evidence import BaselineEvidence, Evidence
from autotune_amp.core.hardware import DeviceIdentity, DeviceMemory, Hardware
from autotune_amp.core.recommendation import Fingerprint, Recommendation, SearchSummary

if TYPE_CHECKING:
    from pathlib import Path


def command_line(*arguments: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """`autotune-amp` as a user starts it, in `folder`."""
    return subprocess.run(
        [sys.executable, "-m", "autotune_amp", *arguments], capture_output=True, text=True, cwd=folder, timeout=60
    )


def recommendation(study: str = "quiet-otter") -> Recommendation:
    config = AmpConfig(precision="bf16", batch_size=64)
    return Recommendation(
        config=config,
        evidence=Evidence(
            samples_per_second=412.3,
            samples_per_second_interval=(398.0, 426.0),
            step_seconds=0.155,
            peak_memory_bytes=1 << 30,
            baseline=BaselineEvidence(
                config=config,
                samples_per_second=None,
                samples_per_second_interval=None,
                step_seconds=None,
                peak_memory_bytes=None,
                reason="out of memory",
            ),
            speedup=None,
            speedup_interval=None,
            num_processes=3,
            is_confirmed=True,
            data_share=0.0,
        ),
        reason="It is the fastest.",
        warnings=(),
        excluded=(),
        candidates=(),
        search=SearchSummary(study=study, num_trials=1, num_failures=0, seconds=1.0),
        hardware=Hardware(
            device="cpu",
            identity=DeviceIdentity(type="cpu", name="caf\u00e9 processor", num_cpus=2, total_memory_bytes=1 << 30),
            memory=DeviceMemory(total=1 << 30, free=1 << 29, available=1 << 29),
            precisions={},
        ),
        versions={},
        fingerprint=Fingerprint(digest="", parts={}),
    )


def saved(folder: Path, study: str = "quiet-otter") -> Path:
    path = folder / "studies" / study / "recommendation.json"
    path.parent.mkdir(parents=True)
    recommendation(study).save(path)
    return path


# --- help and version ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("arguments", [(), ("--help",), ("-h",)])
def test_help_lists_the_commands(arguments: tuple[str, ...], tmp_path: Path) -> None:
    done = command_line(*arguments, folder=tmp_path)
    assert done.returncode == 0
    assert done.stdout.startswith("Usage: autotune-amp ")
    assert [command for command in ("search", "probe", "show") if f"  {command} " in done.stdout] == [
        "search",
        "probe",
        "show",
    ]
    assert done.stderr == ""


def test_help_of_search_names_every_option(tmp_path: Path) -> None:
    done = command_line("search", "--help", folder=tmp_path)
    options = [line.split()[0] for line in done.stdout.splitlines() if line.startswith("  --")]
    assert options == [
        "--budget",
        "--trials",
        "--device",
        "--precision",
        "--batch-size",
        "--effective-batch-size",
        "--baseline",
        "--memory-fraction",
        "--objective",
        "--steps",
        "--samples",
        "--price-per-hour",
        "--study",
        "--out",
        "--storage",
        "--seed",
        "--fresh",
        "--json",
        "--quiet",
    ]
    assert max(map(len, done.stdout.splitlines())) <= 80


@pytest.mark.parametrize("arguments", [["--help"], ["search", "--help"]])
def test_help_imports_nothing_heavy(arguments: list[str], tmp_path: Path) -> None:
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


def test_version(tmp_path: Path) -> None:
    done = command_line("--version", folder=tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (0, f"autotune-amp {__version__}\n", "")


# --- wrong requests ------------------------------------------------------------------------------------------------

WRONG = [
    (("search", "--bogus"), "--bogus"),
    (("search", "--budget", "abc"), "--budget"),
    (("search", "--trials"), "--trials"),
    (("search", "a", "b"), "b"),
    (("bogus",), "bogus"),
    (("--bogus",), "--bogus"),
]


@pytest.mark.parametrize(("arguments", "named"), WRONG)
def test_usage_error_is_said_with_the_next_step(arguments: tuple[str, ...], named: str, tmp_path: Path) -> None:
    done = command_line(*arguments, folder=tmp_path)
    assert done.returncode == 2
    assert done.stdout == ""
    first, second = done.stderr.splitlines()
    assert first.startswith("Error: ")
    assert named in first
    assert second.startswith("Next step: See `autotune-amp ")
    assert second.endswith("--help`.")


@pytest.mark.parametrize(("arguments", "named"), WRONG[:2])
def test_usage_error_is_a_document_too(arguments: tuple[str, ...], named: str, tmp_path: Path) -> None:
    done = command_line(*arguments, "--json", folder=tmp_path)
    document = json.loads(done.stdout)
    assert done.returncode == 2
    assert sorted(document) == ["best", "error", "excluded", "format"]
    assert (document["format"], document["excluded"], document["best"]) == (1, [], None)
    assert sorted(document["error"]) == ["kind", "message", "next_step"]
    assert document["error"]["kind"] == "invalid_request"
    assert named in document["error"]["message"]
    assert named in done.stderr


# --- show ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("given", ["studies/quiet-otter", "studies/quiet-otter/recommendation.json", "studies", None])
def test_show_finds_the_recommendation(given: str | None, tmp_path: Path) -> None:
    saved(tmp_path)
    done = command_line("show", *([given] if given else []), folder=tmp_path)
    assert done.returncode == 0
    assert "bf16, batch size 64" in done.stdout
    assert done.stderr == ""


def test_show_without_folder_takes_the_latest(tmp_path: Path) -> None:
    for study, age in (("older", 2000), ("latest", 1000), ("oldest", 3000)):
        path = saved(tmp_path, study)
        os.utime(path, (10_000 - age, 10_000 - age))
    assert "Study latest:" in command_line("show", folder=tmp_path).stdout


def test_show_json_is_the_document(tmp_path: Path) -> None:
    path = saved(tmp_path)
    done = command_line("show", "--json", folder=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads(done.stdout) == json.loads(path.read_text("utf-8"))


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("{", "is damaged"),
        ('{"format": 1}', "is damaged"),
        ('{"format": 2}', "has format 2"),
        ("[]", "is damaged"),
    ],
)
def test_show_of_a_file_that_cannot_be_read(content: str, said: str, tmp_path: Path) -> None:
    saved(tmp_path).write_text(content)
    done = command_line("show", "--json", folder=tmp_path)
    document = json.loads(done.stdout)
    assert done.returncode == 2
    assert document["error"]["kind"] == "format"
    assert said in document["error"]["message"]
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("given", ["missing", "missing/recommendation.json", ".", "x" * 5000, None])
def test_show_of_nothing(given: str | None, tmp_path: Path) -> None:
    done = command_line("show", *([given] if given else []), folder=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(f"Error: {given or 'studies'} ")
    assert "Next step: " in done.stderr
    assert "Traceback" not in done.stderr


def test_stdout_in_ascii_gets_every_row(tmp_path: Path) -> None:
    saved(tmp_path)
    done = subprocess.run(
        [sys.executable, "-m", "autotune_amp", "show"],
        capture_output=True,
        cwd=tmp_path,
        timeout=60,
        env=os.environ | {"PYTHONIOENCODING": "ascii"},
    )
    assert (done.returncode, done.stderr) == (0, b"")
    assert b"caf? processor" in done.stdout


# --- standard output that nobody reads -----------------------------------------------------------------------------


@pytest.mark.parametrize(("arguments", "code"), [(("show",), 0), (("show", "--json"), 0), (("show", "x", "--json"), 2)])
def test_reader_that_went_away_is_no_error(arguments: tuple[str, ...], code: int, tmp_path: Path) -> None:
    saved(tmp_path)
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(
        [sys.executable, "-m", "autotune_amp", *arguments],
        stdout=writer,
        stderr=subprocess.PIPE,
        text=True,
        cwd=tmp_path,
        timeout=60,
    )
    os.close(writer)
    assert done.returncode == code
    assert "Traceback" not in done.stderr
    assert "BrokenPipe" not in done.stderr


def test_closed_streams_are_no_error(tmp_path: Path) -> None:
    saved(tmp_path)
    shell = f"{sys.executable} -m autotune_amp show >&- 2>&-"
    assert subprocess.run(["sh", "-c", shell], cwd=tmp_path, timeout=60).returncode == 0
