"""Passes repeat bit for bit, leave the model as it was, and hand out unscaled gradients."""

from __future__ import annotations

import dataclasses
import re

import pytest
import torch
from fp16_subjects import SUBJECTS, Batch, build, cross_entropy, dense, mean_square, mlp, subject
from graph_samples import replayed
from torch import Tensor, nn
from torch.nn import functional

from autotune_amp.core.config import Precision
from autotune_amp.core.errors import InvalidRequestError
from autotune_amp.numerics.passes import Passes
from autotune_amp.precision.mode import is_pinned


def state_of(model: nn.Module) -> dict[str, Tensor]:
    return {n: v.detach().clone() for n, v in (*model.named_parameters(), *model.named_buffers())}


def assert_same(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    torch.testing.assert_close(one, other, rtol=0, atol=0)


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("name", sorted(SUBJECTS))
def test_a_pass_can_be_repeated_bit_for_bit(name: str, precision: Precision) -> None:
    passes = Passes(build(name))
    one, _, again = passes.run(1, precision), passes.run(0, precision), passes.run(1, precision)
    assert one.loss == again.loss
    assert one.gradients.keys() == again.gradients.keys()
    torch.testing.assert_close(dense(one.gradients), dense(again.gradients), rtol=0, atol=0, equal_nan=True)
    assert passes.num_passes == 3


def test_a_pass_moves_buffers_and_restore_puts_them_back() -> None:
    passes = Passes(build("convnet with BatchNorm"))
    before = state_of(passes.model)
    passes.run(0, "fp32")
    assert not torch.equal(before["1.running_mean"], passes.model.get_buffer("1.running_mean"))
    passes.run(1, "fp32")
    assert passes.model.get_buffer("1.num_batches_tracked") == 1  # each pass began from the first state
    passes.restore()
    assert_same(before, state_of(passes.model))
    assert all(parameter.grad is None for parameter in passes.model.parameters())


def test_going_on_begins_from_the_state_as_it_is_and_keep_makes_it_the_first() -> None:
    passes = Passes(build("convnet with BatchNorm"))
    passes.run(0, "fp32", restores=False)
    passes.run(1, "fp32", restores=False)
    assert passes.model.get_buffer("1.num_batches_tracked") == 2
    passes.keep()
    passes.run(2, "fp32")
    assert passes.model.get_buffer("1.num_batches_tracked") == 3


@pytest.mark.parametrize("name", ["MLP", "sparse embedding", "transformer with dropout"])
def test_gradients_are_those_of_plain_autograd_whatever_the_scale(name: str) -> None:
    made = build(name)
    torch.manual_seed(made.seed)
    torch.autograd.backward(made.loss(made.model, made.batches[0]))
    plain = {name: p.grad for name, p in made.model.named_parameters() if p.grad is not None}
    for scale in (1.0, 2.0**-30, 2.0**20):  # powers of two: nothing is rounded
        gradients = Passes(made).run(0, "fp32", scale=scale).gradients
        assert {n: g.is_sparse for n, g in gradients.items()} == {n: g.is_sparse for n, g in plain.items()}
        torch.testing.assert_close(dense(gradients), dense(plain))


def test_gradients_stay_when_the_next_pass_writes_over_them() -> None:
    static = torch.zeros(4, 8), torch.zeros(4, 8)

    def graphed(model: nn.Module, batch: Batch) -> Tensor:
        return functional.linear(batch.x, replayed(model.get_parameter("weight"), *static)).square().mean()

    passes = Passes(subject(nn.Linear(8, 4), graphed))
    first = passes.run(0, "fp32").gradients["weight"]
    before = first.clone()
    passes.run(1, "fp32")
    assert torch.equal(first, before)


def test_parameters_without_a_gradient_are_missing() -> None:
    gradients = Passes(build("unused and frozen parameters")).run(0, "fp16").gradients
    assert sorted(gradients) == ["used.bias", "used.weight"]


def test_draws_are_the_same_in_every_precision_and_differ_from_batch_to_batch() -> None:
    drawn: list[Tensor] = []

    def noisy(model: nn.Module, batch: Batch) -> Tensor:
        drawn.append(torch.rand(3))
        return mean_square(model, batch)

    passes = Passes(subject(mlp(), noisy))
    for precision in ("fp32", "bf16", "fp16"):
        passes.run(0, precision)
    passes.run(1, "fp32")
    assert torch.equal(drawn[0], drawn[1])
    assert torch.equal(drawn[0], drawn[2])
    assert not torch.equal(drawn[0], drawn[3])


@pytest.mark.parametrize("name", ["MLP", "sparse embedding", "tied weights", "unused and frozen parameters"])
def test_a_step_is_what_the_optimizer_does_in_a_plain_loop(name: str) -> None:
    made, plain = build(name), build(name)
    passes = Passes(made)
    optimizer, plain_optimizer = (s.make_optimizer(s.model) for s in (made, plain))
    for index in range(2):
        passes.step(optimizer, passes.run(index, "fp32", restores=False).gradients)
        plain_optimizer.zero_grad()
        torch.autograd.backward(plain.loss(plain.model, plain.batches[index]))
        plain_optimizer.step()
    torch.testing.assert_close(state_of(made.model), state_of(plain.model))


@pytest.mark.parametrize("name", ["2", ""])
def test_pins_hold_inside_and_only_there(name: str) -> None:
    passes = Passes(build("MLP"))
    module = passes.model.get_submodule(name)
    low = dense(passes.run(0, "fp16").gradients)
    with passes.pinned([name]):
        assert is_pinned(module)
        pinned = dense(passes.run(0, "fp16").gradients)
    assert not is_pinned(module)
    full = dense(passes.run(0, "fp32").gradients)
    assert not torch.equal(low, pinned)
    assert torch.equal(pinned, full) == (name == "")


def test_a_pin_on_a_module_that_is_not_there_is_refused_by_name() -> None:
    passes = Passes(build("MLP"))
    with pytest.raises(InvalidRequestError, match=re.escape("no module named 'head'")), passes.pinned(["2", "head"]):
        pytest.fail("Nothing was refused.")
    assert not is_pinned(passes.model.get_submodule("2"))


@pytest.mark.parametrize("sparse", [False, True])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_one_bad_gradient_entry_makes_a_pass_non_finite(bad: float, sparse: bool) -> None:
    def loss(model: nn.Module, batch: Batch) -> Tensor:
        value = cross_entropy(model, batch)
        value.register_hook(lambda gradient: gradient * bad)  # type: ignore[no-untyped-call] # torch's
        return value

    made = build("sparse embedding" if sparse else "tied weights")
    assert Passes(made).run(0, "fp32").is_finite
    assert not Passes(dataclasses.replace(made, loss=loss)).run(0, "fp32").is_finite


def test_a_loss_in_fp16_is_scaled_as_grad_scaler_scales_it() -> None:
    def half(model: nn.Module, batch: Batch) -> Tensor:
        total: Tensor = (model(batch.x) * 2.0**-6).sum()
        return total

    made = subject(mlp(), half)
    for scale in (2.0**10, 2.0**17):  # the root gradient is the scale itself, and no fp16 number holds the second
        scaler = torch.amp.GradScaler("cpu", init_scale=scale)
        made.model.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16):
            loss = half(made.model, made.batches[0])
        torch.autograd.backward(scaler.scale(loss))
        real = torch.cat([p.grad.flatten() for p in made.model.parameters() if p.grad is not None]) / scale
        found = Passes(made).run(0, "fp16", scale=scale)
        torch.testing.assert_close(dense(found.gradients), real, rtol=0, atol=0, equal_nan=True)
        assert found.is_finite == bool(real.isfinite().all())
