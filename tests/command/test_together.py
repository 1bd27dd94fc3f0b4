"""Runs of a command that load together, and train one after the other."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import said
from described_commands import described, fidelity, local_backend, trial
from forked_programs import forked_programs
from forked_python import ForkServer

from autotune_amp.command import together
from autotune_amp.command.backend import CommandBackend
from autotune_amp.command.messages import Loaded
from autotune_amp.command.ranks import RunEvents
from autotune_amp.command.running import CommandRun, CompletedRun
from autotune_amp.command.together import MAX_TOGETHER, num_fitting
from autotune_amp.command.verdict import RunState
from autotune_amp.core.job import Deadlines
from autotune_amp.core.outcome import Description, Failure, Fidelity, Measurement
from autotune_amp.core.setting import Setting
from autotune_amp.distributed import free_port
from autotune_amp.hardware import host
from autotune_amp.processes.local import LocalBackend
from autotune_amp.processes.process import Watcher

# Each process says by a file of its own when it has built its model and when it has taken its first step.
SCRIPT = """
import argparse, os, pathlib, socket, time
import torch
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--batch", type=int, default=8)
parser.add_argument("--precision", default="fp32")
parser.add_argument("--port", type=int)
parser.add_argument("--be", default="")
options = parser.parse_args()
here = pathlib.Path(__file__).parent
if options.port:
    taken = socket.create_server(("127.0.0.1", options.port))
if "WORLD_SIZE" in os.environ:
    torch.distributed.init_process_group("gloo")
torch.manual_seed(0)
data = torch.utils.data.TensorDataset(torch.randn(4096, 8), torch.randn(4096, 1))
model = nn.Linear(8, 1)
if "WORLD_SIZE" in os.environ:
    model = nn.parallel.DistributedDataParallel(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
(here / f"built.{os.getpid()}").touch()

def is_running(pid):
    try:
        return "Z" not in pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False

for epoch in range(1000):
    for x, y in torch.utils.data.DataLoader(data, batch_size=options.batch, shuffle=True):
        if len(x) == 3:
            raise ValueError("three")
        with torch.autocast("cpu", torch.bfloat16, enabled=options.precision == "bf16"):
            loss = (model(x) - y).square().mean()
        beside = [p for p in here.glob("built.*") if p.suffix[1:] != str(os.getpid()) and is_running(p.suffix[1:])]
        if options.be == "jealous" and beside:
            raise RuntimeError("another one is here")
        if len(x) == 5:
            raise ValueError("five")
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        (here / f"stepped.{os.getpid()}").touch()
"""
SETTINGS = [Setting(precision="fp32", batch_size=4), Setting(precision="bf16", batch_size=2)]


@pytest.fixture(scope="module", autouse=True)
def _commands_are_forked(fork_server: ForkServer) -> Iterator[None]:
    with forked_programs(fork_server):
        yield


local = pytest.fixture(scope="module")(local_backend)


class Commands:
    """Commands that run a script in this folder."""

    def __init__(self, folder: Path, local: LocalBackend) -> None:
        self.folder = folder
        self._local = local
        (folder / "train.py").write_text(SCRIPT)

    def described(self, *arguments: str, launcher: tuple[str, ...] = (sys.executable,)) -> CommandBackend:
        command = [*launcher, str(self.folder / "train.py"), "--batch", "{batch_size=8}", *arguments]
        backend, found = described([*command, "--precision", "{precision=fp32}"], self._local)
        assert isinstance(found, Description), found
        self.forget()
        return backend

    def forget(self) -> None:
        for path in [*self.folder.glob("built.*"), *self.folder.glob("stepped.*")]:
            path.unlink()

    def pids(self, what: str) -> set[str]:
        return {path.suffix[1:] for path in self.folder.glob(f"{what}.*")}

    def running(self) -> set[str]:
        return {pid for pid in self.pids("built") if Path(f"/proc/{pid}").exists()}


@pytest.fixture
def commands(tmp_path: Path, local: LocalBackend, monkeypatch: pytest.MonkeyPatch) -> Commands:
    monkeypatch.setattr(together, "num_fitting", lambda _: 3)
    return Commands(tmp_path, local)


def test_they_load_together_train_alone_and_measure_what_a_run_alone_does(commands: Commands) -> None:
    backend = commands.described()
    trials = [trial(setting) for setting in SETTINGS]
    alone = [backend.submit(each).result() for each in trials]
    commands.forget()
    backend.load_together(trials)
    loaded = commands.running()
    assert len(loaded) == 2
    assert commands.pids("stepped") == set()
    for number, (each, without) in enumerate(zip(trials, alone, strict=True), 1):
        backend.load_together(trials[number - 1 :])
        found = backend.submit(each).result()
        assert isinstance(found, Measurement)
        assert isinstance(without, Measurement)
        assert found.first_losses == without.first_losses, "bit for bit"
        assert found.build_seconds > 0
        assert commands.pids("built") == loaded, "none is started anew"
        assert len(commands.pids("stepped")) == number
    assert commands.running() == set()


def test_those_that_are_not_asked_for_any_more_are_ended(commands: Commands) -> None:
    backend = commands.described()
    first, second = map(trial, SETTINGS)
    backend.load_together([first, second])
    backend.load_together([trial(Setting(precision="fp32", batch_size=2)), second])
    assert len(commands.pids("built")) == 3, "the second is still there"
    assert len(commands.running()) == 2
    backend.load_together([])
    assert commands.running() == set()
    backend.load_together([first])
    assert len(commands.pids("built")) == 3, "one alone does not wait"


def test_a_trial_of_each_round_has_a_run_of_its_own(commands: Commands) -> None:
    backend = commands.described()
    rounds = [trial(SETTINGS[0], purpose="confirm", round=number) for number in range(3)]
    backend.load_together(rounds)
    assert len(commands.running()) == 3
    for left, each in zip((2, 1, 0), rounds, strict=True):
        assert isinstance(backend.submit(each).result(), Measurement)
        assert len(commands.running()) == left


def test_a_check_loads_both_of_its_runs_together(commands: Commands, monkeypatch: pytest.MonkeyPatch) -> None:
    backend = commands.described()
    loaded = Mock(side_effect=together.RunsTogether.load, autospec=True)
    monkeypatch.setattr(together.RunsTogether, "load", lambda *args: loaded(*args))
    judged = backend.submit(fidelity(Setting(precision="bf16", batch_size=8))).result()
    assert isinstance(judged, Fidelity)
    assert judged.verdict != "unchecked", judged.reason
    assert [len(call.args[1]) for call in loaded.call_args_list] == [2]


def test_where_one_cannot_load_beside_another_each_loads_alone(commands: Commands) -> None:
    backend = commands.described("--port", str(free_port()))
    assert backend.num_together == 3
    trials = [trial(setting) for setting in SETTINGS]
    backend.load_together(trials)
    assert len(commands.running()) == 1, "one has the port"
    for each in trials:
        assert isinstance(backend.submit(each).result(), Measurement)
    assert backend.num_together == 1
    backend.load_together(trials)
    assert commands.running() == set()


def test_one_that_fails_beside_others_runs_again_alone(commands: Commands) -> None:
    backend = commands.described("--be", "jealous")
    trials = [trial(setting) for setting in SETTINGS]
    backend.load_together(trials)
    assert isinstance(backend.submit(trials[0]).result(), Measurement)
    assert backend.num_together == 1
    assert commands.running() == set()


@pytest.mark.parametrize("batch_size", [3, 5], ids=["before it has loaded", "in training"])
def test_one_that_fails_alone_too_is_a_failure_and_others_load_together_still(
    commands: Commands, batch_size: int
) -> None:
    backend = commands.described()
    failing = trial(Setting(precision="fp32", batch_size=batch_size))
    backend.load_together([failing, trial(SETTINGS[0])])
    assert isinstance(backend.submit(failing).result(), Failure)
    assert backend.num_together == 3
    assert commands.running() == set()


def test_ctrl_c_while_they_load_leaves_none_once_the_search_ends_them(
    commands: Commands, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = commands.described()
    with monkeypatch.context() as patch:
        patch.setattr(together, "heed", Mock(side_effect=[None, KeyboardInterrupt]))
        with pytest.raises(KeyboardInterrupt):
            backend.load_together([trial(setting) for setting in SETTINGS])
    backend.load_together([])
    assert commands.running() == set()


@pytest.mark.slow
def test_every_rank_of_a_launcher_waits_and_goes_on(commands: Commands) -> None:
    launcher = (sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2", "--master_port", "{port}")
    backend = commands.described(launcher=launcher)
    trials = [trial(setting) for setting in SETTINGS]
    backend.load_together(trials)
    assert len(commands.running()) == 4
    assert commands.pids("stepped") == set()
    for each in trials:
        assert isinstance(backend.submit(each).result(), Measurement)
    assert len(commands.pids("stepped")) == 4
    assert backend.num_together == 3


@pytest.mark.real_time
def test_the_time_in_which_a_run_waits_counts_for_no_deadline(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT.replace("import torch\n", "import torch\ntime.sleep(4)\n", 1))
    started = CommandRun([sys.executable, str(tmp_path / "train.py")], environment=os.environ, agent={}, is_held=True)
    try:
        until = time.monotonic() + 100
        while (outcome := started.loading_outcome()) is None:
            assert time.monotonic() < until
            time.sleep(0.05)
        assert outcome == "loaded"
        time.sleep(1)
        deadlines = Deadlines(whole_seconds=3.5, first_step_seconds=3.5)
        completed = started.measure(deadlines, lambda events: events.num_steps >= 2, Watcher())
    finally:
        started.close()
    assert completed.verdict == "measured"
    first = completed.events.ranks.popitem()[1].steps[0]
    assert 4 < first.time - completed.began < first.time - completed.events.of(Loaded)[0].time + 100


def completed_run(host_bytes: int, *loaded: tuple[int, int, int], peak: int | None = None) -> CompletedRun:
    """A run of as many ranks as `loaded` has bytes: of the device, used by all, reserved before training."""
    world = max(1, len(loaded))
    events = RunEvents()
    for rank in range(world):
        events.add(said.optimizer(rank, rank, world))
        events.add(said.step(rank, 1, reserved_memory_bytes=peak))
    for rank, (total, used, reserved) in enumerate(loaded):
        where: Any = {"pid": rank, "time": 1.0, "rank": rank, "world": world, "local_rank": rank}
        events.add(Loaded(**where, total_bytes=total, used_bytes=used, reserved_bytes=reserved))
    state = RunState(seconds=5.0, seconds_since_step=0.0, memory_bytes=host_bytes)
    return CompletedRun(0.0, events, state, "measured")


GIB = 1 << 30


@pytest.mark.parametrize(
    ("cores", "free_bytes", "completed", "number"),
    [
        (16, 100 * GIB, completed_run(GIB), MAX_TOGETHER),
        (3, 100 * GIB, completed_run(GIB), 3),
        (1, 100 * GIB, completed_run(GIB), 1),
        (16, 100 * GIB, completed_run(20 * GIB), 4),
        (16, GIB, completed_run(20 * GIB), 1),
        (16, 100 * GIB, completed_run(GIB, (0, 0, 0), (0, 0, 0), (0, 0, 0), (0, 0, 0)), 4),
        # 80 GiB, of which 1 is the context's and 40 times 1.25 are for the one that trains: 29 are left for others.
        (16, 100 * GIB, completed_run(GIB, (80 * GIB, 11 * GIB, 10 * GIB), peak=40 * GIB), 3),
        (16, 100 * GIB, completed_run(GIB, (80 * GIB, 40 * GIB, 10 * GIB), peak=40 * GIB), 1),
        (16, 100 * GIB, completed_run(GIB, (80 * GIB, 2 * GIB, GIB), peak=70 * GIB), 1),
    ],
    ids=["all", "cores", "one core", "memory", "no memory", "ranks", "device", "used by others", "too large"],
)
def test_as_many_fit_as_cores_and_memory_allow(
    cores: int, free_bytes: int, completed: CompletedRun, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(cores)), raising=False)
    monkeypatch.setattr(host, "available_memory_bytes", lambda: free_bytes)
    monkeypatch.setattr(host, "container_memory", lambda: None)
    assert num_fitting(completed) == number
