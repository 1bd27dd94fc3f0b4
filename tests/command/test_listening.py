"""What a run hears of its processes, whatever they send."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from autotune_amp.command.listening import Listener
from autotune_amp.command.messages import ConnectionClosed, Error


@pytest.mark.parametrize("line", [b'{"event":"hello","python":"\xff"}', b"[" * 100_000, b"3", b"{}", b""])
def test_a_line_that_cannot_be_read_is_said_and_the_others_are_heard(tmp_path: Path, line: bytes) -> None:
    listener = Listener(str(tmp_path / "socket"))
    try:
        for _ in range(2):
            with socket.socket(socket.AF_UNIX) as speaker:
                speaker.connect(str(tmp_path / "socket"))
                speaker.sendall(line + b"\n")
            heard = listener.messages.get(timeout=20)
            assert isinstance(heard, Error)
            assert heard.types == ("MessageError",)
            assert isinstance(listener.messages.get(timeout=20), ConnectionClosed)
    finally:
        listener.close()
