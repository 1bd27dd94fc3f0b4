"""Connection from a process of the training command to the search (its parent), which receives JSON lines on a Unix
socket. A process that listens exits when the parent's end of the socket is closed.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import select
import socket
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

PARENT_GONE = 113  # exit status if the parent has ended: a number without another meaning
SEND_SECONDS = 0.1  # interval at which a thread sends queued messages; training does not wait for the socket


class Channel:
    """Connection to the parent that is opened by the first message, and opened anew after a fork."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._listens = False
        self._may_train = threading.Event()  # set once the parent has asked to go on
        self._socket: socket.socket | None = None
        self.before_send: Callable[[], Any] = lambda: None  # called by the sending thread before it sends
        self._reset()
        os.register_at_fork(after_in_child=self._reset)

    def _reset(self) -> None:
        # After a fork: as long as the inherited socket is open, the parent cannot see that the forking process ended.
        if self._socket is not None:
            self._socket.close()
        self._socket = None
        self._thread: threading.Thread | None = None
        self._is_ending = False
        self._messages: list[dict[str, Any]] = []
        self._lock = (
            threading.RLock()
        )  # reentrant: a finalizer that runs while this thread sends may send a message too

    def listen(self) -> None:
        """Start a thread that sends waiting messages and receives the parent's requests: ``dump`` asks for the stacks
        of all threads, ``go`` ends `wait_for_go`, and the end of the connection ends this process.
        """
        self._listens = True
        if self._socket is not None:
            self._start_listening(self._socket)

    def end(self) -> None:
        """Stop the sending thread before Python shuts down: a thread that runs during shutdown can crash the
        process.
        """
        self._is_ending = True
        if self._socket is not None and self._thread is not None:
            with contextlib.suppress(OSError):  # the parent is gone
                self._socket.shutdown(socket.SHUT_RD)
            self._thread.join(1.0)

    def wait_for_go(self) -> None:
        """Wait until the parent asks this process to go on. It keeps listening meanwhile."""
        self._may_train.wait()

    def wait_for_end(self) -> None:
        """Wait until the parent ends this process or closes the connection, which ends it too."""
        while True:
            time.sleep(1.0)

    def shield(self, action: Callable[..., Any]) -> Callable[..., Any]:
        """Return `action` wrapped so that it raises nothing into the user's program: its errors are sent to
        the parent.
        """

        @functools.wraps(action)
        def shielded(*args: Any, **kwargs: Any) -> Any:
            try:
                return action(*args, **kwargs)
            except Exception as error:
                self.send_error(error, is_of_agent=True)

        return shielded

    def after_init(self, owner: Any, action: Callable[[Any], None]) -> None:
        """Call `action` with every new object of the class `owner`, after its `__init__`. Errors of `action` are sent
        to the parent (see `shield`).
        """
        original, report_object = owner.__init__, self.shield(action)

        @functools.wraps(original)
        def __init__(self_: Any, *args: Any, **kwargs: Any) -> None:
            original(self_, *args, **kwargs)
            report_object(self_)

        owner.__init__ = __init__

    def send_error(
        self, error: BaseException, free_memory_share: float | None = None, *, is_of_agent: bool = False
    ) -> None:
        """Send an `Error` message for an exception, with its traceback and the rank of this process."""
        import traceback  # imported here, since importing it slows the start of every Python process of the command

        from . import where

        self.send(
            "error",
            types=[kind.__name__ for kind in type(error).__mro__],
            message=str(error)[:4000],
            traceback="".join(traceback.format_exception(type(error), error, error.__traceback__))[-8000:],
            free_memory_share=free_memory_share,
            is_of_agent=is_of_agent,
            **where.rank(),
        )

    def add(self, event: str, **fields: Any) -> None:
        """Queue a message, which is sent within `SEND_SECONDS` or with the next `send`. Its time is now unless `fields`
        has `time`.
        """
        message = {"event": event, "pid": os.getpid(), "time": time.monotonic(), **fields}
        with self._lock:
            self._messages.append(message)

    def send(self, event: str, **fields: Any) -> None:
        """Send a message and all queued messages now."""
        self.add(event, **fields)
        self.flush()

    def flush(self) -> None:
        """Send the queued messages now. Exit this process with `PARENT_GONE` if the parent has closed the socket."""
        with self._lock:
            messages, self._messages = self._messages, []
            if not messages:
                return
            try:
                if self._socket is None:
                    self._socket = self._connect()
                lines = "".join(json.dumps(message, ensure_ascii=False, default=str) + "\n" for message in messages)
                self._socket.sendall(lines.encode(errors="replace"))  # paths may contain bytes that are not UTF-8
            except OSError:
                os._exit(PARENT_GONE)  # without exit handlers, which are code of the trial too

    def _connect(self) -> socket.socket:
        connection = socket.socket(socket.AF_UNIX)
        connection.connect(self._path)
        if self._listens:
            self._start_listening(connection)
        return connection

    def _start_listening(self, connection: socket.socket) -> None:
        self._thread = threading.Thread(target=self._listen, args=(connection,), daemon=True, name="autotune-amp")
        self._thread.start()

    def _listen(self, connection: socket.socket) -> None:
        requests = b""
        poller = select.poll()  # `select.select` refuses descriptors from 1024 on
        poller.register(connection, select.POLLIN)
        while True:
            try:
                if not poller.poll(1000 * SEND_SECONDS):
                    self.before_send()
                    self.flush()
                    continue
                received = connection.recv(4096)
            except OSError:
                received = b""
            if self._is_ending:
                return
            if not received:
                os._exit(PARENT_GONE)
            requests += received
            while b"\n" in requests:
                line, _, requests = requests.partition(b"\n")
                if line == b"dump":
                    self.send("stack", text=_stacks_of_other_threads(), at=_main_thread_files())
                elif line == b"go":
                    self._may_train.set()


def _stacks_of_other_threads() -> str:
    """Return the innermost frames of every thread except this one, as text."""
    import traceback

    names = {thread.ident: thread.name for thread in threading.enumerate()}
    return "".join(
        f"thread {names.get(ident, ident)}:\n{''.join(traceback.format_stack(frame)[-8:])}"
        for ident, frame in sys._current_frames().items()
        if ident != threading.get_ident()
    )[-8000:]


def _main_thread_files() -> list[str]:
    """Return the source files of the main thread's innermost 8 frames, the innermost last."""
    files: list[str] = []
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    while frame is not None and len(files) < 8:
        files.insert(0, frame.f_code.co_filename)
        frame = frame.f_back
    return files
