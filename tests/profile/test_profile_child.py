"""The child's side in this process: where a step's time goes is where it was put."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from profile_samples import measured
from torch import nn
from torch.utils.data import DataLoader, Dataset

from autotune_amp import Workload
from autotune_amp.core.config import LossScale
from autotune_amp.core.dimensions import Precision
from autotune_amp.core.outcome import Failure
from autotune_amp.core.setting import Setting
from autotune_amp.precision import torch_state
from autotune_amp.profile import child
from autotune_amp.profile.child import count_flops
from autotune_amp.profile.gap import Profile, Profiled, gap
from autotune_amp.profile.results import Gap
from autotune_amp.trial.context import Context
from autotune_amp.trial.jobs import Trial


class Rows(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Samples of 32 numbers."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        x = torch.linspace(0, 1 + index / 64, 32)
        return x, x[:1]


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 1))


def loss(model: nn.Module, batch: Any) -> torch.Tensor:
    y = batch.pop()
    error: torch.Tensor = model(batch.pop()) - y
    return error.square().mean()


def workload(**changes: Any) -> Workload:
    data = DataLoader(Rows(), batch_size=4, shuffle=True)
    return Workload(**{"model": model, "loss": loss, "data": data, **changes})


def outcome(made: Workload, precision: Precision, trace_file: Path) -> Profiled | Failure:
    trial = Trial(
        candidate=Setting(precision=precision, batch_size=4),
        device="cpu",
        loss_scale=LossScale() if precision == "fp16" else None,
        torch_state=torch_state.capture(),
    )
    spec = Profile(device="cpu", trial=trial, trace_file=str(trace_file))
    return child.profile(Context(made, is_kept=False), spec, lambda message: None)


def gap_of(found: Profiled) -> Gap:
    assert found.split is not None, found.split_problem
    made = gap([measured(1.0)], found, None, "cpu")
    assert made is not None
    assert sum(part.share for part in made.parts) == pytest.approx(1)
    return made


def taken_apart(made: Workload, precision: Precision, folder: Path) -> Gap:
    found = outcome(made, precision, folder / "trace.json")
    assert isinstance(found, Profiled), found
    return gap_of(found)


def largest(made: Gap) -> str:
    return max(made.parts, key=lambda part: part.seconds).name


def test_an_optimizer_with_much_to_update_is_the_largest_part(tmp_path: Path) -> None:
    class Wide(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(32, 1)
            self.table = nn.Parameter(torch.zeros(2_000_000))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = self.linear(x) + self.table[0]
            return out

    assert largest(taken_apart(workload(model=Wide, optimizer=torch.optim.AdamW), "bf16", tmp_path)) == "optimizer"


def test_operations_that_autocast_keeps_in_fp32_are_the_largest_part_and_only_there(tmp_path: Path) -> None:
    class Kept(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(32, 1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = self.linear(x) + x.repeat(1, 20_000).softmax(1)[:, :1]
            return out

    made = workload(model=Kept, optimizer=lambda p: torch.optim.SGD(p, lr=1e-3))
    bf16 = taken_apart(made, "bf16", tmp_path)
    assert largest(bf16) == "fp32_operations"
    assert bf16.share("casts") > 0
    assert taken_apart(made, "fp32", tmp_path).share("fp32_operations") == 0


def test_the_trace_has_the_marks_and_the_operations_are_counted(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    found = outcome(workload(optimizer=torch.optim.AdamW), "fp16", path)
    assert isinstance(found, Profiled)
    # Each layer has one product forward and two back, but for the gradient of the data: 2 FLOPs a multiplication.
    assert found.flops_per_step == 2 * 4 * (2 * 32 * 64 + 3 * 64)
    assert found.unfused_optimizer == "AdamW"
    assert found.flops_per_second
    assert found.split is not None
    assert 3 <= len(found.split.steps) <= 7
    names = [event["name"] for event in json.loads(path.read_text())["traceEvents"] if "name" in event]
    for mark in ("fp16 step 1", "forward and backward", "update"):
        assert f"autotune_amp {mark}" in names


def test_a_trace_that_cannot_be_written_costs_the_split_alone(tmp_path: Path) -> None:
    found = outcome(workload(), "fp32", tmp_path / "no" / "trace.json")
    assert isinstance(found, Profiled)
    assert found.split is None
    assert "could not be written" in (found.split_problem or "")
    assert found.flops_per_step


def test_a_cpus_attention_counts_as_the_products_that_it_is_made_of() -> None:
    query = torch.randn(2, 3, 16, 8, requires_grad=True)
    attention = nn.functional.scaled_dot_product_attention
    flops, problem = count_flops(lambda: torch.autograd.backward(attention(query, query, query).sum()), "cpu")
    assert (flops, problem) == (2 * 2 * 3 * 16 * 16 * 8 * 6, None)
    assert count_flops(lambda: query.sum(), "cpu") == (None, "torch's FLOP counter knows none of its operations")


def test_a_loop_of_its_own_is_taken_apart_too(tmp_path: Path) -> None:
    def build() -> dict[str, Any]:
        net = model()
        return {"net": net, "optimizer": torch.optim.SGD(net.parameters(), lr=0.01)}

    def train_step(state: dict[str, Any], batch: Any, amp: Any) -> None:
        state["optimizer"].zero_grad()
        with amp.autocast():
            value = loss(state["net"], batch)
        amp.backward(value)
        amp.step(state["optimizer"])
        amp.update()

    data = DataLoader(Rows(), batch_size=4)
    made = Workload(build=build, train_step=train_step, data=data)
    assert taken_apart(made, "bf16", tmp_path).share("optimizer") > 0
