"""A finished search is ranked again through the command line, without a trial."""

from __future__ import annotations

import json

import pytest
from conftest import CommandLine

WORKLOAD = """
import time
import torch
from torch import nn
from autotune_amp import Workload

def loss(model, batch):
    time.sleep(0.01)
    return model(batch).square().mean()

def workload():
    data = lambda size: torch.randn(size, 8)
    return Workload(lambda: nn.Linear(8, 1), loss, data, lambda p: torch.optim.SGD(p, lr=0.01))
"""


@pytest.mark.slow
def test_a_finished_search_is_ranked_again(cli: CommandLine) -> None:
    target = cli.write("train.py", WORKLOAD)
    options = (
        *("--budget", "30", "--trials", "2", "--precision", "fp32", "--baseline", "fp32:4", "--batch-size", "4:8"),
        *("--effective-batch-size", "free", "--device", "cpu"),
    )
    first = cli.search(target, *options, "--steps", "1000", "--price-per-hour", "3")
    assert first.code == 0, first.err
    job = first.document["job"]
    num_samples = 1000 * first.document["config"]["batch_size"]
    speed = first.document["evidence"]["samples_per_second"]
    assert (job["num_steps"], job["num_samples"]) == (1000, num_samples)
    assert abs(job["hours"] - num_samples / speed / 3600) < 1e-9
    low, high = job["price_interval"]
    assert low <= job["price"] <= high
    file, log = (cli.folder / "studies/train" / name for name in ("recommendation.json", "outcomes.jsonl"))
    measured = log.read_bytes()

    shown = cli("show", "studies/train", "--objective", "memory", "--json")
    assert shown.code == 0, shown.err
    assert shown.document["objective"] == "memory"
    assert "has the least memory" in shown.document["reason"] or "Keep what you have" in shown.document["reason"]
    assert json.loads(file.read_text()) == first.document, "nothing is saved"

    again = cli.search(target, *options, "--objective", "memory")
    assert again.code == 0, again.err
    assert "Ranked again for memory" in again.err
    assert again.document["job"] is None
    assert again.document["config"] == shown.document["config"]
    assert json.loads(file.read_text()) == again.document
    back = cli.search(target, *options, "--steps", "1000", "--price-per-hour", "3")
    assert back.document == first.document, "what was chosen does not hang on the way to it"
    assert log.read_bytes() == measured, "nothing was run"

    log.unlink()
    lost = cli("show", "studies/train", "--objective", "memory")
    assert lost.code == 2
    assert "outcomes.jsonl lacks the trials" in lost.err
