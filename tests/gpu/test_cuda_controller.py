"""The controller on a CUDA device: no step waits for it; the weights are GradScaler's."""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeAlias

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from autotune_amp import AmpConfig, LossScale, PrecisionController
from autotune_amp.core.precisions import Precision
from autotune_amp.hardware import nvml
from autotune_amp.runtime import run_log
from autotune_amp.runtime.scaler import LAG_UPDATES
from autotune_amp.runtime.sinks import MetricValues

pytestmark = pytest.mark.gpu
DEVICE = "cuda"
DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}
MakeOptimizer: TypeAlias = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]
OPTIMIZERS: dict[str, MakeOptimizer] = {
    "Adam": lambda parameters: torch.optim.Adam(parameters, lr=0.01),
    "fused Adam": lambda parameters: torch.optim.Adam(parameters, lr=0.01, fused=True),
    # Without momentum: where the first step is skipped, torch's fused kernel leaves its buffer uninitialised.
    "fused SGD": lambda parameters: torch.optim.SGD(parameters, lr=0.02, fused=True),
}


@pytest.fixture(autouse=True)
def _strict_fp32() -> None:
    """As the controller sets it, so that the reference runs with the same flags."""
    torch.set_float32_matmul_precision("highest")
    torch.backends.cudnn.allow_tf32 = False


@contextmanager
def no_synchronisation() -> Iterator[None]:
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Synchronization debug mode is a prototype")
            torch.cuda.set_sync_debug_mode("error")
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def config(precision: Precision = "fp16", *, init_scale: float = 1024.0, growth_interval: int = 2000) -> AmpConfig:
    loss_scale = LossScale(init_scale=init_scale, growth_interval=growth_interval, max_scale=2.0**60)
    fallback: tuple[Precision, ...] = ("bf16", "fp32") if precision == "fp16" else ()
    return AmpConfig(
        precision=precision, batch_size=8, loss_scale=loss_scale if precision == "fp16" else None, fallback=fallback
    )


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 8)).to(DEVICE)


def batches(num_batches: int) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    made = [
        (torch.randn(8, 32, generator=generator), torch.randn(8, 8, generator=generator)) for _ in range(num_batches)
    ]
    return [(inputs.to(DEVICE), targets.to(DEVICE)) for inputs, targets in made]


def state(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


def assert_same(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    assert [name for name in one if not torch.equal(one[name], other[name])] == []


def reference(
    precision: Precision,
    given: list[tuple[Tensor, Tensor]],
    make_optimizer: MakeOptimizer,
    scaler: torch.amp.GradScaler | None = None,
    clips: bool = False,
) -> tuple[nn.Module, list[float]]:
    """A plain loop with GradScaler, which is off where none is given: the model and the scale after every step.

    It unscales to clip alone, as the loop that it is compared with: fused SGD's own division gave other bits on
    an H200.
    """
    model = make_model()
    optimizer = make_optimizer(model.parameters())
    scaler = scaler or torch.amp.GradScaler(DEVICE, enabled=False)
    scales = []
    for inputs, targets in given:
        optimizer.zero_grad()
        with torch.autocast(DEVICE, dtype=DTYPES.get(precision), enabled=precision in DTYPES):
            loss = nn.functional.mse_loss(model(inputs), targets)
        scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
        if clips:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
    return model, scales


class Training:
    """The README's loops: written out, or a call of `train_step`."""

    def __init__(
        self,
        controller: PrecisionController,
        make_optimizer: MakeOptimizer,
        clips: bool = False,
        in_one_call: bool = False,
    ) -> None:
        self.controller, self.clips, self.in_one_call = controller, clips, in_one_call
        self.model = make_model()
        self.optimizer = make_optimizer(self.model.parameters())

    def step(self, inputs: Tensor, targets: Tensor) -> object:
        if self.in_one_call:
            clip_norm = 0.5 if self.clips else None
            return self.controller.train_step(
                lambda: nn.functional.mse_loss(self.model(inputs), targets), self.optimizer, clip_norm=clip_norm
            )
        self.optimizer.zero_grad()
        with self.controller.autocast():
            loss = nn.functional.mse_loss(self.model(inputs), targets)
        self.controller.backward(loss)
        if self.clips:
            self.controller.unscale_(self.optimizer)
            nn.utils.clip_grad_norm_(self.model.parameters(), 0.5)
        stepped = self.controller.step(self.optimizer)
        self.controller.update()
        return stepped


@pytest.mark.parametrize(
    ("precision", "clips", "attaches", "guard", "in_one_call"),
    [
        ("fp16", True, True, True, False),
        ("fp16", True, False, False, False),
        ("bf16", True, True, True, False),
        ("fp32", False, False, False, False),
        ("fp16", True, False, True, True),
        ("bf16", False, False, True, True),
    ],
)
def test_no_step_waits_for_the_device(
    precision: Precision, clips: bool, attaches: bool, guard: bool, in_one_call: bool, tmp_path: Path
) -> None:
    """Long enough for verdicts to be read, gradients to be sampled and activations to be observed, twice."""
    given = batches(150)
    told: list[MetricValues] = []
    log = tmp_path / "run.jsonl"
    controller = PrecisionController(config(precision), DEVICE, guard=guard, run_log=log, sinks=[told.append])
    training = Training(controller, OPTIMIZERS["fused Adam"], clips, in_one_call)
    calls: list[int] = []
    controller.on_step(lambda: calls.append(1))
    if attaches:
        controller.attach(training.model)
    for batch in given[:6]:  # the first ones allocate
        training.step(*batch)
    torch.cuda.synchronize()
    with no_synchronisation():
        for batch in given[6:]:
            training.step(*batch)
    lag = LAG_UPDATES if guard or precision == "fp16" else 0
    assert len(calls) == 150 - lag
    assert controller.status().num_steps == len(calls) == 150
    assert {0, 64, 128} <= {line.update for line in run_log.read(log).lines}
    scaler = torch.amp.GradScaler(DEVICE, init_scale=1024.0, enabled=precision == "fp16")
    expected, _ = reference(precision, given, OPTIMIZERS["fused Adam"], scaler, clips)
    assert_same(state(training.model), state(expected))
    controller.detach()
    assert {64, 128} <= {values["autotune_amp/update"] for values in told}


class Waits(TorchDispatchMode):  # type: ignore[no-untyped-call] # torch does not type it
    """Counts what brings a tensor of the device to the host."""

    number = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        is_read = func is torch.ops.aten._local_scalar_dense.default
        is_copied = isinstance(found, Tensor) and not found.is_cuda
        if (is_read or is_copied) and isinstance(args[0], Tensor) and args[0].is_cuda:
            self.number += 1
        return found


def test_a_sampled_update_waits_once_as_any_other_does() -> None:
    training = Training(PrecisionController(config(), DEVICE), OPTIMIZERS["Adam"])
    counted = []
    for batch in batches(140):
        with Waits() as waits:  # type: ignore[no-untyped-call] # as above
            training.step(*batch)
        counted.append(waits.number)
    assert set(counted[6:]) == {1}
    assert training.controller.status().flushed_share is not None


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_overflows_and_growth_go_as_gradscalers(name: str) -> None:
    given = batches(40)
    scaler = torch.amp.GradScaler(DEVICE, init_scale=2.0**30, growth_interval=3)
    expected, scales = reference("fp16", given, OPTIMIZERS[name], scaler)
    assert min(scales) < max(scales[-8:]) < 2.0**30, "neither an overflow nor growth to compare"
    controller = PrecisionController(config(init_scale=2.0**30, growth_interval=3), DEVICE)
    training = Training(controller, OPTIMIZERS[name])
    used = []
    for batch in given:
        used.append(float(controller.scale(torch.ones((), device=DEVICE))))
        training.step(*batch)
    assert used == [2.0**30, *scales[:-1]]
    # The reference's BatchNorm keeps what skipped batches left in its statistics; so does a model that is not attached.
    assert_same(state(training.model), state(expected))
    assert controller.get_scale() == scales[-1]


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_one_bad_batch_is_skipped_whole(name: str) -> None:
    """As if it had not been there: weights, the optimizer's state, BatchNorm's statistics and the scale."""
    given = batches(12)
    training = Training(PrecisionController(config(), DEVICE), OPTIMIZERS[name])
    training.controller.attach(training.model)
    for index, (inputs, targets) in enumerate(given):
        assert training.step(inputs, targets)
        if index == 5:
            assert not training.step(inputs * math.nan, targets)
    expected, _ = reference("fp16", given, OPTIMIZERS[name], torch.amp.GradScaler(DEVICE, init_scale=1024.0))
    assert_same(state(training.model), state(expected))
    status = training.controller.status()
    assert (status.num_skips, status.scale, status.history) == (1, 1024.0, ())


def test_the_status_has_the_sensors_of_this_card_and_its_support_of_each_precision() -> None:
    training = Training(PrecisionController(config(), DEVICE), OPTIMIZERS["fused Adam"])
    (batch,) = batches(1)
    deadline = time.monotonic() + 60
    while (status := training.controller.status()).temperature_celsius is None and time.monotonic() < deadline:
        training.step(*batch)
    sensors = nvml.read_sensors(str(torch.cuda.get_device_properties(DEVICE).uuid))
    assert sensors.temperature_celsius is not None
    assert abs((status.temperature_celsius or 0) - sensors.temperature_celsius) < 30
    assert (status.sm_clock_mhz or 0) > 0
    assert (status.power_watts or 0) > 0
    assert status.throttling in (0, 1)
    assert status.capabilities["fp16"].level == "native"
    training.controller.detach()
    assert training.controller.status().temperature_celsius is None


two_cards = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two cards")


@two_cards
@pytest.mark.parametrize("attaches", [True, False])
def test_a_device_without_an_index_is_the_card_that_the_model_is_on(attaches: bool, tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    model = nn.Linear(8, 1).to("cuda:1")
    controller = PrecisionController(config(), DEVICE, run_log=path)
    if attaches:
        controller.attach(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with controller.autocast():
        loss = model(torch.ones(4, 8, device="cuda:1")).float().mean()
    controller.backward(loss)
    controller.step(optimizer)
    controller.update()
    controller.detach()
    assert run_log.read(path).begin.device == "cuda:1"


class Split(nn.Module):
    """A layer on each of two cards and one on the host, as PyTorch's tutorial of model parallelism splits a model."""

    def __init__(self) -> None:
        super().__init__()
        self.host, self.first, self.second = (nn.Linear(8, 8).to(where) for where in ("cpu", "cuda:0", "cuda:1"))

    def forward(self, inputs: Tensor) -> Tensor:
        return self.second(self.first(self.host(inputs).to("cuda:0")).to("cuda:1")).float().square().mean()  # type: ignore[no-any-return]


@two_cards
@pytest.mark.parametrize("precision", ["fp16", "bf16", "fp32"])
def test_a_model_that_is_split_over_cards_and_host_is_trained_and_guarded(precision: Precision) -> None:
    model, controller = Split(), PrecisionController(config(precision), DEVICE)
    controller.attach(model)
    parts = [*model.first.parameters(), *model.second.parameters()]
    optimizers = [torch.optim.SGD(parts, lr=0.01, fused=True), torch.optim.SGD(model.host.parameters(), lr=0.01)]
    for update in range(10):
        factor = math.nan if update == 3 else 1.0
        controller.train_step(lambda: model(torch.ones(4, 8)) * factor, optimizers, clip_norm=1.0)  # noqa: B023
    status = controller.status()
    assert (status.num_steps, status.num_skips) == (9, 1)
    assert (status.flushed_share is not None) == (precision == "fp16")  # a sample was taken
    assert all(parameter.isfinite().all() for parameter in model.parameters())
