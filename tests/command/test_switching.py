"""One start of a command that measures several settings."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from described_commands import described, local_backend, trial

from autotune_amp.command import command as command_module
from autotune_amp.command import running
from autotune_amp.command.agent.outside import switching
from autotune_amp.command.backend import CommandBackend
from autotune_amp.core.outcome import Description, Measurement
from autotune_amp.core.setting import Setting
from autotune_amp.processes.local import LocalBackend

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="elsewhere each setting has its own start")
SCRIPT = """
import sys, time, torch
from torch import nn
torch.manual_seed(0)
data = torch.utils.data.TensorDataset(torch.randn(4096, 8), torch.randn(4096, 1))
model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 1))
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
scaler = torch.amp.GradScaler("cpu", enabled=False)
workers = {"num_workers": 1} if "workers" in sys.argv else {}
size = next((int(word) for word in sys.argv if word.isdecimal()), 8)
loader = torch.utils.data.DataLoader(data, batch_size=size, shuffle=True, **workers)
started_with = loader.batch_size
for epoch in range(100000):
    for x, y in loader:
        if len(x) == 32 and started_with != 32 and "crashing" in sys.argv:
            raise ValueError("changed")
        with torch.autocast("cpu", torch.bfloat16, enabled=False):
            loss = (model(x) - y).square().mean()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
"""
local = pytest.fixture(scope="module")(local_backend)
Describe = Callable[..., CommandBackend]


@pytest.fixture
def starts(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The command lines that were started."""
    found: list[Any] = []
    started = running.started

    def noted(arguments: Any, **how: Any) -> Any:
        found.append(arguments)
        return started(arguments, **how)

    monkeypatch.setattr(command_module, "started", noted)
    return found


@pytest.fixture
def describe(local: LocalBackend, tmp_path: Path) -> Iterator[Describe]:
    made: list[CommandBackend] = []

    def describe(*arguments: str) -> CommandBackend:
        (tmp_path / "train.py").write_text(SCRIPT)
        backend, found = described([sys.executable, str(tmp_path / "train.py"), *arguments], local)
        assert isinstance(found, Description), found
        made.append(backend)
        return backend

    yield describe
    for backend in made:
        backend._command.end_live()


def measured(backend: CommandBackend, precision: Any, batch_size: int) -> Measurement:
    found = backend.submit(trial(Setting(precision=precision, batch_size=batch_size))).result()
    assert isinstance(found, Measurement), found
    return found


@pytest.mark.slow
@pytest.mark.parametrize("arguments", [[], ["workers"]])
def test_one_start_measures_every_precision_and_batch_size(
    describe: Describe, starts: list[Any], arguments: list[str]
) -> None:
    backend = describe(*arguments)
    assert not measured(backend, "fp32", 8).is_build_shared
    settings = [("bf16", 4), ("fp32", 32), ("fp16", 8), ("fp16", 16), ("fp32", 8)]
    assert all(measured(backend, *setting).is_build_shared for setting in settings)  # what ran is checked in each
    assert len(starts) == 1


@pytest.mark.slow
def test_a_placeholder_of_the_command_needs_a_start_of_its_own(describe: Describe, starts: list[Any]) -> None:
    backend = describe("{batch_size=8}")
    num_before = len(starts)
    assert not measured(backend, "fp32", 16).is_build_shared
    assert len(starts) == num_before + 1
    assert measured(backend, "bf16", 16).is_build_shared  # only the precision is set from outside
    assert len(starts) == num_before + 1


@pytest.mark.slow
def test_a_setting_that_crashes_after_a_switch_is_measured_in_a_start_of_its_own(
    describe: Describe, starts: list[Any]
) -> None:
    backend = describe("crashing")
    assert not measured(backend, "fp32", 32).is_build_shared
    assert len(starts) == 2
    assert measured(backend, "fp32", 16).is_build_shared
    assert len(starts) == 2


def test_weights_optimizer_and_random_numbers_are_put_back_bit_for_bit(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4))
    optimizer = torch.optim.Adam(model.parameters())
    tensors = [*model.parameters(), *model.buffers()]

    def train() -> list[torch.Tensor]:
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.randn(8, 4)).square().mean().backward()
            optimizer.step()
        return [tensor.detach().clone() for tensor in tensors]

    train()
    torch.save(switching._state(tensors, [optimizer], []), tmp_path / "state.pt")
    first = train()
    optimizer.param_groups[0]["lr"] = 1.0  # as a schedule would
    train()
    state = torch.load(tmp_path / "state.pt", mmap=True, weights_only=False)
    switching._restore(state, tensors, [optimizer], [])
    assert all(map(torch.equal, first, train()))
