"""Server of the service: its socket, its priority, and how it ends."""

from __future__ import annotations

import os
import platform
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import filelock

from autotune_amp.core.errors import InvalidRequestError, StudyBusyError
from autotune_amp.service.settings import Settings

_BACKLOG = 2048  # connections that wait to be accepted
_MAX_CONNECTIONS = 4096  # further ones are answered with 503
_GOODBYE_SECONDS = 3  # for open answers when the service ends
_LOWEST_PRIORITY = 19


class Service:
    """Running service: `url` is its address, `serve_forever` answers until a signal."""

    def __init__(self, url: str, server: Any, listener: socket.socket) -> None:
        self.url, self._server, self._listener = url, server, listener

    def serve_forever(self) -> None:
        """Answer requests until Ctrl-C or SIGTERM, which raise `KeyboardInterrupt` or end the process."""
        if hasattr(os, "nice"):
            # On Linux this is the priority of this thread and those that it starts, not of the searches' thread.
            os.nice(_LOWEST_PRIORITY)
        self._server.run([self._listener])


@contextmanager
def open_service(settings: Settings, tokens: dict[str, str]) -> Iterator[Service]:
    """Open a service, and end its searches with their best saved when the context ends.

    Raises `InvalidRequestError` if FastAPI or uvicorn is not installed or the address cannot be used, `StudyBusyError`
    if another service uses the folder, `StudyError` if the database cannot be used.
    """
    try:
        import uvicorn

        from autotune_amp.service.app import create_app
        from autotune_amp.service.gate import Gate, TimedProtocol
        from autotune_amp.service.jobs import Queue
        from autotune_amp.service.searching import SearchThread
    except ModuleNotFoundError as error:
        raise InvalidRequestError(
            f"A service needs the package {error.name}, which is not installed.",
            "Run `pip install 'autotune_amp[serve]'`.",
        ) from error

    class Server(uvicorn.Server):
        """Server that has streams of events end at a signal, before it waits for them."""

        def handle_exit(self, sig: int, frame: FrameType | None) -> None:
            searches.is_stopping = True
            super().handle_exit(sig, frame)

    folder = Path(settings.folder)
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        lock = filelock.FileLock(folder / ".lock")
        lock.acquire(blocking=False)
    except filelock.Timeout as error:
        raise StudyBusyError(f"Another service uses {folder}.", "End that one, or set another folder.") from error
    except OSError as error:
        raise InvalidRequestError(
            f"The service's folder {folder} cannot be used: {error.strerror}.", "Set folder to one that can be written."
        ) from error
    with lock, listening(settings) as listener:
        database = settings.database or f"sqlite:///{folder / 'queue.db'}"
        queue = Queue(database, f"{platform.node()}:{folder}", settings.max_queued)
        searches = SearchThread(settings, queue)
        app = create_app(searches)
        gate = Gate(app, tokens, settings.requests_per_minute)
        app.state.num_answers = gate.num_answers
        server = Server(
            uvicorn.Config(
                gate,
                http=TimedProtocol,
                ws="none",
                loop="asyncio",
                lifespan="off",
                log_level="warning",
                access_log=False,
                server_header=False,
                backlog=_BACKLOG,
                limit_concurrency=_MAX_CONNECTIONS,
                timeout_graceful_shutdown=_GOODBYE_SECONDS,
            )
        )
        host, port = listener.getsockname()[:2]
        searches.start()
        try:
            yield Service(f"http://{f'[{host}]' if ':' in host else host}:{port}", server, listener)
        finally:
            searches.stop()
            queue.close()


@contextmanager
def listening(settings: Settings) -> Iterator[socket.socket]:
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
