"""Driver: the process connected to a Ray cluster, started by cluster.py. It alone imports Ray.

Ray ends this process if the head node is lost. The search, in another process, can still save its results.
"""

from __future__ import annotations

import os
import re
import threading
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

import msgspec
import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from autotune_amp.core.errors import InvalidRequestError
from autotune_amp.processes.on_ray.messages import Node, NodeShare, Reply, Request, pack, request_error
from autotune_amp.processes.on_ray.node import NodeActor

_MAX_CHARACTERS = 600
_COLOURS = re.compile("\x1b\\[[0-9;]*m")
_HEAD = "node:__internal_head__"  # a resource that only the head has


class Driver:
    """Server that answers the search's requests by calls to Ray; replies are sent as results arrive."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._sending = threading.Lock()
        self._actors: dict[str, Any] = {}
        self._opening: Any = None

    def serve(self) -> None:
        """Handle requests until the search closes its end."""
        while True:
            try:
                request = msgspec.msgpack.decode(self._connection.recv_bytes(), type=Request)
            except EOFError:
                return
            try:
                getattr(self, f"_{request.do}")(request)
            except Exception as error:
                self._reply(_failed(request.number, error))

    def _connect(self, request: Request) -> None:
        address, working_directory, excludes = msgspec.msgpack.decode(request.body)
        environment: dict[str, Any] = {}
        is_sent = "working_dir" in os.environ.get("RAY_JOB_CONFIG_JSON_ENV_VAR", "")  # by `ray job submit`
        if working_directory is not None and not is_sent:
            environment = {"working_dir": working_directory, "excludes": excludes}
        try:
            ray.init(address=address, log_to_driver=False, logging_level="ERROR", runtime_env=environment)
        except (ConnectionError, RuntimeError, ValueError, TimeoutError, OSError) as error:
            raise InvalidRequestError(
                f"--ray: the cluster at {address!r} cannot be used: {_line(error)}",
                "Start one with `ray start --head`, check it with `ray status`, and pass its HOST:PORT. If the working "
                "directory is too large, name files that are not needed in .rayignore.",
            ) from error
        self._reply(Reply(number=request.number))

    def _nodes(self, request: Request) -> None:
        """List the nodes in a thread: it may wait a minute for the head, which must not delay calls to the nodes."""
        threading.Thread(target=self._list_nodes, args=(request,), daemon=True).start()

    def _list_nodes(self, request: Request) -> None:
        try:
            alive = [node for node in ray.nodes() if node["Alive"]]
        except Exception as error:
            self._reply(_failed(request.number, error))
            return
        nodes = [
            Node(
                node_id=node["NodeID"],
                host=node["NodeManagerHostname"],
                is_head=_HEAD in node["Resources"],
                num_gpus=int(node["Resources"].get("GPU", 0)),
                num_cpus=int(node["Resources"].get("CPU", 0)),
            )
            for node in alive
        ]
        self._reply(Reply(number=request.number, body=pack(nodes)))

    def _open(self, request: Request) -> None:
        """Store the data that the processes on all nodes need."""
        self._opening = ray.put(request.body)
        self._reply(Reply(number=request.number))

    def _start(self, request: Request) -> None:
        """Start an actor on a node. It waits while others use the devices."""
        share, device = msgspec.msgpack.decode(request.body, type=tuple[NodeShare, str])
        scheduling = NodeAffinitySchedulingStrategy(share.node_id, soft=False)
        options = {"num_gpus": share.num_gpus, "num_cpus": share.num_cpus, "scheduling_strategy": scheduling}
        actor = ray.remote(NodeActor).options(**options, max_restarts=0, max_concurrency=2).remote(self._opening)
        self._actors[share.name] = actor
        self._when_done(request.number, actor.describe.remote(device))

    def _call(self, request: Request) -> None:
        """Call a method of an actor."""
        method, arguments = msgspec.msgpack.decode(request.body, type=tuple[str, list[bytes]])
        actor = self._actors.get(str(request.place))
        if actor is None:
            self._reply(Reply(number=request.number, lost="it was ended before"))
            return
        self._when_done(request.number, getattr(actor, method).remote(*arguments))

    def _end(self, request: Request) -> None:
        """Kill an actor together with its processes."""
        actor = self._actors.pop(str(request.place), None)
        if actor is not None:
            ray.kill(actor)
        self._reply(Reply(number=request.number))

    def _when_done(self, number: int, reference: Any) -> None:
        reference.future().add_done_callback(partial(self._done, number))

    def _done(self, number: int, future: Any) -> None:
        error = future.exception()
        self._reply(Reply(number=number, body=future.result() or b"") if error is None else _failed(number, error))

    def _reply(self, reply: Reply) -> None:
        with self._sending:
            self._connection.send_bytes(pack(reply))


def _failed(number: int, error: BaseException) -> Reply:
    if isinstance(error, ray.exceptions.RayTaskError):  # raised by the actor's code, not by Ray
        return Reply(number=number, error=request_error(error.cause or error))
    if isinstance(error, ray.exceptions.RayError):
        return Reply(number=number, lost=_line(error))
    return Reply(number=number, error=request_error(error))


def _line(error: BaseException) -> str:
    """Return an error's message on one line; of a traceback only its last line."""
    lines = _COLOURS.sub("", str(error)).strip().splitlines() or [type(error).__name__]
    kept_lines = lines[-1:] if any("Traceback" in line for line in lines) else lines
    return " ".join(" ".join(kept_lines).split())[:_MAX_CHARACTERS]


def main(file_number: int) -> None:
    """Serve on this socket until the search closes it."""
    Driver(Connection(file_number)).serve()
    ray.shutdown()
