"""Killed, interrupted, started twice, or given what cannot be used: nothing measured is lost, nothing left."""

from __future__ import annotations

import json
import os
import random
import resource
import signal
import time
from pathlib import Path
from typing import Any

import pytest
from conftest import CommandLine
from real_searches import CHECKS, FP32, WORKLOADS, lines, wait_for_lines
from unisolated import run_jobs_here

from autotune_amp.cli import run
from autotune_amp.search.stages.explore import MAX_PROCESSES

SEARCH = ("train.py:plain", *FP32, "--budget", "110", "--baseline", "fp32:4", "--batch-size", "1:64")


@pytest.fixture
def training(cli: CommandLine) -> CommandLine:
    """The command line beside a train.py."""
    cli.write("train.py", WORKLOADS)
    return cli


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
    assert all(tried.count(candidate) <= MAX_PROCESSES for candidate in tried)
    assert done.document["search"]["num_trials"] == sum(line["purpose"] not in CHECKS for line in lines(training))


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


@pytest.mark.slow
def test_slurms_end_of_a_job_saves_the_best_so_far_and_the_same_command_goes_on(training: CommandLine) -> None:
    known: list[dict[str, Any]] = []
    for _ in range(2):
        process = training.start("search", *SEARCH, "--json")
        wait_for_lines(training, process, len(known) + 2)
        training.terminate_all(process)
        out, err = process.communicate(timeout=60)
        assert process.returncode == 143, err
        assert training.leftovers() == []
        saved = json.loads((training.folder / "studies/train-plain/recommendation.json").read_text())
        assert saved["search"]["was_interrupted"]
        document = json.loads(out)
        assert (document["error"]["kind"], document["best"]) == ("search_interrupted", saved)
        found = lines(training)
        assert found[: len(known)] == known
        assert len(found) > len(known)
        assert [line["outcome"] for line in found if line["outcome"]["outcome"] == "failure"] == []
        known = found


def refused(capfd: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    """The error of a search that must be refused with a next step, before any trial."""
    assert run(["search", *arguments, "--json"]) == 2
    document: dict[str, Any] = json.loads(capfd.readouterr().out)
    assert (document["excluded"], document["best"]) == ([], None)
    error: dict[str, Any] = document["error"]
    assert error["next_step"]
    return error


@pytest.mark.parametrize(
    ("option", "value", "kind"),
    [
        ("--budget", "-1", "invalid_request"),
        ("--budget", "0.5", "budget_too_small"),
        ("--device", "cuda:63", "device"),
        ("--precision", "tf32", "invalid_request"),
        ("--out", "train.py", "study"),
        ("--storage", "not a url", "study"),
    ],
)
def test_what_cannot_be_done_is_refused_by_name(
    option: str,
    value: str,
    kind: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text(WORKLOADS)
    if value not in ("0.5", "cuda:63"):  # a start that takes too long, and what starts a driver
        run_jobs_here(monkeypatch)
    error = refused(capfd, "train.py:plain", "--device", "cpu", option, value)
    assert error["kind"] == kind
    assert value in error["message"] or option.strip("-") in error["message"]
    assert not Path("studies/train-plain/outcomes.jsonl").exists()


@pytest.mark.slow
def test_a_full_disk(training: CommandLine) -> None:
    def small_files() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (30_000, 30_000))
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)

    training.environment["PYTHONDONTWRITEBYTECODE"] = "1"  # half a module would be left for every later process
    process = training.start("search", "--json", *SEARCH, preexec_fn=small_files)
    out, err = process.communicate(timeout=200)
    assert (process.returncode, json.loads(out)["error"]["kind"]) == (2, "study"), err


@pytest.mark.parametrize(
    ("text", "target", "word"),
    [
        ("", "missing.py:workload", "missing.py"),
        ("from autotune_amp import Workload\ndef tiny(size=8): ...\n", "tinny", "tinny"),
        ("def workload(): raise KeyError('gone')\n", "workload", "KeyError: 'gone'"),
        ("import os; os.kill(os.getpid(), 11)\n", "workload", "segmentation fault"),
        ("import autotune_amp\nautotune_amp.recommend_config()\n", "workload", "inside a trial"),
    ],
)
def test_a_workload_that_cannot_be_loaded_leaves_no_folder(
    text: str,
    target: str,
    word: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    if "os.kill" not in text:
        run_jobs_here(monkeypatch)
    Path("train.py").write_text(text)
    assert word in refused(capfd, target if ":" in target else f"train.py:{target}", *FP32)["message"]
    assert not Path("studies").exists() or not list(Path("studies").iterdir())
