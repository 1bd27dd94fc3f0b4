"""Slots on the nodes of a real Ray cluster of processes, and what befalls them."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest
from backend_contract import BackendContract, Made
from conftest import needs_two_cpus
from listening import Listener
from ray_nodes import RayCluster, RayNodes, with_module

from autotune_amp.core.errors import ClusterLostError, InvalidRequestError, WorkloadError
from autotune_amp.core.outcome import Failure, Measurement
from autotune_amp.core.setting import Setting
from autotune_amp.distributed import free_port
from autotune_amp.processes.local import Payload, Slot, SlotLostError
from autotune_amp.processes.on_ray import backend as on_node
from autotune_amp.processes.on_ray import slots as ray_slots
from autotune_amp.processes.on_ray.cluster import Cluster
from autotune_amp.processes.on_ray.messages import pack
from autotune_amp.processes.on_ray.slots import RayDevices, RaySlots
from autotune_amp.processes.process import Watcher
from autotune_amp.trial.jobs import Check, Describe, Trial

pytestmark = [pytest.mark.slow, pytest.mark.real_time, pytest.mark.usefixtures("nothing_left_at_once")]

# What a batch does is said by its size. Where it runs is a variable whose name is not written there: one that is counts
# among what nodes must have alike.
WORKLOAD = """
import os, time
import torch
from pathlib import Path
from torch import nn
from autotune_amp import Workload
from flavour import FLAVOUR

if FLAVOUR == "broken":
    raise ImportError("no data here")
HERE = Path(os.environ["HERE"])

def loss(model, batch):
    size = len(batch)
    if size == 3:
        raise ValueError("three")
    if size == 6:
        (HERE / f"hangs-{os.getpid()}").touch()
        time.sleep(1000)
    if size == 7 and FLAVOUR == "full":
        with open("/dev/full", "w") as file:
            file.write("x" * 100_000)
    if size in (8, 9):
        (HERE / f"met-{size}").touch()
        while not (HERE / f"met-{17 - size}").exists():
            time.sleep(0.01)
    print("on", os.environ.get("".join(("NO", "DE"))), "flavour", FLAVOUR, "in", os.getpid())
    return FLAVOUR_FACTOR * model(batch).square().mean()

FLAVOUR_FACTOR = 1.0

def workload():
    return Workload(lambda: nn.Linear(4, 1), loss, lambda size: torch.ones(size, 4))
"""
PLAIN = "FLAVOUR = 'plain'\n"


class Opened:
    """A workload of a working directory on a cluster."""

    def __init__(self, folder: Path, address: str, num_ranks: int = 1) -> None:
        folder.mkdir(exist_ok=True)
        (folder / "train.py").write_text(WORKLOAD)
        self.listeners: dict[str | None, Listener] = {}
        self.notes: list[str] = []
        with pytest.MonkeyPatch.context() as patch:
            patch.chdir(folder)
            self.cluster = Cluster(address, sends_directory=True, excludes=[])
        payload = Payload(target="train.py:workload", path=())
        self.devices = RayDevices(self.cluster, "cpu", num_ranks, payload, self.listener, self.notes.append)
        self.state: dict[str, Any] = {}
        self.backend: Any = None  # `RaySlots`, once it is open

    def listener(self, slot: Slot) -> Watcher:
        return self.listeners.setdefault(slot.name, Listener())

    def open(self) -> Opened:
        found = self.devices.backend()
        assert isinstance(found, RaySlots)
        self.backend = found
        found.load(60)
        self.state = found.open("cpu", None, 60).torch_state
        found.open_others(60)
        return self

    def trial(self, batch_size: int = 4, **fields: Any) -> Trial:
        candidate = Setting(precision="fp32", batch_size=batch_size)
        return Trial(candidate=candidate, device="cpu", torch_state=self.state, num_steps=(1, 1), **fields)

    def submit(self, batch_size: int, slot: Slot | None = None, **fields: Any) -> Any:
        return self.backend.submit(self.trial(batch_size, **fields), slot)

    def where(self, slot: Slot) -> str:
        """The node that a slot is on, by the variable that it was started with."""
        assert isinstance(self.submit(4, slot).result(), Measurement)
        found = re.findall(r"on (\S+) flavour", self.listeners[slot.name].text)
        return str(found[-1])

    def wait_until(self, is_true: Callable[[], object], seconds: float = 60.0) -> None:
        until = time.monotonic() + seconds
        while not is_true():
            assert time.monotonic() < until
            self.backend._handle_calls()  # as while a job is waited for

    def close(self) -> None:
        if self.backend is not None:
            self.backend.close()
        self.devices.close()

    def __enter__(self) -> Opened:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    """Closes what a test opens: the last first."""
    with ExitStack() as made:
        yield made


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """Of a node like the others."""
    return {"HERE": str(tmp_path), **with_module(tmp_path / "plain", "flavour", PLAIN)}


@pytest.fixture
def nodes(stack: ExitStack, ray_cluster: RayCluster) -> RayNodes:
    """None yet."""
    return stack.enter_context(RayNodes(ray_cluster))


@pytest.fixture
def two(tmp_path: Path, stack: ExitStack, nodes: Any, environment: dict[str, str]) -> Opened:
    """Opened on two nodes, of which `other` may be killed."""
    nodes.add({**environment, "NODE": "first"})
    nodes.other = nodes.add({**environment, "NODE": "other"})
    return stack.enter_context(Opened(tmp_path / "work", nodes.address)).open()


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Opened]:
    """On a cluster of its own: the nodes of other tests would be taken for its own."""
    folder = tmp_path_factory.mktemp("ray")
    environment = {"HERE": str(folder), **with_module(folder / "plain", "flavour", PLAIN)}
    with RayCluster(environment={**environment, "NODE": "first"}) as nodes:
        nodes.add({**environment, "NODE": "other"})
        with Opened(folder / "work", nodes.address) as made:
            yield made.open()


def made_of(opened: Opened) -> Made:
    check = Check(
        what="fidelity",
        candidate=Setting(precision="bf16", batch_size=4),
        device="cpu",
        torch_state=opened.state,
    )
    return Made(opened.backend, opened.trial(), opened.trial(3), "workload_error", check)


class TestRay(BackendContract):
    @pytest.fixture
    def made(self, shared: Opened) -> Made:
        return made_of(shared)

    @pytest.fixture
    def new(self, two: Opened) -> Made:
        return made_of(two)


def test_two_jobs_run_at_the_same_time_and_each_is_heard_by_its_slot_s_listener(shared: Opened) -> None:
    first, second = shared.backend.slots
    handles = [shared.submit(8, first, deadline_seconds=60.0), shared.submit(9, second, deadline_seconds=60.0)]
    assert shared.backend.wait(handles) in handles
    assert all(isinstance(handle.result(), Measurement) for handle in handles), "they met"
    assert {shared.where(first), shared.where(second)} == {"first", "other"}
    assert first.name != second.name


def test_a_job_that_hangs_is_ended_there_and_the_slot_goes_on(shared: Opened) -> None:
    slot = shared.backend.slots[1]
    found = shared.submit(6, slot, deadline_seconds=6.0).result()
    assert isinstance(found, Failure)
    assert found.kind == "timeout"
    assert isinstance(shared.submit(4, slot).result(), Measurement)


def hanging(folder: Path) -> list[int]:
    return [int(path.name.partition("-")[2]) for path in folder.glob("hangs-*")]


def slot_on(opened: Opened, node: str) -> Slot:
    slots: tuple[Slot, ...] = opened.backend.slots
    return next(slot for slot in slots if opened.where(slot) == node)


def test_a_node_that_is_killed_in_a_job_is_no_slot_any_more_and_one_that_comes_later_is(
    two: Opened, nodes: Any, tmp_path: Path, environment: dict[str, str]
) -> None:
    slot = slot_on(two, "other")
    job = two.submit(6, slot)
    two.wait_until(lambda: hanging(tmp_path))
    nodes.kill(nodes.other)
    with pytest.raises(SlotLostError) as lost:
        job.result()
    assert lost.value.slot == slot
    (left,) = two.backend.slots
    assert two.where(left) == "first"
    assert any(str(slot.name) in note for note in two.notes)
    two.wait_until(lambda: not any(psutil.pid_exists(pid) for pid in hanging(tmp_path)))
    nodes.add({**environment, "NODE": "later"})
    two.wait_until(lambda: len(two.backend.slots) == 2)
    assert {two.where(slot) for slot in two.backend.slots} == {"first", "later"}


def test_what_ended_on_a_killed_node_and_was_not_heard_is_lost_too(two: Opened, nodes: Any) -> None:
    slot = slot_on(two, "other")
    place = two.backend._runner_at(slot)
    node = place.backend
    assert isinstance(node, on_node.NodeBackend)
    job = two.trial()
    place.thread.submit(node._ask, "start_call", pack(("run", (job.kind(), msgspec.to_builtins(job))))).result()
    time.sleep(3.0)
    nodes.kill(nodes.other)
    time.sleep(5.0)  # its processes see that they are alone
    with pytest.raises(SlotLostError):
        place.thread.submit(node._ask, "take_progress").result()


def test_when_the_last_node_is_lost_another_one_is_waited_for(
    tmp_path: Path, stack: ExitStack, nodes: RayNodes, environment: dict[str, str]
) -> None:
    first = nodes.add({**environment, "NODE": "first"})
    opened = stack.enter_context(Opened(tmp_path / "work", nodes.address)).open()
    job = opened.submit(6)
    opened.wait_until(lambda: hanging(tmp_path))
    nodes.kill(first)
    nodes.add({**environment, "NODE": "second"})
    with pytest.raises(SlotLostError):
        job.result()
    (slot,) = opened.backend.slots
    assert opened.where(slot) == "second"


@needs_two_cpus
def test_nodes_that_are_unlike_the_first_are_left_out_and_it_is_said_why(
    tmp_path: Path, stack: ExitStack, nodes: RayNodes, environment: dict[str, str]
) -> None:
    here = {"HERE": str(tmp_path)}
    library = with_module(tmp_path / "library", "flavour", PLAIN)
    (tmp_path / "library/torchao-99.0.dist-info").mkdir()
    (tmp_path / "library/torchao-99.0.dist-info/METADATA").write_text(
        "Metadata-Version: 2.1\nName: torchao\nVersion: 99.0\n"
    )
    other_code = with_module(tmp_path / "code", "flavour", f"{PLAIN}MORE = 1\n")
    nodes.add(environment)
    opened = stack.enter_context(Opened(tmp_path / "work", nodes.address)).open()  # the others are not the first
    nodes.add({**here, **library})
    nodes.add({**here, **other_code})
    nodes.add({**here, **with_module(tmp_path / "broken", "flavour", "FLAVOUR = 'broken'\n")})
    nodes.add({**environment, "MKL_DEBUG_CPU_TYPE": "5"})
    nodes.add(environment, cpus=[min(os.sched_getaffinity(0))])
    reasons = ("version of torchao", "flavour.py", "no data here", "MKL_DEBUG_CPU_TYPE", "CPUs")
    opened.wait_until(lambda: len(opened.notes) == len(reasons))
    assert len(opened.backend.slots) == 1
    said = "\n".join(opened.notes)
    for reason in reasons:
        assert reason in said, (reason, said)
    assert isinstance(opened.submit(4).result(), Measurement)


def test_where_the_first_node_cannot_load_the_next_one_does_and_where_none_can_it_is_the_user_s_error(
    tmp_path: Path, stack: ExitStack, nodes: RayNodes, environment: dict[str, str]
) -> None:
    broken = {**environment, **with_module(tmp_path / "broken", "flavour", "FLAVOUR = 'broken'\n")}
    nodes.add(broken)
    with Opened(tmp_path / "work", nodes.address) as opened, pytest.raises(WorkloadError, match="no data here"):
        opened.open()
    nodes.add({**environment, "NODE": "whole"})
    opened = stack.enter_context(Opened(tmp_path / "work", nodes.address)).open()
    (slot,) = opened.backend.slots
    assert opened.where(slot) == "whole"


def test_a_node_whose_disk_is_full_is_given_up(
    tmp_path: Path, stack: ExitStack, nodes: RayNodes, environment: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    full = with_module(tmp_path / "full", "flavour", "FLAVOUR = 'full'\n")
    nodes.add({**environment, **full})
    opened = stack.enter_context(Opened(tmp_path / "work", nodes.address)).open()
    monkeypatch.setattr(ray_slots, "START_SECONDS", 1.0)
    with pytest.raises(ClusterLostError, match="No space left"):
        opened.submit(7).result()


def test_a_node_that_cannot_load_the_workload_again_is_given_up(
    two: Opened, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slot = slot_on(two, "other")
    two.backend.keep()
    (tmp_path / "plain/flavour.py").write_text("FLAVOUR = 'broken'\n")
    with pytest.raises(SlotLostError, match="no data here"):
        two.submit(4, slot).result()


def test_a_node_that_stands_still_is_lost(two: Opened, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(on_node, "SILENT_SECONDS", 4.0)
    slot = slot_on(two, "other")
    job = two.submit(6, slot)
    two.wait_until(lambda: hanging(tmp_path))
    (pid,) = hanging(tmp_path)
    actor = next(p for p in psutil.Process(pid).parents() if p.name().startswith("ray::"))
    actor.send_signal(signal.SIGSTOP)
    try:
        with pytest.raises(SlotLostError, match="did not answer"):
            job.result()
    finally:
        actor.send_signal(signal.SIGCONT)
    assert len(two.backend.slots) == 1
    assert isinstance(two.submit(4).result(), Measurement)


def until_gone(folder: Path) -> None:
    """Nothing that hangs is left."""
    until = time.monotonic() + 30
    while any(psutil.pid_exists(pid) for pid in hanging(folder)):
        assert time.monotonic() < until
        time.sleep(0.1)


def test_when_the_head_is_killed_that_is_said_and_nothing_of_ours_is_left(
    tmp_path: Path, stack: ExitStack, environment: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_gcs_rpc_server_reconnect_timeout_s", "5")
    nodes = stack.enter_context(RayCluster(environment=environment))
    opened = stack.enter_context(Opened(tmp_path / "work", nodes.address)).open()
    job = opened.submit(6)
    opened.wait_until(lambda: hanging(tmp_path))
    nodes.kill(nodes.head)
    with pytest.raises(ClusterLostError, match="Next step: Start"):
        job.result()
    opened.close()
    until_gone(tmp_path)


def test_closing_in_a_job_ends_it_on_the_node(two: Opened, tmp_path: Path) -> None:
    two.submit(6, two.backend.slots[1])
    two.wait_until(lambda: hanging(tmp_path))
    two.backend.close()
    until_gone(tmp_path)


@needs_two_cpus
def test_the_ranks_of_a_trial_train_together_on_one_node(
    tmp_path: Path, stack: ExitStack, nodes: RayNodes, environment: dict[str, str]
) -> None:
    nodes.add(environment, num_cpus=2)
    opened = stack.enter_context(Opened(tmp_path / "work", nodes.address, num_ranks=2)).open()
    described = opened.backend.submit(Describe(device="cpu", torch_state=opened.state)).result()
    assert not isinstance(described, Failure)
    assert described.num_ranks == 2
    found = opened.submit(4, num_ranks=2).result()
    assert isinstance(found, Measurement), found
    assert found.samples_per_second * found.step_seconds == pytest.approx(8), "of both together"


def test_where_there_is_no_cluster_the_request_is_refused(tmp_path: Path, stack: ExitStack) -> None:
    opened = stack.enter_context(Opened(tmp_path / "work", f"127.0.0.1:{free_port()}"))
    with pytest.raises(InvalidRequestError, match="ray start"):
        opened.devices.backend()
