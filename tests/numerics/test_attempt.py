"""One precision with one set of pins: what is measured once, and what of it reaches the verdict."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from fp16_subjects import Batch, Transformer, build, mean_square, mlp, sgd, subject
from torch import Tensor, nn

from autotune_amp.core.config import Precision
from autotune_amp.numerics.fidelity import NUM_BATCHES, NUM_PAIRED_STEPS, Experiment
from autotune_amp.numerics.modules import watch_forward
from autotune_amp.numerics.passes import Passes, Subject
from autotune_amp.precision.mode import is_pinned


@contextmanager
def experiment_on(made: Subject, precision: Precision) -> Iterator[Experiment]:
    with watch_forward(made.model, made.device) as watch:
        yield Experiment(Passes(made), precision, watch)


def test_fp32_is_measured_once_for_all_attempts() -> None:
    with experiment_on(build("MLP"), "bf16") as experiment:
        assert experiment.num_passes == NUM_BATCHES
        first = experiment.train(experiment.one_step(()))
        cost = experiment.num_passes
        second = experiment.train(experiment.one_step(("2",)))
        assert experiment.num_passes - cost == NUM_BATCHES + NUM_PAIRED_STEPS
    # Another rounding, and two paired runs in fp32.
    assert cost - (experiment.num_passes - cost) == NUM_BATCHES + 1 + 2 * NUM_PAIRED_STEPS
    assert first.pins == ()
    assert second.pins == ("2",)
    assert first.comparison is not None
    assert second.comparison is not None
    assert second.comparison.whole.noise_ratio != first.comparison.whole.noise_ratio
    assert first.training is not None
    assert len(first.training.losses) == NUM_PAIRED_STEPS
    assert (experiment.report(second).fp32_step_seconds or 0) > 0


def test_with_everything_pinned_a_precision_is_fp32() -> None:
    with experiment_on(build("transformer with dropout"), "bf16") as experiment:
        attempt = experiment.train(experiment.one_step(("",)))
    assert attempt.comparison is not None
    assert attempt.comparison.whole.noise_ratio == 0
    assert attempt.comparison.whole.cosine == pytest.approx(1)
    assert attempt.loss_error == 0
    assert attempt.gap == (0.0, 0.0)
    assert set(attempt.forward_maxima.values()) == {0.0}  # what is in fp32 has room enough
    assert not any(map(is_pinned, experiment.low.model.modules()))


def test_pins_hold_in_every_pass() -> None:
    seen: list[bool] = []
    model = mlp()
    head = model.get_submodule("2")
    head.register_forward_hook(lambda module, _, output: seen.append(output.dtype == torch.float32))
    with experiment_on(subject(model), "bf16") as experiment:
        before = len(seen)
        experiment.one_step(("2",))
        assert seen[before:] == [True] * (NUM_BATCHES + 1)
        experiment.train(experiment.one_step(("2",)))
        assert all(seen)
        experiment.one_step(())
        assert not seen[-1]


def test_the_bias_of_a_key_carries_no_signal() -> None:
    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.query, self.key, self.value = (nn.Linear(8, 8) for _ in range(3))

        def forward(self, x: Tensor) -> Tensor:
            query, key = self.query(x), self.key(x)
            out: Tensor = (query @ key.transpose(1, 2)).softmax(-1) @ self.value(x)
            return out

    torch.manual_seed(0)
    made = subject(Attention(), x=lambda: torch.randn(8, 3, 8), y=lambda: torch.randn(8, 3, 8))
    with experiment_on(made, "bf16") as experiment:
        names = {name for name, _ in made.model.named_parameters()}
        assert experiment.signals() == names - {"key.bias"}
        comparison = experiment.one_step(()).comparison
    assert comparison is not None
    assert comparison.parameters.keys() == names - {"key.bias"}
    assert comparison.whole.noise_ratio < 0.05


class Scores(nn.Module):
    """Puts out what only half precision has little room for, and a mask."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([x * 100, torch.full_like(x, torch.finfo(x.dtype).min)])


def test_what_a_module_without_weights_puts_out_counts_and_a_mask_does_not() -> None:
    model = nn.Sequential(nn.Linear(4, 4), Scores(), nn.Linear(4, 1))
    with torch.no_grad():
        model[0].weight.fill_(0.0)  # type: ignore[operator]
        model[0].bias.fill_(300.0)  # type: ignore[operator]
    with watch_forward(model, torch.device("cpu")) as watch, torch.autocast("cpu", dtype=torch.float16):
        model(torch.ones(2, 4))
        assert watch.maxima()["1"] == 30000.0


def test_forward_maxima_are_of_what_is_in_half_precision() -> None:
    torch.manual_seed(0)
    with experiment_on(subject(Transformer(), x=lambda: torch.randn(8, 3, 8)), "bf16") as experiment:
        maxima = experiment.one_step(()).forward_maxima
    assert {"layer.linear1", "head"} <= maxima.keys()
    assert all(maximum == 0 for name, maximum in maxima.items() if "norm" in name)  # autocast keeps them in fp32
    assert all(0 < maximum < 100 for name, maximum in maxima.items() if name in ("layer.linear1", "head"))


@pytest.mark.parametrize("precision", ["fp16", "bf16"])
def test_a_pass_that_is_not_finite_is_found_at_its_batch(precision: Precision) -> None:
    def loss(model: nn.Module, batch: Batch) -> Tensor:
        value = mean_square(model, batch)
        return value * math.nan if batch.number == 1 and torch.is_autocast_enabled("cpu") else value

    with experiment_on(subject(mlp(), loss), precision) as experiment:
        attempt = experiment.one_step(())
    assert attempt.bad_index == 1
    assert attempt.comparison is None
    assert attempt.grade.verdict == "unfaithful"


def test_all_batches_have_one_loss_scale_that_suits_each() -> None:
    def loss(model: nn.Module, batch: Batch) -> Tensor:
        return mean_square(model, batch) * (2.0**4 if batch.number == 2 else 1.0)

    def grads(number: int) -> float:
        return max(float(g.abs().max()) for g in Passes(made).run(number, "fp32").gradients.values())

    torch.manual_seed(0)
    made = subject(mlp(), loss)
    assert grads(2) > 4 * grads(0)
    with experiment_on(made, "fp16") as experiment:
        attempt = experiment.one_step(())
    assert attempt.has_safe_scale
    assert attempt.bad_index is None
    assert all(Passes(made).run(index, "fp16", scale=attempt.scale).is_finite for index in range(NUM_BATCHES))
    assert not all(Passes(made).run(index, "fp16", scale=8 * attempt.scale).is_finite for index in range(NUM_BATCHES))


def test_weights_in_half_precision_are_held_against_a_copy_in_fp32() -> None:
    torch.manual_seed(0)
    model = mlp().bfloat16()
    made = subject(
        model,
        lambda model, batch: nn.functional.mse_loss(model(batch.x.bfloat16()).float(), batch.y),
        make_optimizer=lambda model: torch.optim.Adam(model.parameters(), lr=1e-5),
    )
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with experiment_on(made, "fp32") as experiment:
        attempt = experiment.train(experiment.one_step(()))
        lost = experiment.report(attempt).low_weights
    assert lost is not None
    assert lost.lost_share > 0.5
    assert attempt.comparison is not None
    assert 0 < attempt.comparison.whole.noise_ratio < 0.2
    experiment.low.restore()
    torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)
    with experiment_on(build("MLP"), "bf16") as experiment:
        assert experiment.report(experiment.one_step(())).low_weights is None


@pytest.mark.parametrize(
    ("precision", "dtype", "largest"),
    [
        ("fp16", torch.float32, 65504.0),
        ("bf16", torch.float32, 3.4e38),
        ("fp32", torch.float16, 65504.0),
        ("fp32", torch.bfloat16, 3.4e38),
    ],
)
def test_the_format_ends_where_the_weights_or_the_precision_do(
    precision: Precision, dtype: torch.dtype, largest: float
) -> None:
    def loss(model: nn.Module, batch: Batch) -> Tensor:
        return model(batch.x.to(next(model.parameters()).dtype)).float().square().mean()  # type: ignore[no-any-return] # a module's output is Any

    with experiment_on(subject(nn.Linear(8, 4).to(dtype), loss, make_optimizer=sgd), precision) as experiment:
        assert experiment.report(experiment.one_step(())).format_max == pytest.approx(largest, rel=0.01)
