"""Processes on the nodes of a Ray cluster: find nodes, start a process for each slot, and compare their devices."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future

import msgspec

from autotune_amp.core.errors import AutotuneAmpError, RunnerError
from autotune_amp.core.hardware import MIN_MEMORY_SHARE, DeviceIdentity
from autotune_amp.processes.local import Slot
from autotune_amp.processes.on_ray.cluster import Cluster, NodeProcessLostError
from autotune_amp.processes.on_ray.messages import Node, NodeShare, ProcessDescription

NODE_REQUEST_SECONDS = 2.0  # interval of requests for new nodes
GPU_WAIT_SECONDS = 10.0  # wait for nodes with GPUs before nodes without are used


class Fleet:
    """Processes on the nodes of a cluster, one for each slot of the search. `note` is called for those left out.

    A process gets as many GPUs of one node as a trial has ranks, on CPUs the whole node. Devices and versions have to
    be those of the `first` process.
    """

    def __init__(self, cluster: Cluster, device: str, num_ranks: int, note: Callable[[str], None]) -> None:
        self._cluster = cluster
        self._device = device
        self._num_ranks = num_ranks
        self.note = note
        self.first: ProcessDescription | None = None
        self._node_ids: set[str] = set()  # nodes found so far
        self._started: dict[str, ProcessDescription] = {}  # descriptions of processes by name, not compared yet
        self._names: dict[str, None] = {}  # names of processes in the order of their nodes, the head first
        self._starting: dict[str, Future[bytes]] = {}
        self._node_request: Future[bytes] | None = None
        self._requested_at = -NODE_REQUEST_SECONDS
        self._created_at = time.monotonic()

    @property
    def is_up(self) -> bool:
        """Whether a process has started."""
        return bool(self._started)

    @property
    def is_settled(self) -> bool:
        """Whether all processes requested so far have started or failed."""
        return self._node_request is None and not self._starting

    def take_started_slots(self) -> list[Slot]:
        """Return slots for processes that have started since the last call and are like the first. Does not wait."""
        self._update_nodes()
        for name in [name for name, about in self._starting.items() if about.done()]:
            try:
                self._started[name] = msgspec.msgpack.decode(self._starting.pop(name).result(), type=ProcessDescription)
            except (
                NodeProcessLostError,
                AutotuneAmpError,
                msgspec.MsgspecError,
            ) as error:  # or a message of another version
                self.leave_out(name, str(error))
        if self.first is None:
            return []
        slots = []
        for name in [name for name in self._names if name in self._started]:
            about = self._started.pop(name)
            problem = incompatibility(self.first, about)
            if problem is None:
                slots.append(Slot(_device(about.identity), name, is_here=False))
            else:
                self.leave_out(name, problem)
        return slots

    def begin(self) -> list[Slot]:
        """Choose the most common kind of process as the reference, and return slots for those of that kind."""
        kinds = [self._started[name] for name in self._names if name in self._started]
        self.first = max(kinds, key=lambda kind: sum(incompatibility(kind, other) is None for other in kinds))
        return self.take_started_slots()

    def leave_out(self, name: str, problem: str) -> None:
        """End a process, with a note that names the problem."""
        self._cluster.end(name)
        self.note(f"{name} is left out: {problem.rstrip('.')}.")

    def _update_nodes(self) -> None:
        if self._node_request is None:
            if time.monotonic() > self._requested_at + NODE_REQUEST_SECONDS:
                self._requested_at = time.monotonic()
                self._node_request = self._cluster.nodes()
        elif self._node_request.done():
            request, self._node_request = self._node_request, None
            try:
                nodes = msgspec.msgpack.decode(request.result(), type=list[Node])
            except (RunnerError, NodeProcessLostError):  # Ray cannot answer now
                return
            in_order = sorted(nodes, key=lambda node: (not node.is_head, node.host, node.node_id))
            new = [node for node in in_order if node.node_id not in self._node_ids]
            if self._device == "auto" and any(node.num_gpus for node in new):
                self._device = "cuda"
            elif self._device == "auto" and time.monotonic() < self._created_at + GPU_WAIT_SECONDS:
                return
            for node in new:
                self._node_ids.add(node.node_id)
                self._start_on(node)

    def _start_on(self, node: Node) -> None:
        if self._device == "cuda":
            for _ in range(node.num_gpus // self._num_ranks):
                share = NodeShare(
                    name=self._name(node), node_id=node.node_id, num_gpus=self._num_ranks, num_cpus=self._num_ranks
                )
                self._starting[share.name] = self._cluster.start(share, "cuda")
        elif node.num_cpus >= self._num_ranks:
            share = NodeShare(name=self._name(node), node_id=node.node_id, num_gpus=0, num_cpus=node.num_cpus)
            self._starting[share.name] = self._cluster.start(share, "cpu")

    def _name(self, node: Node) -> str:
        """Return a name for a process: the host's, with a number from the second process on."""
        name, number = node.host, 1
        while name in self._names:
            number += 1
            name = f"{node.host}:{number}"
        self._names[name] = None
        return name


def incompatibility(first: ProcessDescription, other: ProcessDescription) -> str | None:
    """Return why results of the other process cannot be compared with those of the first, or None if they can."""
    first_identity, other_identity = first.identity, other.identity
    pairs = [
        ("is a", first_identity.name, other_identity.name),
        ("has autotune_amp", first.version, other.version),
        ("has Python", first.python, other.python),
        ("has driver", str(first_identity.driver), str(other_identity.driver)),
    ]
    if first_identity.type == "cpu":
        pairs.append(
            (
                "has CPUs:",
                str(first_identity.allowed_cpus or first_identity.num_cpus),
                str(other_identity.allowed_cpus or other_identity.num_cpus),
            )
        )
    for phrase, first_value, other_value in pairs:
        if first_value != other_value:
            return f"it {phrase} {other_value}, and the first {first_value}: their results cannot be compared"
    least, most = sorted((first_identity.total_memory_bytes, other_identity.total_memory_bytes))
    return None if least >= MIN_MEMORY_SHARE * most else "its memory size is not that of the first"


def _device(identity: DeviceIdentity) -> str:
    return "cpu" if identity.type == "cpu" else f"{identity.type}:0"
