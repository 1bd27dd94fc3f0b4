"""Several optimizers clipped by one norm: what is not finite in one reaches no weight of another."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autotune_amp import AmpConfig, LossScale
from autotune_amp.core.precisions import Precision
from autotune_amp.precision.step_amp import StepAmp
from autotune_amp.runtime.controller import PrecisionController
from autotune_amp.runtime.scaler import GradientCheck


class Pair:
    """An encoder and a head with an optimizer each; `bad` is added to one gradient of one of them, a loss stays finite.

    Momentum and weight decay move weights in a step whose gradients are zero, too.
    """

    def __init__(self, fused: bool = False) -> None:
        torch.manual_seed(0)
        self.parts = nn.Linear(4, 4), nn.Linear(4, 1)
        self.optimizers = [
            torch.optim.SGD(part.parameters(), lr=0.1, momentum=0.9, weight_decay=0.1, fused=fused)
            for part in self.parts
        ]
        self.inputs = torch.randn(2, 4)
        self.bad: tuple[int, float] | None = None
        for index, part in enumerate(self.parts):
            part.weight.register_hook(partial(self.spoilt, index))  # type: ignore[no-untyped-call]

    def spoilt(self, index: int, gradient: Tensor) -> Tensor:
        return gradient + self.bad[1] if self.bad is not None and self.bad[0] == index else gradient

    def loss(self) -> Tensor:
        return self.parts[1](self.parts[0](self.inputs)).float().square().mean()  # type: ignore[no-any-return]

    def weights(self) -> list[Tensor]:
        return [parameter.detach().clone() for part in self.parts for parameter in part.parameters()]

    def written_out(self, controller: Any) -> list[bool]:
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        with controller.autocast():
            loss = self.loss()
        controller.backward(loss)
        for optimizer in self.optimizers:
            controller.unscale_(optimizer)
        nn.utils.clip_grad_norm_([parameter for part in self.parts for parameter in part.parameters()], 1.0)
        taken = [bool(controller.step(optimizer)) for optimizer in self.optimizers]
        controller.update()
        return taken


def config(precision: Precision) -> AmpConfig:
    loss_scale = LossScale(init_scale=1024.0) if precision == "fp16" else None
    return AmpConfig(precision=precision, batch_size=2, loss_scale=loss_scale)


@pytest.fixture(params=["the host knows at once", "the device knows"])
def where(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "the device knows":
        monkeypatch.setattr(GradientCheck, "is_on_host", staticmethod(lambda tensor: False))


@pytest.mark.usefixtures("where")
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("bad", [(0, math.nan), (1, math.nan), (0, math.inf), (1, -math.inf)])
@pytest.mark.parametrize("precision", ["fp16", "bf16", "fp32"])
def test_one_call_skips_all_of_them_or_none(precision: Precision, bad: tuple[int, float], fused: bool) -> None:
    pair = Pair(fused)
    controller = PrecisionController(config(precision), device="cpu")
    calls: list[str] = []
    controller.on_step(lambda: calls.append("first"), pair.optimizers[0])
    controller.on_step(lambda: calls.append("second"), pair.optimizers[1])
    for _ in range(3):
        assert controller.train_step(pair.loss, pair.optimizers, clip_norm=1.0)
    before, pair.bad = pair.weights(), bad

    stepped = controller.train_step(pair.loss, pair.optimizers, clip_norm=1.0)

    assert not stepped
    assert all(torch.equal(one, other) for one, other in zip(before, pair.weights(), strict=True))
    assert (controller.status().num_steps, controller.status().num_overflows) == (3, 1)
    assert calls == ["first", "second"] * 3
    pair.bad = None
    assert controller.train_step(pair.loss, pair.optimizers, clip_norm=1.0)
    assert all(bool(weight.isfinite().all()) for weight in pair.weights())


@pytest.mark.usefixtures("where")
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("index", [0, 1])
@pytest.mark.parametrize("precision", ["fp16", "bf16", "fp32"])
def test_in_a_loop_written_out_a_clip_cannot_carry_nan_over(precision: Precision, index: int, fused: bool) -> None:
    pair = Pair(fused)
    controller = PrecisionController(config(precision), device="cpu")
    assert pair.written_out(controller) == [True, True]
    before, pair.bad = pair.weights(), (index, math.nan)

    assert pair.written_out(controller) == [False, False]

    assert all(torch.equal(one, other) for one, other in zip(before, pair.weights(), strict=True))
    pair.bad = None
    assert pair.written_out(controller) == [True, True]


@pytest.mark.usefixtures("where")
@pytest.mark.parametrize("fused", [False, True])
def test_clipped_each_by_itself_they_go_on_alone_as_with_gradscaler(fused: bool) -> None:
    pair = Pair(fused)
    controller = PrecisionController(config("fp16"), device="cpu")
    pair.bad = 0, math.nan
    controller.backward(pair.loss())
    for part, optimizer in zip(pair.parts, pair.optimizers, strict=True):
        controller.unscale_(optimizer)
        nn.utils.clip_grad_norm_(part.parameters(), 1.0)
    assert [bool(controller.step(optimizer)) for optimizer in pair.optimizers] == [False, True]


def test_trials_skip_as_the_controller_does() -> None:
    pair = Pair()
    amp = StepAmp(lambda: torch.autocast("cpu", dtype=torch.float16), "cpu", config("fp16"))
    assert amp.train_step(pair.loss, pair.optimizers, clip_norm=1.0)
    before, pair.bad = pair.weights(), (0, math.nan)
    assert not amp.train_step(pair.loss, pair.optimizers, clip_norm=1.0)
    assert all(torch.equal(one, other) for one, other in zip(before, pair.weights(), strict=True))
