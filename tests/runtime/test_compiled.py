"""Under torch.compile: how many graphs, and what they compute, with the precision moving and the model attached."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from training import Loop, batches, fp16

from autotune_amp import AmpConfig, LossScale
from autotune_amp.core.precisions import Precision
from autotune_amp.runtime.controller import PrecisionController


@pytest.fixture(autouse=True)
def _fresh_compiler() -> Iterator[None]:
    torch.manual_seed(0)
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def small() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.ReLU(), nn.Linear(8, 1))


def test_each_new_precision_compiles_once_comes_back_for_free_and_is_never_stale() -> None:
    """The gradients are those of the code that is not compiled, in each precision."""
    counter: Any = CompileCounterWithBackend("aot_eager")
    mine = Loop(small(), PrecisionController(fp16(), "cpu"), mode="attached then compiled", backend=counter)
    theirs = Loop(copy.deepcopy(mine.model._orig_mod), PrecisionController(fp16(), "cpu"))
    moves: list[Precision] = ["fp16", "bf16", "fp32", "fp16", "bf16", "fp32"]
    counts = []
    for name, batch in zip(moves, batches(len(moves)), strict=True):
        for loop in (mine, theirs):
            loop.controller.set_precision(name)  # type: ignore[union-attr] # it has one
            loop.step(batch)
        counts.append(counter.frame_count)
        assert mine.losses[-1] == pytest.approx(theirs.losses[-1], rel=1e-4)
    assert counts == [1, 2, 3, 3, 3, 3]


def test_code_with_an_autocast_of_its_own_has_its_backward_pass_in_the_lower_rung_too() -> None:
    """Gradients that fp16 cannot hold: eager, they are those of plain fp32; compiled, they are 0."""
    model = small()
    ((inputs, _),) = batches(1)
    gradients = []
    for how in ("plain", "eager", "compiled"):
        trained = copy.deepcopy(model)
        if how != "plain":
            controller = PrecisionController(fp16(), device="cpu")
            controller.attach(trained)
            controller.set_precision("fp32")
        called: Any = torch.compile(trained, backend="aot_eager") if how == "compiled" else trained
        with torch.autocast("cpu", dtype=torch.float16, enabled=how != "plain"):
            output = called(inputs)
        (output.float().sum() * 1e-9).backward()
        gradients.append([parameter.grad for parameter in trained.parameters()])
    assert all(map(torch.equal, gradients[0], gradients[1]))  # type: ignore[arg-type]
    assert all(map(torch.equal, gradients[0], gradients[2]))  # type: ignore[arg-type]


# -- TorchScript, which nothing can be put around or into --------------------------------------------------------------


class Spoilt(torch.autograd.Function):
    """Makes gradients infinite in half precision."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.dtype = x.dtype
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        return gradients[0] * (1.0 if ctx.dtype == torch.float32 else torch.inf)


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:.*torch.jit.trace:FutureWarning")
@pytest.mark.parametrize("is_whole", [False, True])
@pytest.mark.parametrize("is_attached", [False, True])
def test_scripted_modules_train_and_step_down(is_whole: bool, is_attached: bool) -> None:
    """Not to another half precision: their compiled code keeps to the first it ran in."""
    inner: Any = torch.jit.trace(nn.Linear(8, 1), torch.randn(4, 8))  # type: ignore[no-untyped-call] # torch's
    model = inner if is_whole else nn.Sequential(nn.Linear(8, 8), inner)
    config = AmpConfig(precision="fp16", batch_size=4, loss_scale=LossScale(init_scale=16.0), fallback=["bf16", "fp32"])
    controller = PrecisionController(config, device="cpu")
    if is_attached:
        controller.attach(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for inputs, _ in batches(40):

        def loss(given: torch.Tensor = inputs) -> torch.Tensor:
            spoilt: torch.Tensor = Spoilt.apply(model(given))  # type: ignore[no-untyped-call] # torch's
            return spoilt.float().square().mean()

        controller.train_step(loss, optimizer)
    assert controller.status().precision == "fp32"
    assert controller.status().num_steps > 0
    assert [move.after for move in controller.status().history] == ["fp32"]
