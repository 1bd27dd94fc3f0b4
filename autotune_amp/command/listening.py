"""Server of the agents' socket: a thread receives the messages of all processes of a run."""

from __future__ import annotations

import contextlib
import queue
import selectors
import socket
import threading
import time

import msgspec

from autotune_amp.command.messages import ConnectionClosed, Error, Message
from autotune_amp.core.documents import decode

_DECODER: msgspec.json.Decoder[Message] = msgspec.json.Decoder(Message)


class Listener:
    """Server of the Unix socket at `path`. `messages` is a queue of the received messages, in order of arrival."""

    def __init__(self, path: str) -> None:
        self.messages: queue.SimpleQueue[Message] = queue.SimpleQueue()
        self._server = socket.socket(socket.AF_UNIX)
        self._server.bind(path)
        self._server.listen(128)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._server, selectors.EVENT_READ)
        self._wake_sender, self._wake_receiver = socket.socketpair()
        self._selector.register(self._wake_receiver, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._listen, daemon=True, name="autotune-amp listener")
        self._thread.start()

    def send_request(self, request: str) -> None:
        """Send a request, such as ``dump``, to all connected processes (see `Channel.listen`)."""
        for key in list(self._selector.get_map().values()):
            if key.data is not None:
                with contextlib.suppress(OSError):
                    key.fileobj.sendall(request.encode() + b"\n")  # type: ignore[union-attr]

    def close(self) -> None:
        """End the thread and close all connections."""
        self._wake_sender.send(b".")
        self._thread.join()
        for key in list(self._selector.get_map().values()):
            key.fileobj.close()  # type: ignore[union-attr]
        self._selector.close()
        self._wake_sender.close()

    def _listen(self) -> None:
        while True:
            for key, _ in self._selector.select():
                if key.fileobj is self._wake_receiver:
                    return
                if key.fileobj is self._server:
                    connection, _ = self._server.accept()
                    self._selector.register(connection, selectors.EVENT_READ, _Connection(connection))
                elif not key.data.read(self.messages):
                    self._selector.unregister(key.fileobj)
                    key.data.connection.close()


def _decoding_error(pid: int, line: bytes, error: Exception) -> Error:
    """Return the `Error` message that replaces a line which cannot be decoded."""
    return Error(
        pid=pid,
        time=time.monotonic(),
        rank=0,
        world=1,
        local_rank=0,
        types=("MessageError",),
        message=f"a message of the agent cannot be read: {error}",
        traceback=line.decode(errors="replace"),
    )


class _Connection:
    """Connection of one process, with the bytes of an incomplete line."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self._pid: int | None = None
        self._partial_line = b""

    def read(self, messages: queue.SimpleQueue[Message]) -> bool:
        """Put the received messages into `messages`; return false once the connection has ended."""
        try:
            chunk = self.connection.recv(1 << 16)
        except OSError:
            chunk = b""
        *lines, self._partial_line = (self._partial_line + chunk).split(b"\n")
        for line in lines:
            try:
                message = decode(line, _DECODER)
            except msgspec.MsgspecError as error:  # later lines are still read
                message = _decoding_error(self._pid or 0, line, error)
            self._pid = message.pid
            messages.put(message)
        if not chunk and self._pid is not None:
            messages.put(ConnectionClosed(pid=self._pid, time=time.monotonic()))
        return bool(chunk)
