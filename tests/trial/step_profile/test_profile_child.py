"""The child's side in this process: where a step's time goes is where it was put."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from profile_samples import measured
from torch import nn
from torch.utils.data import DataLoader

from autotune_amp import Workload
from autotune_amp.core.config import LossScale
from autotune_amp.core.outcome import Profiled
from autotune_amp.core.precisions import Precision
from autotune_amp.core.setting import Setting
from autotune_amp.precision import torch_state
from autotune_amp.trial.context import Context
from autotune_amp.trial.jobs import Trial
from autotune_amp.trial.step_profile import child
from autotune_amp.trial.step_profile.breakdown import ProfileJob, StepBreakdown, break_down

SAMPLES = torch.utils.data.TensorDataset(torch.linspace(0, 1, 64 * 32).reshape(64, 32), torch.ones(64, 1))


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 1))


def loss(model: nn.Module, batch: Any) -> torch.Tensor:
    """It uses its batch up; the softmax is kept in fp32 by autocast, and takes most of the step."""
    y, x = batch.pop(), batch.pop()
    error: torch.Tensor = model(x) - y + x.repeat(1, 20_000).softmax(1)[:, :1]
    return error.square().mean()


def taken_apart(precision: Precision, trace_file: Path | None, **changes: Any) -> tuple[Profiled, StepBreakdown]:
    data = DataLoader(SAMPLES, batch_size=4, shuffle=True)
    made = Workload(**{"model": model, "loss": loss, "data": data, "optimizer": torch.optim.AdamW, **changes})
    trial = Trial(
        candidate=Setting(precision=precision, batch_size=4),
        device="cpu",
        loss_scale=LossScale() if precision == "fp16" else None,
        torch_state=torch_state.capture(),
    )
    path = None if trace_file is None else str(trace_file)
    spec = ProfileJob(device="cpu", trial=trial, trace_file=path)
    found = child.profile(Context(made, is_kept=False), spec, lambda message: None)
    assert isinstance(found, Profiled), found
    split = break_down([measured(1.0)], found, None)
    assert split is not None, found.split_problem
    assert sum(part.share for part in split.parts) == pytest.approx(1)
    return found, split


def test_operations_that_autocast_keeps_in_fp32_are_the_largest_part_and_only_there(tmp_path: Path) -> None:
    _, bf16 = taken_apart("bf16", tmp_path / "trace.json")
    assert max(bf16.parts, key=lambda part: part.seconds).name == "fp32_operations"
    assert bf16.share("casts") > 0
    assert taken_apart("fp32", tmp_path / "trace.json")[1].share("fp32_operations") == 0


def test_the_trace_has_the_marks_and_the_operations_are_counted(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    found, _ = taken_apart("fp16", path)
    # Each layer has one product forward and two back, but for the gradient of the data: 2 FLOPs a multiplication.
    assert found.flops_per_step == 2 * 4 * (2 * 32 * 64 + 3 * 64)
    assert found.unfused_optimizer == "AdamW"
    assert found.split is not None
    assert 3 <= len(found.split.steps) <= 7
    names = [event.get("name") for event in json.loads(path.read_text())["traceEvents"]]
    for mark in ("fp16 step 1", "forward and backward", "update"):
        assert f"autotune_amp {mark}" in names


def test_without_a_file_for_it_no_trace_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    found, _ = taken_apart("fp32", None)
    assert found.split is not None
    assert not list(tmp_path.iterdir())
