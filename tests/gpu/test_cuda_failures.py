"""Whatever fails on a CUDA device, the trial says what it was and the next one runs."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from autotune_amp.core.outcome import Failure, Measurement
from autotune_amp.core.setting import Setting
from autotune_amp.processes.local import LocalBackend, Payload
from autotune_amp.processes.process import Watcher
from autotune_amp.trial.jobs import Trial

pytestmark = pytest.mark.gpu

DEVICE = "cuda:0"
WORKLOAD = """
import os, signal, time
import torch
from torch import nn
from autotune_amp import Workload

HEALTHY, IN_LOADER, ON_HOST, IN_FORWARD, IN_BACKWARD, IN_OPTIMIZER, KILLED, HANGS, ASSERTS = range(1, 10)

def fill():
    torch.empty(1 << 50, dtype=torch.uint8, device="cuda")

class Filling(torch.autograd.Function):
    @staticmethod
    def forward(ctx, outputs):
        return outputs.clone()

    @staticmethod
    def backward(ctx, gradient):
        fill()

class Optimizer(torch.optim.SGD):
    is_filling = False

    def step(self):
        fill() if self.is_filling else super().step()

def data(size):
    if size == IN_LOADER:
        fill()
    if size == ON_HOST:
        torch.empty(1 << 50, dtype=torch.uint8)
    return torch.ones(size, 4)

def loss(model, batch):
    size = len(batch)
    Optimizer.is_filling = size == IN_OPTIMIZER
    if size == IN_FORWARD:
        fill()
    if size == KILLED:
        os.kill(os.getpid(), signal.SIGKILL)
    if size == HANGS:
        time.sleep(1000)
    if size == ASSERTS:
        batch = batch[torch.full((size,), size, device=batch.device)]
    outputs = model(batch)
    return (Filling.apply(outputs) if size == IN_BACKWARD else outputs).square().mean()

def workload():
    return Workload(lambda: nn.Linear(4, 1), loss, data, lambda parameters: Optimizer(parameters, lr=0.03))
"""
OUT_OF_MEMORY = ("oom", "memory")
FAILURES = [*[OUT_OF_MEMORY] * 5, ("crash", "SIGKILL"), ("timeout", "step"), ("workload_error", "device-side assert")]
HEALTHY, HANGS, ASSERTS = 1, 8, 9  # batch sizes


class Trials:
    """Trials of one runner, by batch size."""

    def __init__(self, runner: LocalBackend) -> None:
        self._runner = runner
        runner.load(60)
        self._state, reason, _ = runner.open(DEVICE, None, 60)
        assert reason is None

    def __call__(self, batch_size: int) -> Measurement | Failure:
        return self._runner.submit(
            Trial(
                candidate=Setting(precision="fp32", batch_size=batch_size),
                device=DEVICE,
                torch_state=self._state,
                measure_seconds=0.0,
                first_step_deadline_seconds=2.0 if batch_size == HANGS else 60.0,
            )
        ).result()


@pytest.fixture
def payload(tmp_path: Path) -> Payload:
    (tmp_path / "train.py").write_text(WORKLOAD)
    return Payload(target="train:workload", path=(str(tmp_path), *sys.path))


def test_every_failure_is_named_and_the_next_trial_runs(payload: Payload) -> None:
    with LocalBackend(payload, "forked", Watcher()) as runner:
        run = Trials(runner)
        for batch_size, (kind, word) in enumerate(FAILURES, start=2):
            failed = run(batch_size)
            assert isinstance(failed, Failure)
            assert (failed.kind, word in failed.message) == (kind, True), failed
            assert isinstance(run(HEALTHY), Measurement)


def test_an_assert_on_the_device_ends_with_the_kept_worker_that_met_it(payload: Payload) -> None:
    with LocalBackend(payload, "kept", Watcher()) as runner:
        run = Trials(runner)
        assert isinstance(run(HEALTHY), Measurement)
        assert isinstance(run(ASSERTS), Failure)
        assert isinstance(run(HEALTHY), Measurement)
