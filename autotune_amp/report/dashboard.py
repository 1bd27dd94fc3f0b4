"""Optuna's own dashboard on a study, served to this machine alone."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from socketserver import ThreadingMixIn
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

from autotune_amp.core.errors import InvalidRequestError
from autotune_amp.search.storage.study import connected

_HOST = "127.0.0.1"  # it asks nobody for a password


class DashboardServer(ThreadingMixIn, WSGIServer):
    """Answers a browser's requests side by side, and waits for none when it ends."""

    daemon_threads = True

    @property
    def url(self) -> str:
        """Where a browser finds it."""
        return f"http://{_HOST}:{self.server_port}/dashboard/"


class _Handler(WSGIRequestHandler):
    def log_message(self, *_: object) -> None:
        """A request is no news."""


@contextmanager
def serving(storage: str | Path, port: int) -> Iterator[DashboardServer]:
    """A server that listens: `storage` is an Optuna storage URL or a study's own file, port 0 any that is free.

    Raises `InvalidRequestError` where optuna-dashboard is not installed or the port is taken, `StudyError` where the
    storage cannot be used.
    """
    try:
        from optuna_dashboard import wsgi
    except ModuleNotFoundError as error:
        raise InvalidRequestError(
            f"The dashboard needs the package {error.name}, which is not installed.",
            "Run `pip install 'autotune_amp[dashboard]'`.",
        ) from error
    with connected(storage) as database:
        try:
            server = make_server(_HOST, port, wsgi(database), DashboardServer, _Handler)
        except OSError as error:
            raise InvalidRequestError(
                f"Port {port} cannot be used: {error.strerror}.", "Give another with --port; 0 is any free one."
            ) from error
        with server:
            yield server


def has_display() -> bool:
    """Whether a browser would open a window: in a terminal alone it would take the terminal."""
    return sys.platform in ("darwin", "win32") or bool({"DISPLAY", "WAYLAND_DISPLAY"} & set(os.environ))
