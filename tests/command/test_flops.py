"""Floating-point operations, counted by hand."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import said
import torch
from commands import run
from torch import nn

from autotune_amp.command.agent.flops import FlopCounter, count_flops
from autotune_amp.command.measure import description
from autotune_amp.command.messages import Flops
from autotune_amp.core.outcome import CountedFlops
from autotune_amp.core.setting import Setting


def forward_backward(model: Callable[[torch.Tensor], torch.Tensor], batch: torch.Tensor) -> None:
    torch.autograd.backward(model(batch).sum())


def test_products_are_counted_forward_and_back_also_of_a_compiled_model() -> None:
    model = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 4))
    batch = torch.randn(16, 64)
    # Each layer has one product forward and two back, but for the gradient of the data.
    expected = 2 * 16 * (2 * 64 * 32 + 3 * 32 * 4)
    compiled: Any = torch.compile(model, backend="eager")
    compiled(batch)
    for one in (model, compiled):
        assert count_flops(partial(forward_backward, one, batch)) == (expected, None)


def test_attention_counts_in_full_and_its_scores_once_more_in_the_backward_pass() -> None:
    query = torch.randn(2, 3, 16, 8, requires_grad=True)
    attention = nn.functional.scaled_dot_product_attention
    causal = partial(attention, query, query, is_causal=True)
    flops, problem = count_flops(partial(forward_backward, causal, query))
    assert (flops, problem) == (2 * 2 * 3 * 16 * 16 * 8 * 7, None)


@torch.library.custom_op("autotune_amp_test::twice", mutates_args=())
def twice(x: torch.Tensor) -> torch.Tensor:
    return 2 * x


@torch.library.custom_op("autotune_amp_test::dequantize", mutates_args=())
def dequantize(x: torch.Tensor) -> torch.Tensor:
    return x.clone()


def test_what_has_no_formula_is_named_in_place_of_a_number() -> None:
    square = torch.randn(4, 4)
    flops, problem = count_flops(lambda: twice(square @ square))
    assert flops is None
    assert "twice" in str(problem)
    assert count_flops(lambda: dequantize(square @ square)) == (2 * 4**3, None)
    flops, problem = count_flops(lambda: nn.LSTM(4, 4)(square[None])[0].sum().backward())
    assert flops is None
    assert "rnn" in str(problem)
    assert count_flops(lambda: square + 1)[0] is None


def test_an_error_of_the_model_is_the_reason_and_one_of_a_formula_stops_no_training(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail() -> None:
        raise ValueError("no such shape")

    assert count_flops(fail) == (None, "no such shape")

    def formula(*_: object, **__: object) -> int:
        raise TypeError("a layout that it does not know")

    counter = FlopCounter()
    monkeypatch.setitem(counter._formulas, torch.ops.aten.mm, formula)
    with counter:
        product = torch.ones(2, 2) @ torch.ones(2, 2)
    assert product.sum() == 8
    assert "aten.mm" in str(counter.problem)


SCRIPT = """
import sys, torch
model = torch.nn.Linear(8, 2)
if "compiled" in sys.argv:
    model = torch.compile(model, backend="eager")
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
rows = [{"input_ids": torch.ones(3, dtype=torch.long), "x": torch.ones(8)} for _ in range(40)]
for batch in torch.utils.data.DataLoader(rows, batch_size=4):
    model(batch["x"]).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def counted(folder: Path, *arguments: str) -> CountedFlops | None:
    (folder / "train.py").write_text(SCRIPT)
    (rank,) = run([sys.executable, "train.py", *arguments], folder, counts_flops=True).ranks.values()
    assert len(rank.steps) == 10
    return description(rank, "train", Setting(precision="fp32", batch_size=4), 0.0).counted_flops


@pytest.mark.slow
def test_a_commands_second_step_is_counted(tmp_path: Path) -> None:
    assert counted(tmp_path) == CountedFlops(flops=2 * 2 * 4 * 8 * 2, num_samples=4, num_positions=12)


def test_operations_without_a_loader_are_those_of_a_rank_s_share_of_the_batch() -> None:
    (rank,) = said.trained([9]).ranks.values()
    rank.add(Flops(pid=rank.pid, time=0.0, flops=8, problem=None, num_samples=0, num_positions=0))
    found = description(rank, "train", Setting(precision="fp32", batch_size=4), 0.0, num_sharing=2).counted_flops
    assert found == CountedFlops(flops=8, num_samples=2)


@pytest.mark.slow
def test_compiled_code_of_a_command_is_not_counted(tmp_path: Path) -> None:
    found = counted(tmp_path, "compiled")
    assert found is not None
    assert found.flops is None
    assert "compile" in str(found.problem)
