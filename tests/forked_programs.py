"""Trial processes and commands that are run as a search runs them, but for the start of Python: keepers, and what they
start of this Python and torch, are forks of a process that has imported torch.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from forked_python import ForkedProcess, ForkServer

from autotune_amp.processes import program

PROGRAM = str(Path(__file__).with_name("forked_keeper.py"))


@contextlib.contextmanager
def forked_programs(server: ForkServer) -> Iterator[None]:
    """Fork the keepers that are started meanwhile, and programs of this Python that name torch."""

    def popen(command: Sequence[str], *, env: Mapping[str, str], **streams: Any) -> ForkedProcess:
        _, _, _, *arguments = command  # Python, its option, the keeper's file
        del streams["start_new_session"]  # each fork has one
        own = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        return server.popen([PROGRAM, json.dumps(dict(env)), *arguments], env=own, **streams)

    stand_in = SimpleNamespace(**{**vars(subprocess), "Popen": popen})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(program, "subprocess", stand_in)
        yield
