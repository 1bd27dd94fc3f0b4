"""Real processes that run jobs, and stand by: killed at any moment, the next job runs and nothing is left."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import psutil
import pytest
import torch
from listening import Listener

from autotune_amp.core.job import Job
from autotune_amp.core.outcome import Failure, Measurement
from autotune_amp.core.setting import Setting
from autotune_amp.precision import torch_state
from autotune_amp.processes import server, standby
from autotune_amp.processes.devices import ConfirmationBackend, Devices
from autotune_amp.processes.local import LocalBackend, Payload, Slot, can_fork
from autotune_amp.processes.process import Process, Watcher
from autotune_amp.processes.process_tree import MARK
from autotune_amp.processes.standby import Standby
from autotune_amp.trial.jobs import Trial

pytestmark = [pytest.mark.real_time, pytest.mark.usefixtures("nothing_left_at_once", "forked_processes")]

# Its import takes time and starts threads. What a batch does is said by
# its size, and each process says how far it is by a file.
WORKLOAD = """
import os, sys, threading, time
from pathlib import Path
import torch
from torch import nn
from autotune_amp import Workload

HERE = Path(__file__).parent

def tell(what):
    (HERE / f"{what}.{os.getpid()}").touch()

tell("loading")
time.sleep(LOADING_SECONDS)
torch.set_num_threads(2)
STARTS_POOL and (torch._C.set_num_threads(2), torch.ones(1 << 22).add_(1).sum())  # on which a child would hang
threading.Thread(target=threading.Event().wait, daemon=True).start()

def model():
    tell("building")
    while (HERE / "slow to build").read_text() not in ("", str(os.getpid())):
        time.sleep(0.02)
    print("built", os.getpid(), "by", torch.get_num_threads(), "threads at", os.getpriority(os.PRIO_PROCESS, 0))
    return nn.Linear(4, 1)

steps = 0

def loss(model, batch):
    global steps
    steps += 1
    if len(batch) == 5 and steps == 1 or len(batch) == 6 and steps == 4:
        tell("hanging")
        time.sleep(1000)
    priorities = {os.getpriority(os.PRIO_PROCESS, int(thread)) for thread in os.listdir("/proc/self/task")}
    print("trains", os.getpid(), "by", torch.get_num_threads(), "threads at", priorities)
    print("weight", model.weight.detach().flatten().tolist(), "in", os.getpid())
    return model(batch).square().mean()

def workload():
    tell("opened")
    return Workload(model, loss, lambda size: torch.ones(size, 4), lambda p: torch.optim.SGD(p, lr=0.03))
"""


def eventually(found: Callable[[], Any]) -> Any:
    """What is found within a minute."""
    until = time.monotonic() + 60
    while time.monotonic() < until:
        if value := found():
            return value
        time.sleep(0.02)
    raise AssertionError("it did not come")


def write(folder: Path, loading_seconds: float = 0.0, *, starts_pool: bool = False) -> Path:
    """The file that says which process alone may build."""
    text = WORKLOAD.replace("LOADING_SECONDS", str(loading_seconds)).replace("STARTS_POOL", str(starts_pool))
    (folder / "train.py").write_text(text)
    slow = folder / "slow to build"
    slow.write_text("")
    return slow


class Search:
    """A backend with a process that stands by, whatever this machine has room for, and its workload open."""

    def __init__(self, folder: Path, loading_seconds: float = 0.0, isolation: Any = "kept") -> None:
        self._slow = write(folder, loading_seconds, starts_pool=isolation == "forked")
        self.folder = folder
        self._others = set(self.marked())
        self.listener = Listener()
        self.standby = Standby(room_for=lambda _: 2)
        self._payload = Payload(target="train:workload", path=(str(folder), *sys.path))
        self.backend = self.make(isolation, None)
        self.backend.load(120)
        self.opened = self.backend.open("cpu", None, 120)

    def make(self, isolation: Any, environment: dict[str, str] | None) -> LocalBackend:
        return LocalBackend(self._payload, isolation, self.listener, environment, standby=self.standby)

    def __enter__(self) -> Search:
        return self

    def __exit__(self, *_: object) -> None:
        self.backend.close()
        self.standby.close()
        assert set(self.marked()) <= self._others

    def trial(self, batch_size: int = 4, **fields: Any) -> Trial:
        candidate = Setting(precision="fp32", batch_size=batch_size)
        state = self.opened.torch_state
        return Trial(candidate=candidate, device="cpu", torch_state=state, num_steps=(1, 1), seed=3, **fields)

    def run(self, batch_size: int = 4, **fields: Any) -> tuple[Measurement | Failure, float]:
        """The outcome, and what it waited for its process."""
        handle = self.backend.submit(self.trial(batch_size, **fields))
        outcome = handle.result()
        assert handle.start_seconds is not None
        return outcome, handle.start_seconds

    def measured(self, batch_size: int = 4, **fields: Any) -> float:
        outcome, start_seconds = self.run(batch_size, **fields)
        assert isinstance(outcome, Measurement), outcome
        return start_seconds

    @contextmanager
    def slow_to_build(self) -> Iterator[None]:
        """Have no process build meanwhile but the one that runs jobs now."""
        first = self.backend._process
        self._slow.write_text(str(0 if first is None or not first.is_alive() else number_of(first)))
        yield
        self._slow.write_text("")

    def standing_by(self) -> int:
        """The process that stands by, once it has built."""
        number = number_of(self.standby.processes[0])
        eventually((self.folder / f"building.{number}").exists)
        eventually(lambda: not self.standby.processes[0]._events.empty())
        time.sleep(0.2)
        return number

    def marked(self) -> list[int]:
        """The processes that carry a mark of ours, those of other searches among them."""
        found = []
        for child in psutil.Process().children(recursive=True):
            try:
                if MARK in child.environ() and child.status() != psutil.STATUS_ZOMBIE:
                    found.append(child.pid)
            except (psutil.NoSuchProcess, psutil.AccessDenied):
                continue
        return found


def number_of(process: Process) -> int:
    """The number of a process, once it has one."""
    return int(eventually(lambda: process.pid))


def kill(process: Process) -> None:
    """Kill it, and wait until all that it has sent is read, by which its end is known."""
    os.kill(number_of(process), signal.SIGKILL)
    reader = process._threads[0]
    reader.join(60)
    assert not reader.is_alive()


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Search]:
    with Search(tmp_path_factory.mktemp("shared")) as search:
        search.measured()
        yield search


def process_of(search: Search) -> Process:
    """The process that runs jobs."""
    assert search.backend._process is not None
    return search.backend._process


def running(search: Search) -> int:
    return number_of(process_of(search))


@pytest.mark.skipif(not can_fork(), reason="nothing is forked here")
@pytest.mark.slow
def test_what_cannot_be_forked_runs_jobs_itself_and_another_takes_over_loaded(tmp_path: Path) -> None:
    """An import of three seconds is waited for once, whatever the process dies of."""
    with Search(tmp_path, 3.0, isolation="forked") as search:
        assert search.opened.why_not_forked is not None
        first = running(search)
        search.measured()
        assert running(search) == first, "the process that loaded is not started anew"
        assert search.measured() == 0.0, "it has run a job before"
        second = search.standing_by()
        kill(process_of(search))
        start_seconds = search.measured()
        assert running(search) == second
        assert start_seconds > 0.0, "it has not"
        assert search.measured() == 0.0
        third = search.standing_by()
        assert third not in (first, second)


def test_the_one_that_stands_by_trains_as_the_first_did(shared: Search) -> None:
    shared.measured()
    shared.standing_by()
    shared.listener.text = ""
    kill(process_of(shared))
    for _ in range(3):
        shared.measured(num_warmup_steps=(3, 3))
    number = running(shared)
    # What the one that was killed printed last may be heard now, too.
    lines = [line for line in shared.listener.text.splitlines() if str(number) in line.split()]
    (built,) = [line for line in lines if line.startswith("built")]
    own = os.getpriority(os.PRIO_PROCESS, 0)
    assert built in [f"built {number} by 1 threads at {priority}" for priority in (own, 19)]
    threads = shared.opened.torch_state["num_threads"]
    trained = {line for line in lines if line.startswith("trains")}
    assert trained == {f"trains {number} by {threads} threads at {{{own}}}"}
    weights = [line for line in lines if line.startswith("weight")]
    assert len(weights) >= 8, "of four steps each"
    assert weights[4:] == weights[:-4], "each trial begins with the first weights"


@pytest.mark.parametrize("moment", ["idle", "building", "in the first step", "measuring"])
def test_a_process_that_is_killed_costs_its_own_job(shared: Search, moment: str) -> None:
    shared.measured()
    if moment == "building":  # which one that stood by has done
        shared.standby.close()
    else:
        shared.standing_by()
    kill(process_of(shared))
    if moment != "idle":  # a process that has taken no step yet
        sizes = {"in the first step": 5, "measuring": 6}
        with shared.slow_to_build() if moment == "building" else nullcontext():
            handle = shared.backend.submit(shared.trial(sizes.get(moment, 4)))
            number = running(shared)
            eventually((shared.folder / f"{'building' if moment == 'building' else 'hanging'}.{number}").exists)
            kill(process_of(shared))
            found = handle.result()
        assert isinstance(found, Failure)
        assert found.kind == "crash"
    assert shared.measured() > 0.0
    assert shared.measured() == 0.0


@pytest.mark.parametrize("moment", ["loading", "waiting", "as it is needed"])
def test_one_that_stands_by_and_is_killed_costs_nothing_but_its_start(tmp_path: Path, moment: str) -> None:
    with Search(tmp_path, 1.0) as search:
        search.measured()
        beside = search.standby.processes[0]
        number = number_of(beside)
        if moment == "waiting":
            search.standing_by()
        else:
            eventually((tmp_path / f"loading.{number}").exists)
        kill(process_of(search))
        if moment == "as it is needed":  # it is taken while it loads, and does not come to an end
            os.kill(number, signal.SIGSTOP)
            handle_at = time.monotonic()
            threading.Timer(1.0, os.kill, [number, signal.SIGKILL]).start()
            search.measured()
            assert time.monotonic() - handle_at >= 1.0
        else:
            kill(beside)
            search.measured()
        assert running(search) != number
        assert search.measured() == 0.0
        assert number_of(search.standby.processes[0]) != number, "another one"


def test_one_that_takes_too_long_to_load_is_waited_for_no_longer_than_the_job_may_load(tmp_path: Path) -> None:
    with Search(tmp_path) as search:
        with search.slow_to_build():
            search.measured()
            eventually((tmp_path / f"building.{number_of(search.standby.processes[0])}").exists)
            kill(process_of(search))
            found = search.backend.submit(search.trial(loading_seconds=1.0)).result()
            assert isinstance(found, Failure)
            assert (found.kind, found.is_loading) == ("timeout", True)
            assert found.message == "the workload takes more than 1.0 s to load"
        search.measured()


def test_what_is_loaded_in_advance_leaves_a_job_half_of_its_time_to_load(
    shared: Search, monkeypatch: pytest.MonkeyPatch
) -> None:
    left_seconds = []
    monkeypatch.setattr(shared.standby, "num_wanted", 1)
    monkeypatch.setattr(shared.standby, "begin", lambda *_: None)
    monkeypatch.setattr(shared.standby, "load", lambda _, until: left_seconds.append(until - time.monotonic()))
    shared.backend.submit(shared.trial(loading_seconds=1000.0)).result()
    assert left_seconds == [pytest.approx(500.0, abs=100.0)]


def confirming(search: Search, *, shares_processes: bool) -> ConfirmationBackend:
    return ConfirmationBackend(
        lambda variables: search.make("kept", variables), Slot("cpu"), shares_processes=shares_processes
    )


def loaded(folder: Path) -> set[str]:
    """The processes that have begun to load."""
    return {path.suffix[1:] for path in folder.glob("loading.*")}


def test_the_processes_of_all_rounds_are_loaded_before_the_first_run_and_none_beside_it(tmp_path: Path) -> None:
    with Search(tmp_path) as search, closing(confirming(search, shares_processes=True)) as processes:
        search.measured()
        before = [search.standing_by()]
        search.backend.close()
        search.standby.num_wanted = 2
        for number in range(3):
            starts: list[float | None] = []
            for _ in range(2):
                handle = processes.submit(search.trial(purpose="confirm", round=number))
                if not starts and number == 0:
                    before += map(number_of, search.standby.processes)
                    assert loaded(tmp_path) >= set(map(str, before))
                    known = loaded(tmp_path)
                assert isinstance(handle.result(), Measurement)
                starts.append(handle.start_seconds)
            current: Any = processes._current
            assert current._process.pid == before[number]
            assert starts[0]
            assert starts[1] == 0.0
        handle = processes.submit(search.trial(purpose="outlook"))
        assert isinstance(handle.result(), Measurement)
        assert processes._current is current, "what lies beyond runs in the last process"
        assert loaded(tmp_path) == known
        assert not search.standby.processes


def test_what_stands_by_stands_still_while_steps_are_timed(tmp_path: Path) -> None:
    with Search(tmp_path, 2.0) as search:
        handle = search.backend.submit(search.trial(6))
        beside = psutil.Process(number_of(search.standby.processes[0]))
        threading.Thread(target=handle.result).start()
        eventually((tmp_path / f"hanging.{running(search)}").exists)
        eventually(lambda: beside.status() == psutil.STATUS_STOPPED)
        kill(process_of(search))
        eventually(lambda: beside.status() != psutil.STATUS_STOPPED)
        eventually(lambda: search.backend._process is None)
        search.measured()
        assert running(search) == beside.pid


def test_a_run_with_other_variables_starts_a_process_of_its_own_and_nothing_loads_beside_it(tmp_path: Path) -> None:
    with Search(tmp_path) as search, closing(confirming(search, shares_processes=False)) as processes:
        search.measured()
        number = search.standing_by()
        search.backend.close()
        for variables, is_from_standby in (({"OWN": "1"}, False), ({}, True), ({}, False)):
            handle = processes.submit(search.trial(purpose="confirm", round=0, environment=variables))
            current: Any = processes._current
            assert (current._process.pid == number) == is_from_standby
            assert isinstance(handle.result(), Measurement)
            assert handle.start_seconds
        assert not search.standby.processes


def test_jobs_of_one_device_stand_by_and_closing_its_place_ends_all(tmp_path: Path) -> None:
    write(tmp_path)
    payload = Payload(target="train:workload", path=(str(tmp_path), *sys.path))

    def start(*how: Any) -> LocalBackend:
        watcher, isolation, environment, slot, beside = how
        assert isinstance(beside, Standby)
        beside._room_for = lambda _: 2
        return LocalBackend(payload, isolation or "kept", watcher, environment, slot, beside)

    with closing(Devices("cpu", start, lambda _: Watcher())) as place, place.backend() as backend:
        backend.load(60)
        state, _, _ = backend.open("cpu", None, 60)
        job: Job[Any] = Trial(
            candidate=Setting(precision="fp32", batch_size=4), device="cpu", torch_state=state, num_steps=(1, 1)
        )
        assert isinstance(backend.submit(job).result(), Measurement)
        assert place._standby is not None
        assert place._standby.processes
    assert not place._standby.processes


@pytest.mark.parametrize("notices", ["take", "has_room"])
def test_after_one_that_could_not_load_none_is_started(notices: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its model is on a GPU, of which it may take little."""
    answers = ["ready", Failure(kind="oom", message="")]
    started = Mock(return_value=Mock(num_unread=2, **{"wait.side_effect": answers}))
    monkeypatch.setattr(standby, "Process", started)
    beside, found = Mock(pid=os.getpid()), Standby(room_for=lambda _: 2)
    found.begin(beside, {}, {}, b"")
    assert found.take({}, Watcher(), None) is None if notices == "take" else not found.has_room(beside)
    found.begin(beside, {}, {}, b"")
    assert not found.has_room(beside)
    assert (started.call_count, found.processes) == (1, [])


@pytest.mark.parametrize(
    ("cores", "quota", "free_bytes", "container_bytes", "number"),
    [
        (4, None, 200, None, 1),
        (3, None, 200, None, 0),
        (16, None, 199, None, 0),
        (16, None, 900, 150, 0),
        (16, None, 900, 400, 2),
        (16, 2.0, 900, 400, 0),
        (16, 4.0, 900, 400, 2),
    ],
)
def test_there_is_room_with_four_cores_and_twice_the_memory(
    cores: int,
    quota: float | None,
    free_bytes: int,
    container_bytes: int | None,
    number: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from autotune_amp.hardware import host

    limited = None if container_bytes is None else host.ContainerMemory(limit=1000, available=container_bytes)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(cores)), raising=False)
    monkeypatch.setattr(host, "available_memory_bytes", lambda: free_bytes)
    monkeypatch.setattr(host, "container_memory", lambda: limited)
    monkeypatch.setattr(host, "container_cpus", lambda: quota)
    assert standby.room_for(100) == number


@pytest.mark.parametrize(("device", "may_stand_by"), [("cpu", True), ("cuda:0", False)])
def test_none_stands_by_on_a_gpu_whose_memory_it_could_not_be_kept_from(device: str, *, may_stand_by: bool) -> None:
    standby, variables = Mock(), {"PYTORCH_CUDA_ALLOC_CONF": "garbage_collection_threshold:0.8"}
    backend = LocalBackend(Payload(target=None, path=()), "kept", Watcher(), variables, standby=standby)
    backend._device, backend._process = device, Mock()
    assert "load_together" not in backend.abilities
    backend._begin_standby(Mock(), Trial(candidate=Setting(precision="bf16", batch_size=4), device=device), 1)
    assert standby.begin.called == may_stand_by


def test_one_that_stands_by_takes_little_of_the_gpus_memory_until_it_takes_over(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    at_start: list[Callable[[], object]] = []
    shares: list[float] = []
    monkeypatch.setattr(torch.cuda, "_lazy_call", at_start.append)
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", lambda share, _: shares.append(share))
    monkeypatch.setattr(torch_state, "started_accelerator", lambda: torch.device("cuda"))
    monkeypatch.setattr(server, "_lower_priority", lambda: None)
    made = server.Server(Mock(), is_template=False)
    made._context = Mock()
    monkeypatch.setattr(made, "load", lambda: [start() for start in at_start])
    made.stand_by("cuda:1", {}, 0)
    made.take_over("cuda")
    assert [share < 0.1 for share in shares] == [True, False]
    assert [start() for start in at_start] == [None]
    assert shares[1:] == [1.0]
