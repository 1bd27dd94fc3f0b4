"""Local server of Optuna's dashboard for a study."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from socketserver import ThreadingMixIn
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

from autotune_amp.core.errors import InvalidRequestError
from autotune_amp.search.storage.database import open_storage

_HOST = "127.0.0.1"  # the dashboard has no password, so only this machine may connect


class DashboardServer(ThreadingMixIn, WSGIServer):
    """Server that answers requests concurrently, and does not wait for them when it closes."""

    daemon_threads = True

    @property
    def url(self) -> str:
        """Return the address of the dashboard for a browser."""
        return f"http://{_HOST}:{self.server_port}/dashboard/"


class _Handler(WSGIRequestHandler):
    def log_message(self, *_: object) -> None:
        """Log nothing: the terminal shows no requests."""


@contextmanager
def open_dashboard(storage: str | Path, port: int) -> Iterator[DashboardServer]:
    """Start a server that listens on `port` (0: any free one), and close it when the context ends.

    `storage` is an Optuna storage URL or a study's own file. Raises `InvalidRequestError` if optuna-dashboard is not
    installed or the port is in use, `StudyError` if the storage cannot be used.
    """
    try:
        from optuna_dashboard import wsgi
    except ModuleNotFoundError as error:
        raise InvalidRequestError(
            f"The dashboard needs the package {error.name}, which is not installed.",
            "Run `pip install 'autotune_amp[dashboard]'`.",
        ) from error
    with open_storage(storage) as database:
        try:
            server = make_server(_HOST, port, wsgi(database), DashboardServer, _Handler)
        except OSError as error:
            raise InvalidRequestError(
                f"Port {port} cannot be used: {error.strerror}.", "Choose another with --port; 0 is any free one."
            ) from error
        with server:
            yield server


def has_display() -> bool:
    """Whether a browser would open a window. Without a display, a text browser would take over the terminal."""
    return sys.platform == "darwin" or bool({"DISPLAY", "WAYLAND_DISPLAY"} & set(os.environ))
