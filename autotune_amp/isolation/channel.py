"""The server's end of the two pipes to its parent."""

from __future__ import annotations

import json
import os
from typing import Any

import msgspec


class Channel:
    """Lines of JSON in, lines of JSON out; every line out is one write with a newline before and after it, so that
    the remains of a killed writer's line cannot spoil the next."""

    def __init__(self) -> None:
        self.input = os.dup(0)
        self._output = os.dup(1)
        null = os.open(os.devnull, os.O_RDONLY)
        os.dup2(null, 0)
        os.close(null)
        os.dup2(2, 1)
        self._buffer = b""

    def send(self, message: dict[str, Any]) -> None:
        """Write one message."""
        data = b"\n" + msgspec.json.encode(message) + b"\n"
        while data:
            data = data[os.write(self._output, data) :]

    def read_line(self) -> dict[str, Any] | None:
        """The next message, None at the end of the input."""
        while b"\n" not in self._buffer:
            chunk = os.read(self.input, 1 << 16)
            if not chunk:
                return None
            self._buffer += chunk
        line, _, self._buffer = self._buffer.partition(b"\n")
        message: dict[str, Any] = json.loads(line)
        return message

    def read_exactly(self, num_bytes: int) -> bytes:
        """The raw bytes that follow a message; fewer at the end of the input."""
        parts = bytearray(self._buffer[:num_bytes])
        self._buffer = self._buffer[num_bytes:]
        while len(parts) < num_bytes:
            chunk = os.read(self.input, min(1 << 20, num_bytes - len(parts)))
            if not chunk:
                break
            parts += chunk
        return bytes(parts)
