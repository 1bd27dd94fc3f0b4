"""Which places of a cluster are comparable, and what is said of the others; by a cluster that is played."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any
from unittest.mock import Mock

import pytest
from msgspec.structs import replace

from autotune_amp.core.errors import InvalidRequestError
from autotune_amp.core.hardware import DeviceIdentity
from autotune_amp.core.setting import Setting
from autotune_amp.processes.local import Slot, SlotLostError
from autotune_amp.processes.on_ray import fleet
from autotune_amp.processes.on_ray.backend import NodeBackend, _NodeHandle
from autotune_amp.processes.on_ray.cluster import Cluster, NodeProcessLostError
from autotune_amp.processes.on_ray.fleet import Fleet, incompatibility
from autotune_amp.processes.on_ray.messages import CallProgress, Node, NodeShare, ProcessDescription, pack
from autotune_amp.processes.process import Watcher
from autotune_amp.trial.jobs import Trial

CARD = ProcessDescription(
    identity=DeviceIdentity(type="cuda", name="NVIDIA A", driver="570", num_cpus=8, total_memory_bytes=80 * 10**9),
    version="1.0",
    python="3.12.1",
)
CPU = replace(CARD, identity=DeviceIdentity(type="cpu", name="CPU A", num_cpus=8, total_memory_bytes=64 * 10**9))


def with_identity(about: ProcessDescription, **fields: Any) -> ProcessDescription:
    return replace(about, identity=replace(about.identity, **fields))


@pytest.mark.parametrize(
    ("first", "other", "said"),
    [
        (CARD, with_identity(CARD, uuid="GPU-b", index=3), None),
        (CARD, with_identity(CARD, total_memory_bytes=79 * 10**9), None),
        (CARD, with_identity(CARD, num_cpus=64), None),
        (CARD, with_identity(CARD, total_memory_bytes=40 * 10**9), "memory"),
        (CARD, with_identity(CARD, name="NVIDIA B"), "NVIDIA B"),
        (CARD, with_identity(CARD, driver="560"), "560"),
        (CARD, replace(CARD, version="0.9"), "autotune_amp 0.9"),
        (CARD, replace(CARD, python="3.12.2"), "Python 3.12.2"),
        (CPU, with_identity(CPU, num_cpus=4), "4"),
        (CPU, with_identity(CPU, allowed_cpus=2.5), "2.5"),
    ],
)
def test_what_cannot_be_compared_is_told_by_what_differs(
    first: ProcessDescription, other: ProcessDescription, said: str | None
) -> None:
    problem = incompatibility(first, other)
    assert (problem is None) == (said is None)
    assert said is None or said in str(problem)


class Played:
    """Nodes that answer at once, each with what it says of itself, or an error."""

    def __init__(self) -> None:
        self.nodes_there: list[Node] = []
        self.says: dict[str, Any] = {}
        self.ended: list[str] = []
        self.asked: list[tuple[NodeShare, str]] = []

    def add(self, node_id: str, says: Any = CPU, *, is_head: bool = False, num_gpus: int = 0) -> None:
        node = Node(node_id=node_id, host=f"host-{node_id}", is_head=is_head, num_gpus=num_gpus, num_cpus=8)
        self.nodes_there.append(node)
        self.says[node_id] = says

    def nodes(self) -> Future[bytes]:
        return answered(self.nodes_there)

    def start(self, place: NodeShare, device: str) -> Future[bytes]:
        self.asked.append((place, device))
        return answered(self.says[place.node_id])

    def end(self, name: str) -> None:
        self.ended.append(name)


def answered(value: Any) -> Future[bytes]:
    future: Future[bytes] = Future()
    if isinstance(value, Exception):
        future.set_exception(value)
    else:
        future.set_result(pack(value))
    return future


class Searching:
    """A search on it, whose clock may be moved."""

    def __init__(self, cluster: Played, monkeypatch: pytest.MonkeyPatch, device: str = "cpu", num_ranks: int = 1):
        self.now = 0.0
        monkeypatch.setattr("autotune_amp.processes.on_ray.fleet.time.monotonic", lambda: self.now)
        self.notes: list[str] = []
        self.fleet = Fleet(cluster, device, num_ranks, self.notes.append)  # type: ignore[arg-type]  # it is played

    def look(self) -> list[str | None]:
        """The names of what has come up since the last look."""
        self.now += fleet.NODE_REQUEST_SECONDS + 0.1
        return [slot.name for _ in range(3) for slot in self.fleet.take_started_slots()]


def test_the_most_common_kind_is_the_first_and_the_head_where_all_are_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = Played()
    cluster.add("a", with_identity(CPU, name="CPU B"))
    cluster.add("b")
    cluster.add("c", is_head=True)
    searching = Searching(cluster, monkeypatch)
    assert searching.look() == []
    assert [slot.name for slot in searching.fleet.begin()] == ["host-c", "host-b"]
    assert cluster.ended == ["host-a"]
    assert "CPU B" in searching.notes[0]
    cluster.add("d")
    cluster.add("e", replace(CPU, version="0.9"))
    assert searching.look() == ["host-d"]


@pytest.mark.parametrize("problem", [NodeProcessLostError("it died"), {"another": "version's"}])
def test_one_that_does_not_start_or_cannot_be_read_is_left_out(problem: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = Played()
    cluster.add("a")
    cluster.add("b", problem)
    searching = Searching(cluster, monkeypatch)
    searching.look()
    assert [slot.name for slot in searching.fleet.begin()] == ["host-a"]
    assert cluster.ended == ["host-b"]


def test_every_group_of_cards_is_a_place_and_nodes_without_any_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = Played()
    cluster.add("head", is_head=True)
    searching = Searching(cluster, monkeypatch, device="auto", num_ranks=2)
    searching.look()
    assert not searching.fleet.is_up, "cards may come"
    cluster.add("a", CARD, num_gpus=5)
    searching.look()
    slots = searching.fleet.begin()
    assert [(slot.name, slot.device) for slot in slots] == [("host-a", "cuda:0"), ("host-a:2", "cuda:0")]
    assert [(place.num_gpus, device) for place, device in cluster.asked] == [(2, "cuda"), (2, "cuda")]


def test_where_no_cards_come_auto_is_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = Played()
    cluster.add("a")
    searching = Searching(cluster, monkeypatch, device="auto")
    searching.look()
    searching.now += fleet.GPU_WAIT_SECONDS
    searching.look()
    assert [slot.device for slot in searching.fleet.begin()] == ["cpu"]


def test_while_the_head_does_not_say_what_there_is_the_search_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = Played()
    cluster.add("a")
    searching = Searching(cluster, monkeypatch)
    searching.look()
    searching.fleet.begin()
    monkeypatch.setattr(cluster, "nodes", lambda: answered(NodeProcessLostError("no answer")))
    assert searching.look() == []


def test_without_ray_the_error_has_the_line_that_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("autotune_amp.processes.on_ray.cluster.find_spec", lambda name: None)
    with pytest.raises(InvalidRequestError, match=r"pip install 'autotune_amp\[ray\]'"):
        Cluster("auto", sends_directory=True, excludes=[])


@pytest.mark.parametrize(
    ("message", "is_lost"),
    [
        ("OSError: [Errno 28] No space left on device", True),
        ("RuntimeError: unable to write to file </torch_7_1>: No space left on device (28)", False),  # a loader's
    ],
)
def test_a_full_disk_gives_a_node_up_and_full_shared_memory_does_not(message: str, is_lost: bool) -> None:
    cluster = Mock()
    failure = {"outcome": "failure", "kind": "crash", "message": message}
    cluster.wait_for.return_value = pack(CallProgress(steps=[], output="", is_over=True, answer=failure))
    node = NodeBackend(cluster, Slot("cpu", "10.0.0.7"), None, {}, Watcher())
    handle = _NodeHandle(node, Trial(candidate=Setting(precision="fp32", batch_size=1), device="cpu"))
    if is_lost:
        with pytest.raises(SlotLostError, match="No space left"):
            handle.result()
    else:
        assert handle.result().message == message
