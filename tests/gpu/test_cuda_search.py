"""A search on a CUDA device, which many tests read, and a profile."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from conftest import CommandLine, SharedOnce, command_line

pytestmark = [pytest.mark.gpu, pytest.mark.real_time]

# From 512 samples on it takes more memory than a card has.
WORKLOAD = """
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from autotune_amp import Workload

def loss(model, batch):
    if len(batch[0]) >= 512:
        torch.empty(1 << 50, dtype=torch.uint8, device="cuda")
    return nn.functional.cross_entropy(model(batch[0]), batch[1])

def model():
    return nn.Sequential(nn.Linear(1024, 1024), nn.LayerNorm(1024), nn.ReLU(), nn.Linear(1024, 10))

def workload():
    data = TensorDataset(torch.randn(2048, 1024), torch.randint(10, (2048,)))
    return Workload(model, loss, DataLoader(data, batch_size=64), torch.optim.AdamW)
"""


@pytest.fixture
def searched(shared_once: SharedOnce) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The document of one search, and its records."""

    def search(folder: Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
        with command_line(folder) as cli:
            target = cli.write("train.py", WORKLOAD)
            options = ("--batch-size", "64:512", "--effective-batch-size", "free", "--budget", "180")
            done = cli.search(target, "--device", "cuda", *options)
        assert done.code == 0, done.err
        lines = (folder / "studies/train/outcomes.jsonl").read_text().splitlines()
        return done.document, [json.loads(line) for line in lines]

    return shared_once("searched on a card", search)


def test_every_precision_is_measured_and_the_baseline_is_confirmed(searched: Any) -> None:
    document, _ = searched
    assert document["hardware"]["device"].startswith("cuda:")
    measured = {row["precision"] for row in document["candidates"] if row["samples_per_second"]}
    legal = {p for p, c in document["hardware"]["precisions"].items() if c["level"] != "unsupported"} - {"fp8"}
    assert measured >= legal
    assert document["evidence"]["baseline"]["samples_per_second"] > 0
    assert document["config"]["environment"] == {}
    assert document["evidence"]["peak_memory_bytes"] > 1024 * 1024 * 4


def test_what_else_a_card_can_have_is_tried_or_refused_with_a_reason(searched: Any) -> None:
    document, records = searched
    rows = {(row["name"], row["value"]): row for row in document["variants"]}
    assert rows["memory_format", "channels_last"]["status"] == "untried", "it has no convolution"
    assert rows["compile", "reduce-overhead"]["reason"] != "CUDA graphs need CUDA"
    assert all(row["reason"] for row in rows.values() if row["status"] == "untried")
    assert not [row for row in rows.values() if row["status"] == "crash"]
    assert sum(record["purpose"] == "profile" for record in records) <= 1


def test_a_batch_over_the_devices_memory_is_out_of_memory_and_the_search_goes_on(searched: Any) -> None:
    document, _ = searched
    assert any("oom" in one["reason"] for one in document["excluded"] if one["batch_size"] == 512)


def test_the_runs_of_a_round_share_a_process_that_is_started_for_it(searched: Any) -> None:
    document, records = searched
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
    assert document["evidence"]["are_processes_shared"]


def test_what_the_calling_process_holds_is_said(cli: CommandLine) -> None:
    cli.write("train.py", WORKLOAD)
    script = """
import torch
from autotune_amp import recommend_config
from train import workload
held = torch.empty(torch.cuda.get_device_properties(0).total_memory // 8, dtype=torch.uint8, device="cuda")
found = recommend_config(workload(), budget=40, precision="fp32", batch_size=(64, 64), quiet=True)
print(*found.warnings, sep="\\n")
"""
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, cwd=cli.folder, env=cli.environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "torch.cuda.empty_cache()" in done.stdout


@pytest.mark.real_gpu("CUPTI, which times kernels")
def test_kernels_are_told_apart_and_the_device_is_idle_between_them(cli: CommandLine) -> None:
    target = cli.write("train.py", WORKLOAD)
    done = cli("profile", target, "--device", "cuda", "--trace", "trace.json", "--json")
    assert done.code == 0, done.err
    ran = [row for row in done.document["rows"] if row["gap"] is not None]
    assert "fp32" in [row["precision"] for row in ran]
    for row in ran:
        parts = {part["name"]: part for part in row["gap"]["parts"]}
        assert sum(part["share"] for part in parts.values()) == pytest.approx(1)
        for name in ("idle", "matrix_products", "optimizer"):
            assert parts[name]["seconds"] > 0
        assert parts["casts"]["share"] > 0 or row["precision"] not in ("bf16", "fp16")
        assert row["gap"]["note"] is None
        assert row["peak_memory_bytes"] > 1024 * 1024 * 4
    categories = {event.get("cat") for event in json.loads((cli.folder / "trace.json").read_text())["traceEvents"]}
    assert "kernel" in categories
