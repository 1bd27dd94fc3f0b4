"""Runs of real commands: how they end, and that nothing of them is left."""

from __future__ import annotations

import errno
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from unittest.mock import Mock

import psutil
import pytest
from commands import TORCHRUN
from forked_python import ForkServer, forked_programs
from running_commands import run_command

from autotune_amp.command import running, verdict
from autotune_amp.command.messages import Torch
from autotune_amp.command.rank_steps import LIMITS_OF_WARMUP_STEPS
from autotune_amp.command.ranks import RunEvents
from autotune_amp.core.errors import RunnerError, WorkloadError
from autotune_amp.core.job import Deadlines
from autotune_amp.core.outcome import Failure
from autotune_amp.processes.process import Watcher
from autotune_amp.processes.process_tree import shared_memory

GONE_SECONDS = 60.0


@pytest.fixture(autouse=True)
def _in_its_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


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
shared = [memory.name, "sem." + lock._semlock.name.lstrip("/")]
facts = {"port": server.getsockname()[1], "temporary": tempfile.gettempdir(), "shared": shared}
pathlib.Path("facts.json").write_text(json.dumps(facts))
try:
    while True:
        time.sleep(1)
finally:
    pathlib.Path("handled").touch()
"""


def of_python() -> list[str]:
    """Names of shared memory, without that of services for other tests, such as PostgreSQL, which stays."""
    return [name for name in shared_memory() if name.startswith(("torch_", "sem.", "psm_"))]


def lasting(left: Callable[[], list[str]]) -> list[str]:
    """What is left for good: shared memory of other tests, which run at the same time, goes by itself."""
    until = time.monotonic() + 20
    while (found := left()) and time.monotonic() < until:
        time.sleep(0.1)
    return found


class Clinging:
    """What `CLINGING` has said of itself in a folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        (folder / "pids").mkdir()
        (folder / "train.py").write_text(CLINGING)
        (folder / "train.sh").write_text(f"{sys.executable} train.py\n")

    @property
    def pids(self) -> list[int]:
        return [int(path.name) for path in (self._folder / "pids").iterdir()]

    @property
    def is_up(self) -> bool:
        """Whether all that could stay is there; once true, it is for good."""
        facts = self._folder / "facts.json"
        if len(self.pids) < 4 or not facts.exists() or not facts.read_text():
            return False
        self.facts = json.loads((self._folder / "facts.json").read_text())
        assert shared_memory().keys() >= set(self.facts["shared"])
        assert all(map(psutil.pid_exists, self.pids))
        return True

    def left(self) -> list[str]:
        """What is there of it."""
        found = [f"process {pid}" for pid in self.pids if psutil.pid_exists(pid)]
        found += [self.facts["temporary"]] if Path(self.facts["temporary"]).exists() else []
        found += sorted(shared_memory().keys() & set(self.facts["shared"]))
        found += ["a handler ran"] if (self._folder / "handled").exists() else []
        try:
            socket.create_server(("127.0.0.1", self.facts["port"])).close()
        except OSError:
            found.append("the port")
        return found


@pytest.mark.parametrize("command", [[sys.executable, "train.py"], ["bash", "train.sh"]], ids=["python", "shell"])
def test_nothing_is_left_of_what_clings(tmp_path: Path, command: list[str]) -> None:
    clinging = Clinging(tmp_path)
    ran = run_command(command, is_enough=lambda _: clinging.is_up)
    assert ran.verdict == "measured"
    assert lasting(clinging.left) == []


def test_nothing_is_left_when_the_parent_is_killed(tmp_path: Path) -> None:
    clinging = Clinging(tmp_path)
    other = tmp_path / "other"
    other.mkdir()
    parent = f"""
import os, time
from pathlib import Path
from autotune_amp.core.job import Deadlines
from autotune_amp.processes.process import Watcher
from autotune_amp.command.running import CommandRun
class Forks(Watcher):
    def tick(self):
        if Path("holder").exists():
            return
        if holder := os.fork():
            Path("holder").write_text(str(holder))
        else:  # holds open whatever the parent has open
            time.sleep(1000)
started = CommandRun(["bash", "train.sh"], environment=os.environ, agent={{}}, output=Path({str(other / "agent")!r}),
                     memory=Path("made.json"), aside=Path("aside").absolute())
started.measure(Deadlines(whole_seconds=1000.0), lambda _: False, Forks())
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
    assert (tmp_path / "aside/facts.json").exists()
    assert not (tmp_path / "facts.json").exists()


@pytest.mark.parametrize("moment", ["subprocess.Popen", "program.Program.__init__", "program.Program.start"])
@pytest.mark.parametrize("what", ["run", "check"])
def test_a_search_that_is_killed_where_a_run_begins_leaves_no_folder(tmp_path: Path, moment: str, what: str) -> None:
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    (tmp_path / "train.py").write_text("open('was started', 'w')\n")
    search = f"""
import os, signal, subprocess, sys
from autotune_amp.command.command import Command, RunRequest
from autotune_amp.core.job import Deadlines
from autotune_amp.core.command_template import CommandTemplate
from autotune_amp.core.setting import Setting
from autotune_amp.processes import program
from autotune_amp.processes.process import Watcher
original = {moment}
def killed(*args, **named):
    if {moment!r} == "program.Program.__init__":
        original(*args, **named)
    os.kill(os.getpid(), signal.SIGKILL)
{moment} = killed
if {what!r} == "check":
    program.temporary_folder().__enter__()
line = CommandTemplate.of([sys.executable, "train.py", "{{trial_dir}}"])
request = RunRequest.of(Setting(precision="fp32", batch_size=1))
Command(line).run(request, Deadlines(), lambda _: False, Watcher())
"""
    environment = {**os.environ, "TMPDIR": str(temporary)}
    done = subprocess.run([sys.executable, "-c", search], cwd=tmp_path, env=environment, check=False)
    assert done.returncode == -signal.SIGKILL
    assert lasting(lambda: [path.name for path in temporary.iterdir()]) == []
    assert not (tmp_path / "was started").exists()


def _is_alive(process: psutil.Process) -> bool:
    return process.is_running() and process.status() != psutil.STATUS_ZOMBIE


LOOP = """
import sys, torch
from torch import nn

def train():
    model = nn.Linear(8, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    data = torch.utils.data.TensorDataset(torch.randn(1024, 8))
    {before}
    while True:
        for (x,) in torch.utils.data.DataLoader(data, batch_size=8, num_workers=2, multiprocessing_context={context!r}):
            optimizer.zero_grad()
            model(x).sum().backward()
            optimizer.step()

if __name__ == "__main__":
    train()
"""


@pytest.mark.slow
@pytest.mark.parametrize("context", ["fork", "spawn"])
def test_nothing_is_left_of_ranks_and_loader_workers(tmp_path: Path, context: str) -> None:
    before = "torch.distributed.init_process_group('gloo'); torch.multiprocessing.set_sharing_strategy('file_system')"
    (tmp_path / "train.py").write_text(LOOP.format(before=before, context=context))
    shared, temporary = set(of_python()), set(Path(tempfile.gettempdir()).iterdir())
    pids: set[int] = set()

    def is_enough(heard: RunEvents) -> bool:
        (keeper,) = (one for one in psutil.Process().children() if "keeper.py" in " ".join(one.cmdline()))
        pids.update(one.pid for one in keeper.children(recursive=True))
        return heard.num_steps >= 8

    ran = run_command([*TORCHRUN, "train.py"], is_enough=is_enough)
    assert ran.verdict == "measured", ran.state.printed
    assert len(pids) >= 7, "a launcher, two ranks, two workers of each"
    assert not any(map(psutil.pid_exists, pids))
    assert not lasting(lambda: sorted(set(of_python()) - shared))
    left = set(Path(tempfile.gettempdir()).iterdir()) - temporary
    assert not [path for path in left if re.match("amp-|autotune", path.name)]
    assert ran.kept == ()


def test_a_python_that_is_not_guarded_is_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verdict, "UNOBSERVED_SECONDS", 0.5)
    (tmp_path / "train.py").write_text("import time; time.sleep(1000)\n")
    ending = run_command([sys.executable, "-E", "train.py"], deadlines=Deadlines()).verdict
    assert isinstance(ending, Failure)
    assert ending.kind == "workload_error"
    assert "-E" in ending.message


def test_a_signal_that_was_dropped_ends_the_wait_for_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("autotune_amp.command.running.heed", Mock(side_effect=[None, None, KeyboardInterrupt]))
    (tmp_path / "train.py").write_text("import os, time\nopen(f'{os.getpid()}.pid', 'w')\ntime.sleep(1000)\n")
    with pytest.raises(KeyboardInterrupt):
        run_command([sys.executable, "train.py"])
    assert [path for path in tmp_path.glob("*.pid") if psutil.pid_exists(int(path.stem))] == []


def test_a_settings_file_is_written_in_utf_8_whatever_the_locale(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_text", Mock(side_effect=UnicodeEncodeError("ascii", "é", 0, 1, "no")))
        completed = run_command(
            [sys.executable, "-c", "print(open('c.yaml', 'rb').read())"], files={str(tmp_path / "c.yaml"): "é"}
        )
    assert completed.state.printed == "b'\\xc3\\xa9'\n"


def test_it_trains_and_tells(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(LOOP.format(before="", context="fork"))
    watcher = Mock(spec=Watcher)
    ran = run_command(
        [sys.executable, "train.py"], is_enough=lambda events: events.num_measured_steps >= 4, watcher=watcher
    )
    assert ran.verdict == "measured"
    assert ran.events.num_steps >= 4 + LIMITS_OF_WARMUP_STEPS[0]
    assert ran.state.status is None
    told = [call.args[0] for call in watcher.step.call_args_list]
    assert told == sorted(told)
    assert told[-1] == ran.events.num_measured_steps < ran.events.num_steps


@pytest.mark.parametrize("temporary", ["short", "a" * 90])
def test_where_temporary_files_are_far_down_its_sockets_still_open(
    tmp_path: Path, fork_server: ForkServer, monkeypatch: pytest.MonkeyPatch, temporary: str
) -> None:
    (tmp_path / temporary).mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / temporary))
    (tmp_path / "train.py").write_text(
        "import multiprocessing, torch\n"
        "if __name__ == '__main__':\n"
        "    print('went', multiprocessing.Manager().list([1]))\n"
    )
    with forked_programs(fork_server):
        ran = run_command([sys.executable, "train.py"])
    assert ran.events.of(Torch)
    assert "went" in ran.state.printed


@pytest.mark.parametrize(
    ("script", "kind", "said"),
    [
        ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", "crash", ["SIGSEGV"]),
        ("import sys; sys.exit(3)", "crash", ["status 3"]),
        ("import no_such_module", "crash", ["status 1", "ModuleNotFoundError", "no_such_module", "train.py"]),
        ("import argparse; argparse.ArgumentParser().parse_args(['--bs'])", "crash", ["status 2", "--bs"]),
        ("print(input('continue?'))", "crash", ["EOFError", "argument"]),
        ("import torch; input('continue?')", "workload_error", ["EOFError", "argument", "train.py"]),
        ("import torch\ndef build(): torch.ones(2) @ torch.ones(3)\nbuild()", "workload_error", ["in build", "size"]),
        (
            "import socket\na = socket.create_server(('127.0.0.1', 0))\nsocket.create_server(a.getsockname())",
            "crash",
            ["{port}"],
        ),
        (
            "import torch.distributed as d\na = d.TCPStore('127.0.0.1', 0, is_master=True)\n"
            "d.TCPStore('127.0.0.1', a.port, is_master=True)",
            "workload_error",
            ["{port}"],
        ),
    ],
)
def test_how_it_failed_and_what_to_do(
    tmp_path: Path, fork_server: ForkServer, script: str, kind: str, said: list[str]
) -> None:
    (tmp_path / "train.py").write_text(script + "\n")
    with forked_programs(fork_server):
        ending = run_command([sys.executable, "train.py"]).verdict
    assert isinstance(ending, Failure)
    assert ending.kind == kind
    assert all(word in f"{ending.message}\n{ending.details}" for word in said), ending


@pytest.mark.parametrize(
    ("command", "said"),
    [
        (["no-such-program", "train.py"], ["no-such-program", "bash -c"]),
        (["./train.sh"], ["./train.sh", "`bash ./train.sh"]),
        (["CUDA_VISIBLE_DEVICES=0", "python", "train.py"], ["`env CUDA_VISIBLE_DEVICES=0"]),
    ],
)
def test_what_cannot_be_started(tmp_path: Path, command: list[str], said: list[str]) -> None:
    (tmp_path / "train.sh").write_text("true\n")
    with pytest.raises(WorkloadError) as refused:
        run_command(command)
    assert all(word in f"{refused.value.message} {refused.value.next_step}" for word in said)
    assert not [one for one in psutil.Process().children() if "keeper.py" in " ".join(one.cmdline())]


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EACCES])
def test_a_full_disk_is_an_error_that_names_its_folder_and_a_way_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    failing = Mock(side_effect=OSError(number, os.strerror(number)))
    monkeypatch.setattr("autotune_amp.processes.program.Program.start", failing)
    with pytest.raises(RunnerError, match=os.strerror(number)) as raised:
        run_command([sys.executable, "-c", ""], memory=tmp_path / "made.json", aside=tmp_path / "aside")
    assert tempfile.gettempdir() in raised.value.message
    assert str(tmp_path) in raised.value.message
    assert ("space" in raised.value.next_step) is (number != errno.EACCES)
    assert "TMPDIR" in raised.value.next_step
    assert list(tmp_path.iterdir()) == [], "the list of what it creates is gone"


def test_memory_is_the_resident_one_where_the_shares_of_pages_may_not_be_read() -> None:
    process = Mock(memory_full_info=Mock(side_effect=psutil.AccessDenied), memory_info=lambda: Mock(rss=1000))
    assert running._proportional_bytes(process) == 1000
