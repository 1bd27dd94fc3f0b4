"""Runs a command with the agent in it, and says what was heard."""

from __future__ import annotations

import json
import os
import queue
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from forked_python import ForkServer

import autotune_amp.command.agent
from autotune_amp.command.listening import Listener
from autotune_amp.command.ranks import RunEvents

INJECTED = Path(autotune_amp.command.agent.__file__).parent / "path"
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]


def run(
    command: list[str], folder: Path, *, server: ForkServer | None = None, fails: bool = False, **settings: Any
) -> RunEvents:
    """Run `command` in `folder` to its end with the agent, whose settings are `settings`.

    With a `server`, the command is a program of this Python and is forked from a process that has imported torch.
    """
    heard = RunEvents()
    with tempfile.TemporaryDirectory() as temporary:
        listener = Listener(f"{temporary}/socket")
        agent = {"socket": f"{temporary}/socket", "folder": temporary, **settings}
        path = os.pathsep.join(filter(None, [str(INJECTED), os.environ.get("PYTHONPATH")]))
        environment = {**os.environ, "AUTOTUNE_AMP_AGENT": json.dumps(agent), "PYTHONPATH": path}
        environment["TMPDIR"] = temporary  # where launchers leave what they wrote
        if server is None:
            done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=200)
        else:
            assert command[0] == sys.executable
            done = server.run(command[1:], cwd=folder, env=environment)
        listener.close()
        while True:
            try:
                heard.add(listener.messages.get_nowait())
            except queue.Empty:
                break
    assert (done.returncode != 0) is fails, done.stderr
    return heard
