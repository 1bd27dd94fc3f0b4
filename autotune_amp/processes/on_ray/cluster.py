"""Client of a Ray cluster: starts the driver, a child process that alone connects to Ray, and sends it requests."""

from __future__ import annotations

import json
import math
import os
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from contextlib import suppress
from importlib.util import find_spec
from multiprocessing.connection import Connection
from pathlib import Path

import msgspec

from autotune_amp.core.errors import ClusterLostError, InvalidRequestError
from autotune_amp.interruption import heed
from autotune_amp.processes.on_ray.messages import NodeSetup, NodeShare, Reply, Request, pack
from autotune_amp.processes.process import TICK_SECONDS
from autotune_amp.processes.program import import_path

SILENT_SECONDS = 30.0  # after so long without an answer a node is lost; a healthy one answers within half a second
REACH_SECONDS = 10.0  # for the TCP connection that tests whether a server listens at the cluster's address
CONNECT_SECONDS = 120.0  # for the driver to connect to the cluster, which includes sending the working directory
_END_SECONDS = 10.0  # for the driver to exit once its connection is closed
# Program of the driver for `python -c`. Its arguments are this process's sys.path as JSON and its socket's file number.
_DRIVER = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from autotune_amp.processes.on_ray.driver import main; main(int(sys.argv[2]))"
)
# Environment variables that Ray sets to a number of CPUs in its processes, where they get this process's values again.
_SET_BY_RAY = ("OMP_NUM_THREADS",)


class NodeProcessLostError(Exception):
    """Raised when a process on a node has ended or does not answer."""


class Cluster:
    """Connection to the Ray cluster at `address`, which starts processes on its nodes and calls their methods.

    Requests return futures of results encoded as msgpack. The processes end when the connection is closed. With
    `sends_directory`, Ray copies the working directory to the nodes, without the paths that match the patterns
    `excludes`, written as in .gitignore. Raises `InvalidRequestError` if Ray is not installed.
    """

    def __init__(self, address: str, *, sends_directory: bool, excludes: Sequence[str]) -> None:
        if find_spec("ray") is None:
            raise InvalidRequestError("--ray needs Ray, which is not installed.", "pip install 'autotune_amp[ray]'")
        self.address = address
        self._directory = str(Path.cwd()) if sends_directory else None
        self._excludes = list(excludes)
        self._waiting: dict[int, Future[bytes]] = {}  # futures of requests without a reply, by the request's number
        self._lock = threading.Lock()
        self._number = 0
        self._popen: subprocess.Popen[bytes] | None = None

    def connect(self, target: str | None, packed: bytes, num_ranks: int, tick: Callable[[], None]) -> None:
        """Start the driver process, connect it to the cluster, and give it the workload for the nodes' processes.

        The workload is the object that `target` names ("module:name"), or with None the serialized `packed`.
        `num_ranks` processes train together in a trial. `tick` is called every `TICK_SECONDS` while waiting. Raises
        `InvalidRequestError` if the cluster cannot be used, or the working directory cannot be sent.
        """
        self._raise_if_unreachable()
        self._driver_output = tempfile.TemporaryFile()  # noqa: SIM115 - open as long as the process
        self._socket, driver_socket = socket.socketpair()
        self._connection = Connection(os.dup(self._socket.fileno()))
        self._popen = subprocess.Popen(  # noqa: S603 - this interpreter and a module of this package
            [sys.executable, "-c", _DRIVER, json.dumps(import_path()), str(driver_socket.fileno())],
            stdin=subprocess.DEVNULL,
            stdout=self._driver_output,
            stderr=self._driver_output,
            pass_fds=[driver_socket.fileno()],
            start_new_session=True,  # Ctrl-C at the terminal is handled by this process alone
        )
        driver_socket.close()
        self._thread = threading.Thread(target=self._read_replies, daemon=True)
        self._thread.start()
        setup = NodeSetup(
            target=target,
            packed=packed,
            num_ranks=num_ranks,
            environment={name: os.environ.get(name) for name in _SET_BY_RAY},
        )
        try:
            connecting = self.request("connect", pack((self.address, self._directory, self._excludes)))
            self.wait_for(connecting, tick, CONNECT_SECONDS)
            self.wait_for(self.request("open", pack(setup)), tick, CONNECT_SECONDS)
        except (NodeProcessLostError, ClusterLostError) as error:
            self._driver_output.seek(0)
            output_lines = self._driver_output.read().decode(errors="replace").strip().splitlines()
            raise InvalidRequestError(
                f"--ray: the cluster at {self.address!r} cannot be used: {output_lines[-1] if output_lines else error}",
                "Check it with `ray status`.",
            ) from error

    def _raise_if_unreachable(self) -> None:
        """Raise `InvalidRequestError` if no server listens at HOST:PORT: Ray would wait for two minutes."""
        host, _, port = self.address.removeprefix("ray://").rpartition(":")
        if not port.isdecimal():
            return
        try:
            socket.create_connection((host, int(port)), REACH_SECONDS).close()
        except OSError as error:
            raise InvalidRequestError(
                f"--ray: no server listens at {self.address!r}: {error.strerror or error}.",
                "Start a cluster with `ray start --head`, and give the HOST:PORT that it prints.",
            ) from error

    def nodes(self) -> Future[bytes]:
        """Request the nodes that are alive. The future's result is an encoded list of `Node`."""
        return self.request("nodes")

    def start(self, share: NodeShare, device: str) -> Future[bytes]:
        """Request a process that uses `share` of a node, on its devices of the type `device` ("cuda" or "cpu").

        The future is completed once the process runs, which waits until the node has these GPUs and CPUs free. Its
        result is an encoded `ProcessDescription`.
        """
        return self.request("start", pack((share, device)))

    def call(self, place: str, method: str, *arguments: bytes) -> Future[bytes]:
        """Request a method call, with encoded arguments, in the process named `place`. The future has its result."""
        return self.request("call", pack((method, arguments)), place)

    def end(self, place: str) -> None:
        """Request that the process named `place` ends, without waiting for it."""
        self.request("end", place=place)

    def request(self, action: str, body: bytes = b"", place: str | None = None) -> Future[bytes]:
        """Send a request to the driver and return its future, which another thread completes.

        `action` names the driver's action, such as "call", `body` has its encoded arguments, and `place` names the
        process on a node that it concerns, if any. The future fails with the driver's error, `NodeProcessLostError` if
        that process has ended, or `ClusterLostError` if the driver has.
        """
        future: Future[bytes] = Future()
        with self._lock:
            self._number += 1
            self._waiting[self._number] = future
            try:
                self._connection.send_bytes(pack(Request(number=self._number, do=action, place=place, body=body)))
            except OSError:
                self._fail_all()
        return future

    def wait_for(self, future: Future[bytes], tick: Callable[[], None], limit_seconds: float = math.inf) -> bytes:
        """Wait for the result of a request's future, calling `tick` every `TICK_SECONDS`, and return it.

        Raises the future's error, `NodeProcessLostError` if there is no result within `limit_seconds`, and
        `KeyboardInterrupt` after Ctrl-C or SIGTERM.
        """
        deadline = time.monotonic() + limit_seconds
        while True:
            heed()
            tick()
            wait([future], TICK_SECONDS)
            if future.done():
                return future.result()
            if time.monotonic() > deadline:
                raise NodeProcessLostError(f"it did not answer within {limit_seconds:.0f} s")

    def close(self) -> None:
        """Close the connection and wait for the driver to exit, which ends the processes on the nodes."""
        if self._popen is None:
            return
        popen, self._popen = self._popen, None
        with suppress(OSError):  # the driver has ended already
            self._socket.shutdown(socket.SHUT_WR)
        try:
            popen.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            popen.kill()
            popen.wait()
        self._thread.join()
        for resource in (self._driver_output, self._connection, self._socket):
            resource.close()

    def _read_replies(self) -> None:
        """Complete the futures from the driver's replies until the connection ends, then fail those without a reply."""
        while True:
            try:
                reply = msgspec.msgpack.decode(self._connection.recv_bytes(), type=Reply)
            except (EOFError, OSError):
                break
            with self._lock:
                future = self._waiting.pop(reply.number, None)
            if future is None:
                continue
            if reply.error is not None:
                future.set_exception(reply.error.exception())
            elif reply.lost is not None:
                future.set_exception(NodeProcessLostError(reply.lost))
            else:
                future.set_result(reply.body)
        with self._lock:
            self._fail_all()

    def _fail_all(self) -> None:
        """Fail all futures without a reply with `ClusterLostError`. The caller holds the lock."""
        lost = ClusterLostError(
            f"The Ray cluster at {self.address} is lost: the connection to it ended.",
            "Start it again, then run the same command: it resumes with the results so far.",
        )
        for future in self._waiting.values():
            future.set_exception(lost)
        self._waiting.clear()
