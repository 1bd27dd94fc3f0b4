"""Several slots of this host: real processes beside one another."""

from __future__ import annotations

import re
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import psutil
import pytest
from backend_contract import BackendContract, Made
from conftest import needs_two_cpus
from listening import Listener

from autotune_amp.core.errors import WorkloadError
from autotune_amp.core.outcome import Failure, Measurement
from autotune_amp.core.setting import Setting
from autotune_amp.processes.devices import cpu_slots
from autotune_amp.processes.local import CompletedHandle, LocalBackend, OpenResult, Payload, Slot
from autotune_amp.processes.process import Watcher
from autotune_amp.processes.slots import Slots, WorkloadSlots
from autotune_amp.trial.jobs import Check, Trial

pytestmark = pytest.mark.usefixtures("nothing_left_at_once", "forked_processes")

# What a batch does is said by its size; two that meet wait for each other's file.
WORKLOAD = """
import os, sys, time
import torch
from pathlib import Path
from torch import nn
from autotune_amp import Workload

HERE = Path(__file__).parent

def loss(model, batch):
    size = len(batch)
    if size == 3:
        raise ValueError("three")
    if size == 5:
        os._exit(7)
    if size == 6:
        time.sleep(1000)
    if size in (8, 9):
        (HERE / f"met-{size}").touch()
        while not (HERE / f"met-{17 - size}").exists():
            time.sleep(0.01)
    print("on", sorted(os.sched_getaffinity(0)), "with", torch.get_num_threads(), "in", os.getpid())
    return model(batch).square().mean()

def workload():
    torch.set_num_threads(2)
    return Workload(lambda: nn.Linear(4, 1), loss, lambda size: torch.ones(size, 4))
"""


class Heard(Listener):
    """Which thread told it, too."""

    def __init__(self) -> None:
        super().__init__()
        self.threads: set[threading.Thread] = set()

    def step(self, num_steps: int, step_seconds: float) -> None:
        self.threads.add(threading.current_thread())

    def output(self, text: str) -> None:
        self.threads.add(threading.current_thread())
        super().output(text)


class Opened:
    """A workload that is open on two shares of the CPU."""

    def __init__(self, folder: Path, text: str = WORKLOAD) -> None:
        (folder / "train.py").write_text(text)
        self.slots = cpu_slots(2)
        self.listeners = [Heard(), Heard()]
        payload = Payload(target="train:workload", path=(str(folder), *sys.path))
        self.backend = WorkloadSlots(
            self.slots,
            lambda slot, watcher: LocalBackend(payload, None, watcher, slot=slot),
            lambda slot: self.listeners[self.slots.index(slot)],
        )
        self.state: dict[str, Any] = {}

    def open(self) -> None:
        self.backend.load(60)
        self.state = self.backend.open("cpu", None, 60).torch_state
        self.backend.open_others(60)

    def trial(self, batch_size: int = 4, **fields: Any) -> Trial:
        candidate = Setting(precision="fp32", batch_size=batch_size)
        return Trial(candidate=candidate, device="cpu", torch_state=self.state, num_steps=(1, 1), **fields)

    def submit(self, batch_size: int, place: int, **fields: Any) -> Any:
        return self.backend.submit(self.trial(batch_size, **fields), self.slots[place])


@pytest.fixture
def own(tmp_path: Path) -> Iterator[Opened]:
    made = Opened(tmp_path)
    with made.backend:
        made.open()
        yield made


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Opened]:
    made = Opened(tmp_path_factory.mktemp("slots"))
    with made.backend:
        made.open()
        yield made


def made_of(opened: Opened) -> Made:
    setting = Setting(precision="bf16", batch_size=4)
    check = Check(what="fidelity", candidate=setting, device="cpu", torch_state=opened.state)
    return Made(opened.backend, opened.trial(), opened.trial(3), "workload_error", check)


@needs_two_cpus
class TestSlots(BackendContract):
    @pytest.fixture
    def made(self, shared: Opened) -> Made:
        return made_of(shared)

    @pytest.fixture
    def new(self, own: Opened) -> Made:
        return made_of(own)


@needs_two_cpus
def test_two_jobs_run_at_the_same_time_and_what_they_tell_arrives_in_this_thread(shared: Opened) -> None:
    handles = [shared.submit(8, 0, deadline_seconds=60.0), shared.submit(9, 1, deadline_seconds=60.0)]
    first = shared.backend.wait(handles)
    assert first in handles
    assert all(isinstance(handle.result(), Measurement) for handle in handles), "they met"
    assert all(listener.threads == {threading.current_thread()} for listener in shared.listeners)


@needs_two_cpus
def test_each_has_its_cpus_and_as_many_threads(shared: Opened) -> None:
    for place, slot in enumerate(shared.slots):
        assert isinstance(shared.submit(4, place).result(), Measurement)
        said = re.findall(r"on (\[.*?\]) with (\d+)", shared.listeners[place].text)
        assert said[-1] == (str(list(slot.cpus)), str(min(2, len(slot.cpus))))


@needs_two_cpus
def test_the_first_to_end_is_returned_first_and_one_that_dies_leaves_the_other_alone(shared: Opened) -> None:
    dying, hanging = shared.submit(5, 0), shared.submit(6, 1, deadline_seconds=8.0)
    assert shared.backend.wait([hanging, dying]) is dying
    assert isinstance(dying.result(), Failure)
    assert isinstance(shared.submit(4, 0).result(), Measurement), "the slot goes on"
    assert hanging.result().kind == "timeout"


@needs_two_cpus
def test_closed_it_ends_what_runs_at_once(own: Opened) -> None:
    def living() -> set[int]:
        return {process.pid for process in psutil.Process().children(recursive=True)}

    before = living()  # that it is forked from, and what other tests keep
    for place in (0, 1):
        own.submit(6, place)
    until = time.monotonic() + 30
    while len(living() - before) < 2 and time.monotonic() < until:
        time.sleep(0.02)
    assert len(trials := living() - before) >= 2
    began = time.monotonic()
    own.backend.close()
    assert time.monotonic() - began < 10
    assert not living() & trials
    assert len(living()) <= len(before) - 2


@needs_two_cpus
def test_what_cannot_be_loaded_on_another_slot_is_an_error_of_this_thread(tmp_path: Path) -> None:
    text = WORKLOAD + (
        "\nmark = HERE / 'loaded'\nif mark.exists():\n    raise RuntimeError('only once')\nmark.touch()\n"
    )
    made = Opened(tmp_path, text)
    with made.backend, pytest.raises(WorkloadError, match="only once"):
        made.open()


def test_a_slot_s_card_is_all_that_its_processes_see(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(WORKLOAD.replace('print("on"', 'print(os.environ["CUDA_VISIBLE_DEVICES"], "on"'))
    payload, listener = Payload(target="train:workload", path=(str(tmp_path), *sys.path)), Heard()
    slot = Slot("cpu", "cuda:3", uuid="GPU-d")
    with LocalBackend(payload, None, listener, slot=slot) as backend:
        backend.load(60)
        state = backend.open("cpu", None, 60).torch_state
        candidate = Setting(precision="fp32", batch_size=4)
        trial = Trial(candidate=candidate, device="cpu", torch_state=state, num_steps=(1, 1))
        assert isinstance(backend.submit(trial, slot).result(), Measurement)
    assert "GPU-d on" in listener.text


class SlowTerminal(Watcher):
    """A terminal that takes a while for each text; it keeps how many it had taken at each tick."""

    def __init__(self) -> None:
        self.num_taken = 0
        self.taken_at_ticks: list[int] = []

    def output(self, text: str) -> None:
        time.sleep(0.001)
        self.num_taken += 1

    def tick(self) -> None:
        self.taken_at_ticks.append(self.num_taken)


class Printing:
    """A backend whose job prints far faster than a terminal can take."""

    def __init__(self, watcher: Watcher) -> None:
        self.watcher = watcher

    def submit(self, job: int, slot: Slot | None) -> CompletedHandle:
        for _ in range(job):
            self.watcher.output("text")
        return CompletedHandle(job)

    def close(self) -> None:
        pass


def test_a_job_that_prints_without_end_leaves_time_for_ticks_and_may_be_closed() -> None:
    terminal = SlowTerminal()
    slots = Slots([Slot("cpu")], lambda _, watcher: Printing(watcher), lambda _: terminal)
    assert slots.submit(1000).result() == 1000
    assert terminal.taken_at_ticks[0] < 300
    assert terminal.num_taken == 1000
    slots.submit(1000)
    slots.close()
    assert terminal.num_taken == 2000


def test_each_slot_opens_the_workload_on_its_own_device() -> None:
    opened: list[str] = []

    def make(slot: Slot, watcher: Watcher) -> Any:
        def open_on(device: str, num_threads: int | None, deadline_seconds: float) -> OpenResult:
            opened.append(device)
            return OpenResult({}, None)

        return Mock(open=open_on)

    places = [Slot(f"cuda:{number}", f"cuda:{number}") for number in range(2)]
    with WorkloadSlots(places, make, lambda _: Watcher()) as backend:
        backend.open("auto", None, 60.0)
        backend.open_others(60.0)
    assert opened == ["auto", "cuda:1"]


def test_what_a_job_is_doing_arrives_too() -> None:
    listener = Mock(Watcher)

    def make(slot: Slot, watcher: Watcher) -> Any:
        def submit(job: Any, slot: Slot | None) -> CompletedHandle:
            watcher.activity("evaluating")
            return CompletedHandle(job)

        return Mock(submit=submit)

    slots = Slots([Slot("cpu")], make, lambda _: listener)
    slots.submit(None).result()
    slots.close()
    listener.activity.assert_called_once_with("evaluating")
