"""Passes repeat bit for bit, leave the model as it was, hand out unscaled gradients, and draw alike."""

from __future__ import annotations

import random
import warnings
from collections import Counter
from dataclasses import replace
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from subjects import SUBJECTS, Batch, build, dense, mean_square, mlp, storages_on_fake_gpu, subject
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from autotune_amp.core.precisions import Precision
from autotune_amp.numerics import passes as passes_module
from autotune_amp.numerics.paired_runs import lost_updates, perturb
from autotune_amp.numerics.passes import Passes, are_equal, fp32_copy
from autotune_amp.precision.forward_wrapper import computes_in_half


def state_of(model: nn.Module) -> dict[str, Tensor]:
    return {n: v.detach().clone() for n, v in (*model.named_parameters(), *model.named_buffers())}


PRECISIONS: tuple[Precision, ...] = ("fp32", "bf16", "fp16")


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("name", sorted(SUBJECTS))
def test_a_pass_can_be_repeated_bit_for_bit(name: str, precision: Precision) -> None:
    passes = Passes(build(name))
    before = state_of(passes.model)
    one, _, again = passes.run(1, precision), passes.run(0, precision), passes.run(1, precision)
    assert one.loss == again.loss
    assert one.gradients.keys() == again.gradients.keys()
    torch.testing.assert_close(dense(one.gradients), dense(again.gradients), rtol=0, atol=0, equal_nan=True)
    assert passes.num_passes == 3
    passes.restore()
    torch.testing.assert_close(state_of(passes.model), before, rtol=0, atol=0)
    assert all(parameter.grad is None for parameter in passes.model.parameters())


def test_a_pass_begins_from_the_first_state_from_the_state_as_it_is_or_from_what_is_kept() -> None:
    passes = Passes(build("convnet with BatchNorm"))
    for restores, tracked in ((True, 1), (True, 1), (False, 2), (False, 3)):
        passes.run(0, "fp32", restores=restores)
        assert passes.model.get_buffer("1.num_batches_tracked") == tracked
    changed = list(passes.changed(passes.model.named_buffers()))
    assert changed == ["1.running_mean", "1.running_var", "1.num_batches_tracked"]
    passes.keep()
    assert not list(passes.changed(passes.model.named_buffers()))
    passes.run(2, "fp32")
    assert passes.model.get_buffer("1.num_batches_tracked") == 4


def test_the_first_state_is_kept_in_host_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(passes_module, "is_plain_tensor", lambda _: True)  # a fake tensor is no plain one
    before = storages_on_fake_gpu()
    with FakeTensorMode():
        model = nn.ParameterDict({"w": torch.zeros(64, device="cuda")})
        passes = Passes(replace(build("MLP"), model=model))
        held = storages_on_fake_gpu()
    assert len(held.keys() - before.keys()) == 1, "the model's own parameter"
    assert not passes.num_passes


def test_the_seconds_of_a_pass_are_without_those_of_restoring(monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = iter([0.0, 100.0, 100.0, 101.0])
    monkeypatch.setattr(passes_module, "time", Mock(perf_counter=lambda: next(seconds)))
    passes = Passes(build("MLP"))
    passes.run(0, "fp32")
    assert (passes.seconds_of["fp32"], passes.restore_seconds) == (1.0, 100.0)


def test_a_buffer_that_is_expanded_is_left_alone() -> None:
    """Nobody can write to it in place, the model no more than we."""
    made = build("MLP")
    made.model.register_buffer("mask", torch.ones(1).expand(4))
    made.model.register_buffer("position", torch.arange(4).expand(1, -1))  # each entry has a place of its own
    passes = Passes(made)
    assert passes.run(0, "fp32").loss == passes.run(0, "fp32").loss
    passes.model.get_buffer("position").zero_()
    passes.restore()
    assert passes.model.get_buffer("position").tolist() == [[0, 1, 2, 3]]


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
    unused = Passes(build("unused and frozen parameters")).run(0, "fp16").gradients
    assert sorted(unused) == ["used.bias", "used.weight"], "parameters without a gradient are missing"


def test_a_loss_in_fp16_is_scaled_as_grad_scaler_scales_it() -> None:
    def half(model: nn.Module, batch: Batch) -> Tensor:
        total: Tensor = (model(batch.x) * 2.0**-6).sum()
        return total

    torch.manual_seed(0)
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


def test_draws_are_the_same_in_every_precision_and_differ_from_batch_to_batch() -> None:
    drawn: list[tuple[float, float, float]] = []

    def noisy(model: nn.Module, batch: Batch) -> Tensor:
        drawn.append((random.random(), float(np.random.rand()), float(torch.rand(()))))
        return mean_square(model, batch)

    passes = Passes(subject(mlp(), noisy))
    for precision in PRECISIONS:
        passes.run(0, precision)
    passes.run(1, "fp32")
    assert drawn[0] == drawn[1] == drawn[2]
    assert all(one != other for one, other in zip(drawn[0], drawn[3], strict=True))


def test_a_pass_knows_whether_it_drew_and_waits_once_however_many_parameters_there_are() -> None:
    num_waits = Counter[str]()

    class Waits(TorchDispatchMode):  # type: ignore[no-untyped-call] # torch's
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            num_waits[func.overloadpacket.__name__] += 1
            return func(*args, **(kwargs or {}))

    deep = Passes(subject(nn.Sequential(*(nn.Linear(8, 8) for _ in range(20)), nn.Linear(8, 4))))
    with Waits():  # type: ignore[no-untyped-call] # torch's
        assert deep.run(0, "fp32").has_gradient
    assert num_waits["_local_scalar_dense"] <= 2
    assert not deep.has_random_draws
    drawing = Passes(build("transformer with dropout"))
    drawing.run(0, "fp32")
    assert drawing.has_random_draws


def test_batches_are_equal_if_they_hold_the_same_numbers_in_the_same_places() -> None:
    dense_tensor = torch.tensor([[0.0, 1.0], [2.0, 0.0]])
    for made in (Tensor.clone, Tensor.to_sparse, Tensor.to_sparse_csr, Tensor.to_sparse_csc):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # sparse tensors are in beta
            one, same, other = made(dense_tensor), made(dense_tensor), made(dense_tensor.flip(0))
        assert are_equal({"x": one}, {"x": same})
        assert not are_equal({"x": one}, {"x": other})
        assert are_equal({"x": one}, {"x": dense_tensor}) is (made is Tensor.clone)


class PackedWeight(nn.Parameter):
    """A frozen weight of 4 bit that is stored as bf16, as FSDP needs it."""

    quant_state = "4 bit"


class Quantized(nn.Module):
    """A layer with a packed weight in a model that refuses `float`, as quantized ones of Transformers."""

    def __init__(self) -> None:
        super().__init__()
        self.packed = PackedWeight(torch.arange(1, 9).to(torch.int16).view(torch.bfloat16), requires_grad=False)
        self.adapter = nn.Linear(8, 8, dtype=torch.bfloat16)

    def float(self) -> Any:
        """Refuse."""
        raise ValueError("not supported for quantized models")

    def forward(self, x: Tensor) -> Tensor:
        """Unpack the weight."""
        hidden: Tensor = self.adapter(x)
        return hidden * self.packed.detach().view(torch.int16).to(x.dtype)


def test_packed_weights_stay_as_they_are_in_the_copy_that_computes_in_fp32() -> None:
    model = Quantized()
    assert computes_in_half(model)
    copied = fp32_copy(model, "cpu")
    assert not computes_in_half(copied)
    before = {name: value.float() for name, value in state_of(copied).items()}
    perturb(copied, 0.125, 0)
    assert torch.equal(copied.get_parameter("packed"), model.packed)
    after = {name: value.float() for name, value in state_of(copied).items()}
    assert lost_updates(model, before, after) is not None
    assert copied(torch.ones(2, 8, dtype=torch.bfloat16)).dtype == torch.float32, "its inputs are converted"
