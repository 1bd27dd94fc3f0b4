"""Training runs on the same batches: equal runs do not part, overflow lowers the scale, what fails is cut."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import pytest
import torch
from fp16_subjects import Batch, Partly, build, mean_square, mlp, subject
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from autotune_amp.numerics.comparison import Run, gap, perturb, train
from autotune_amp.numerics.passes import Passes

NUM_STEPS = 4


class Overflowing(nn.Module):
    """Its gradient at call `call` is infinite in fp16 above `limit`, the loss scale as fp16 has it."""

    def __init__(self, call: int, limit: float) -> None:
        super().__init__()
        self.body, self.call, self.limit = nn.Linear(8, 4), call, limit
        self.seen: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.body(x)
        self.seen.append(x)
        if len(self.seen) >= self.call and y.dtype == torch.float16:
            y.register_hook(lambda gradient: gradient * math.inf if self.scale > self.limit else gradient)  # type: ignore[no-untyped-call] # torch's
        return y

    scale = 1.0


def overflowing(call: int, limit: float) -> Passes:
    """The loss sees its scale through its own gradient, which is taken first."""
    model = Overflowing(call, limit)

    def loss(_: nn.Module, batch: Batch) -> Tensor:
        value = mean_square(model, batch)

        def note(gradient: Tensor) -> None:
            model.scale = float(gradient)

        value.register_hook(note)  # type: ignore[no-untyped-call] # torch's
        return value

    return Passes(subject(model, loss))


def test_equal_runs_have_no_gap() -> None:
    passes = Passes(build("transformer with dropout"))
    one, again, moved = (train(passes, "fp32", NUM_STEPS, perturbation=p) for p in (0.0, 0.0, 0.01))
    assert one == again
    assert one.is_finite
    assert one.num_skips == 0
    assert gap(one, again, moved) == (0.0, 0.0)
    assert gap(one, again, again) == (0.0, 0.0)


def test_a_run_is_what_a_plain_loop_does() -> None:
    made, plain = build("convnet with BatchNorm"), build("convnet with BatchNorm")
    run = train(Passes(made), "fp32", NUM_STEPS)
    optimizer = plain.make_optimizer(plain.model)
    losses = []
    for index in range(NUM_STEPS):
        loss = plain.loss(plain.model, plain.batches[index])
        optimizer.zero_grad()
        torch.autograd.backward(loss)
        optimizer.step()
        losses.append(float(loss.detach()))
    assert run.losses == pytest.approx(losses, rel=1e-6)
    torch.testing.assert_close(made.model.state_dict(), plain.model.state_dict())


def test_the_gap_by_hand() -> None:
    reference, low, perturbed = Run((3.0, 1.0, 2.0), 0), Run((3.0, 1.5, 2.5), 0), Run((3.0, 1.1, 2.1), 0)
    found = gap(low, reference, perturbed)
    assert found.over_perturbed == pytest.approx(5.0)
    # The loss moves by -2 and +1: their standard deviation is 1.5, that of one loss 1.5 / sqrt(2).
    assert found.over_scatter == pytest.approx(1 / 3 / (1.5 / math.sqrt(2)))
    assert gap(low, reference, reference).over_perturbed == math.inf


@given(st.lists(st.floats(-1e3, 1e3), min_size=3, max_size=8), st.floats(1e-3, 1e3))
def test_the_loss_may_fall_and_be_in_any_unit(losses: list[float], unit: float) -> None:
    def runs(slope: float, factor: float) -> list[Run]:
        return [
            Run(tuple(factor * (loss + shift * step + slope * step) for step, loss in enumerate(losses)), 0)
            for shift in (0.5, 0.0, 0.25)
        ]

    def of(runs: list[Run]) -> tuple[float, float]:
        low, reference, perturbed = runs
        return gap(low, reference, perturbed)

    plain, other = of(runs(0.0, 1.0)), of(runs(0.0, unit))
    assert other[0] == pytest.approx(plain[0], rel=1e-3)
    steps = [b - a for a, b in itertools.pairwise(losses)]
    if max(steps) - min(steps) > 1e-2:  # the scatter is no rounding noise
        assert other[1] == pytest.approx(plain[1], rel=1e-3)
        assert of(runs(3.0, 1.0))[1] == pytest.approx(plain[1], rel=1e-3)


def test_an_overflow_halves_the_scale_and_tries_the_same_batch_again() -> None:
    passes = overflowing(call=3, limit=64.0)
    run = train(passes, "fp16", NUM_STEPS, scale=512.0)
    model = passes.model
    assert isinstance(model, Overflowing)
    assert run.is_finite
    assert len(run.losses) == NUM_STEPS
    assert run.num_skips == 3
    assert model.scale == 64.0  # and stays so
    batches = [next(i for i, batch in enumerate(passes.subject.batches) if batch.x is x) for x in model.seen]
    assert batches == [0, 1, 2, 2, 2, 2, 3]


def test_a_gradient_that_no_scale_saves_ends_the_run_soon() -> None:
    passes = overflowing(call=3, limit=0.0)
    run = train(passes, "fp16", NUM_STEPS, scale=2.0**15)
    assert not run.is_finite
    assert len(run.losses) == 3
    assert math.isnan(run.losses[-1])
    assert passes.num_passes < 10


def test_many_halvings_are_made_where_they_help() -> None:
    run = train(overflowing(call=1, limit=2.0**-3), "fp16", NUM_STEPS, scale=2.0**15)
    assert run.is_finite
    assert run.num_skips == 18


@pytest.mark.parametrize(("bad", "precision"), [(math.nan, "fp32"), (math.inf, "bf16"), (math.nan, "fp16")])
def test_a_run_whose_loss_is_not_finite_is_cut(bad: float, precision: str) -> None:
    def loss(model: nn.Module, batch: Batch) -> Tensor:
        value = mean_square(model, batch)
        return value * bad if batch.number == 2 else value

    passes = Passes(subject(mlp(), loss))
    run = train(passes, precision, NUM_STEPS, scale=8.0)  # type: ignore[arg-type] # a parameter
    assert not run.is_finite
    assert len(run.losses) == 3
    assert run.num_skips == 0
    assert passes.num_passes == 3


def test_a_gradient_that_is_not_finite_in_bf16_cuts_the_run_though_the_loss_is_fine() -> None:
    def loss(model: nn.Module, batch: Batch) -> Tensor:
        value = mean_square(model, batch)
        if batch.number == 1:
            value.register_hook(lambda gradient: gradient * math.inf)  # type: ignore[no-untyped-call] # torch's
        return value

    run = train(Passes(subject(mlp(), loss)), "bf16", NUM_STEPS)
    assert len(run.losses) == 2
    assert math.isnan(run.losses[1])


def weights(model: nn.Module) -> list[Tensor]:
    return [parameter.detach().clone() for parameter in model.parameters()]


def test_no_perturbation_changes_nothing() -> None:
    model = mlp()
    before = weights(model)
    perturb(model, 0.0, 0)
    assert all(torch.equal(a, b) for a, b in zip(weights(model), before, strict=True))


@pytest.mark.parametrize("make", [mlp, Partly, lambda: mlp().bfloat16(), lambda: mlp().double()])
def test_a_perturbation_is_relative_and_of_frozen_parameters_too(make: Callable[[], nn.Module]) -> None:
    model = make()
    with torch.no_grad():
        next(model.parameters()).view(-1)[0] = 0.0
    before = weights(model)
    perturb(model, 0.125, 0)
    for old, new in zip(before, weights(model), strict=True):
        ratio = (new / old)[old != 0].double()
        assert (ratio - 1).abs().max() <= 0.125 + 2.0**-6  # bf16 rounds what comes out
        assert ratio.min() < 1 < ratio.max()
        assert (new[old == 0] == 0).all()


def test_the_seed_decides_the_perturbation_and_global_draws_do_not_move() -> None:
    before = torch.get_rng_state()
    moved = []
    for seed in (0, 0, 1):
        model = nn.Linear(4, 4)
        torch.nn.init.ones_(model.weight)
        state = torch.get_rng_state()
        perturb(model, 0.5, seed)
        assert torch.equal(state, torch.get_rng_state())
        moved.append(model.weight.detach().clone())
    assert torch.equal(moved[0], moved[1])
    assert not torch.equal(moved[0], moved[2])
    torch.set_rng_state(before)
