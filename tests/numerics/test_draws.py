"""Dropout does the same in every precision, or does nothing; generators go back to where they stood."""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import nullcontext

import numpy as np
import pytest
import torch
from fp16_subjects import CPU, Batch, mean_square, subject
from torch import Tensor, nn
from torch.nn import functional

from autotune_amp.core.config import Precision
from autotune_amp.numerics.draws import _draws_are_equal, _WithoutDropout, comparable_draws, generators, set_generators
from autotune_amp.numerics.passes import Passes

X = torch.randn(2, 4, 8, 8, generator=torch.Generator().manual_seed(0))
WEIGHT = torch.randn(8, 8, generator=torch.Generator().manual_seed(1))


class DroppingOut(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.drop, self.head = nn.Linear(8, 64), nn.Dropout(0.5), nn.Linear(64, 4)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.drop(self.body(x)))
        return out


@pytest.mark.parametrize("low", ["bf16", "fp16"])
def test_a_model_draws_the_same_dropout_mask_in_fp32_and_in_low_precision(low: Precision) -> None:
    model = DroppingOut()
    masks: list[Tensor] = []
    model.drop.register_forward_hook(lambda _, __, output: masks.append(output != 0))
    passes = Passes(subject(model))
    for precision, index in (("fp32", 0), (low, 0), ("fp32", 1), (low, 1)):
        passes.run(index, precision)  # type: ignore[arg-type] # mypy joins the literals to str
    assert torch.equal(masks[0], masks[1])
    assert torch.equal(masks[2], masks[3])
    assert not torch.equal(masks[0], masks[2])
    assert 0.3 < masks[0].float().mean() < 0.7


def test_python_and_numpy_draw_the_same_in_every_precision_too() -> None:
    drawn: list[tuple[float, float]] = []

    def noisy(model: nn.Module, batch: Batch) -> Tensor:
        drawn.append((random.random(), float(np.random.rand())))
        return mean_square(model, batch)

    passes = Passes(subject(DroppingOut(), noisy))
    passes.run(0, "fp32")
    passes.run(0, "bf16")
    passes.run(1, "fp32")
    assert drawn[0] == drawn[1]
    assert drawn[0] != drawn[2]


def test_on_a_cpu_draws_are_equal_and_dropout_stays() -> None:
    assert _draws_are_equal(CPU)
    assert isinstance(comparable_draws(CPU), nullcontext)


def test_finding_out_draws_nothing_from_the_global_generator() -> None:
    before = torch.get_rng_state()
    _draws_are_equal(CPU)
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize(
    "draw",
    [
        lambda: functional.dropout(X, 0.5),
        lambda: functional.dropout(X, p=0.5),
        lambda: functional.dropout(X),
        lambda: functional.dropout1d(X[0], 0.5),
        lambda: functional.dropout2d(X, 0.5),
        lambda: functional.dropout3d(X, 0.5),
        lambda: functional.alpha_dropout(X, 0.5, training=True),
        lambda: functional.feature_alpha_dropout(X, 0.5, training=True),
        lambda: torch.dropout(X, 0.5, True),
        lambda: torch.dropout(X, p=0.5, train=True),
        lambda: nn.Dropout(0.5)(X),
        lambda: nn.Dropout2d(0.5)(X),
        lambda: functional.scaled_dot_product_attention(X, X, X, None, 0.5),
        lambda: functional.scaled_dot_product_attention(X, X, X, dropout_p=0.5),
        lambda: nn.MultiheadAttention(8, 2, dropout=0.5)(X[0], X[0], X[0])[0],
        lambda: nn.TransformerEncoderLayer(8, 2, 16, dropout=0.5)(X[0]),
        lambda: nn.LSTM(8, 8, num_layers=2, dropout=0.5)(X[0])[0],
        lambda: nn.GRU(8, 8, num_layers=2, dropout=0.5)(X[0])[0],
    ],
)
def test_dropout_taken_out_drops_nothing(draw: Callable[[], Tensor]) -> None:
    def drawn() -> Tensor:
        torch.manual_seed(0)  # the weights of a module made in `draw`, then its dropout
        return draw()

    dropped = drawn()
    with _WithoutDropout():
        plain = drawn()
        plain_zeros = (plain == 0).sum()
    assert not torch.allclose(plain, dropped)
    assert plain_zeros == 0


def test_dropout_taken_out_leaves_other_functions_alone() -> None:
    with _WithoutDropout():
        assert torch.equal(functional.linear(X, WEIGHT), X @ WEIGHT.T)
    assert (functional.dropout(torch.ones(1000), 0.5) == 0).any()


def test_generators_go_back_to_where_they_stood() -> None:
    def draw() -> tuple[float, float, float]:
        return random.random(), float(np.random.rand()), float(torch.rand(()))

    found = generators(CPU)
    first, second = draw(), draw()
    set_generators(CPU, found)
    assert draw() == first
    assert first != second
