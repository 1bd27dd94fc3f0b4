"""Messages between the search, the process connected to Ray, and the nodes, encoded as msgpack."""

from __future__ import annotations

from typing import Any

import msgspec

from autotune_amp.core.errors import AutotuneAmpError, RunnerError
from autotune_amp.core.hardware import DeviceIdentity
from autotune_amp.core.job import RequestError


class Node(msgspec.Struct, frozen=True, kw_only=True):
    """Node of the cluster with its numbers of GPUs and CPUs."""

    node_id: str
    host: str
    is_head: bool
    num_gpus: int
    num_cpus: int


class NodeShare(msgspec.Struct, frozen=True, kw_only=True):
    """Share of a node for a process: `num_gpus`, one for each rank of a trial, or with 0 all CPUs of the node."""

    name: str
    node_id: str
    num_gpus: int
    num_cpus: int


class NodeSetup(msgspec.Struct, frozen=True, kw_only=True):
    """Data that a process on a node needs to run jobs.

    It is the workload as a target or packed, the number of ranks of a trial, and those environment variables that Ray
    sets, with their values where the search runs (None for unset).
    """

    target: str | None
    packed: bytes
    num_ranks: int
    environment: dict[str, str | None]


class CallProgress(msgspec.Struct, frozen=True, kw_only=True):
    """Progress of a method call on a node: new steps (number, seconds) and printed output, at the end also its answer
    or error.

    `abilities`, `is_build_shared` and `start_seconds` are those of the node's backend at that time.
    """

    steps: list[tuple[int, float]]
    output: str
    is_over: bool
    answer: Any = None
    error: RequestError | None = None
    abilities: list[str] = []
    is_build_shared: bool = False
    start_seconds: float | None = None


class ProcessDescription(msgspec.Struct, frozen=True, kw_only=True):
    """Description of a node's process: its device and versions."""

    identity: DeviceIdentity
    version: str
    python: str


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """Request from the search to the driver, the process connected to Ray. `place` names a process on a node."""

    number: int
    do: str
    place: str | None = None
    body: bytes = b""


class Reply(msgspec.Struct, frozen=True, kw_only=True):
    """Reply to a request: a result, an error, or the reason for which the process on the node is `lost`."""

    number: int
    body: bytes = b""
    error: RequestError | None = None
    lost: str | None = None


def request_error(error: BaseException) -> RequestError:
    """Return the message for an exception. Other types than `AutotuneAmpError` become a `RunnerError`."""
    if not isinstance(error, AutotuneAmpError):
        error = RunnerError(f"{type(error).__name__}: {error}", "See the logs of Ray on that node.")
    return RequestError(type(error).__name__, error.message, error.next_step)


def pack(value: Any) -> bytes:
    """Return a value encoded as msgpack."""
    return msgspec.msgpack.encode(value)
