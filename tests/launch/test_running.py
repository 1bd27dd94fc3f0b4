"""Runs of real commands: how they end, and that nothing of them is left."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil
import pytest
from commands import TORCHRUN
from running_commands import RunCommand

from autotune_amp.core.errors import WorkloadError
from autotune_amp.core.outcome import Failure
from autotune_amp.isolation.marks import shared_memory
from autotune_amp.launch.ranks import Heard

GONE_SECONDS = 60.0

# Everything that could stay: handlers, children that left the session, the environment or their parent, a port, shared
# memory. Each process notes its number in `pids`.
CLINGING = """
import atexit, json, multiprocessing, os, pathlib, signal, socket, subprocess, sys, tempfile, time
from multiprocessing.shared_memory import SharedMemory

signal.signal(signal.SIGTERM, signal.SIG_IGN)
signal.signal(signal.SIGINT, lambda *_: pathlib.Path("handled").touch())
signal.signal(signal.SIGHUP, lambda *_: pathlib.Path("handled").touch())
atexit.register(lambda: pathlib.Path("handled").touch())
memory, lock = SharedMemory(create=True, size=100), multiprocessing.get_context("spawn").Lock()
tempfile.mkstemp()
server = socket.create_server(("127.0.0.1", 0))
note = "import os, pathlib; pathlib.Path('pids', str(os.getpid())).touch(); os.execlp('sleep', 'sleep', '1000')"
subprocess.Popen(["env", "-i", sys.executable, "-c", note], start_new_session=True)
subprocess.Popen([sys.executable, "-E", "-c", f"import os; os.fork() and os._exit(0); os.setsid(); {note}"])
subprocess.Popen(["bash", "-c", f'trap "" TERM; "{sys.executable}" -c "{note}"'])
pathlib.Path("pids", str(os.getpid())).touch()
facts = {"port": server.getsockname()[1], "temporary": tempfile.gettempdir()}
pathlib.Path("facts.json").write_text(json.dumps(facts))
try:
    while True:
        time.sleep(1)
finally:
    pathlib.Path("handled").touch()
"""


class Clinging:
    """What `CLINGING` has said of itself in a folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        (folder / "pids").mkdir()
        (folder / "train.py").write_text(CLINGING)
        (folder / "train.sh").write_text(f"{sys.executable} train.py\n")
        self._shared = shared_memory().keys()

    @property
    def pids(self) -> list[int]:
        return [int(path.name) for path in (self._folder / "pids").iterdir()]

    @property
    def is_up(self) -> bool:
        """Whether all that could stay is there; once true, it is for good."""
        if len(self.pids) < 4 or not (self._folder / "facts.json").read_text():
            return False
        self.facts = json.loads((self._folder / "facts.json").read_text())
        assert shared_memory().keys() - self._shared
        assert all(map(psutil.pid_exists, self.pids))
        return True

    def left(self) -> list[str]:
        """What is there of it."""
        found = [f"process {pid}" for pid in self.pids if psutil.pid_exists(pid)]
        found += [self.facts["temporary"]] if Path(self.facts["temporary"]).exists() else []
        found += sorted(shared_memory().keys() - self._shared)
        found += ["a handler ran"] if (self._folder / "handled").exists() else []
        try:
            socket.create_server(("127.0.0.1", self.facts["port"])).close()
        except OSError:
            found.append("the port")
        return found


@pytest.mark.parametrize("command", [[sys.executable, "train.py"], ["bash", "train.sh"]], ids=["python", "shell"])
def test_nothing_is_left_of_what_clings(run_command: RunCommand, tmp_path: Path, command: list[str]) -> None:
    clinging = Clinging(tmp_path)
    ran = run_command(command, is_enough=lambda _: clinging.is_up)
    assert ran.ending == "measured"
    assert clinging.left() == []


def test_nothing_is_left_when_the_parent_is_killed(tmp_path: Path) -> None:
    clinging = Clinging(tmp_path)
    other = tmp_path / "other"
    other.mkdir()
    parent = f"""
import os, time
from pathlib import Path
from autotune_amp.core.job import Deadlines
from autotune_amp.isolation.process import Watcher
from autotune_amp.launch.running import run
class Forks(Watcher):
    def tick(self):
        if Path("holder").exists():
            return
        if holder := os.fork():
            Path("holder").write_text(str(holder))
        else:  # holds open whatever the parent has open
            time.sleep(1000)
run(["bash", "train.sh"], environment=os.environ, agent={{}}, deadlines=Deadlines(whole_seconds=1000.0),
    is_enough=lambda _: False, watcher=Forks(), folders=[Path({str(other)!r})])
"""
    process = subprocess.Popen([sys.executable, "-c", parent], cwd=tmp_path)
    until = time.monotonic() + GONE_SECONDS
    while not clinging.is_up:
        assert time.monotonic() < until
        time.sleep(0.05)
    started = psutil.Process(process.pid).children()
    process.kill()
    process.wait()
    holder = int((tmp_path / "holder").read_text())
    (keeper,) = [one for one in started if one.pid != holder]
    try:
        while (left := clinging.left()) or other.exists() or _is_alive(keeper):
            assert time.monotonic() < until, left
            time.sleep(0.05)
    finally:
        os.kill(holder, signal.SIGKILL)


def _is_alive(process: psutil.Process) -> bool:
    return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
