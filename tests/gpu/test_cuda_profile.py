"""A profile on a CUDA device."""

from __future__ import annotations

import json

import pytest
from conftest import CommandLine

pytestmark = pytest.mark.gpu

WORKLOAD = """
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from autotune_amp import Workload

def loss(model, batch):
    return nn.functional.cross_entropy(model(batch[0]), batch[1])

def workload():
    data = TensorDataset(torch.randn(2048, 1024), torch.randint(10, (2048,)))
    layers = [nn.Linear(1024, 1024), nn.LayerNorm(1024), nn.ReLU(), nn.Linear(1024, 10)]
    return Workload(lambda: nn.Sequential(*layers), loss, DataLoader(data, batch_size=64), torch.optim.AdamW)
"""


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
        assert parts["idle"]["seconds"] > 0
        assert parts["matrix_products"]["seconds"] > 0
        assert parts["optimizer"]["seconds"] > 0
        assert row["gap"]["note"] is None
        assert row["peak_memory_bytes"] > 1024 * 1024 * 4
    low = [row for row in ran if row["precision"] in ("bf16", "fp16")]
    assert all({part["name"]: part["share"] for part in row["gap"]["parts"]}["casts"] > 0 for row in low)
    categories = {event.get("cat") for event in json.loads((cli.folder / "trace.json").read_text())["traceEvents"]}
    assert "kernel" in categories
