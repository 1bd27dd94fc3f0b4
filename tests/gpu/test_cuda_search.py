"""A search on a CUDA device."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from conftest import CommandLine

pytestmark = pytest.mark.gpu

FREE = ("--effective-batch-size", "free")
WORKLOAD = """
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from autotune_amp import Workload

def loss(model, batch):
    if {memory_per_sample} and len(batch[0]) >= 512:
        torch.empty(len(batch[0]) * {memory_per_sample}, dtype=torch.uint8, device="cuda").add_(1)
    return nn.functional.cross_entropy(model(batch[0]), batch[1])

def model():
    layers = [nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 10)]
    return nn.Sequential(*layers)

def workload():
    data = TensorDataset(torch.randn(2048, 1024), torch.randint(10, (2048,)))
    return Workload(model, loss, DataLoader(data, batch_size=64), torch.optim.AdamW)
"""


def test_every_precision_is_measured_and_the_baseline_is_confirmed(cli: CommandLine) -> None:
    target = cli.write("train.py", WORKLOAD.format(memory_per_sample=0))
    done = cli.search(target, "--device", "cuda", "--budget", "150", "--batch-size", "64:512", *FREE)
    assert done.code == 0, done.err
    document = done.document
    assert document["hardware"]["device"].startswith("cuda:")
    measured = {row["precision"] for row in document["candidates"] if row["samples_per_second"]}
    legal = {p for p, c in document["hardware"]["precisions"].items() if c["level"] != "unsupported"} - {"fp8"}
    assert measured >= legal
    assert document["evidence"]["baseline"]["samples_per_second"] > 0
    assert document["config"]["environment"] == {}
    assert document["evidence"]["peak_memory_bytes"] > 1024 * 1024 * 4


def test_a_batch_over_the_devices_memory_is_out_of_memory_and_the_search_goes_on(cli: CommandLine) -> None:
    target = cli.write("train.py", WORKLOAD.format(memory_per_sample=2**30))
    options = ("--batch-size", "64:1024", *FREE)
    done = cli.search(target, "--device", "cuda", "--precision", "fp32", "--budget", "60", *options)
    assert done.code == 0, done.err
    reasons = [e["reason"] for e in done.document["excluded"] if e["batch_size"] in (512, 1024)]
    assert any("oom" in reason for reason in reasons)


def test_what_the_calling_process_holds_is_said(cli: CommandLine) -> None:
    (cli.folder / "train.py").write_text(WORKLOAD.format(memory_per_sample=0))
    total = torch.cuda.get_device_properties(0).total_memory
    script = f"""
import os, torch
from autotune_amp import recommend_config
from train import workload
held = torch.empty({total // 8}, dtype=torch.uint8, device="cuda")
found = recommend_config(workload(), budget=60, precision="fp32", batch_size=(64, 64), quiet=True)
print([text for text in found.warnings if "The calling process holds" in text])
print("a stranger:", any(str(os.getpid()) in text for text in found.warnings))
"""
    (cli.folder / "script.py").write_text(script)
    done = subprocess.run(
        [sys.executable, "script.py"], cwd=cli.folder, env=cli.environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert "torch.cuda.empty_cache()" in done.stdout
    assert "a stranger: False" in done.stdout
