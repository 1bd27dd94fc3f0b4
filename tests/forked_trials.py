"""Trial processes that are forked from the tests' fork server, and else as they are."""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from forked_python import ForkedProcess, ForkServer

from autotune_amp.isolation import process


@contextlib.contextmanager
def forked_trials(server: ForkServer) -> Iterator[None]:
    """Fork the trial processes that are started meanwhile."""

    def popen(command: Sequence[str], *, env: Mapping[str, str], **streams: Any) -> ForkedProcess:
        # A trial process ends when its parent does, and its parent is the server.
        arguments = [str(server.pid) if argument == str(os.getpid()) else argument for argument in command[1:]]
        del streams["start_new_session"]  # each fork has one
        return server.popen(arguments, env=env, **streams)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(process, "subprocess", SimpleNamespace(Popen=popen, PIPE=subprocess.PIPE))
        yield
