"""Server of the socket to which the processes of a training command report steps, losses and errors: a thread receives
their messages, one JSON object a line.
"""

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
    """Server of a new Unix socket at `path`, with a thread that runs until `close`.

    `messages` is a queue of the messages received from all processes, in order of arrival. A message that cannot be
    decoded is replaced by an `Error`, and a `ConnectionClosed` follows the last one of a process.
    """

    def __init__(self, path: str) -> None:
        self.messages: queue.SimpleQueue[Message] = queue.SimpleQueue()
        self._server = socket.socket(socket.AF_UNIX)
        self._server.bind(path)
        self._server.listen(128)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._server, selectors.EVENT_READ)
        self._wake_sender, self._wake_receiver = socket.socketpair()  # a byte sent to it ends the thread
        self._selector.register(self._wake_receiver, selectors.EVENT_READ)
        self._connections: set[socket.socket] = set()  # changed by the thread alone
        self._may_train = False
        self._thread = threading.Thread(target=self._listen, daemon=True, name="autotune-amp listener")
        self._thread.start()

    def send_request(self, request: str) -> None:
        """Send a line of text to all connected processes: ``dump`` asks each for the stacks of its threads.

        Processes that have ended are left out.
        """
        for connection in tuple(self._connections):
            _send(connection, request)

    def send_go(self) -> None:
        """Let all processes that are held go on, and those that connect later."""
        self._may_train = True
        self.send_request("go")

    def close(self) -> None:
        """End the thread and close all connections."""
        self._wake_sender.send(b".")
        self._thread.join()
        for opened in (*self._connections, self._server, self._wake_receiver, self._wake_sender):
            opened.close()
        self._selector.close()

    def _listen(self) -> None:
        """Accept connections and read their messages until `close` wakes this thread."""
        while True:
            for key, _ in self._selector.select():
                if key.fileobj is self._wake_receiver:
                    return
                if key.fileobj is self._server:
                    connection, _ = self._server.accept()
                    self._connections.add(connection)
                    if self._may_train:
                        _send(connection, "go")
                    self._selector.register(connection, selectors.EVENT_READ, _Connection(connection))
                elif not key.data.read(self.messages):
                    self._selector.unregister(key.fileobj)
                    self._connections.remove(key.data.connection)
                    key.data.connection.close()


def _send(connection: socket.socket, request: str) -> None:
    """Send a line of text to a process, unless it has ended."""
    with contextlib.suppress(OSError):
        connection.sendall(request.encode() + b"\n")


def _decoding_error(pid: int, line: bytes, error: Exception) -> Error:
    """Return the `Error` message that replaces a line which cannot be decoded. Its rank is unknown and given as 0."""
    return Error(
        pid=pid,
        time=time.monotonic(),
        rank=0,
        world=1,
        types=("MessageError",),
        message=f"a message of the agent cannot be read: {error}",
        traceback=line.decode(errors="replace"),
    )


class _Connection:
    """Connection of one process, with its process id once known and the bytes of an incomplete line."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self._pid: int | None = None
        self._partial_line = b""

    def read(self, messages: queue.SimpleQueue[Message]) -> bool:
        """Receive once and put the complete lines into `messages`, decoded. Return false once the connection has ended.

        A `ConnectionClosed` is added then, if the process has sent any message.
        """
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
