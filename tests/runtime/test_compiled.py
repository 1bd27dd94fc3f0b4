"""Under torch.compile: how many graphs, and what they compute, with the precision moving and the model attached."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from training import Batch, batches, fp16, same

from autotune_amp.core.dimensions import Precision
from autotune_amp.runtime.controller import PrecisionController

MOVES: list[Precision] = ["fp16", "bf16", "fp32", "fp16", "bf16", "fp32"]
_DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}
LEVEL = 66246.0
INDUCTOR_WARNS = pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")  # importing inductor


@pytest.fixture(autouse=True)
def _fresh_compiler() -> Iterator[None]:
    torch.manual_seed(0)
    torch._dynamo.reset()
    with torch._inductor.config.patch(compile_threads=1):
        yield
    torch._dynamo.reset()


def small() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.ReLU(), nn.Linear(8, 1))


class Training:
    """A compiled model; `plain` steps as a loop without the controller does."""

    def __init__(self, model: nn.Module, backend: str) -> None:
        self.counter = CompileCounterWithBackend(backend)
        self.model = copy.deepcopy(model)
        self.compiled: Any = torch.compile(self.model, backend=self.counter, fullgraph=True)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.05)

    def step(self, scaler: torch.amp.GradScaler, autocast: AbstractContextManager[object], batch: Batch) -> None:
        inputs, targets = batch
        with autocast:
            loss = nn.functional.mse_loss(self.compiled(inputs), targets)
        scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
        scaler.step(self.optimizer)
        scaler.update()
        self.optimizer.zero_grad()

    def plain(self, scaler: torch.amp.GradScaler, name: str, batch: Batch) -> None:
        dtype = _DTYPES.get(name)
        context = nullcontext() if dtype is None else torch.autocast("cpu", dtype=dtype)
        self.step(scaler, context, batch)


@INDUCTOR_WARNS
@pytest.mark.parametrize(
    ("backend", "attached"),
    [("aot_eager", False), ("aot_eager", True), pytest.param("inductor", True, marks=pytest.mark.slow)],
)
def test_each_new_precision_compiles_once_comes_back_for_free_and_is_never_stale(backend: str, attached: bool) -> None:
    """A graph compiled anew for each precision, by a loop without the controller, gives the same parameters."""
    model = small()
    given = batches(len(MOVES))
    mine = Training(model, backend)
    controller = PrecisionController(fp16(), device="cpu")
    if attached:
        controller.attach(mine.compiled)
    counts = []
    for name, batch in zip(MOVES, given, strict=True):
        controller.set_precision(name)
        mine.step(controller, controller.autocast(), batch)
        counts.append(mine.counter.frame_count)
    assert counts == [1, 2, 3, 3, 3, 3]
    weights = model.state_dict()
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for name, batch in zip(MOVES, given, strict=True):
        torch._dynamo.reset()
        fresh = Training(small(), backend)
        fresh.model.load_state_dict(weights)
        fresh.plain(scaler if name == "fp16" else torch.amp.GradScaler("cpu", enabled=False), name, batch)
        weights = fresh.model.state_dict()
    assert same(mine.model, fresh.model)


def test_code_with_an_autocast_of_its_own_has_its_backward_pass_in_the_lower_rung_too() -> None:
    """Gradients that fp16 cannot hold: eager, they are those of plain fp32; compiled, they are 0."""
    model = small()
    ((inputs, _),) = batches(1)
    gradients = []
    for how in ("plain", "eager", "compiled"):
        training = Training(model, "aot_eager")
        if how != "plain":
            controller = PrecisionController(fp16(), device="cpu")
            controller.attach(training.model)
            controller.set_precision("fp32")
        with torch.autocast("cpu", dtype=torch.float16, enabled=how != "plain"):
            output = (training.compiled if how == "compiled" else training.model)(inputs)
        (output.float().sum() * 1e-9).backward()
        gradients.append([parameter.grad for parameter in training.model.parameters()])
    assert all(map(torch.equal, gradients[0], gradients[1]))  # type: ignore[arg-type]
    assert all(map(torch.equal, gradients[0], gradients[2]))  # type: ignore[arg-type]
