"""Runs of a command that load together, and train one after the other."""

from __future__ import annotations

import os
import sys
import time
from contextlib import closing
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import said
from described_commands import described, fidelity, local_backend, trial

from autotune_amp.command import command as command_module
from autotune_amp.command import together
from autotune_amp.command.backend import CommandBackend
from autotune_amp.command.command import KEPT_LIST, Command, RunRequest
from autotune_amp.command.leftovers import load_kept, save_kept
from autotune_amp.command.messages import Loaded
from autotune_amp.command.ranks import RunEvents
from autotune_amp.command.running import CommandRun, CompletedRun
from autotune_amp.command.together import MAX_TOGETHER, RunsTogether, is_crowded, num_fitting
from autotune_amp.command.verdict import RunState
from autotune_amp.core.command_template import CommandTemplate
from autotune_amp.core.errors import RunnerError
from autotune_amp.core.job import Deadlines
from autotune_amp.core.outcome import Description, Failure, Fidelity, Measurement
from autotune_amp.core.setting import Setting
from autotune_amp.distributed import free_port
from autotune_amp.hardware import host
from autotune_amp.processes.local import LocalBackend
from autotune_amp.processes.process import Watcher

pytestmark = pytest.mark.usefixtures("forked_processes")

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
if options.be == "noisy":
    log = here / "stepped.log"
    while options.batch == 2 and (here / "together").exists() and not log.exists():
        time.sleep(0.01)
    log.write_text("begun")

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
    assert commands.running() == set()


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


def test_a_file_that_each_writes_is_named_with_the_folder_for_it(commands: Commands) -> None:
    backend = commands.described("--be", "noisy")
    (commands.folder / "study").mkdir()
    backend._command.keep_in(commands.folder / "study")
    (commands.folder / "together").touch()
    backend.load_together([trial(setting) for setting in SETTINGS])
    (commands.folder / "together").unlink()
    for setting in SETTINGS:
        assert isinstance(backend.submit(trial(setting)).result(), Measurement)
    (note,) = backend._command.notes()
    assert str(commands.folder / "stepped.log") in note
    assert "{trial_dir}" in note


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


@pytest.mark.slow
@pytest.mark.real_time
def test_the_time_in_which_a_run_waits_counts_for_no_deadline(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT.replace("import torch\n", "import torch\ntime.sleep(4)\n", 1))
    started = CommandRun([sys.executable, str(tmp_path / "train.py")], environment=os.environ, agent={}, is_held=True)
    with closing(started):
        began = time.monotonic()
        while (outcome := started.loading_outcome()) is None:
            assert time.monotonic() < began + 100
            time.sleep(0.05)
        loading_seconds = time.monotonic() - began
        assert outcome == "loaded"
        time.sleep(6)
        deadlines = Deadlines(whole_seconds=5.0, first_step_seconds=5.0)
        completed = started.measure(deadlines, lambda events: events.num_steps >= 2, Watcher())
    assert completed.verdict == "measured"
    first = completed.events.ranks.popitem()[1].steps[0]
    loaded = completed.events.of(Loaded)[0]
    assert first.time - loaded.time > 6
    assert first.time - completed.began < loading_seconds + 5


WORKER = """
import time, torch
class Data(torch.utils.data.Dataset):
    def __len__(self):
        return 4096
    def __getitem__(self, index):
        until = time.process_time() + (1.0 if 0 < index < 5 else 0.0)
        while time.process_time() < until:
            pass
        return torch.ones(8)
model = torch.nn.Linear(8, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for x in torch.utils.data.DataLoader(Data(), batch_size=1, num_workers=1):
    model(x).sum().backward()
    optimizer.step()
"""


@pytest.mark.real_time
def test_a_run_whose_workers_still_fetch_has_not_loaded(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(WORKER)
    started = CommandRun([sys.executable, str(tmp_path / "train.py")], environment=os.environ, agent={}, is_held=True)
    with closing(started):
        until = time.monotonic() + 100
        while started.loading_outcome() is None:
            assert time.monotonic() < until
            time.sleep(0.05)
        quiet_at = time.monotonic()
        completed = started.measure(Deadlines(), lambda events: events.num_steps >= 2, Watcher())
    assert quiet_at - completed.events.of(Loaded)[0].time > 1.0, "two batches of a second each are fetched in advance"


class Run:
    """A run that loads at the call of this number, or never, and notes that it was closed."""

    def __init__(self, at: int | None = 1, closing_raises: type[Exception] | None = None) -> None:
        self._num_left = at
        self._closing_raises = closing_raises
        self.is_closed = False

    def loading_outcome(self) -> str | None:
        if self._num_left is None:
            return None
        self._num_left -= 1
        return "loaded" if self._num_left <= 0 else None

    kept = stuck = created_folders = ()

    def close(self) -> None:
        self.is_closed = True
        if self._closing_raises is not None:
            raise self._closing_raises


def holder(closed: Any = lambda _: None) -> Any:
    found = RunsTogether(closed)
    found.loading_seconds, found.num_fitting = 0.01, 4
    return found


def test_where_no_more_can_be_started_those_that_are_there_load() -> None:
    runs, refused = [Run(), Run(3)], Mock(side_effect=RunnerError("no more processes", "Wait."))
    loading = holder()
    loading.load({0: lambda: runs[0], 1: lambda: runs[1], 2: refused, 3: refused}, Watcher(), 100.0)
    assert [key in loading for key in range(4)] == [True, True, False, False]
    assert refused.call_count == 1
    with pytest.raises(RunnerError):
        holder().load({0: refused}, Watcher(), 100.0)


@pytest.mark.parametrize("patience", ["its own", "the search's"])
def test_one_that_never_loads_is_closed_and_remembered(patience: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(together, "_MIN_PATIENCE_SECONDS", 0.3 if patience == "its own" else 100.0)
    runs = [Run(), Run(None)]
    ended: list[Any] = []
    loading = holder(ended.append)
    loading.load({0: lambda: runs[0], 1: lambda: runs[1]}, Watcher(), 100.0 if patience == "its own" else 0.3)
    assert (0 in loading, 1 in loading) == (True, False)
    assert set(loading.unloaded) == {1}
    assert ended == [runs[1]]
    assert [run.is_closed for run in runs] == [False, True]


def test_all_are_closed_whatever_closing_one_raises() -> None:
    runs = [Run(), Run(closing_raises=OSError), Run()]
    loading = holder()
    loading.load({number: lambda number=number: runs[number] for number in range(3)}, Watcher(), 100.0)
    with pytest.raises(OSError):  # noqa: PT011 - it is the one above
        loading.close()
    assert all(run.is_closed for run in runs)
    assert not len(loading)


SHARING = """
import os, pathlib, torch
folder = pathlib.Path("runs")
folder.mkdir(exist_ok=True)
(folder / f"{os.getpid()}").mkdir()
(folder / f"{os.getpid()}" / "log").write_text("started")
torch.manual_seed(0)
model = torch.nn.Linear(8, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for (x,) in torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.randn(4096, 8)), batch_size=8):
    model(x).sum().backward()
    optimizer.step()
"""


def test_a_folder_that_several_have_written_into_is_gone_after_the_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text(SHARING)
    command = Command(CommandTemplate.of([sys.executable, "train.py"]))
    (tmp_path / "study").mkdir()
    command.keep_in(tmp_path / "study")
    monkeypatch.setattr(together, "num_fitting", lambda _: 3)
    requests = [RunRequest.of(SETTINGS[0], round=number) for number in range(3)]

    def run(request: RunRequest) -> None:
        ended = command.run(request, Deadlines(), lambda events: events.num_steps >= 4, Watcher())
        assert ended.verdict == "measured"

    run(RunRequest.of(SETTINGS[0]))
    command.load_together(requests, Watcher())
    assert len(list((tmp_path / "runs").iterdir())) == 3
    for request in requests[:2]:
        run(request)
    command.load_together([], Watcher())
    assert not (tmp_path / "runs").exists()
    assert len(list((tmp_path / "study/trial_leftovers/runs").iterdir())) == 4
    assert command.stuck == ()


def test_data_of_one_run_stay_known_after_another_that_began_before(tmp_path: Path) -> None:
    command = Command(CommandTemplate.of(["python", "train.py"]))
    data = tmp_path / "cache.bin"
    data.write_text("data")
    for kept in ((str(data),), ()):
        command._learn_files(Mock(kept=kept, stuck=(), created_folders=()))
        save_kept(tmp_path / KEPT_LIST, kept)
    assert list(command.kept) == [str(data)]
    assert load_kept(tmp_path / KEPT_LIST) == (str(data),)
    command._learn_files(Mock(kept=(), stuck=(str(data),), created_folders=()))
    save_kept(tmp_path / KEPT_LIST, (), [str(data)])
    assert not command.kept
    assert not load_kept(tmp_path / KEPT_LIST)


class Measured(Run):
    """A run that is measured, as given."""

    def __init__(self, completed: CompletedRun) -> None:
        super().__init__()
        self._completed = completed

    def held_bytes(self) -> int:
        return GIB

    def measure(self, deadlines: Deadlines, is_enough: Any, watcher: Watcher, limit_bytes: int | None) -> CompletedRun:
        self.limit_bytes = limit_bytes
        return self._completed


OOM = Failure(kind="oom", message="out of memory")


@pytest.mark.parametrize(
    ("beside", "alone", "seconds", "expected", "num_left"),
    [
        (OOM, "measured", 100.0, "measured", 1),
        (OOM, OOM, 100.0, OOM, 4),
        (OOM, "measured", 5.0, "timeout", 4),
        ("measured", "measured", 100.0, "measured", 4),
        ("crowded", "measured", 100.0, "measured", 2),
        ("crowded", "measured", 5.0, "crowded", 4),
    ],
    ids=["because of others", "by itself", "no time", "well", "near the limit", "near the limit and no time"],
)
def test_what_others_may_have_caused_is_measured_again_alone_if_there_is_time(
    beside: Any, alone: Any, seconds: float, expected: Any, num_left: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(together, "num_fitting", lambda _: 2)
    monkeypatch.setattr(command_module, "num_fitting", lambda _: 2)
    command = Command(CommandTemplate.of(["python", "train.py"]))
    command._together.loading_seconds, command._together.num_fitting = 20.0, 4
    crowded = completed_run(GIB, (80 * GIB, GIB, 0), peak=64 * GIB)
    outcomes = {
        name: crowded if name == "crowded" else completed_run(GIB)._replace(verdict=name) for name in (beside, alone)
    }
    held, waiting, again = (Measured(outcomes[name]) for name in (beside, alone, alone))
    starts = iter([held, waiting, again])
    monkeypatch.setattr(command, "_start", lambda *_, **__: next(starts))
    requests = [RunRequest.of(setting) for setting in SETTINGS]
    command.load_together(requests, Watcher())
    found = command.run(
        requests[0], Deadlines(whole_seconds=seconds), lambda _: True, Watcher(), memory_limit_bytes=5 * GIB
    )
    assert held.limit_bytes == 4 * GIB, "less what the one that waits has"
    if isinstance(found.verdict, Failure) and expected == "timeout":
        assert found.verdict.is_loading
        assert "out of memory" in found.verdict.message
    else:
        assert found is (crowded if expected == "crowded" else found)
        assert found.verdict == ("measured" if expected == "crowded" else expected)
    assert command.num_together == num_left
    assert bool(command.notes()) == (num_left == 1)


def completed_run(host_bytes: int, *loaded: tuple[int, int, int], peak: int | None = None) -> CompletedRun:
    """A run of as many ranks as `loaded` has bytes: of the device, used by all, reserved before training."""
    world = max(1, len(loaded))
    events = RunEvents()
    for rank in range(world):
        events.add(said.optimizer(rank, rank, world))
        events.add(said.step(rank, 1, reserved_memory_bytes=peak))
    for rank, (total, used, reserved) in enumerate(loaded):
        where: Any = {"pid": rank, "time": 1.0, "rank": rank, "world": world}
        device = "cuda" if total else "cpu"
        events.add(Loaded(**where, device=device, total_bytes=total, used_bytes=used, reserved_bytes=reserved))
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
    monkeypatch.setattr(host, "container_cpus", lambda: None)
    assert num_fitting(completed) == number


@pytest.mark.parametrize(
    ("peak", "num_held", "is_near"),
    [(60 * GIB, 7, False), (75 * GIB, 7, True), (75 * GIB, 0, False)],
    ids=["room", "near", "alone"],
)
def test_a_run_near_the_limit_may_have_been_slowed_by_those_that_wait(
    peak: int, num_held: int, *, is_near: bool
) -> None:
    completed = completed_run(GIB, (80 * GIB, GIB, 0), peak=int(peak / 1.25))
    assert is_crowded(completed, num_held) == is_near
    assert not is_crowded(completed_run(GIB), num_held), "on a CPU the host's limit is lower by what they hold"
