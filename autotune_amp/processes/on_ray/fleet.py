"""Places of a Ray cluster: found, started, and compared with the first one."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future

import msgspec

from autotune_amp.core.errors import AutotuneAmpError, RunnerError
from autotune_amp.core.hardware import LEAST_MEMORY_SHARE, DeviceIdentity
from autotune_amp.processes.local import Slot
from autotune_amp.processes.on_ray.cluster import Cluster, NodeProcessLostError
from autotune_amp.processes.on_ray.messages import Node, NodeShare, ProcessDescription

LOOK_SECONDS = 2.0  # between requests for new nodes
CARDS_SECONDS = 10.0  # time to wait for nodes with GPUs before nodes without are used


class Fleet:
    """Places of a cluster: found, started, and compared with the first one. `note` is called for those left out.

    A place has as many devices of one node as a trial has ranks; on CPUs it is the whole node.
    """

    def __init__(self, cluster: Cluster, device: str, num_ranks: int, note: Callable[[str], None]) -> None:
        self._cluster = cluster
        self._device = device
        self._num_ranks = num_ranks
        self.note = note
        self.first: ProcessDescription | None = None
        self._known: set[str] = set()  # node IDs
        self._up: dict[str, ProcessDescription] = {}  # places that were not compared yet
        self._names: dict[str, None] = {}  # in the order of finding them, the head first
        self._starting: dict[str, Future[bytes]] = {}
        self._looking: Future[bytes] | None = None
        self._looked = -LOOK_SECONDS
        self._began = time.monotonic()

    @property
    def is_up(self) -> bool:
        """Whether there is a place to start with."""
        return bool(self._up)

    @property
    def is_settled(self) -> bool:
        """Whether every place found so far has answered."""
        return self._looking is None and not self._starting

    def arrived(self) -> list[Slot]:
        """Return the places that have come up since the last call and are like the first. Does not wait."""
        self._look()
        for name in [name for name, about in self._starting.items() if about.done()]:
            try:
                self._up[name] = msgspec.msgpack.decode(self._starting.pop(name).result(), type=ProcessDescription)
            except (
                NodeProcessLostError,
                AutotuneAmpError,
                msgspec.MsgspecError,
            ) as error:  # or a message of another version
                self.leave_out(name, str(error))
        if self.first is None:
            return []
        found = []
        for name in [name for name in self._names if name in self._up]:
            about = self._up.pop(name)
            problem = incompatibility(self.first, about)
            if problem is None:
                found.append(Slot(_device(about.identity), name, is_here=False))
            else:
                self.leave_out(name, problem)
        return found

    def begin(self) -> list[Slot]:
        """Choose the most common kind of place as the reference, and return the places of that kind that are up."""
        kinds = [self._up[name] for name in self._names if name in self._up]
        self.first = max(kinds, key=lambda kind: sum(incompatibility(kind, other) is None for other in kinds))
        return self.arrived()

    def leave_out(self, name: str, problem: str) -> None:
        """End a place, with a note that names the problem."""
        self._cluster.end(name)
        self.note(f"{name} is left out: {problem.rstrip('.')}.")

    def _look(self) -> None:
        if self._looking is None:
            if time.monotonic() > self._looked + LOOK_SECONDS:
                self._looked = time.monotonic()
                self._looking = self._cluster.nodes()
        elif self._looking.done():
            looked, self._looking = self._looking, None
            try:
                nodes = msgspec.msgpack.decode(looked.result(), type=list[Node])
            except (RunnerError, NodeProcessLostError):  # Ray cannot answer now
                return
            in_order = sorted(nodes, key=lambda node: (not node.is_head, node.host, node.node_id))
            new = [node for node in in_order if node.node_id not in self._known]
            if self._device == "auto" and any(node.num_gpus for node in new):
                self._device = "cuda"
            elif self._device == "auto" and time.monotonic() < self._began + CARDS_SECONDS:
                return
            for node in new:
                self._known.add(node.node_id)
                self._start_on(node)

    def _start_on(self, node: Node) -> None:
        if self._device == "cuda":
            for _ in range(node.num_gpus // self._num_ranks):
                place = NodeShare(
                    name=self._name(node), node_id=node.node_id, num_gpus=self._num_ranks, num_cpus=self._num_ranks
                )
                self._starting[place.name] = self._cluster.start(place, "cuda")
        elif node.num_cpus >= self._num_ranks:
            place = NodeShare(name=self._name(node), node_id=node.node_id, num_gpus=0, num_cpus=node.num_cpus)
            self._starting[place.name] = self._cluster.start(place, "cpu")

    def _name(self, node: Node) -> str:
        """Return the host's name, with a number if it has several places."""
        name, number = node.host, 1
        while name in self._names:
            number += 1
            name = f"{node.host}:{number}"
        self._names[name] = None
        return name


def incompatibility(first: ProcessDescription, other: ProcessDescription) -> str | None:
    """Return why results of the other place cannot be compared with those of the first, or None if they can. Pure."""
    ours, theirs = first.identity, other.identity
    pairs = [
        ("is a", ours.name, theirs.name),
        ("has autotune_amp", first.version, other.version),
        ("has Python", first.python, other.python),
        ("has driver", str(ours.driver), str(theirs.driver)),
    ]
    if ours.type == "cpu":
        pairs.append(
            ("has CPUs:", str(ours.allowed_cpus or ours.num_cpus), str(theirs.allowed_cpus or theirs.num_cpus))
        )
    for what, mine, its in pairs:
        if mine != its:
            return f"it {what} {its}, and the first {mine}: their results cannot be compared"
    least, most = sorted((ours.total_memory_bytes, theirs.total_memory_bytes))
    return None if least >= LEAST_MEMORY_SHARE * most else "its memory is not that of the first"


def _device(identity: DeviceIdentity) -> str:
    return "cpu" if identity.type == "cpu" else f"{identity.type}:0"
