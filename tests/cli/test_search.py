"""What a search says and keeps, through the command line."""

from __future__ import annotations

import json
import sqlite3
import sys
import time
from typing import Any

import msgspec
import pytest
from conftest import CommandLine

from autotune_amp.core.hardware import MachineLoad
from autotune_amp.search import busy

SLEEPY = """
import time
import torch
from torch import nn
from autotune_amp import Workload

def model():
    time.sleep({build})
    return nn.Linear(8, 1)

def loss(model, batch):
    time.sleep({step} + {sample} * len(batch))
    return model(batch).square().mean()

def workload():
    return Workload(model, loss, lambda size: torch.randn(size, 8), lambda p: torch.optim.SGD(p, lr=0.01))
"""
FREE = ("--effective-batch-size", "free")


@pytest.mark.slow
def test_the_document(cli: CommandLine) -> None:
    target = cli.write("train.py", SLEEPY.format(build=0, step=0.02, sample=0.0))
    done = cli.search(
        target,
        "--budget",
        "60",
        "--precision",
        "fp32",
        "--baseline",
        "fp32:4",
        "--batch-size",
        "4:16",
        "--device",
        "cpu",
        *FREE,
    )
    assert done.code == 0, done.err
    document = done.document
    assert document == json.loads((cli.folder / "studies/train/recommendation.json").read_text())
    assert document["format"] == 1
    config = document["config"]
    # A step takes the same time for any batch: the largest is the fastest, four times the baseline.
    assert (config["precision"], config["batch_size"], config["accumulation_steps"]) == ("fp32", 16, 1)
    assert config["loss_scale"] is None
    assert config["fallback"] == []
    assert config["pinned_modules"] == []
    evidence = document["evidence"]
    if evidence["is_confirmed"]:
        assert evidence["num_processes"] >= 3
    else:  # a busy machine: three rounds did not fit
        assert any("Unconfirmed" in warning for warning in document["warnings"])
    assert evidence["speedup"] > 1.5
    low, high = evidence["speedup_interval"]
    assert low <= evidence["speedup"] <= high
    low, high = evidence["samples_per_second_interval"]
    assert low <= evidence["samples_per_second"] <= high
    assert evidence["peak_memory_bytes"] > 50 * 2**20
    baseline = evidence["baseline"]
    assert (baseline["config"]["precision"], baseline["config"]["batch_size"]) == ("fp32", 4)
    assert 0 < baseline["samples_per_second"] <= 4 / 0.02  # a step sleeps 20 ms
    assert "16" in document["reason"]
    assert any("learning rate" in warning for warning in document["warnings"])
    assert any("loss was finite" in w or "learns what fp32" in w for w in document["warnings"]) is False
    assert document["search"]["study"] == "train"
    assert cli.failures() == []
    load = msgspec.convert(document["search"]["load"], MachineLoad)
    said = busy.before_first_trial(load)
    assert set(said) <= set(document["warnings"])
    assert all(line in done.err for line in said), "at once, and kept"
    if sys.platform == "linux":
        assert load.others_num_cores is not None
        assert (load.own_num_cores or 0.0) > 0, "importing torch takes a while"
    assert evidence["load"]["num_cpus"] == load.num_cpus
    assert set(document["versions"]) >= {"python", "torch", "optuna", "autotune_amp"}
    assert len(document["fingerprint"]["digest"]) == 64
    assert {"fp8", "tf32"} >= {e["precision"] for e in document["excluded"] if e["batch_size"] is None}
    lines = [json.loads(line) for line in (cli.folder / "studies/train/outcomes.jsonl").read_text().splitlines()]
    assert document["search"]["num_trials"] == len(lines)
    assert_interleaved(lines, config["environment"])
    shown = cli("show", "studies/train", "--json")
    assert shown.document == document


def assert_interleaved(lines: list[dict[str, Any]], environment: dict[str, str]) -> None:
    """Winner and baseline take turns, the winner in the recommended environment and the baseline in the user's own."""
    confirming = [line for line in lines if line["purpose"] == "confirm"]
    sizes = [(line["candidate"]["batch_size"], line["environment"]) for line in confirming]
    assert {json.dumps(size) for size in sizes} >= {json.dumps((16, environment)), json.dumps((4, {}))}
    for number in {line["round"] for line in confirming}:
        in_round = [line["candidate"]["batch_size"] for line in confirming if line["round"] == number]
        assert len(set(in_round)) == len(in_round)
    if environment:
        assert [line["environment"] for line in lines if line["purpose"] == "plain"] == [{}]


def test_an_effective_batch_size_is_kept_exactly(cli: CommandLine) -> None:
    target = cli.write("train.py", SLEEPY.format(build=0, step=0.01, sample=0.0))
    options = ("--precision", "fp32", "--baseline", "fp32:4", "--effective-batch-size", "24", "--device", "cpu")
    document = cli.search(target, "--budget", "24", *options).document
    config = document["config"]
    assert config["batch_size"] * config["accumulation_steps"] == 24
    assert document["evidence"]["accumulation"]["verdict"] == "mean"
    assert not any("learning rate" in warning for warning in document["warnings"])
    rows = [row for row in document["candidates"] if row["precision"] == "fp32"]
    assert all(row["batch_size"] * row["accumulation_steps"] == 24 for row in rows)
    measured = {row["batch_size"]: row["step_seconds"] for row in rows if row["step_seconds"]}
    # One optimizer step is 24 / b passes of at least 10 ms, so that the largest batch is the fastest.
    assert config["batch_size"] == max(measured)
    for size, seconds in measured.items():
        assert seconds >= 0.0099 * 24 / size


def test_batch_norm_keeps_the_loaders_batch_whole(cli: CommandLine) -> None:
    """The loader's batch is the effective batch where no option says otherwise."""
    target = cli.write(
        "train.py",
        """
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from autotune_amp import Workload

def workload():
    data = TensorDataset(torch.randn(64, 8), torch.randn(64, 1))
    return Workload(lambda: nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 1)),
                    lambda model, batch: (model(batch[0]) - batch[1]).square().mean(), DataLoader(data, batch_size=8))
""",
    )
    done = cli.search(target, "--budget", "30", "--precision", "fp32", "--device", "cpu")
    assert done.code == 0, done.err
    document = done.document
    assert {(row["batch_size"], row["accumulation_steps"]) for row in document["candidates"]} == {(8, 1)}
    assert document["evidence"]["accumulation"]["verdict"] == "inexact"
    (excluded,) = [e for e in document["excluded"] if e["batch_size"] is not None]
    assert excluded["batch_size"] == 4
    assert "BatchNorm" in excluded["reason"]
    (warning,) = [w for w in document["warnings"] if "withheld" in w]
    assert "BatchNorm" in warning


def test_the_study_opens_in_optuna_and_says_why_a_trial_failed(cli: CommandLine) -> None:
    text = SLEEPY.format(build=0, step=0.0, sample=0.0)
    text = text.replace("    return model(batch)", "    assert len(batch) != 8, 'not eight'\n    return model(batch)")
    target = cli.write("train.py", text)
    options = ("--precision", "fp32", "--baseline", "fp32:4", "--batch-size", "8:8", "--device", "cpu", *FREE)
    assert cli.search(target, "--budget", "16", *options).code == 0
    with sqlite3.connect(cli.folder / "studies/train/study.db") as database:
        rows = database.execute("select key, value_json from trial_user_attributes").fetchall()
        parameters = database.execute("select distinct param_name from trial_params").fetchall()
    database.close()
    assert ("failure", '"workload_error"') in rows
    assert any(key == "reason" and "not eight" in value for key, value in rows)
    assert {name for (name,) in parameters} == {"precision", "batch_size"}


def test_a_storage_of_the_users_own(cli: CommandLine) -> None:
    target = cli.write("train.py", SLEEPY.format(build=0, step=0.0, sample=0.0))
    options = ("--precision", "fp32", "--baseline", "fp32:4", "--batch-size", "4:4", "--device", "cpu")
    assert cli.search(target, "--budget", "16", *options, "--storage", f"sqlite:///{cli.folder}/own.db").code == 0
    assert (cli.folder / "own.db").exists()
    assert not (cli.folder / "studies/train/study.db").exists()


@pytest.mark.slow
def test_the_budget_is_kept_with_long_steps_and_a_long_set_up(cli: CommandLine) -> None:
    """Steps of a second and ten seconds of building; the time over the budget is the ending of processes."""
    target = cli.write("train.py", SLEEPY.format(build=10, step=1.0, sample=0.0))
    started = time.monotonic()
    options = ("--precision", "fp32", "--baseline", "fp32:4", "--device", "cpu", *FREE)
    done = cli.search(target, "--budget", "80", *options)
    seconds = time.monotonic() - started
    assert done.code == 0, done.err
    assert seconds < 80 + 8, "this is the budget's own promise, not a speed"
    assert "it is built once and shared" in done.err
    assert done.document["search"]["num_trials"] >= 3
    if not done.document["evidence"]["is_confirmed"]:
        assert any("nconfirmed" in warning for warning in done.document["warnings"])


def test_a_budget_for_the_baseline_alone_says_what_was_left_untried(cli: CommandLine) -> None:
    target = cli.write("train.py", SLEEPY.format(build=0.0, step=0.5, sample=0.0))
    options = ("--precision", "fp32", "--baseline", "fp32:4", "--device", "cpu", *FREE)
    done = cli.search(target, "--budget", "24", *options)
    assert done.code == 0, done.err
    assert not done.document["evidence"]["is_confirmed"]
    assert any("not tried" in entry["reason"] for entry in done.document["excluded"])


@pytest.mark.slow
def test_the_embedded_default_needs_no_argument(cli: CommandLine) -> None:
    done = cli("search", "--budget", "25")
    assert done.code == 0, done.err
    assert "fp32 batch 32" in done.err
    assert "Recommended" in done.out
    assert (cli.folder / "studies/embedded/recommendation.json").exists()
    shown = cli("show")
    assert "Recommended" in shown.out


def test_quiet_says_nothing_but_the_result(cli: CommandLine) -> None:
    target = cli.write("train.py", SLEEPY.format(build=0, step=0.0, sample=0.0))
    options = ("--precision", "fp32", "--baseline", "fp32:4", "--batch-size", "4:4", "--device", "cpu")
    done = cli.search(target, "--budget", "16", *options, "--quiet")
    assert done.code == 0
    assert done.err == ""
