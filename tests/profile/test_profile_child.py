"""The child's side in this process: where a step's time goes is where it was put, and one that fails ends alone."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from autotune_amp import Workload
from autotune_amp.core.config import LossScale
from autotune_amp.core.outcome import Failure
from autotune_amp.core.setting import Precision, Setting
from autotune_amp.isolation.packing import compiler_of
from autotune_amp.precision import torch_state
from autotune_amp.profile import child
from autotune_amp.profile.child import count_flops
from autotune_amp.profile.gap import Step, gap
from autotune_amp.profile.job import Lane, Profile, Profiled
from autotune_amp.profile.results import Gap
from autotune_amp.trial.context import Context
from autotune_amp.trial.jobs import Trial


@pytest.fixture(autouse=True)
def flags() -> Iterator[None]:
    before = torch_state.capture()
    yield
    torch_state.apply(before)


@pytest.fixture(autouse=True)
def uncut(monkeypatch: pytest.MonkeyPatch) -> None:
    """However slow a precision is on the machine that tests it."""
    monkeypatch.setattr(child, "CUT_RATIO", math.inf)


class Rows(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Samples of 32 numbers, each after a wait."""

    def __init__(self, seconds: float = 0.0) -> None:
        self.seconds = seconds

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        time.sleep(self.seconds)
        x = torch.linspace(0, 1 + index / 64, 32)
        return x, x[:1]


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 1))


def loss(model: nn.Module, batch: Any) -> torch.Tensor:
    y = batch.pop()  # the other precisions need it too
    error: torch.Tensor = model(batch.pop()) - y
    return error.square().mean()


def workload(**changes: Any) -> Workload:
    data = DataLoader(Rows(), batch_size=4, shuffle=True)
    return Workload(**{"model": model, "loss": loss, "data": data, **changes})


def profiled(
    made: Workload, *precisions: Precision, num_batches: int = 3, trace_file: Path | None = None, **changes: Any
) -> Profiled | Failure:
    trials = [
        Trial(
            candidate=Setting(precision=precision, batch_size=4),
            device="cpu",
            loss_scale=LossScale() if precision == "fp16" else None,
            torch_state=torch_state.capture(),
        )
        for precision in precisions
    ]
    spec = Profile(
        device="cpu",
        trials=tuple(trials),
        num_batches=num_batches,
        trace_file=None if trace_file is None else str(trace_file),
        **changes,
    )
    return child.profile(Context(made, is_kept=False), spec, lambda message: None)


def lanes(made: Workload, *precisions: Precision) -> tuple[Lane, ...]:
    found = profiled(made, *precisions)
    assert isinstance(found, Profiled), found
    return found.lanes


def gap_of(lane: Lane) -> Gap:
    assert lane.failure is None
    step = Step(sum(lane.data_seconds) / 3, sum(lane.block_seconds) / 3, (0.0, 1.0))
    assert lane.split is not None
    found = gap(step, lane.split, None, None, "cpu")
    assert sum(part.share for part in found.parts) == pytest.approx(1)
    return found


def largest(lane: Lane) -> str:
    return max(gap_of(lane).parts, key=lambda part: part.seconds).name


def test_a_loader_that_sleeps_is_the_largest_part() -> None:
    (lane,) = lanes(workload(data=DataLoader(Rows(0.05), batch_size=4)), "bf16")
    assert largest(lane) == "loader"


def test_an_optimizer_with_much_to_update_is_the_largest_part() -> None:
    class Wide(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(32, 1)
            self.table = nn.Parameter(torch.zeros(2_000_000))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = self.linear(x) + self.table[0]
            return out

    (lane,) = lanes(workload(model=Wide, optimizer=torch.optim.AdamW), "bf16")
    assert largest(lane) == "optimizer"


def test_operations_that_autocast_keeps_in_fp32_are_the_largest_part_and_only_there() -> None:
    class Kept(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(32, 1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = self.linear(x) + x.repeat(1, 20_000).softmax(1)[:, :1]
            return out

    fp32, bf16 = lanes(workload(model=Kept, optimizer=lambda p: torch.optim.SGD(p, lr=1e-3)), "fp32", "bf16")
    assert largest(bf16) == "fp32_operations"
    assert gap_of(bf16).share("casts") > 0
    assert gap_of(fp32).share("fp32_operations") == 0


def test_every_precision_has_the_same_batches_and_first_weights_of_its_own() -> None:
    seen: dict[str, list[Any]] = {}
    order: list[str] = []

    def watched(model: nn.Module, batch: Any) -> torch.Tensor:
        name = str(torch.get_autocast_dtype("cpu")) if torch.is_autocast_enabled("cpu") else "fp32"
        order.append(name.removeprefix("torch."))
        weights = next(model.parameters())
        seen.setdefault(name, []).append((batch[0].sum().item(), weights.detach().sum().item(), weights.data_ptr()))
        return loss(model, batch)

    live = model()  # handed out again and again
    found = lanes(workload(model=live, loss=watched), "fp32", "bf16", "fp16")
    assert [lane.failure for lane in found] == [None, None, None]
    turns = "fp32 bfloat16 float16 bfloat16 float16 fp32 float16 fp32 bfloat16"
    assert turns in " ".join(order), "another one is first each time"
    fp32, bf16, fp16 = seen["fp32"], seen["torch.bfloat16"], seen["torch.float16"]
    num_steps = min(map(len, (fp32, bf16, fp16)))
    assert num_steps >= 9
    assert [x for x, _, _ in fp32[:num_steps]] == [x for x, _, _ in bf16[:num_steps]]
    assert len({fp32[0][1], bf16[0][1], fp16[0][1]}) == 1
    assert len({fp32[0][2], bf16[0][2], fp16[0][2]}) == 3


def test_what_is_hopelessly_slow_is_left_after_a_few_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(child, "CUT_RATIO", 5.0)

    def slow(model: nn.Module, batch: Any) -> torch.Tensor:
        time.sleep(0.1 if torch.is_autocast_enabled("cpu") else 0.0)
        return loss(model, batch)

    found = profiled(workload(loss=slow), "fp32", "bf16", num_batches=6)
    assert isinstance(found, Profiled)
    fp32, bf16 = found.lanes
    assert (len(fp32.block_seconds), fp32.was_cut) == (6, False)
    assert (len(bf16.block_seconds), bf16.was_cut, bf16.split) == (3, True, None)
    assert set(found.rates) == {"fp32", "bf16"}


def test_one_that_fails_ends_alone_and_memory_ends_all() -> None:
    def failing(error: type[Exception]) -> Any:
        def fails(model: nn.Module, batch: Any) -> torch.Tensor:
            if torch.is_autocast_enabled("cpu"):
                raise error("no more")
            return loss(model, batch)

        return fails

    fp32, bf16 = lanes(workload(loss=failing(ValueError)), "fp32", "bf16")
    assert len(fp32.block_seconds) == 3
    assert fp32.split is not None
    assert bf16.failure is not None
    assert (bf16.failure.kind, bf16.failure.message) == ("workload_error", "ValueError: no more")
    everything = profiled(workload(loss=failing(MemoryError)), "fp32", "bf16")
    assert isinstance(everything, Failure)
    assert everything.kind == "oom"


def test_the_trace_has_the_marks_and_the_operations_are_counted(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    found = profiled(workload(optimizer=torch.optim.AdamW), "fp32", "bf16", trace_file=path)
    assert isinstance(found, Profiled)
    # Each layer has one product forward and two back, but for the gradient of the data: 2 FLOPs a multiplication.
    assert found.flops_per_step == 2 * 4 * (2 * 32 * 64 + 3 * 64)
    assert found.unfused_optimizer == "AdamW"
    assert not found.is_compiled
    assert (found.num_loader_workers, found.loads_ahead) == (0, False)
    names = [event["name"] for event in json.loads(path.read_text())["traceEvents"] if "name" in event]
    for mark in ("fp32 step 1", "bf16 step 2", "forward and backward", "update"):
        assert f"autotune_amp {mark}" in names


def test_a_trace_that_cannot_be_written_costs_the_splits_and_not_the_timings(tmp_path: Path) -> None:
    found = profiled(workload(), "fp32", "bf16", trace_file=tmp_path / "no" / "trace.json")
    assert isinstance(found, Profiled)
    assert [(len(lane.block_seconds), lane.split, lane.failure) for lane in found.lanes] == [(3, None, None)] * 2
    assert found.split_problem is not None
    assert "could not be written" in found.split_problem
    assert found.flops_per_step


def test_a_later_round_times_and_takes_nothing_apart() -> None:
    found = profiled(workload(), "bf16", num_batches=5, num_batches_per_block=2, takes_apart=False)
    assert isinstance(found, Profiled)
    (lane,) = found.lanes
    assert (len(lane.block_seconds), lane.num_steps, lane.split) == (3, 5, None)
    assert (found.flops_per_step, found.flops_problem, found.rates) == (None, None, {})


def test_a_cpus_attention_counts_as_its_two_products_and_their_five_backward() -> None:
    query = torch.randn(2, 3, 16, 8, requires_grad=True)
    attention = nn.functional.scaled_dot_product_attention
    flops, problem = count_flops(lambda: torch.autograd.backward(attention(query, query, query).sum()))
    assert (flops, problem) == (2 * 2 * 3 * 16 * 16 * 8 * 7, None)
    assert count_flops(lambda: query.sum()) == (None, "torch's FLOP counter knows none of its operations")


def test_a_loop_of_its_own_is_taken_apart_too() -> None:
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
    fp32, bf16 = lanes(Workload(build=build, train_step=train_step, data=data), "fp32", "bf16")
    assert len(bf16.block_seconds) == 3
    assert gap_of(fp32).share("optimizer") > 0


def test_a_live_model_compiled_in_place_is_compiled_in_each_precision() -> None:
    class Net(nn.Module):  # of our own: torch compiles its own modules as parts of others alone
        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            return inputs

    live = Net()
    live.linear = nn.Linear(4, 1)
    live.compile(backend="eager")
    context = Context(workload(model=live), is_kept=False)
    trials = [Trial(candidate=Setting(precision=p, batch_size=2), device="cpu") for p in ("fp32", "bf16")]
    models = [training.model for training in child.trainings(context, trials)]
    assert models[0] is not models[1]
    assert [compiler_of(model) is not None for model in models] == [True, True]
