"""`autotune-amp profile` in a real process: one document, one trace, a row for what fails."""

from __future__ import annotations

import json

import pytest
from conftest import CommandLine

WORKLOAD = """
import torch
from torch import nn
from autotune_amp import Workload

def loss(model, batch):
    if torch.is_autocast_enabled("cpu") and torch.get_autocast_dtype("cpu") == torch.float16:
        raise torch.OutOfMemoryError("fp16 takes too much")
    return (model(batch[0]) - batch[1]).square().mean()

def data(size):
    x = torch.randn(size, 8)
    return x, x[:, :1]

def workload():
    return Workload(lambda: nn.Linear(8, 1), loss, data, torch.optim.SGD)
"""


@pytest.mark.slow
def test_one_document_one_trace_and_what_runs_out_of_memory_alone(cli: CommandLine) -> None:
    target = cli.write("train.py", WORKLOAD)
    done = cli("profile", target, "--device", "cpu", "--batches", "2", "--trace", "trace.json", "--json")
    assert done.code == 0, done.err
    document = done.document
    assert [row["precision"] for row in document["rows"]] == ["fp32", "bf16", "fp16"]
    fp32, bf16, fp16 = document["rows"]
    assert (fp16["failure"], fp16["reason"], fp16["speedup"]) == ("oom", "OutOfMemoryError: fp16 takes too much", None)
    assert document["best_precision"] == "bf16"
    assert document["speedup"] == bf16["speedup"] > 0
    assert fp32["speedup"] is None
    assert (len(bf16["process_step_seconds"]), bf16["num_steps"]) == (2, 2)
    assert document["batch_size"] == 32
    assert "The data has no batch size of its own: 32 is assumed" in document["notes"][0]
    assert "fp32, bf16, fp16 in turns on the same batches" in done.err
    assert "fp16 batch 32" in done.err
    events = json.loads((cli.folder / "trace.json").read_text())["traceEvents"]
    names = {event.get("name") for event in events}
    assert {"autotune_amp fp32 step 1", "autotune_amp bf16 step 1"} <= names
    assert "autotune_amp fp16 step 1" not in names
