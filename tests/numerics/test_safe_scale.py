"""The largest safe loss scale, both ways, against every power of two tried for real."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, TypeAlias

import pytest
import torch
from fp16_subjects import SUBJECTS, Batch, brute_force, build, dense, mean_square, mlp, octave, subject
from torch import Tensor, nn

from autotune_amp.numerics.calibration import (
    LOG2_FP16_MAX,
    MAX_LOG2_SCALE,
    MIN_LOG2_SCALE,
    SafeScale,
    by_backward,
    by_bisection,
    largest_safe_scale,
)
from autotune_amp.numerics.passes import Passes

Way: TypeAlias = Callable[[Passes, int], SafeScale]
WAYS: list[Way] = [by_backward, by_bisection]


@pytest.mark.parametrize("name", sorted(SUBJECTS))
def test_both_ways_agree_with_brute_force_wherever_they_start(name: str) -> None:
    passes = Passes(build(name))
    truth = brute_force(passes, 0)
    assert truth is not None
    for start in (12.0, truth + 0.5, -24.0, 40.0):
        found, bisected = by_backward(passes, 0, start), by_bisection(passes, 0, start)
        assert bisected.log2_scale == truth
        if name != "clamped":
            assert octave(found.log2_scale) == truth
        for answer in (found, bisected):
            assert answer.last.is_finite
            assert answer.log2_scale is not None
            assert math.log2(answer.last_scale) <= answer.log2_scale


@pytest.mark.parametrize("name", sorted(set(SUBJECTS) - {"clamped"}))
def test_one_pass_where_the_answer_is_about_known_and_two_to_bisect(name: str) -> None:
    passes = Passes(build(name))
    truth = by_backward(passes, 0).log2_scale
    assert truth is not None
    for error in (-3.0, 0.0, 2.0):
        before = passes.num_passes
        assert by_backward(passes, 0, truth + error).log2_scale == pytest.approx(truth, abs=0.01)
        assert passes.num_passes - before == 1
    before = passes.num_passes
    by_bisection(passes, 0, truth)
    assert passes.num_passes - before == 2


def test_some_workloads_need_a_scale_under_1() -> None:
    assert by_backward(Passes(build("sum over 1e5 elements")), 0).log2_scale == pytest.approx(-1.6, abs=0.2)


def test_the_largest_leaf_gradient_would_be_off_by_many_octaves() -> None:
    passes = Passes(build("large gradients inside"))
    found = by_backward(passes, 0)
    largest = float(dense(found.last.gradients).abs().max())
    by_leaves = LOG2_FP16_MAX - math.log2(largest)
    assert found.log2_scale is not None
    assert by_leaves - found.log2_scale > 10


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("value", [math.nan, math.inf, 1e30])
def test_a_batch_that_is_bad_at_every_scale_has_none(way: Way, value: float) -> None:
    made = subject(mlp(), x=lambda: torch.full((8, 8), value))
    passes = Passes(made)
    found = way(passes, 0)
    assert found.log2_scale is None
    assert not found.last.is_finite
    assert passes.num_passes == 1  # its loss is bad, and no scale changes that


def test_gradients_that_overflow_at_every_scale_have_none() -> None:
    def steep(model: nn.Module, batch: Batch) -> Tensor:
        return 2.0**60 * mean_square(model, batch)

    passes = Passes(subject(mlp(), steep))
    assert brute_force(passes, 0) is None
    for way in WAYS:
        found = way(passes, 0)
        assert found.log2_scale is None
        assert found.last_scale == 2.0**MIN_LOG2_SCALE
        assert math.isfinite(found.last.loss)


def test_a_model_all_in_fp32_bears_every_scale() -> None:
    passes = Passes(build("MLP"))
    with passes.pinned([""]):
        for way in WAYS:
            assert way(passes, 0).log2_scale == MAX_LOG2_SCALE


def test_an_overflow_that_reaches_no_gradient_is_none() -> None:
    passes = Passes(build("clamped"))
    assert by_bisection(passes, 0).log2_scale == MAX_LOG2_SCALE
    assert by_backward(passes, 0, 30.0).log2_scale == MAX_LOG2_SCALE


class _WritesAConstant(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        (gradient,) = gradients
        constant = torch.full_like(gradient, 900.0)
        return gradient * (constant / 900.0)


def test_what_does_not_grow_with_the_scale_does_not_count() -> None:
    def loss(model: nn.Module, batch: Batch) -> Tensor:
        y = _WritesAConstant.apply(model(batch.x))  # type: ignore[no-untyped-call] # torch does not type it
        return nn.functional.mse_loss(y, batch.y)

    passes = Passes(subject(mlp(), loss))
    truth = brute_force(passes, 0)
    for start in (0.0, 12.0, 30.0):
        assert octave(by_backward(passes, 0, start).log2_scale) == truth


def test_a_compiled_model_is_bisected() -> None:
    made = build("MLP")
    truth = brute_force(Passes(made), 0)
    compiled = torch.compile(made.model, backend="aot_eager")
    assert isinstance(compiled, nn.Module)
    assert largest_safe_scale(Passes(made, compiled), 0).log2_scale == truth
    made.model.compile(backend="aot_eager")
    assert largest_safe_scale(Passes(made), 0).log2_scale == truth
    torch._dynamo.reset()
