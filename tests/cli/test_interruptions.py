"""Killed, interrupted, started twice, or given what cannot be used: nothing measured is lost, nothing left."""

from __future__ import annotations

import json
import os
import random
import resource
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
from conftest import CommandLine
from real_searches import FP32, WORKLOADS

from autotune_amp.cli import run
from autotune_amp.search.stages.explore import NUM_SEARCH_PROCESSES

SEARCH = ("train.py:plain", *FP32, "--budget", "110", "--baseline", "fp32:4", "--batch-size", "1:64")


@pytest.fixture
def training(cli: CommandLine, monkeypatch: pytest.MonkeyPatch) -> CommandLine:
    """The command line beside a train.py; this process stands there too."""
    cli.write("train.py", WORKLOADS)
    monkeypatch.chdir(cli.folder)
    return cli


def lines(cli: CommandLine) -> list[dict[str, Any]]:
    path = cli.folder / "studies/train-plain/outcomes.jsonl"
    text = path.read_text() if path.exists() else ""
    return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]


def wait_for_lines(cli: CommandLine, process: subprocess.Popen[str], count: int) -> None:
    deadline = time.monotonic() + 60
    while len(lines(cli)) < count and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.02)


@pytest.mark.slow
def test_killed_at_random_moments_the_same_command_goes_on(training: CommandLine) -> None:
    chance, search = random.Random(7), (*SEARCH, "--budget", "25")
    known: list[dict[str, Any]] = []
    for _ in range(5):
        process = training.start("search", *search)
        if chance.random() < 0.3:
            time.sleep(chance.uniform(0.0, 3.0))  # while it starts
        else:
            wait_for_lines(training, process, len(known) + chance.randint(1, 2))
            time.sleep(chance.uniform(0.0, 0.5))
        process.send_signal(signal.SIGKILL)
        process.communicate()
        found = lines(training)
        assert found[: len(known)] == known, "a kill lost or changed what was measured"
        known = found
        assert training.wait_until_alone() == []
    done = training.search(*search)
    assert done.code == 0, done.err
    assert lines(training)[: len(known)] == known
    numbers = [line["number"] for line in lines(training)]
    assert numbers == list(range(1, len(numbers) + 1))
    tried = [json.dumps(line["candidate"]) for line in lines(training) if line["purpose"] == "search"]
    assert all(tried.count(candidate) <= NUM_SEARCH_PROCESSES for candidate in tried)
    assert done.document["search"]["num_trials"] == len(numbers)


def test_ctrl_c_saves_the_best_so_far_and_a_second_search_in_the_folder_is_refused(training: CommandLine) -> None:
    first = training.start("search", *SEARCH, "--json")
    wait_for_lines(training, first, 1)
    second = training.search(*SEARCH)
    assert (second.code, second.document["error"]["kind"]) == (2, "study_busy")
    assert first.poll() is None, "the first search must go on"
    wait_for_lines(training, first, 2)
    os.killpg(first.pid, signal.SIGINT)  # as a terminal does: to the whole foreground group
    out, err = first.communicate(timeout=60)
    assert first.returncode == 130, err
    assert training.leftovers() == []
    saved = json.loads((training.folder / "studies/train-plain/recommendation.json").read_text())
    assert saved["search"]["was_interrupted"]
    assert not saved["evidence"]["is_confirmed"]
    assert "search was interrupted" in (training.folder / "studies/train-plain/report.html").read_text()
    document = json.loads(out)
    assert document["error"]["kind"] == "search_interrupted"
    assert document["best"] == saved


def test_ctrl_c_before_anything_was_measured(cli: CommandLine) -> None:
    cli.write("train.py", "import time; open('began', 'w').close(); time.sleep(60)")
    process = cli.start("search", *SEARCH, "--json")
    deadline = time.monotonic() + 60
    while not (cli.folder / "began").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    out, _ = process.communicate(timeout=60)
    assert process.returncode == 130
    assert json.loads(out)["best"] is None
    assert cli.leftovers() == []


def refused(capfd: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    """The error of a search that must be refused with a next step, before any trial."""
    assert run(["search", *arguments, "--json"]) == 2
    out = capfd.readouterr().out
    document: dict[str, Any] = json.loads(out)
    assert (document["excluded"], document["best"]) == ([], None)
    error: dict[str, Any] = document["error"]
    assert error["next_step"]
    return error


@pytest.mark.usefixtures("training")
@pytest.mark.parametrize(
    ("options", "kind", "word"),
    [
        (["--budget", "-1"], "invalid_request", "--budget"),
        (["--trials", "none"], "invalid_request", "--trials"),
        (["--no-such-option"], "invalid_request", "--no-such-option"),
        (["--budget", "0.5"], "budget_too_small", "budget"),
        (["--device", "cuda:63"], "device", "cuda"),
        (["--precision", "tf32"], "invalid_request", "tf32"),
        (["--out", "train.py"], "study", "train.py"),
        (["--storage", "not a url"], "study", "not a url"),
    ],
)
def test_what_cannot_be_done_is_refused_by_name(
    options: list[str], kind: str, word: str, capfd: pytest.CaptureFixture[str]
) -> None:
    error = refused(capfd, "train.py:plain", "--device", "cpu", *options)
    assert error["kind"] == kind
    assert word.lower() in error["message"].lower()
    assert not Path("studies/train-plain/outcomes.jsonl").exists()


@pytest.mark.usefixtures("training")
@pytest.mark.parametrize(
    ("name", "text", "word"),
    [
        ("recommendation.json", "{ half", "damaged"),
        ("recommendation.json", '{"format": 99}', "format 99"),
        ("outcomes.jsonl", "nonsense\n", "line 1"),
        ("outcomes.jsonl", '{"format": 9}\n', "format 9"),
    ],
)
def test_files_that_cannot_be_read_are_named_and_left_as_they_are(
    name: str, text: str, word: str, capfd: pytest.CaptureFixture[str]
) -> None:
    path = Path("studies/train-plain", name)
    path.parent.mkdir(parents=True)
    path.write_text(text)
    assert word in refused(capfd, *SEARCH)["message"]
    assert path.read_text() == text


def test_a_full_disk(training: CommandLine) -> None:
    def small_files() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (30_000, 30_000))
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)

    done = training.search(*SEARCH, preexec_fn=small_files)
    assert (done.code, done.document["error"]["kind"]) == (2, "study"), done.err


@pytest.mark.parametrize(
    ("text", "target", "word"),
    [
        ("", "missing.py:workload", "missing.py"),
        ("from autotune_amp import Workload\ndef tiny(size=8): ...\n", "train.py:tinny", "tinny"),
        ("def workload(): raise KeyError('gone')\n", "train.py:workload", "KeyError: 'gone'"),
        ("import os; os.kill(os.getpid(), 11)\n", "train.py:workload", "segmentation fault"),
        ("import autotune_amp\nautotune_amp.recommend_config()\n", "train.py:workload", "inside a trial"),
    ],
)
def test_a_workload_that_cannot_be_loaded_leaves_no_folder(
    text: str, target: str, word: str, training: CommandLine, capfd: pytest.CaptureFixture[str]
) -> None:
    training.write("train.py", text)
    assert word in refused(capfd, target, *FP32)["message"]
    assert not Path("studies").exists() or not list(Path("studies").iterdir())
