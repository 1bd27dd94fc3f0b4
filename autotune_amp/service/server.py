"""Server of the service: its socket, its priority, and how it ends."""

from __future__ import annotations

import os
import platform
import resource
import socket
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

import filelock
import uvicorn

from autotune_amp.core.errors import InvalidRequestError, StudyBusyError
from autotune_amp.service.app import create_app
from autotune_amp.service.gate import Gate, TimedProtocol
from autotune_amp.service.jobs import Queue
from autotune_amp.service.runs import RunStore
from autotune_amp.service.searching import SearchThread
from autotune_amp.service.settings import Settings

_BACKLOG = 2048  # connections that wait to be accepted
_MAX_CONNECTIONS = 4096  # at most half of the file descriptors; further ones are answered with 503
_GOODBYE_SECONDS = 3  # for open answers when the service ends
_LOWEST_PRIORITY = 19


class Service(uvicorn.Server):
    """Service that listens at `url`; at a signal it first has streams of events end, which it would wait for."""

    def __init__(self, config: uvicorn.Config, searches: SearchThread, listener: socket.socket) -> None:
        super().__init__(config)
        self._searches, self._listener = searches, listener
        host, port = listener.getsockname()[:2]
        self.url = f"http://{f'[{host}]' if ':' in host else host}:{port}"

    def serve_forever(self) -> None:
        """Answer requests until Ctrl-C or SIGTERM, then pass the signal on to the handler that was there before."""
        if sys.platform == "linux":  # where this is the priority of this thread and those that it starts
            os.nice(_LOWEST_PRIORITY)
        self.run([self._listener])

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Handle a signal."""
        self._searches.is_stopping = True
        super().handle_exit(sig, frame)


@contextmanager
def open_service(settings: Settings, tokens: Mapping[str, str]) -> Iterator[Service]:
    """Open a service, and end its searches with their best saved when the context ends.

    Raises `InvalidRequestError` if the folder or the address cannot be used, `StudyBusyError` if another service uses
    the folder, `StudyError` if the database cannot be used.
    """
    folder = Path(settings.folder)
    with _locked(folder), _listening(settings) as listener:
        database = settings.database or f"sqlite:///{folder / 'queue.db'}"
        name = settings.name or f"{platform.node()}:{folder}"
        queue = Queue(database, name, settings.max_queued)
        searches = SearchThread(settings, queue)
        app = create_app(searches, RunStore(queue.engine, name))
        gate = Gate(app, tokens, settings.requests_per_minute)
        app.state.num_answers = gate.num_answers
        config = uvicorn.Config(
            gate,
            http=TimedProtocol,
            ws="none",
            loop="asyncio",
            lifespan="off",
            log_level="warning",
            access_log=False,
            server_header=False,
            backlog=_BACKLOG,
            limit_concurrency=_max_connections(),
            timeout_graceful_shutdown=_GOODBYE_SECONDS,
        )
        searches.start()
        try:
            yield Service(config, searches, listener)
        finally:
            searches.stop()
            queue.close()


def _max_connections() -> int:
    """Raise this process' limit of file descriptors where it may; return how many connections leave half of it free."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return _MAX_CONNECTIONS
    wanted = 2 * _MAX_CONNECTIONS if hard == resource.RLIM_INFINITY else min(hard, 2 * _MAX_CONNECTIONS)
    if soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    return min(max(soft, wanted) // 2, _MAX_CONNECTIONS)


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Make the service's folder, which only its user may read, and lock it."""
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        lock = filelock.FileLock(folder / ".lock").acquire(blocking=False)
    except filelock.Timeout as error:
        raise StudyBusyError(f"Another service uses {folder}.", "End that one, or set another folder.") from error
    except OSError as error:
        raise InvalidRequestError(
            f"The service's folder {folder} cannot be used: {error.strerror}.", "Set folder to one that can be written."
        ) from error
    with lock:
        yield


@contextmanager
def _listening(settings: Settings) -> Iterator[socket.socket]:
    """Open the service's socket. Raises `InvalidRequestError` if its address cannot be used."""
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    try:
        listener = socket.create_server((settings.host, settings.port), family=family, backlog=_BACKLOG)
    except OSError as error:
        raise InvalidRequestError(
            f"{settings.host}:{settings.port} cannot be listened on: {error.strerror}.",
            "Set another host or port; port 0 is any free one.",
        ) from error
    with listener:
        yield listener
