"""A memory profile on a card: exact parts within what the allocator counts, and PyTorch's own snapshot."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from autotune_amp import Workload
from autotune_amp.core.setting import Setting
from autotune_amp.diagnostics.memory import child
from autotune_amp.diagnostics.memory.results import MemoryBreakdown, MemoryJob
from autotune_amp.precision import torch_state
from autotune_amp.trial.context import Context
from autotune_amp.trial.jobs import Trial

pytestmark = pytest.mark.gpu

WIDTH, BATCH = 256, 64


def loss(model: nn.Module, batch: Tensor) -> Tensor:
    found: Tensor = model(batch).square().mean()
    return found


def taken_apart(snapshot_file: str | None = None) -> MemoryBreakdown:
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH, bias=False), nn.ReLU(), nn.Linear(WIDTH, WIDTH, bias=False))
    made = Workload(lambda: model, loss, lambda size: torch.ones(size, WIDTH), torch.optim.AdamW)
    trial = Trial(
        candidate=Setting(precision="fp32", batch_size=BATCH), device="cuda", torch_state=torch_state.capture()
    )
    spec = MemoryJob(device="cuda", trial=trial, snapshot_file=snapshot_file)
    found = child.measure_memory(Context(made, is_kept=False), spec, lambda message: None)
    assert isinstance(found, MemoryBreakdown), found
    return found


def test_every_part_is_exact_and_within_what_the_allocator_counts() -> None:
    found = taken_apart()
    parameters = 2 * 4 * WIDTH**2
    assert found.parameters_bytes == found.gradients_bytes == parameters
    assert found.optimizer_state_bytes == 2 * parameters, "its step counters are on the host"
    assert found.batch_bytes == 4 * BATCH * WIDTH
    assert {module.name: module.num_bytes for module in found.modules}["1"] == 4 * BATCH * WIDTH
    assert found.allocated_bytes is not None
    held = found.taken_bytes - found.rest_bytes
    assert held <= found.allocated_bytes <= found.taken_bytes


@pytest.mark.real_gpu("a snapshot of its allocator")
def test_the_snapshot_holds_the_allocations_of_the_step(tmp_path: Path) -> None:
    path = tmp_path / "memory.pickle"
    taken_apart(str(path))
    snapshot = pickle.loads(path.read_bytes())
    assert {"segments", "device_traces"} <= snapshot.keys()
    assert any(event["action"] == "alloc" for trace in snapshot["device_traces"] for event in trace)
