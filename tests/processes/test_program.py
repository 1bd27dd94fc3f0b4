"""What is left of a process under a keeper, whose search was killed or has ended: nothing, however it left."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest.mock import Mock

import psutil
import pytest
from conftest import is_gone

from autotune_amp.core.errors import RunnerError
from autotune_amp.processes.local import LocalBackend, Payload
from autotune_amp.processes.process import Process, Watcher
from autotune_amp.processes.program import Program, new_folder, temporary_folder

pytestmark = pytest.mark.usefixtures("nothing_left_at_once")
GONE_SECONDS = 20.0
START_SECONDS = 120.0  # two Pythons, one of which imports torch
SEARCH = """
import sys
from autotune_amp.processes.local import LocalBackend, Payload
from autotune_amp.processes.process import Watcher
LocalBackend(Payload(target="train:workload", path=tuple(sys.path)), {isolation!r}, Watcher()).load(1000)
"""
SLOW = "import os, pathlib, time; pathlib.Path({file!r}).write_text(str(os.getpid())); time.sleep(1000)\n"
# Of a session and an environment of its own: neither a group nor a mark leads to it.
ESCAPED = """
import pathlib, subprocess, tempfile
tempfile.mkdtemp()
sleeper = subprocess.Popen(["/bin/sleep", "1000"], start_new_session=True, env={{}})
pathlib.Path({file!r}).write_text(str(sleeper.pid))
"""


def eventually(is_so: Callable[[], object], what: str, seconds: float = GONE_SECONDS) -> None:
    until = time.monotonic() + seconds
    while not is_so():
        assert time.monotonic() < until, what
        time.sleep(0.05)


def number_in(file: Path) -> int:
    eventually(lambda: file.exists() and file.read_text(), "it was started", START_SECONDS)
    return int(file.read_text())


@pytest.mark.parametrize("isolation", ["forked", "kept"])
@pytest.mark.parametrize("slow", ["torch", "train"])
def test_a_search_that_is_killed_leaves_nothing_of_a_process_that_imports(
    tmp_path: Path, isolation: str, slow: str
) -> None:
    """Before the server has said a word, and in the workload's own code."""
    started, escaped = tmp_path / "started", tmp_path / "escaped"
    text = ESCAPED.format(file=str(escaped)) + SLOW.format(file=str(started))
    (tmp_path / f"{slow}.py").write_text(text)
    search = subprocess.Popen(
        [sys.executable, "-c", SEARCH.format(isolation=isolation)],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
    )
    try:
        importing, sleeper = number_in(started), number_in(escaped)
        folder = Path(psutil.Process(importing).environ()["TMPDIR"])
        assert folder.is_dir()
    finally:
        search.kill()
        search.wait()
    eventually(lambda: is_gone(importing) and is_gone(sleeper), "they went on")
    eventually(lambda: not folder.exists(), "its temporary files are there")


@pytest.mark.parametrize("isolation", ["forked", "kept"])
def test_nothing_that_the_workloads_import_started_outlives_the_search(tmp_path: Path, isolation: str) -> None:
    escaped = tmp_path / "escaped"
    (tmp_path / "train.py").write_text(ESCAPED.format(file=str(escaped)) + "def workload(): ...\n")
    payload = Payload(target="train:workload", path=(str(tmp_path), *sys.path))
    with LocalBackend(payload, isolation, Watcher()) as backend:  # type: ignore[arg-type]
        backend.load(100)
        sleeper = number_in(escaped)
        assert not is_gone(sleeper)
    assert is_gone(sleeper)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP, signal.SIGTERM])
def test_a_signal_that_ends_every_process_of_a_job_leaves_the_keeper_its_work(tmp_path: Path, number: int) -> None:
    escaped = tmp_path / "escaped"
    text = ESCAPED.format(file=str(escaped)) + "import time; time.sleep(1000)"
    null = subprocess.DEVNULL
    folder = new_folder()
    program = Program([sys.executable, "-c", text], os.environ, folder, stdin=null, stdout=null, stderr=null)
    program.start()
    sleeper = number_in(escaped)
    program.popen.send_signal(number)
    program.close()
    assert is_gone(sleeper)
    assert not folder.exists()


def test_a_program_starts_where_it_is_told_to(tmp_path: Path) -> None:
    text, null = "import os; assert os.path.samefile('.', os.environ['HERE'])", subprocess.DEVNULL
    environment = {**os.environ, "HERE": str(tmp_path)}
    command = [sys.executable, "-c", text]
    program = Program(
        command, environment, new_folder(), working_directory=tmp_path, stdin=null, stdout=null, stderr=null
    )
    program.start()
    assert program.wait(START_SECONDS) == 0
    program.close()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP, signal.SIGTERM])
def test_a_program_itself_hears_such_a_signal(number: int) -> None:
    text, null = f"import os; os.kill(os.getpid(), {number}); import time; time.sleep(1000)", subprocess.DEVNULL
    program = Program([sys.executable, "-c", text], os.environ, new_folder(), stdin=null, stdout=null, stderr=null)
    program.start()
    try:
        assert program.wait(GONE_SECONDS) == -number
    finally:
        program.close()


@pytest.fixture
def program(tmp_path: Path) -> Iterator[Program]:
    """A program that has started another one, whose process id is in the file `child`, and sleeps."""
    child = f"subprocess.Popen(['sleep', '1000']).pid, file=open({str(tmp_path / 'child')!r}, 'w')"
    null = subprocess.DEVNULL
    arguments = [sys.executable, "-c", f"import subprocess, time; print({child}); time.sleep(1000)"]
    started = Program(arguments, os.environ, tmp_path / "folder", stdin=null, stdout=null, stderr=null)
    started.start()
    yield started
    if started.popen.returncode is None:
        started.close()


def test_many_open_files_and_closed_standard_streams_do_not_matter() -> None:
    """In a process of its own: descriptors from 1,024 on, and 0 to 2 free for what is opened next."""
    script = f"""
import os, resource, subprocess, sys
from autotune_amp.processes.program import Program, new_folder
most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
resource.setrlimit(resource.RLIMIT_NOFILE, (most if most == resource.RLIM_INFINITY else min(most, 4096), most))
said = os.dup(1)

def run():
    null = subprocess.DEVNULL
    program = Program([sys.executable, "-c", "exit(3)"], os.environ, new_folder(), stdin=null, stdout=null, stderr=null)
    program.start()
    os.write(said, str(program.wait({GONE_SECONDS})).encode())
    program.close()

for number in range(3):
    os.close(number)
run()
opened = [os.open("/dev/null", os.O_RDONLY) for _ in range(1100)]
run()
"""
    done = subprocess.run([sys.executable, "-c", script], stdout=subprocess.PIPE, check=False, timeout=START_SECONDS)
    assert done.stdout == b"33"


def test_a_parent_that_has_ended_it_clears_up_by_itself(tmp_path: Path) -> None:
    null, called = subprocess.DEVNULL, tmp_path / "called"
    program = Program(
        ["true"],
        os.environ,
        tmp_path / "folder",
        folders=[tmp_path / "other"],
        when_orphaned=["os", "mkdir", str(called)],
        stdin=null,
        stdout=null,
        stderr=null,
    )
    program.start()
    program.end()
    program._connection.close()
    assert program.popen.wait(GONE_SECONDS) == 0
    assert not called.exists()


def test_a_keeper_below_another_ends_its_own_program_and_clears_up(tmp_path: Path) -> None:
    child, called, null = tmp_path / "child", tmp_path / "called", subprocess.DEVNULL
    search = f"""
import os, subprocess, sys, time
from pathlib import Path
from autotune_amp.processes.program import Program
arguments = [sys.executable, "-c", {SLOW.format(file=str(child))!r}]
trial = Program(arguments, os.environ, Path({str(tmp_path / "trial")!r}), stdin={null}, stdout={null}, stderr={null},
                when_orphaned=["os", "mkdir", {str(called)!r}])
trial.start()
time.sleep(1000)
"""
    command = [sys.executable, "-c", search]
    program = Program(command, os.environ, tmp_path / "search", stdin=null, stdout=null, stderr=null)
    program.start()
    trial = number_in(child)
    program.end()
    assert is_gone(trial)
    assert called.exists()
    assert not (tmp_path / "trial").exists()
    program.close()


def test_ctrl_c_while_it_is_closed_leaves_nothing(
    program: Program, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    child = number_in(tmp_path / "child")
    with monkeypatch.context() as patch:
        patch.setattr(program.popen, "wait", Mock(side_effect=KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            program.close()
    eventually(lambda: is_gone(child), "it went on")
    eventually(lambda: not (tmp_path / "folder").exists(), "its temporary files are there")


def test_ctrl_c_between_its_end_and_its_close_leaves_nothing_when_this_process_lets_go_of_it(
    program: Program, tmp_path: Path
) -> None:
    program.end()
    assert (tmp_path / "folder").is_dir()
    program._connection.close()  # as the kernel does when a process ends
    eventually(lambda: not (tmp_path / "folder").exists(), "its temporary files are there")
    assert program.popen.wait(GONE_SECONDS) == 0


@pytest.mark.parametrize("root", ["torch_extensions", "given"])
def test_a_program_that_is_ended_takes_its_own_lock_of_a_build_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, root: str
) -> None:
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "given"))
    for name in (f"{root}/own", f"{root}/others", "unrelated"):
        (tmp_path / name).mkdir(parents=True)
    own, others, unrelated = (tmp_path / name / "lock" for name in (f"{root}/own", f"{root}/others", "unrelated"))
    others.touch()
    text = f"""
import os, pathlib, time
for path in {str(own), str(unrelated)}:
    os.open(path, os.O_CREAT | os.O_EXCL)
pathlib.Path({str(tmp_path / "child")!r}).write_text(str(os.getpid()))
time.sleep(1000)
"""
    null = subprocess.DEVNULL
    program = Program([sys.executable, "-c", text], os.environ, new_folder(), stdin=null, stdout=null, stderr=null)
    program.start()
    number_in(tmp_path / "child")
    program.close()
    assert (own.exists(), others.exists(), unrelated.exists()) == (False, True, True)


def test_a_killed_keeper_leaves_nothing(program: Program, tmp_path: Path) -> None:
    child = number_in(tmp_path / "child")
    program.popen.kill()
    program.end()
    assert is_gone(child)
    assert program.wait(0) == -signal.SIGKILL
    program.close()
    assert not (tmp_path / "folder").exists()


def test_a_status_can_be_asked_for_more_than_once_and_the_folder_stays_until_the_close() -> None:
    null, folder = subprocess.DEVNULL, new_folder()
    program = Program([sys.executable, "-c", "exit(3)"], os.environ, folder, stdin=null, stdout=null, stderr=null)
    assert program.wait(0) is None
    program.start()
    assert [program.wait(GONE_SECONDS), program.wait(), program.wait(0)] == [3, 3, 3]
    assert folder.is_dir()
    program.close()
    assert not folder.exists()


def test_a_folder_that_cannot_be_made_is_an_error_that_names_it(tmp_path: Path) -> None:
    null, folder = subprocess.DEVNULL, tmp_path / "not there" / "folder"
    with pytest.raises(RunnerError, match="not there"):
        Program(["true"], os.environ, folder, stdin=null, stdout=null, stderr=null)


def test_a_temporary_folder_is_gone_after_its_block_with_what_is_in_it() -> None:
    with temporary_folder() as folder:
        (folder / "file").write_text("1")
    assert not folder.exists()


def test_what_a_process_was_compiling_is_gone_with_it(tmp_path: Path) -> None:
    """Where torch puts what its compilers write on the way; what was compiled is kept for the next process."""
    (tmp_path / "train.py").write_text(
        "import os, tempfile\n"
        "from torch._inductor.runtime.cache_dir_utils import cache_dir\n"
        f"open({str(tmp_path / 'said')!r}, 'w').write(tempfile.mkdtemp() + chr(10) + cache_dir())\n"
        "os.kill(os.getpid(), 9)\n"
    )
    payload = Payload(target="train:workload", path=(str(tmp_path), *sys.path))
    with LocalBackend(payload, "kept", Watcher()) as backend, pytest.raises(Exception, match="SIGKILL"):
        backend.load(100)
    temporary, cache = (tmp_path / "said").read_text().splitlines()
    assert not Path(temporary).parent.exists()
    assert Path(cache).is_dir()


def test_a_keeper_finds_this_package_where_only_an_import_hook_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The hook of an editable install in the user's own site folder, which the keeper's Python does not read."""
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -S "$@"\n')
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if not Path(entry, "autotune_amp").is_dir()])
    null = subprocess.DEVNULL
    program = Program(["true"], os.environ, new_folder(), stdin=null, stdout=null, stderr=null)
    program.start()
    try:
        assert program.wait(GONE_SECONDS) == 0
    finally:
        program.close()


def test_an_import_path_may_have_what_is_no_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path, tmp_path])
    with temporary_folder() as folder:
        assert folder.is_dir()
    refused = Mock(side_effect=RunnerError("no process", "Wait."))
    monkeypatch.setattr("autotune_amp.processes.process.Program", refused)
    with pytest.raises(RunnerError):
        Process("kept", {}, Watcher())


@pytest.mark.parametrize(
    ("default", "is_tmp_writable", "parent"),
    [("/scratch/x", True, "/scratch/x"), ("/" + 50 * "x", True, "/tmp"), ("/" + 50 * "x", False, "/" + 50 * "x")],
)
def test_a_folder_of_a_long_path_is_used_where_tmp_is_not_writable(
    default: str, is_tmp_writable: bool, parent: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", default)
    monkeypatch.setattr(os, "access", lambda *_: is_tmp_writable)
    assert str(new_folder().parent) == parent
