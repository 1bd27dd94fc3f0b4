"""Under torch.compile: how many graphs, and what they compute, with the precision moving and the model attached."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from training import Batch, batches, fp16, same

from autotune_amp.core.config import AmpConfig, LossScale
from autotune_amp.core.setting import Precision
from autotune_amp.precision import mode as precision
from autotune_amp.runtime.controller import PrecisionController

MOVES: list[Precision] = ["fp16", "bf16", "fp32", "fp16", "bf16", "fp32"]
_DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}
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


@pytest.mark.parametrize("attached", ["before", pytest.param("after", marks=pytest.mark.slow)])
def test_code_with_an_autocast_of_its_own_recompiles_as_often_and_is_never_stale(attached: str) -> None:
    """Compared with a run that starts in each of the precisions; the forward pass also with plain eager code."""
    model = small()
    given = batches(len(MOVES))
    own = torch.autocast("cpu", dtype=torch.float16)
    mine = Training(model, "aot_eager")
    controller = PrecisionController(fp16(), device="cpu")
    if attached == "after":
        with own:
            mine.compiled(given[0][0])
    controller.attach(mine.compiled)
    weights = model.state_dict()
    mine.counter.frame_count = 0
    counts = []
    for name, batch in zip(MOVES, given, strict=True):
        controller.set_precision(name)
        mine.step(controller, own, batch)
        counts.append(mine.counter.frame_count)
    assert counts == [1, 2, 3, 3, 3, 3]
    for name, batch in zip(MOVES, given, strict=True):
        torch._dynamo.reset()
        fresh = Training(small(), "aot_eager")
        fresh.model.load_state_dict(weights)
        other = PrecisionController(fp16(), device="cpu")
        other.attach(fresh.model)
        other.set_precision(name)
        with own:
            output = fresh.compiled(batch[0])
        with precision.autocast(name, "cpu"):
            assert torch.equal(output, copy.deepcopy(fresh.model)(batch[0]))
        fresh.step(other, own, batch)
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


@INDUCTOR_WARNS
@pytest.mark.parametrize(
    ("backend", "name"),
    [
        ("aot_eager", "fp16"),
        pytest.param("inductor", "fp16", marks=pytest.mark.slow),
    ],
)
def test_attached_before_or_after_compiling_graphs_and_numerics_stay_as_they_were(
    backend: str, name: Precision
) -> None:
    model = small()
    given = batches(10)
    config = fp16() if name == "fp16" else AmpConfig(precision=name, batch_size=4)
    trained, counts, maxima = [], [], []
    for attached in ("never", "before", "after"):
        torch._dynamo.reset()
        training = Training(model, backend)
        controller = PrecisionController(config, device="cpu")
        if attached == "before":
            controller.attach(training.model)
        if attached == "after":
            training.step(controller, controller.autocast(), given[0])
            controller.attach(training.compiled)
            training.counter.frame_count = 0  # of the graph from before it was attached
        for batch in given[1:] if attached == "after" else given:
            training.step(controller, controller.autocast(), batch)
        trained.append(training.model)
        counts.append(training.counter.frame_count)
        maxima.append(controller.status().forward_max)
    assert counts == [1, 1, 1]
    assert same(trained[0], trained[1])
    assert same(trained[0], trained[2])
    assert maxima[0] is None
    assert isinstance(maxima[1], float)
    plain = Training(model, backend)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, enabled=name == "fp16")
    for batch in given:
        plain.plain(scaler, name, batch)
    assert same(trained[0], plain.model)


class Spiky(nn.Module):
    """A hidden activation of 66246 and more, which no output shows; T5's feed-forward put out as much."""

    def __init__(self, level: float) -> None:
        super().__init__()
        self.wi = nn.Linear(8, 8)
        self.wo = nn.Linear(8, 8)
        self.norm = nn.LayerNorm(8)
        self.head = nn.Linear(8, 1)
        with torch.no_grad():
            self.wo.weight.zero_()
            self.wo.bias.copy_(torch.linspace(-level, level / 2, 8))
        self.wo.requires_grad_(False)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.head(self.norm(self.wo(torch.relu(self.wi(inputs)))))  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("mode", "name"), [("eager", "fp16"), ("attached, then compiled", "bf16"), ("compiled, then attached", "fp32")]
)
def test_the_largest_activation_is_seen_also_beyond_what_fp16_holds(mode: str, name: Precision) -> None:
    level = 66246.0
    config = AmpConfig(precision=name, batch_size=4, loss_scale=LossScale() if name == "fp16" else None)
    model = Spiky(level)
    controller = PrecisionController(config, device="cpu")
    compiled: Any = model
    if mode == "attached, then compiled":
        controller.attach(model)
    if mode != "eager":
        compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    if mode != "attached, then compiled":
        controller.attach(compiled)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.01)
    # Eager modules are looked at early in the run, and from then on every 64 updates.
    for inputs, targets in batches(11):
        with controller.autocast():
            loss = nn.functional.mse_loss(compiled(inputs), targets)
        controller.backward(loss)
        controller.step(optimizer)
        controller.update()
        optimizer.zero_grad()
    seen = controller.status().forward_max
    assert seen is not None
    if name == "fp16":
        assert not math.isfinite(seen)
    else:
        assert seen == pytest.approx(level, rel=0.0 if name == "fp32" else 2**-8)
