"""Killed, interrupted, started twice, or given a folder that cannot be used: nothing measured is lost, nothing left."""

from __future__ import annotations

import json
import os
import random
import resource
import signal
import sqlite3
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
from conftest import CommandLine, Finished

from autotune_amp.search.explore import NUM_SEARCH_PROCESSES

TINY = """
import time
import torch
from torch import nn
from autotune_amp import Workload

def make_batch(size):
    return torch.randn(size, 8), torch.randn(size, 1)

def loss(model, batch):
    time.sleep({sleep})
    return (model(batch[0]) - batch[1]).square().mean()

def workload():
    return Workload(lambda: nn.Linear(8, 1), loss, make_batch, lambda p: torch.optim.SGD(p, lr=0.01))
"""
FREE = ("--batch-size", "1:64", "--effective-batch-size", "free")
OPTIONS = ("--budget", "20", "--precision", "fp32", "--baseline", "fp32:4", *FREE, "--device", "cpu")


def lines(cli: CommandLine) -> list[dict[str, Any]]:
    path = cli.folder / "studies/train/outcomes.jsonl"
    text = path.read_text() if path.exists() else ""
    return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]


def wait_for_lines(cli: CommandLine, process: subprocess.Popen[str], count: int) -> None:
    deadline = time.monotonic() + 60
    while len(lines(cli)) < count and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.02)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_killed_at_twenty_random_moments_the_same_command_goes_on(cli: CommandLine) -> None:
    target = cli.write("train.py", TINY.format(sleep=0.02))
    chance = random.Random(7)
    known: list[dict[str, Any]] = []
    for _ in range(20):
        process = cli.start("search", target, *OPTIONS)
        began = len(known)
        if chance.random() < 0.3:
            time.sleep(chance.uniform(0.0, 3.0))  # while it starts
        else:
            wait_for_lines(cli, process, began + chance.randint(1, 2))
            time.sleep(chance.uniform(0.0, 0.5))
        process.send_signal(signal.SIGKILL)
        process.communicate()
        found = lines(cli)
        assert found[:began] == known, "a kill lost or changed what was measured"
        known = found
        assert cli.wait_until_alone() == []
    done = cli.search(target, *OPTIONS)
    assert done.code == 0, done.err
    assert lines(cli)[: len(known)] == known
    numbers = [line["number"] for line in lines(cli)]
    assert numbers == list(range(1, len(numbers) + 1))
    searched = [json.dumps(line["candidate"]) for line in lines(cli) if line["purpose"] == "search"]
    assert all(searched.count(candidate) <= NUM_SEARCH_PROCESSES for candidate in searched)
    assert done.document["search"]["num_trials"] == len(numbers)


@pytest.mark.slow
def test_a_line_cut_short_by_a_kill_is_dropped(cli: CommandLine) -> None:
    target = cli.write("train.py", TINY.format(sleep=0))
    assert cli.search(target, *OPTIONS).code == 0
    path = cli.folder / "studies/train/outcomes.jsonl"
    whole = path.read_text()
    with path.open("a") as file:
        file.write('{"format":1,"search_id":"half a li')
    (cli.folder / "studies/train/recommendation.json").unlink()
    done = cli.search(target, *OPTIONS)
    assert done.code == 0
    assert path.read_text().startswith(whole)
    assert all(json.loads(line)["format"] == 1 for line in path.read_text().splitlines())


@pytest.mark.slow
@pytest.mark.parametrize("is_json", [True, False])
def test_ctrl_c_saves_the_best_so_far(cli: CommandLine, is_json: bool) -> None:
    target = cli.write("train.py", TINY.format(sleep=0.05))
    process = cli.start("search", target, *OPTIONS, *(["--json"] if is_json else []))
    wait_for_lines(cli, process, 2)
    time.sleep(0.2)
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does: to the whole foreground group
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    assert cli.leftovers() == []
    saved = json.loads((cli.folder / "studies/train/recommendation.json").read_text())
    assert saved["search"]["was_interrupted"]
    assert saved["evidence"]["is_confirmed"] is False
    assert "The search was interrupted" in (cli.folder / "studies/train/report.html").read_text()
    if is_json:
        document = json.loads(out)
        assert document["error"]["kind"] == "search_interrupted"
        assert document["best"] == saved
        assert document["excluded"]
        return
    assert "Best so far" in out
    again = cli.search(target, *OPTIONS)
    assert again.code == 0
    assert not again.document["search"]["was_interrupted"]


def test_ctrl_c_before_anything_was_measured(cli: CommandLine) -> None:
    target = cli.write("train.py", "import time; time.sleep(60)")
    process = cli.start("search", target, *OPTIONS, "--json")
    time.sleep(3)
    process.send_signal(signal.SIGINT)
    out, _ = process.communicate(timeout=60)
    assert process.returncode == 130
    assert json.loads(out)["best"] is None
    assert cli.leftovers() == []


@pytest.mark.slow
def test_a_second_search_in_the_folder_is_told_so(cli: CommandLine) -> None:
    target = cli.write("train.py", TINY.format(sleep=0.2))
    first = cli.start("search", target, *OPTIONS)
    wait_for_lines(cli, first, 1)
    second = cli.search(target, *OPTIONS)
    assert second.code == 2
    assert second.document["error"]["kind"] == "study_busy"
    assert first.poll() is None, "the first search must go on"
    first.send_signal(signal.SIGINT)
    first.communicate(timeout=60)


def refused(cli: CommandLine, *arguments: str, **options: Any) -> Finished:
    """A search that must be refused before any trial, with a document that says why."""
    target = cli.write("train.py", TINY.format(sleep=0))
    done = cli.search(target, *OPTIONS, *arguments, **options)
    assert done.code == 2, done.err
    assert lines(cli) == []
    assert done.document["error"]["next_step"]
    return done


def test_a_folder_that_cannot_be_made(cli: CommandLine) -> None:
    (cli.folder / "taken").write_text("a file")
    assert "cannot be written" in refused(cli, "--out", "taken").document["error"]["message"]


def test_a_full_disk(cli: CommandLine) -> None:
    def small_files() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (30_000, 30_000))
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)

    done = refused(cli, preexec_fn=small_files)
    assert done.document["error"]["kind"] == "study"


@pytest.mark.parametrize("url", ["sqlite:////nowhere/study.db", "nonsense://host/db", "not a url"])
def test_a_storage_that_cannot_be_reached(cli: CommandLine, url: str) -> None:
    done = refused(cli, "--storage", url)
    assert done.document["error"]["kind"] == "study"
    assert url in done.document["error"]["message"]


@pytest.mark.parametrize(
    ("text", "word"), [("{ half", "is damaged"), ('{"format": 99}', "has format 99"), ("[]", "is damaged")]
)
@pytest.mark.parametrize("fresh", [[], ["--fresh"]])
def test_a_recommendation_that_cannot_be_read(cli: CommandLine, text: str, word: str, fresh: list[str]) -> None:
    folder = cli.folder / "studies/train"
    folder.mkdir(parents=True)
    (folder / "recommendation.json").write_text(text)
    assert word in refused(cli, *fresh).document["error"]["message"]
    assert (folder / "recommendation.json").read_text() == text


@pytest.mark.parametrize(("text", "word"), [("nonsense\n", "is damaged"), ('{"format": 9}\n', "has format 9")])
def test_outcomes_that_cannot_be_read(cli: CommandLine, text: str, word: str) -> None:
    target = cli.write("train.py", TINY.format(sleep=0))
    folder = cli.folder / "studies/train"
    folder.mkdir(parents=True)
    (folder / "outcomes.jsonl").write_text(text)
    done = cli.search(target, *OPTIONS)
    assert done.code == 2
    assert word in done.document["error"]["message"]
    assert "line 1" in done.document["error"]["message"]


@pytest.mark.parametrize(
    ("options", "word"),
    [
        (["--budget", "-1"], "--budget"),
        (["--trials", "0"], "--trials"),
        (["--device", "tpu"], "--device"),
        (["--precision", "int4"], "--precision"),
        (["--trials", "none"], "--trials"),
        (["--batch-size", "8"], "--batch-size"),
        (["--batch-size", "9:8"], "--batch-size"),
        (["--baseline", "fp32"], "--baseline"),
        (["--memory-fraction", "1.5"], "--memory-fraction"),
        (["--effective-batch-size", "0"], "--effective-batch-size"),
        (["--study", "../elsewhere"], "--study"),
        (["--budget", "soon"], "--budget"),
        (["--no-such-option"], "--no-such-option"),
    ],
)
def test_an_impossible_option(cli: CommandLine, options: list[str], word: str) -> None:
    target = cli.write("train.py", TINY.format(sleep=0))
    done = cli.search(target, *OPTIONS, *options)
    assert done.code == 2, done.err
    assert word in done.document["error"]["message"]


def test_a_precision_that_the_device_lacks(cli: CommandLine) -> None:
    target = cli.write("train.py", TINY.format(sleep=0))
    done = cli.search(target, "--precision", "tf32", "--device", "cpu", "--budget", "20")
    assert done.code == 2
    assert "TF32" in done.document["error"]["message"]
    assert lines(cli) == []


def test_a_device_that_is_not_there(cli: CommandLine) -> None:
    done = refused(cli, "--device", "cuda:63")
    assert done.document["error"]["kind"] == "device"


def test_a_budget_too_small_for_anything_says_how_much_would_do(cli: CommandLine) -> None:
    done = refused(cli, "--budget", "0.5")
    assert done.document["error"]["kind"] == "budget_too_small"
    assert "--budget" in done.document["error"]["next_step"]


@pytest.mark.slow
def test_a_study_folder_is_data_and_is_never_executed(cli: CommandLine) -> None:
    """A study folder made of hostile pickles does nothing but be refused or ignored."""
    target = cli.write("train.py", TINY.format(sleep=0))
    assert cli.search(target, *OPTIONS).code == 0
    folder = cli.folder / "studies/train"
    bomb = b"cos\nsystem\n(S'touch exploded'\ntR."
    for name in ("payload.pkl", "outcomes.pkl", "recommendation.pkl"):
        (folder / name).write_bytes(bomb)
    assert cli.search(target, *OPTIONS, "--budget", "21").code == 0
    assert not (cli.folder / "exploded").exists()
    with sqlite3.connect(folder / "study.db") as database:
        columns = database.execute("select value_json from trial_user_attributes").fetchall()
    database.close()
    assert columns
    assert all(isinstance(json.loads(value), (str, int, float, bool)) for (value,) in columns)


def test_what_a_search_leaves_in_its_folder(cli: CommandLine) -> None:
    target = cli.write("train.py", TINY.format(sleep=0))
    assert cli.search(target, *OPTIONS).code == 0
    names = {path.name for path in (cli.folder / "studies/train").iterdir()}
    assert names == {"study.db", "outcomes.jsonl", "recommendation.json", "report.html", ".lock"}
    assert {p.name for p in Path(cli.folder).iterdir()} - {"__pycache__"} == {"train.py", "studies"}
