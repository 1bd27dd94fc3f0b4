"""Losses of training runs and updates of low-precision weights held against fp32's, by hand."""

from __future__ import annotations

import math
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from subjects import build, mlp
from torch import Tensor, nn

from autotune_amp.core.outcome import LostUpdates
from autotune_amp.core.precisions import Precision
from autotune_amp.numerics.paired_runs import (
    TrainingRun,
    lost_updates,
    noise_gap,
    perturb,
    relative_gap,
    shuffled_batch_order,
    train,
    training_divergence,
)
from autotune_amp.numerics.passes import Passes, PassResult

NUM_STEPS = 4


def overflowing(from_call: int, limit: float) -> tuple[Any, list[tuple[int, float]]]:
    """Passes whose gradient is infinite above `limit`, and the batch and the loss scale of each."""
    seen: list[tuple[int, float]] = []

    def run(index: int, _: Precision, *, scale: float, **__: Any) -> PassResult:
        seen.append((index, scale))
        is_bad = len(seen) >= from_call and scale > limit
        return PassResult(1.0, {"w": torch.tensor(0.0)}, largest=math.inf if is_bad else 0.0)

    return Mock(subject=build("MLP"), model=mlp(), run=run), seen


def test_a_run_repeats_and_is_what_a_plain_loop_does() -> None:
    passes = Passes(build("transformer with dropout"))
    first, again, moved = (train(passes, "fp32", NUM_STEPS, perturbation=p) for p in (0.0, 0.0, 0.01))
    assert first == again
    assert relative_gap(first, again, moved) == noise_gap(first, again) == 0.0
    made, plain = build("convnet with BatchNorm"), build("convnet with BatchNorm")
    run = train(Passes(made), "fp32", NUM_STEPS)
    optimizer, losses = plain.make_optimizer(plain.model), []
    for index in range(NUM_STEPS):
        loss = plain.loss(plain.model, plain.batches[index])
        optimizer.zero_grad()
        torch.autograd.backward(loss)
        optimizer.step()
        losses.append(float(loss.detach()))
    assert run.losses == pytest.approx(losses, rel=1e-5)
    torch.testing.assert_close(made.model.state_dict(), plain.model.state_dict())


def test_the_gap_by_hand() -> None:
    reference, low, perturbed = (
        TrainingRun((3.0, 1.0, 2.0), 0),
        TrainingRun((3.0, 1.5, 2.5), 0),
        TrainingRun((3.0, 1.1, 2.1), 0),
    )
    assert relative_gap(low, reference, perturbed) == pytest.approx(5.0)
    # The loss moves by -2 and +1: their standard deviation is 1.5, that of one loss 1.5 / sqrt(2).
    assert noise_gap(low, reference) == pytest.approx(1 / 3 / (1.5 / math.sqrt(2)))
    assert relative_gap(low, reference, reference) == math.inf


def test_orders_hold_every_batch_once_in_each_round_and_runs_part_by_the_end_of_each() -> None:
    orders = [shuffled_batch_order(12, 4, order) for order in range(2)]
    assert orders[0] != orders[1]
    assert all(sorted(order[start : start + 4]) == [0, 1, 2, 3] for order in orders for start in (0, 4, 8))
    fp32 = [TrainingRun((9.0, 7.0, 3.0, 1.0), 0), TrainingRun((8.0, 8.0, 2.0, 3.0), 0)]
    low = [TrainingRun((9.0, 7.0, 5.0, 3.0), 0), TrainingRun((9.0, 9.0, 5.0, 4.0), 0)]
    rerounded = TrainingRun((9.0, 7.0, 3.0, 1.2), 0)
    found = training_divergence(low, fp32, rerounded, 2, roundoff=2.0**-9)
    # A pass through both: 8, 8 in fp32, then 2 and 2.5; the differences are 0 and 1, then 2 and 2.
    assert (found.distance, found.spread, found.fall, found.num_steps) == (1.25, 0.75, 5.75, 4)
    assert found.resolution == pytest.approx(2.0**-8 * (8 + 8 + 2 + 2.5) / 4)
    assert found.is_apart
    moved = training_divergence(low, fp32, TrainingRun((9.0, 9.0, 5.0, 5.0), 0), 2, roundoff=2.0**-9)
    assert (moved.spread, moved.is_apart) == (2.0, False), "as far as another rounding takes fp32 from itself"


def test_an_overflow_halves_the_scale_and_tries_the_same_batch_again() -> None:
    passes, seen = overflowing(from_call=3, limit=64.0)
    run = train(passes, "fp16", NUM_STEPS, scale=512.0)
    assert (run.is_finite, len(run.losses), run.num_skips) == (True, NUM_STEPS, 3)
    assert seen == [(0, 512), (1, 512), (2, 512), (2, 256), (2, 128), (2, 64), (3, 64)]
    many = train(overflowing(from_call=1, limit=2.0**-3)[0], "fp16", NUM_STEPS, scale=2.0**15)
    assert (many.is_finite, many.num_skips) == (True, 18)
    hopeless, seen = overflowing(from_call=3, limit=0.0)
    run = train(hopeless, "fp16", NUM_STEPS, scale=2.0**15)
    assert (len(run.losses), math.isnan(run.losses[-1])) == (3, True)
    assert len(seen) < 10, "it ends soon"


def test_a_perturbation_is_relative_and_of_frozen_parameters_too() -> None:
    first, model = build("unused and frozen parameters").model, build("unused and frozen parameters").model
    perturb(model, 0.125, 0)
    for before, after in zip(first.parameters(), model.parameters(), strict=True):
        assert 0.05 < (after / before - 1).abs().max() <= 0.126


# -- weights kept in low precision -------------------------------------------------------------------------------------


def lost(weights: Tensor, updates: Tensor) -> LostUpdates | None:
    model = nn.Module()
    model.register_parameter("w", nn.Parameter(weights))
    return lost_updates(model, {"w": weights.float()}, {"w": weights.float() + updates})


def test_what_is_lost_by_hand() -> None:
    # bf16 steps by 2^-7 from 1 on: the first update is lost, the second rounds up to a whole step, the third is none.
    found = lost(torch.ones(3, dtype=torch.bfloat16), torch.tensor([0.25, 0.75, 0.0]) * 2.0**-7)
    assert found == LostUpdates(weights="bf16", lost_share=0.5)  # of the two that move at all
    # A mask of -inf, and a step past the end of the format, are no rounding.
    weights = torch.tensor([-math.inf, 1.0, 1.0, 1.0], dtype=torch.float16)
    odd = lost(weights, torch.tensor([0.0, 1e6, 2.0**-3, 2.0**-13]))
    assert odd == LostUpdates(weights="fp16", lost_share=0.5)
    assert lost(torch.ones(2), torch.ones(2)) is lost(torch.ones(2).bfloat16(), torch.zeros(2)) is None
