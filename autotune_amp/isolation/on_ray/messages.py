"""What the search, the process that is connected to Ray and the nodes say to one another, as bytes of msgpack."""

from __future__ import annotations

from typing import Any

import msgspec

from autotune_amp.core import errors
from autotune_amp.core.errors import AutotuneAmpError, RunnerError
from autotune_amp.core.hardware import DeviceIdentity


class Node(msgspec.Struct, frozen=True, kw_only=True):
    """A node of the cluster, and how many devices of a kind ("GPU" or "CPU") it has."""

    node_id: str
    host: str
    is_head: bool
    num_gpus: int
    num_cpus: int


class Place(msgspec.Struct, frozen=True, kw_only=True):
    """What a search takes of a node: so many devices for the ranks of a trial; without `num_gpus` all of its CPUs."""

    name: str
    node_id: str
    num_gpus: int
    num_cpus: int


class Opening(msgspec.Struct, frozen=True, kw_only=True):
    """What a node needs to run jobs: the workload as a target or packed, the number of ranks of a trial, and the
    variables that are set where the search runs and that Ray would set otherwise, None for unset."""

    target: str | None
    packed: bytes
    num_ranks: int
    environment: dict[str, str | None]


class Told(msgspec.Struct, frozen=True, kw_only=True):
    """What came of a call on a node so far: steps (number, seconds), what was printed, and once it is over its answer,
    or the error of ours that it raised. `abilities`, `is_build_shared` and `start_seconds` are those of then."""

    steps: list[tuple[int, float]]
    output: str
    is_over: bool
    answer: Any = None
    error: Error | None = None
    abilities: list[str] = []
    is_build_shared: bool = False
    start_seconds: float | None = None


class Error(msgspec.Struct, frozen=True, kw_only=True):
    """An error on its way to another process."""

    kind: str
    message: str
    next_step: str

    @classmethod
    def of(cls, error: BaseException) -> Error:
        """One of ours as it is, another by its name."""
        if not isinstance(error, AutotuneAmpError):
            error = RunnerError(f"{type(error).__name__}: {error}", "See the logs of Ray on that node.")
        return cls(kind=type(error).__name__, message=error.message, next_step=error.next_step)

    def opened(self) -> AutotuneAmpError:
        """It, to be raised."""
        kind: type[AutotuneAmpError] = getattr(errors, self.kind, RunnerError)
        return kind(self.message, self.next_step)


class About(msgspec.Struct, frozen=True, kw_only=True):
    """What a node's process says of itself."""

    identity: DeviceIdentity
    version: str
    python: str


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """From the search to the process that is connected to Ray."""

    number: int
    do: str
    place: str | None = None
    body: bytes = b""


class Reply(msgspec.Struct, frozen=True, kw_only=True):
    """What came of a request: an answer, our error, or why the place is `lost`."""

    number: int
    body: bytes = b""
    error: Error | None = None
    lost: str | None = None


def pack(value: Any) -> bytes:
    """As msgpack."""
    return msgspec.msgpack.encode(value)
