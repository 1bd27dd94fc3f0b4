"""Messages to the parent: lines of JSON on its socket. A process whose parent is gone ends."""

from __future__ import annotations

import json
import os
import select
import socket
import sys
import threading
import time
import traceback
from typing import Any

PARENT_GONE = 113  # exit status
SEND_SECONDS = 0.02  # messages wait for one another so long
_LISTEN_SECONDS = 0.1


class Channel:
    """Connected by the first message that is sent, anew after a fork.

    What the parent asks is ``dump``: where every thread is.
    """

    def __init__(self, path: str) -> None:
        self._path = path
        self._reset()
        os.register_at_fork(after_in_child=self._reset)

    def _reset(self) -> None:
        self._socket: socket.socket | None = None
        self._messages: list[dict[str, Any]] = []
        self._lock = threading.RLock()  # a file's finalizer may speak of it while we do
        self._sent_at = 0.0

    @property
    def is_due(self) -> bool:
        """Whether what waits has waited long enough."""
        return time.monotonic() - self._sent_at > SEND_SECONDS

    def add(self, event: str, **fields: Any) -> None:
        """Have a message sent with the next one; its time is now unless it is given."""
        message = {"event": event, "pid": os.getpid(), "time": time.monotonic(), **fields}
        with self._lock:
            self._messages.append(message)

    def send(self, event: str, **fields: Any) -> None:
        """Send a message, and those that wait."""
        self.add(event, **fields)
        self.flush()

    def flush(self) -> None:
        """Send what waits."""
        with self._lock:
            messages, self._messages = self._messages, []
            if not messages:
                return
            self._sent_at = time.monotonic()
            try:
                if self._socket is None:
                    self._socket = self._connected()
                self._socket.sendall("".join(json.dumps(message) + "\n" for message in messages).encode())
            except OSError:
                os._exit(PARENT_GONE)  # nothing of a trial may run on, its handlers at exit neither

    def _connected(self) -> socket.socket:
        connection = socket.socket(socket.AF_UNIX)
        connection.connect(self._path)
        threading.Thread(target=self._listen, args=(connection,), daemon=True, name="autotune-amp").start()
        return connection

    def _listen(self, connection: socket.socket) -> None:
        asked = b""
        while True:
            try:
                if not select.select([connection], [], [], _LISTEN_SECONDS)[0]:
                    self.flush()  # of a program that hangs, too, all that it did before is heard
                    continue
                heard = connection.recv(4096)
            except OSError:
                heard = b""
            if not heard:
                os._exit(PARENT_GONE)
            asked += heard
            while b"\n" in asked:
                line, _, asked = asked.partition(b"\n")
                if line == b"dump":
                    self.send("stack", text=_stacks())


def _stacks() -> str:
    """Where every thread but this one is, the innermost frames of each."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    return "".join(
        f"thread {names.get(ident, ident)}:\n{''.join(traceback.format_stack(frame)[-8:])}"
        for ident, frame in sys._current_frames().items()
        if ident != threading.get_ident()
    )[-8000:]
