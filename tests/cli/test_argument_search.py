"""A search of a training command with arguments of the user's own, in the command and in its settings file."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from conftest import SharedOnce
from forked_python import ForkServer
from real_searches import Searched, searched

SCRIPT = """
import argparse, json, time
import torch

parser = argparse.ArgumentParser()
parser.add_argument("--pause", type=float)
parser.add_argument("--long", action="store_true")
parser.add_argument("--settings")
options = parser.parse_args()
torch.manual_seed(0)
data = torch.utils.data.TensorDataset(torch.randn(4096, 8), torch.randn(4096, 1))
model = torch.nn.Linear(8, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
loss = {"mse": torch.nn.MSELoss, "l1": torch.nn.L1Loss}[json.load(open(options.settings))["loss"]]()
for epoch in range(1000):
    for x, y in torch.utils.data.DataLoader(data, batch_size=8):
        time.sleep(options.pause + 0.1 * options.long)
        loss(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
"""
SETTINGS = '{"loss": "{loss=mse:huber}", "width": {"a": 1}}'
OPTIONS = ("--device", "cpu", "--precision", "fp32", "--trials", "4", "--budget", "600", "--file", "settings.json")
COMMAND = ("train.py", "--settings", "settings.json", "--pause", "{pause=0.1:0.02}", "{!long:on=--long|off=}")


@pytest.fixture
def found(shared_once: SharedOnce, cli_server: ForkServer | None) -> Searched:
    def search(folder: Path) -> Searched:
        (folder / "settings.json").write_text(SETTINGS)
        return searched(cli_server, folder, SCRIPT, *OPTIONS, "--", sys.executable, *COMMAND)

    return shared_once("found_arguments", search)


@pytest.mark.slow
def test_each_value_is_tried_in_runs_of_the_command_and_the_best_is_in_its_answer(found: Searched) -> None:
    assert found.done.code == 0, found.done.err
    document = found.document
    assert document["config"]["arguments"] == [["pause", "0.02"]]
    assert document["evidence"]["speedup"] > 2
    assert document["evidence"]["fidelity"]["verdict"] == "faithful", "the pause is compared by gradients"
    rows = {
        (row["name"], row["value"]): row for row in document["variants"] if row["name"] in ("pause", "long", "loss")
    }
    assert {key: row["status"] for key, row in rows.items()} == {
        ("pause", "0.02"): "chosen",
        ("long", "on"): "tried",
        ("loss", "huber"): "workload_error",
    }
    assert "huber" in rows["loss", "huber"]["reason"]
    checked = [r["candidate"]["arguments"] for r in found.records if r["purpose"] == "fidelity"]
    assert checked == [[["pause", "0.02"]]]
    filled = f"{sys.executable} train.py --settings studies/train/settings.json --pause 0.02"
    assert document["command"] == filled
    assert json.loads((found.study / "settings.json").read_text()) == {"loss": "mse", "width": {"a": 1}}


@pytest.mark.slow
def test_the_plan_is_printed_before_the_trials_and_losses_tell_a_value_without_effect(found: Searched) -> None:
    for text in ("pause 0.1 or 0.02", "long off or on", "loss mse or huber", "{accumulation_steps=", "of the command"):
        assert text in found.done.err, text
    losses = {
        json.dumps(r["candidate"].get("arguments", [])): tuple(r["outcome"]["first_losses"])
        for r in found.records
        if r["purpose"] == "search" and "first_losses" in r["outcome"]
    }
    assert len(losses) == 3
    assert len(set(losses.values())) == 1, "neither a pause changes them"
