"""One start of a command that measures several settings one after another."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from commands import run
from described_commands import described, local_backend, trial
from forked_programs import forked_programs
from forked_python import ForkServer

from autotune_amp.command import command as command_module
from autotune_amp.command.agent.outside import switching
from autotune_amp.command.backend import CommandBackend
from autotune_amp.command.command import Command
from autotune_amp.command.messages import Switchable
from autotune_amp.command.running import RunningCommand
from autotune_amp.core.command_template import CommandTemplate
from autotune_amp.core.outcome import Description, Measurement
from autotune_amp.core.precisions import Precision
from autotune_amp.core.setting import Setting
from autotune_amp.processes.local import LocalBackend

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="elsewhere each setting has its own start")
SCRIPT = """
import itertools, sys, torch
from torch import nn
torch.manual_seed(0)
data = torch.utils.data.TensorDataset(torch.randn(4096, 8), torch.randn(4096, 1))
model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(0.2), nn.Linear(8, 1))
optimizer = (torch.optim.Adagrad if "adagrad" in sys.argv else torch.optim.Adam)(model.parameters(), lr=0.01)
scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 4))
scaler = torch.amp.GradScaler("cpu", enabled=False)
size = next((int(word) for word in sys.argv if word.isdecimal()), 8)
how = {"num_workers": 1} if "workers" in sys.argv else {}
how |= {"sampler": torch.utils.data.SubsetRandomSampler(range(64))} if "sampler" in sys.argv else {"shuffle": True}
loader = torch.utils.data.DataLoader(data, batch_size=size, **how)
other = torch.utils.data.DataLoader(data, batch_size=size)

def ahead(batches):
    batches = iter(batches)
    latest = next(batches)
    for batch in batches:
        yield latest
        latest = batch

seen = set()
for epoch in range(100000):
    batches = ahead(loader) if "ahead" in sys.argv else loader
    for (x, y), _ in zip(batches, other if "two" in sys.argv else itertools.repeat(None)):
        seen.add(len(x))
        if "crashing" in sys.argv and 32 in seen and len(seen) > 1:
            raise ValueError("no change")
        with torch.autocast("cpu", torch.bfloat16, enabled=False):
            loss = (model(x) - y).square().mean()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        scheduler.step()
    if "short" in sys.argv:
        break
"""
local = pytest.fixture(scope="module")(local_backend)
Describe = Callable[..., CommandBackend]


@pytest.fixture(scope="module", autouse=True)
def _commands_are_forked(fork_server: ForkServer) -> Iterator[None]:
    with forked_programs(fork_server):
        yield


@pytest.fixture
def starts(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """The settings of the agent in each start of a command."""
    found: list[dict[str, Any]] = []

    def noted(*arguments: Any, **how: Any) -> RunningCommand:
        found.append(how["agent"])
        return RunningCommand.start(*arguments, **how)

    monkeypatch.setattr(command_module, "RunningCommand", SimpleNamespace(start=noted))
    return found


@pytest.fixture
def script(tmp_path: Path) -> str:
    (tmp_path / "train.py").write_text(SCRIPT)
    return str(tmp_path / "train.py")


@pytest.fixture
def describe(local: LocalBackend, script: str) -> Describe:
    def describe(*arguments: str) -> CommandBackend:
        backend, found = described([sys.executable, script, *arguments], local)
        assert isinstance(found, Description), found
        return backend

    return describe


def measured(backend: CommandBackend, precision: Precision, batch_size: int, **how: Any) -> Measurement:
    found = backend.submit(trial(Setting(precision=precision, batch_size=batch_size), **how)).result()
    assert isinstance(found, Measurement), found
    return found


@pytest.mark.slow
@pytest.mark.parametrize("arguments", [[], ["workers"]])
def test_one_start_measures_every_setting_as_a_start_of_its_own_does(
    describe: Describe, starts: list[Any], arguments: list[str]
) -> None:
    """Losses of several steps are equal bit for bit, from which weights, moments, buffers, batches, dropout, learning
    rates and loss scales are too.
    """
    backend, settings = describe(*arguments), [("fp32", 16), ("fp16", 16), ("bf16", 32)]
    assert len(starts) == 2, "today's, and one with a smaller batch"
    switched = [measured(backend, *setting) for setting in settings]  # type: ignore[arg-type]
    assert all(each.is_build_shared for each in switched)
    assert len(starts) == 2
    for setting, each in zip(settings, switched, strict=True):
        own = measured(backend, *setting, is_alone=True)  # type: ignore[arg-type]
        assert not own.is_build_shared
        assert own.first_losses == each.first_losses
        assert len(own.first_losses) > 3
    assert len(starts) == 5


def test_a_setting_is_measured_once_in_a_process_and_confirmed_in_its_own(
    describe: Describe, starts: list[Any]
) -> None:
    backend = describe()
    measured(backend, "fp32", 8)
    assert measured(backend, "bf16", 8).is_build_shared
    assert not measured(backend, "bf16", 8).is_build_shared
    assert not measured(backend, "fp32", 8, purpose="confirm").is_build_shared
    assert not measured(backend, "fp32", 16, seed=1).is_build_shared
    assert len(starts) == 5
    assert measured(backend, "fp32", 32, seed=1).is_build_shared
    assert not measured(backend, "fp32", 16, seed=1).is_build_shared, "on a CPU"
    assert len(starts) == 6


def test_what_is_filled_into_the_command_needs_a_start(describe: Describe, starts: list[Any]) -> None:
    backend = describe("{batch_size=8}")
    num_before = len(starts)
    assert not measured(backend, "fp32", 16).is_build_shared
    assert measured(backend, "bf16", 16).is_build_shared
    assert len(starts) == num_before + 1


def test_a_setting_that_fails_after_a_switch_has_a_start_of_its_own_and_the_command_is_not_switched_again(
    describe: Describe, starts: list[Any]
) -> None:
    backend = describe("crashing")
    assert not measured(backend, "fp32", 32).is_build_shared
    assert len(starts) == 3
    assert not measured(backend, "fp32", 64).is_build_shared
    assert len(starts) == 4
    assert "switches" not in starts[-1]


def test_a_training_that_ends_is_started_again(describe: Describe, starts: list[Any]) -> None:
    backend = describe("short", "128")
    measured(backend, "fp32", 256)
    assert len(starts) >= 2


@pytest.mark.parametrize("argument", ["ahead", "two", "sampler", "adagrad"])
def test_what_cannot_be_put_back_is_said_before_the_measurement_ends(
    argument: str, script: str, fork_server: ForkServer, tmp_path: Path
) -> None:
    command = [sys.executable, script, argument, "short"]
    events = run(command, tmp_path, server=fork_server, outside={}, switches=True)
    (answer,) = events.of(Switchable)
    assert answer.problem is not None


def test_a_command_that_cannot_switch_is_asked_once(describe: Describe, starts: list[Any]) -> None:
    backend = describe("ahead")
    assert not measured(backend, "fp32", 16).is_build_shared
    assert ["switches" in each for each in starts] == [True, False, False]


def test_a_state_without_room_is_not_saved(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for share, num_files in ((0.25, 1), (0.0, 0)):
        folder = tmp_path / str(share)
        folder.mkdir()
        monkeypatch.setattr(switching, "MAX_SHARE", share)
        switching.Switcher(Mock(), Mock(), Mock(), str(folder)).save_module(torch.nn.Linear(2, 2))
        assert len(list(folder.iterdir())) == num_files


def test_tf32_is_not_switched() -> None:
    command = Command(CommandTemplate.of("python train.py"))
    for today, other in (("fp32", "tf32"), ("tf32", "fp32")):
        command.set_today(Setting(precision=today, batch_size=8), None)  # type: ignore[arg-type]
        in_today, in_other, in_bf16 = (
            command._start(Setting(precision=each, batch_size=4), 0, None)  # type: ignore[arg-type]
            for each in (today, other, "bf16")
        )
        assert in_today == in_bf16 != in_other
