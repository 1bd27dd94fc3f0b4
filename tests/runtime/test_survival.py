"""Hard runs, each against a reference without the controller: who is at fault, and what the parameters became."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from training import MODES, Batch, Loop, batches, fp16, same, weights

from autotune_amp.core.config import AmpConfig
from autotune_amp.core.errors import NotPrecisionError
from autotune_amp.runtime.controller import PrecisionController

NAN_BATCH: Batch = (torch.full((4, 8), math.nan), torch.zeros(4, 1))


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    torch.manual_seed(0)
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def controller(config: AmpConfig | None = None, **options: Any) -> PrecisionController:
    return PrecisionController(config or fp16(), device="cpu", **options)


class FeedForward(nn.Module):
    """T5's feed-forward output reached 66246 > 65504 (transformers#5651); a norm follows, so fp32 trains on it well."""

    def __init__(self) -> None:
        super().__init__()
        self.wi = nn.Linear(8, 16)
        self.wo = nn.Linear(16, 8)
        self.norm = nn.LayerNorm(8)
        self.head = nn.Linear(8, 1)
        with torch.no_grad():
            self.wo.bias.copy_(torch.linspace(-66246.0, 66246.0, 8))
            self.wo.weight.mul_(20000.0)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.head(self.norm(self.wo(torch.relu(self.wi(inputs)))))  # type: ignore[no-any-return]


def small() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 1))


@pytest.mark.parametrize(
    ("mode", "reruns", "own_autocast"),
    [
        ("eager", True, torch.float16),
        ("eager", False, None),
        ("attached then compiled", False, torch.float16),
        ("compiled then attached", True, None),
    ],
)
def test_forward_overflow_is_survived(mode: str, reruns: bool, own_autocast: torch.dtype | None) -> None:
    model = FeedForward()
    twin = copy.deepcopy(model)
    given = batches(60)
    steered = controller()
    loop = Loop(model, steered, mode=mode, reruns=reruns, own_autocast=own_autocast)
    assert not loop.step(given[0])
    assert not loop.step(given[1])
    assert same(model, twin)  # nothing was taken from the two bad steps
    status = steered.status()
    (move,) = status.history
    expected = ("pin", "fp16", ("wo",)) if reruns else ("demotion", "bf16", ())
    assert (move.kind, status.precision, status.pinned_modules) == expected
    loop.run(given[2:])
    plain = Loop(twin).run(given[2:])
    assert steered.status().num_skips == 2
    assert loop.losses[-1] == pytest.approx(plain.losses[-1], rel=0.1, abs=0.02)
    for mine, theirs in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0.05, atol=0.05)


@pytest.mark.parametrize("mode", MODES)
def test_one_nan_batch_is_one_skip(mode: str) -> None:
    model = small()
    twin = copy.deepcopy(model)
    given = batches(20)
    steered = controller()
    loop = Loop(model, steered, mode=mode).run(given[:10])
    before, scale = weights(model), steered.get_scale()
    assert not loop.step(NAN_BATCH)
    assert all(torch.equal(before[name], value) for name, value in weights(model).items())  # BatchNorm's too
    assert steered.get_scale() == scale
    loop.run(given[10:])
    status = steered.status()
    assert (status.num_skips, status.precision, status.history) == (1, "fp16", ())
    other = controller()
    Loop(twin, other, mode=mode).run(given)
    assert same(model, twin)


@pytest.mark.parametrize("mode", MODES)
def test_a_burst_of_nan_batches_is_not_precision(mode: str) -> None:
    model = small()
    twin = copy.deepcopy(model)
    given = batches(20)
    steered = controller(halt=False)
    loop = Loop(model, steered, mode=mode).run(given[:10])
    scale = steered.get_scale()
    loop.run([NAN_BATCH] * 200)
    status = steered.status()
    assert status.precision == "fp16"
    assert {record.kind for record in status.history} == {"not_precision", "stop"}
    assert "the input of the model" in status.history[0].reason
    assert steered.get_scale() == scale
    loop.run(given[10:])
    Loop(twin, controller(), mode=mode).run(given)
    assert same(model, twin)  # as if the burst had never been


class RootOfZero(nn.Module):
    """sqrt has an infinite slope at 0, and infinity times the 0 behind it is NaN, in every precision."""

    def forward(self, inputs: Tensor) -> Tensor:
        return (inputs * 0.0).sqrt()


class WithRoot(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(8, 8)
        self.root = RootOfZero()
        self.head = nn.Linear(8, 1)

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.body(inputs)
        return self.head(hidden + self.root(hidden))  # type: ignore[no-any-return]


@pytest.mark.parametrize(("mode", "precision"), list(zip(MODES, ["fp16", "bf16", "fp32"], strict=True)))
def test_a_nan_gradient_in_every_precision_halts_naming_the_module(mode: str, precision: str) -> None:
    model = WithRoot()
    before = weights(model)
    configs = {
        "fp16": fp16(),
        "bf16": AmpConfig(precision="bf16", batch_size=4, fallback=["fp32"]),
        "fp32": AmpConfig(precision="fp32", batch_size=4),
    }
    steered = controller(configs[precision])
    loop = Loop(model, steered, mode=mode)
    with pytest.raises(NotPrecisionError, match="root"):
        loop.run(batches(60))
    assert steered.status().precision == precision
    assert all(torch.equal(before[name], value) for name, value in weights(model).items())


def test_a_frozen_low_precision_base_is_not_offered_fp32() -> None:
    base = nn.Linear(8, 8).to(torch.bfloat16).requires_grad_(False)
    adapter = nn.Linear(8, 1)
    model = nn.Sequential(base, adapter)
    steered = controller()
    loop = Loop(model, steered, reruns=False)
    before = weights(model)
    with pytest.raises(NotPrecisionError):
        loop.run([NAN_BATCH] * 200)
    moves = [(record.kind, record.after) for record in steered.status().history]
    assert ("demotion", "bf16") in moves
    assert all(after != "fp32" for _, after in moves)
    assert all(torch.equal(before[name], value) for name, value in weights(model).items())
    steered = controller(AmpConfig(precision="bf16", batch_size=4, fallback=["fp32"]), halt=False)
    Loop(model, steered, reruns=True).run([NAN_BATCH] * 5)
    assert steered.status().precision == "bf16"
