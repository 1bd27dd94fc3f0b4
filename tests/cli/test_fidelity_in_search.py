"""Checks and calibrations of a real search, through the command line."""

from __future__ import annotations

import json
import sqlite3
from collections import defaultdict
from typing import Any

import pytest
from conftest import CommandLine

from autotune_amp.search.explore import NUM_SEARCH_PROCESSES

# Steps that sleep take as long in one precision as in another, and as long for 16 samples as for 4.
WORKLOADS = """
import time
import torch
from torch import nn
from autotune_amp import Workload

def sgd(parameters):
    return torch.optim.SGD(parameters, lr=1e-6)

def healthy():
    def loss(model, batch):
        time.sleep(0.1)
        return model(batch).square().mean()
    return Workload(lambda: nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1)), loss, random, sgd)

def random(size):
    return torch.randn(size, 8)

def summing():
    '''A running sum of 1024 positive terms in the precision of the layer: bf16 stops counting at a few hundred.'''
    def loss(model, batch):
        total = 0
        for term in model(batch).abs().unbind(1):
            total = total + term
        time.sleep(0.1)
        return (total.float() - 100).square().mean()
    return Workload(lambda: nn.Linear(8, 1024), loss, random, sgd)

class Offset(nn.Module):
    '''Inputs around 1000, which bf16 cannot tell apart before their mean is taken off.'''
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.rest = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1))

    def forward(self, inputs):
        hidden = self.first(inputs).float()
        return self.rest(hidden - hidden.mean(0))

def offset():
    def loss(model, batch):
        time.sleep(0.1)
        return (model(batch[0]).squeeze(-1) - batch[1]).square().mean()
    def batch(size):
        inputs = torch.randn(size, 8)
        return inputs + 1000, inputs.sum(1)
    return Workload(Offset, loss, batch, sgd)
"""
SIZES = ("--baseline", "fp32:4", "--batch-size", "16:16", "--effective-batch-size", "free")
OPTIONS = (*SIZES, "--device", "cpu", "--budget", "45")


def records(cli: CommandLine, study: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (cli.folder / f"studies/{study}/outcomes.jsonl").read_text().splitlines()]


def attributes(cli: CommandLine, study: str) -> list[dict[str, Any]]:
    """What the study knows of each fp16 trial, its parameters among it."""
    found: dict[int, dict[str, Any]] = defaultdict(dict)
    database = sqlite3.connect(cli.folder / f"studies/{study}/study.db")
    for number, key, value in database.execute("select trial_id, key, value_json from trial_user_attributes"):
        found[number][key] = json.loads(value)
    for number, key, value in database.execute("select trial_id, param_name, param_value from trial_params"):
        found[number][key] = value
    database.close()
    return [trial for trial in found.values() if str(trial["candidate"]).startswith("fp16")]


@pytest.mark.slow
def test_fp16_is_measured_once_calibrated_and_every_pair_answered_by_replay(cli: CommandLine) -> None:
    cli.write("train.py", WORKLOADS)
    options = (*OPTIONS, "--precision", "fp16", "--precision", "fp32", "--steps", "3000")
    done = cli.search("train.py:healthy", *options)
    assert done.code == 0, done.err
    assert "Calibrating the loss scale" in done.err
    lines = records(cli, "train-healthy")
    fp16 = [line for line in lines if line["candidate"]["precision"] == "fp16"]
    searched = [line["candidate"]["batch_size"] for line in fp16 if line["purpose"] == "search"]
    assert set(searched) == {16}
    assert len(searched) <= NUM_SEARCH_PROCESSES
    (calibrated,) = [line["outcome"] for line in fp16 if line["purpose"] == "calibration"]
    assert len(calibrated["log2_scales"]) >= 8
    trials = attributes(cli, "train-healthy")
    assert len(trials) >= 3
    assert all({"precision", "batch_size", "init_scale", "growth_interval"} <= set(trial) for trial in trials)
    assert all({"applied_share", "num_skips", "snapped_init_scale"} <= set(trial) for trial in trials)
    assert sum("record" in trial for trial in trials) == len(searched), "the others were replayed"
    assert calibrated["init_scale"] in {trial["snapped_init_scale"] for trial in trials}

    # Interrupted before its answer was saved, it goes on without a check or a trial of fp16 more.
    (cli.folder / "studies/train-healthy/recommendation.json").unlink()
    assert cli.search("train.py:healthy", *options).code == 0
    again = [line for line in records(cli, "train-healthy") if line["purpose"] in ("search", "fidelity", "calibration")]
    assert [line["number"] for line in again if line["number"] > lines[-1]["number"]] == []


@pytest.mark.slow
def test_a_recommended_fp16_says_what_its_loss_scale_is_based_on(cli: CommandLine) -> None:
    cli.write("train.py", WORKLOADS)
    done = cli.search("train.py:healthy", *OPTIONS, "--precision", "fp16", "--steps", "3000")
    assert done.code == 0, done.err
    document = done.document
    config, evidence = document["config"], document["evidence"]
    assert config["precision"] == "fp16"
    found = evidence["loss_scale"]
    assert found["num_steps"] == 3000
    assert found["applied_share"] > 0.99
    assert found["num_skips"] <= found["default_num_skips"]
    assert found["num_skips_seen"] == found["num_skips_foretold"] == 0
    assert config["loss_scale"]["init_scale"] <= 2 ** found["log2_safe_scale_min"]
    assert evidence["fidelity"]["verdict"] == "faithful"
    assert document["fidelity"] == [evidence["fidelity"]]
    assert not any("learns" in warning for warning in document["warnings"])
    lines = records(cli, "train-healthy")
    checks = [line for line in lines if line["purpose"] in ("fidelity", "calibration")]
    assert document["search"]["num_trials"] == len(lines) - len(checks)
    shown = cli("show", "studies/train-healthy").out
    assert "fp16 is faithful" in shown
    assert "skips seen" in " ".join(shown.replace("│", " ").split())


@pytest.mark.slow
def test_a_precision_that_does_harm_is_excluded_with_its_reason(cli: CommandLine) -> None:
    cli.write("train.py", WORKLOADS)
    done = cli.search("train.py:summing", *OPTIONS, "--precision", "bf16", "--precision", "fp32")
    assert done.code == 0, done.err
    assert "Checking bf16 against fp32" in done.err
    document = done.document
    assert document["config"]["precision"] == "fp32"
    (reason,) = [e["reason"] for e in document["excluded"] if e["precision"] == "bf16" and e["batch_size"] is None]
    assert reason.startswith("bf16 is unfaithful")
    assert document["fidelity"][0]["verdict"] == "unfaithful"


@pytest.mark.slow
def test_a_precision_that_pins_heal_is_recommended_with_them(cli: CommandLine) -> None:
    cli.write("train.py", WORKLOADS)
    # Finding the pins takes the longest of all checks, and on a busy machine several times as long.
    done = cli.search("train.py:offset", *OPTIONS, "--budget", "90", "--precision", "bf16")
    assert done.code == 0, done.err
    document = done.document
    config = document["config"]
    assert (config["precision"], config["batch_size"], config["pinned_modules"]) == ("bf16", 16, ["first"])
    assert [found["verdict"] for found in document["fidelity"]] == ["unfaithful", "faithful"]
    assert document["evidence"]["fidelity"]["pinned_modules"] == ["first"]
    shown = cli("show", "studies/train-offset").out
    assert "first in fp32" in shown
