"""Attempts at a precision: what is measured once, what of the model counts, and at which loss scale."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from fidelity_subjects import Applied
from fp16_subjects import Batch, Transformer, build, mean_square, mlp, subject
from torch import Tensor, nn

from autotune_amp.core.dimensions import Precision
from autotune_amp.numerics.fidelity import NUM_BATCHES, NUM_PAIRED_STEPS, Experiment
from autotune_amp.numerics.modules import watch_forward
from autotune_amp.numerics.passes import Passes, Subject


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


@contextmanager
def experiment_on(made: Subject, precision: Precision) -> Iterator[Experiment]:
    with watch_forward(made.model, made.device) as watch:
        yield Experiment(Passes(made), precision, watch)


def test_fp32_is_measured_once_for_all_attempts() -> None:
    with experiment_on(build("MLP"), "bf16") as experiment:
        assert experiment.num_passes == NUM_BATCHES
        first = experiment.attempt(())
        cost = experiment.num_passes
        second = experiment.attempt(("2",))
        assert experiment.num_passes - cost == NUM_BATCHES + NUM_PAIRED_STEPS
    # Another rounding, and two paired runs in fp32.
    assert cost - (experiment.num_passes - cost) == NUM_BATCHES + 1 + 2 * NUM_PAIRED_STEPS
    assert first.comparison != second.comparison
    assert (experiment.report(second).fp32_step_seconds or 0) > 0


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(8, 8) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = (self.query(x) @ self.key(x).transpose(1, 2)).softmax(-1) @ self.value(x)
        return out


def test_the_bias_of_a_key_carries_no_signal() -> None:
    made = subject(Attention(), x=lambda: torch.randn(8, 3, 8), y=lambda: torch.randn(8, 3, 8))
    with experiment_on(made, "bf16") as experiment:
        comparison = experiment.one_step(()).comparison
    assert comparison is not None
    assert comparison.parameters.keys() == {name for name, _ in made.model.named_parameters()} - {"key.bias"}
    assert comparison.whole.noise_ratio < 0.05


@pytest.mark.parametrize("precision", ["fp16", "bf16"])
def test_a_pass_that_is_not_finite_is_found_at_its_batch(precision: Precision) -> None:
    def loss(model: nn.Module, batch: Batch) -> Tensor:
        value = mean_square(model, batch)
        return value * math.nan if batch.number == 1 and torch.is_autocast_enabled("cpu") else value

    with experiment_on(subject(mlp(), loss), precision) as experiment:
        attempt = experiment.one_step(())
    assert (attempt.bad_index, attempt.comparison, attempt.grade.verdict) == (1, None, "unfaithful")


def test_all_batches_have_one_loss_scale_that_suits_each_and_training_begins_with_it() -> None:
    seen: list[float] = []

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        value = mean_square(model, batch) * (2.0**4 if batch.number == 2 else 1.0)
        value.register_hook(lambda gradient: seen.append(float(gradient)))  # type: ignore[no-untyped-call] # torch's
        return value

    made = subject(mlp(), loss)
    with experiment_on(made, "fp16") as experiment:
        attempt = experiment.one_step(())
        assert experiment.train(attempt).training is not None
    assert seen[-NUM_PAIRED_STEPS:] == [attempt.scale] * NUM_PAIRED_STEPS
    assert attempt.has_safe_scale
    assert attempt.bad_index is None
    assert all(Passes(made).run(index, "fp16", scale=attempt.scale).is_finite for index in range(NUM_BATCHES))
    assert not all(Passes(made).run(index, "fp16", scale=16 * attempt.scale).is_finite for index in range(NUM_BATCHES))


def test_forward_maxima_are_of_what_is_in_half_precision_and_of_no_mask() -> None:
    with experiment_on(subject(Transformer(), x=lambda: torch.randn(8, 3, 8)), "bf16") as experiment:
        maxima = experiment.one_step(()).forward_maxima
    assert all(maximum == 0 for name, maximum in maxima.items() if "norm" in name)  # autocast keeps them in fp32
    assert all(0 < maxima[name] < 100 for name in ("layer.linear1", "head"))

    def scores(x: Tensor) -> Tensor:
        return torch.cat([x * 100, torch.full_like(x, torch.finfo(x.dtype).min)])

    model = nn.Sequential(nn.Linear(4, 4), Applied(scores), nn.Linear(4, 1))
    nn.init.zeros_(model.get_parameter("0.weight"))
    nn.init.constant_(model.get_parameter("0.bias"), 300.0)
    with watch_forward(model, torch.device("cpu")) as watch, torch.autocast("cpu", dtype=torch.float16):
        model(torch.ones(2, 4))
        assert watch.maxima()["1"] == 30000.0
