"""The GPU's sensors during a training run: read beside it, told everywhere, and ended with it. NVML is a made one."""

from __future__ import annotations

import copy
import gc
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import nn
from training import batches, fp16

from autotune_amp.hardware import nvml
from autotune_amp.hardware.nvml import GpuSensors
from autotune_amp.runtime import gpu_sampler, run_log
from autotune_amp.runtime.controller import PrecisionController
from autotune_amp.runtime.gpu_sampler import GpuSampler
from autotune_amp.runtime.sinks import MetricValues

HOT = GpuSensors(91, 1050, 251.5, ("heat, limited by the GPU",))
COOL = GpuSensors(61, 1410, 300.0, ())


def until(is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def num_samplers() -> int:
    return sum(thread.name == "autotune_amp GPU sampler" for thread in threading.enumerate())


@pytest.fixture(autouse=True)
def no_thread_is_left() -> Iterator[None]:
    yield
    until(lambda: num_samplers() == 0)


class Card:
    """What NVML reads of one card: `course`, of which the last stays, a reading every millisecond."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.course = [COOL]
        self.num_read = 0
        monkeypatch.setattr(nvml, "read_sensors", self.read)
        monkeypatch.setattr(gpu_sampler, "SAMPLE_SECONDS", 0.001)

    def read(self, uuid: str) -> GpuSensors:
        assert uuid == "0123"
        self.num_read += 1
        return self.course.pop(0) if len(self.course) > 1 else self.course[0]


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> Card:
    return Card(monkeypatch)


def test_each_beginning_of_throttling_is_warned_of_with_its_reason(
    card: Card, caplog: pytest.LogCaptureFixture
) -> None:
    hotter = HOT._replace(slowdowns=("power brake, requested by the server", *(HOT.slowdowns or ())))
    card.course = [COOL, HOT, HOT, hotter, COOL, GpuSensors(), hotter, COOL]
    sampler = GpuSampler("0123", "cuda:0")
    sampler.start()
    until(lambda: len(card.course) == 1)
    sampler.close()
    first, second = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert all(word in first for word in ("cuda:0", "91", "1050", "heat"))
    assert "power brake" not in first
    assert "power brake" in second


def test_what_was_read_is_gone_with_the_thread_and_a_later_start_reads_anew(card: Card) -> None:
    sampler = GpuSampler("0123", "cuda:0")
    assert sampler.newest == GpuSensors()
    for _ in range(2):
        sampler.start()
        sampler.start()
        until(lambda: sampler.newest == COOL)
        assert num_samplers() == 1
        sampler.close()
        assert (sampler.newest, num_samplers()) == (GpuSensors(), 0)


@pytest.mark.usefixtures("card")
def test_a_forked_child_reads_nothing_and_ends() -> None:
    sampler = GpuSampler("0123", "cuda:0")
    sampler.start()
    until(lambda: sampler.newest == COOL)
    child = os.fork()
    if child == 0:
        sampler.start()
        has_none = sampler.newest == GpuSensors() and threading.active_count() == 1
        sampler.close()
        sampler.start()
        os._exit(0 if has_none and threading.active_count() == 1 else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    sampler.close()


def train(controller: PrecisionController, num_updates: int) -> None:
    model = nn.Linear(8, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for inputs, targets in batches(num_updates):
        controller.train_step(lambda: nn.functional.mse_loss(model(inputs), targets), optimizer)  # noqa: B023


def controller_on_a_card(**options: object) -> PrecisionController:
    """A controller of a training run on the CPU, which reads a card's sensors."""
    controller = PrecisionController(fp16(), device="cpu", **options)  # type: ignore[arg-type] # its own options
    controller._metrics._gpu_sampler = GpuSampler("0123", "cuda:0")
    return controller


def test_the_sensors_are_told_by_status_run_log_and_sinks_and_end_with_the_run(card: Card, tmp_path: Path) -> None:
    told: list[MetricValues] = []
    controller = controller_on_a_card(run_log=tmp_path / "run.jsonl", sinks=[told.append])
    assert (controller.status().temperature_celsius, num_samplers()) == (None, 0), "it begins with the first update"
    card.course = [HOT]
    train(controller, 1)
    until(lambda: controller.status().temperature_celsius is not None)
    train(controller, 63)
    status = controller.status()
    assert (status.temperature_celsius, status.sm_clock_mhz, status.power_watts) == HOT[:3]
    assert (status.throttling, status.throttling_reasons) == (1, HOT.slowdowns)
    assert {("GPU", "91 degrees C, 1,050 MHz, 252 W"), ("throttled", "heat, limited by the GPU")} <= set(status.facts())
    controller.detach()
    assert num_samplers() == 0
    line = run_log.read(tmp_path / "run.jsonl").lines[-1]
    assert (line.update, line.temperature_celsius, line.throttling) == (64, 91, 1)
    names = [f"autotune_amp/{name}" for name in ("temperature_celsius", "sm_clock_mhz", "power_watts", "throttling")]
    assert [told[-1][name] for name in names] == [91, 1050, 251.5, 1]


def test_a_run_on_a_cpu_reads_nothing(card: Card) -> None:
    controller = PrecisionController(fp16(), device="cpu")
    train(controller, 2)
    status = controller.status()
    assert (status.temperature_celsius, status.throttling, status.throttling_reasons) == (None, None, ())
    assert (card.num_read, num_samplers()) == (0, 0)
    controller.detach()


@pytest.mark.usefixtures("card")
def test_a_controller_that_is_forgotten_ends_its_thread_and_a_copy_has_its_own() -> None:
    controller = controller_on_a_card()
    train(controller, 1)
    copied = copy.deepcopy(controller)
    assert num_samplers() == 1
    train(copied, 1)
    assert num_samplers() == 2
    del copied
    gc.collect()
    until(lambda: num_samplers() == 1)
    del controller
    gc.collect()  # and `no_thread_is_left`
