"""A confirmation on a CUDA device: each round is one process, which is started for it."""

from __future__ import annotations

import json
from typing import Any

import pytest
from conftest import CommandLine

pytestmark = [pytest.mark.gpu, pytest.mark.slow]

WORKLOAD = """
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from autotune_amp import Workload

def loss(model, batch):
    return nn.functional.cross_entropy(model(batch[0]), batch[1])

def model():
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 10))

def workload():
    data = TensorDataset(torch.randn(512, 3, 8, 8), torch.randint(10, (512,)))
    return Workload(model, loss, DataLoader(data, batch_size=32), torch.optim.SGD)
"""


def test_the_runs_of_a_round_share_a_process_that_is_started_for_it(cli: CommandLine) -> None:
    target = cli.write("train.py", WORKLOAD)
    done = cli.search(target, "--device", "cuda", "--budget", "110", "--trials", "3", "--precision", "bf16")
    assert done.code == 0, done.err
    (path,) = cli.folder.glob("studies/*/outcomes.jsonl")
    records = [json.loads(line) for line in path.read_text().splitlines()]
    rounds: dict[int, list[dict[str, Any]]] = {}
    for record in records:
        if record["round"] is not None:
            rounds.setdefault(record["round"], []).append(record)
    assert rounds
    for number, runs in rounds.items():
        if any(run["outcome"]["outcome"] == "failure" for run in runs):  # on a busy machine one may be cut off
            continue
        first, *others = [run["start_seconds"] for run in runs]
        assert first > 0
        assert others == [0.0] * len(others)
        assert len(runs) >= 2 or number == max(rounds), "the time left may end the last"
    assert done.document["evidence"]["are_processes_shared"]
