"""Nothing of the user's is touched by a trial: real commands that would, in real processes."""

from __future__ import annotations

import hashlib
import shutil
import sqlite3
import subprocess
import sys
import zipfile
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from forked_python import ForkServer, forked_programs
from running_commands import run_command

from autotune_amp.command.agent import where
from autotune_amp.command.agent.guard import _Guard, is_standard
from autotune_amp.command.leftovers import load_kept
from autotune_amp.command.messages import Error, Hello, Refused
from autotune_amp.command.ranks import RunEvents
from autotune_amp.command.running import CompletedRun
from autotune_amp.core.outcome import Failure

CHANGES = {
    "open for writing": "open('old/file', 'w')",
    "open for appending": "open('old/file', 'a')",
    "open for updating": "open('old/file', 'r+b').write(b'new')",
    "open for updating text": "with open('old/file', 'r+') as file: file.write('new')",
    "open for updating, truncating": "pathlib.Path('old/file').open('r+').truncate()",
    "open for updating, unbuffered": "open('old/file', 'rb+', buffering=0).write(b'new')",
    "open for updating, lines": "open('old/file', '+rt', 1).writelines(['new'])",
    "open for updating, by its descriptor": "file = open('old/file', 'r+b'); os.write(file.fileno(), b'new')",
    "open for updating, by a child": "import subprocess; subprocess.run(['ls'], stdout=open('old/file', 'r+'))",
    "open for updating, by numpy": "import numpy; numpy.ones(2).tofile(open('old/file', 'r+b'))",
    "a zip that grows": "zipfile.ZipFile('old/archive', 'a').writestr('b', '2')",
    "open by a link": "open('link', 'w')",
    "open by a link of its own": (
        "link = pathlib.Path(tempfile.mkdtemp(), 'link'); link.symlink_to(pathlib.Path.cwd() / 'link'); link.open('w')"
    ),
    "open in bytes": "open(b'old/file', 'wb')",
    "write_text": "pathlib.Path('old/file').write_text('new')",
    "os.open": "os.open('old/file', os.O_RDWR)",
    "os.open truncating": "os.open('old/file', os.O_RDONLY | os.O_TRUNC)",
    "truncate": "os.truncate('old/file', 1)",
    "remove": "os.remove('old/file')",
    "remove in a folder": "os.remove('file', dir_fd=os.open('old', os.O_RDONLY))",
    "unlink": "pathlib.Path('old/file').unlink()",
    "unlink a link": "os.unlink('link')",
    "rmdir": "os.rmdir('empty')",
    "rename": "os.rename('old/file', 'other')",
    "rename a folder": "os.rename('old', 'other')",
    "replace": "open('mine', 'w').close(); os.replace('mine', 'old/file')",
    "rmtree": "shutil.rmtree('old')",
    "rmtree of what is inside": "shutil.rmtree('.')",
    "copyfile": "open('mine', 'w').close(); shutil.copyfile('mine', 'old/file')",
    "copytree": "os.mkdir('mine'); open('mine/file', 'w').close(); shutil.copytree('mine', 'old', dirs_exist_ok=True)",
    "move": "open('mine', 'w').close(); shutil.move('mine', 'old/file')",
    "move away": "shutil.move('old', 'other')",
    "a log": "logging.FileHandler('old/file')",
    "a log in turns": "logging.handlers.RotatingFileHandler('old/file')",
    "a zip": "zipfile.ZipFile('old/file', 'w')",
    "numpy.save": "import numpy; numpy.save(open('old/file', 'wb'), numpy.ones(2))",
    "numpy.tofile": "import numpy; numpy.ones(2).tofile('old/file')",
    "numpy.memmap": "import numpy; numpy.memmap('old/file', mode='r+')",
    "sqlite3": "sqlite3.connect('old/database').execute('insert into runs values (2)')",
    "sqlite3 by its address": "sqlite3.connect('file:old/database', uri=True).execute('drop table runs')",
    "safetensors": "import numpy, safetensors.numpy; safetensors.numpy.save_file({'a': numpy.ones(2)}, 'old/file')",
    "an upload": "import huggingface_hub as h; h.HfApi().create_repo('me/model')",
    "an upload by a function": "from huggingface_hub import create_repo; create_repo('me/model', exist_ok=True)",
    "an upload of a file": (
        "import huggingface_hub as h; h.upload_file(path_or_fileobj='old/file', path_in_repo='a', repo_id='me/model')"
    ),
}
WITH_TORCH = {
    "torch.save": "torch.save({'a': 1}, 'old/file')",
    "torch.save by its other name": "torch.serialization.save({'a': 1}, pathlib.Path('old/file'))",
    "torch.save to a file": "torch.save({'a': 1}, open('old/file', 'wb'))",
    "torch.save as it was": "torch.save({'a': 1}, 'old/file', _use_new_zipfile_serialization=False)",
    "torch.jit.save": "torch.jit.save(torch.jit.script(torch.nn.Linear(1, 1)), 'old/file')",
    "a trace of a profiler": (
        "profile = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]); profile.start(); "
        "torch.ones(2); profile.stop(); profile.export_chrome_trace('old/file')"
    ),
    "safetensors.torch": "import safetensors.torch as s; s.save_model(torch.nn.Linear(1, 1), 'old/file')",
}
PREAMBLE = "import logging.handlers, os, pathlib, shutil, sqlite3, sys, tempfile, zipfile\n"


@pytest.fixture
def mine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder in which the user has had files for long, and is."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "old").mkdir()
    (tmp_path / "empty").mkdir()
    (tmp_path / "old" / "file").write_text("the user's")
    (tmp_path / "link").symlink_to("old/file")
    with zipfile.ZipFile(tmp_path / "old" / "archive", "w") as archive:
        archive.writestr("a", "1")
    database = sqlite3.connect(tmp_path / "old" / "database")
    database.execute("create table runs (number)")
    database.commit()
    database.close()
    return tmp_path


def snapshot(folder: Path) -> dict[str, str]:
    """What is in the folder, but for what a test writes there."""
    return {
        str(path.relative_to(folder)): hashlib.sha1(path.read_bytes()).hexdigest() if path.is_file() else ""
        for path in sorted(folder.rglob("*"))
        if path.name != "train.py" and "mine" not in path.relative_to(folder).parts
    }


@pytest.fixture
def train(mine: Path) -> Callable[..., CompletedRun]:
    """Run a script in `mine`."""

    def train(text: str, **how: Any) -> CompletedRun:
        (mine / "train.py").write_text(PREAMBLE + text + "\n")
        return run_command([sys.executable, "train.py"], **how)

    return train


@pytest.mark.parametrize("way", [*CHANGES, *WITH_TORCH])
def test_what_was_there_stays_and_path_and_line_are_said(
    mine: Path, train: Callable[..., CompletedRun], fork_server: ForkServer, way: str
) -> None:
    before = snapshot(mine)
    text = CHANGES[way] if way in CHANGES else f"import torch; {WITH_TORCH[way]}"
    with forked_programs(fork_server):
        ran = train(text + "\nprint('went on')")
    assert isinstance(ran.verdict, Failure)
    refused = ran.events.first(Refused)
    assert refused is not None, ran.state.printed
    assert "went on" not in ran.state.printed
    assert refused.line == f"{mine}/train.py:2"
    assert refused.line in ran.verdict.message
    assert refused.path in ran.verdict.message
    if "upload" in way:
        assert refused.path.startswith("https://")
        assert refused.path.endswith("me/model")
    else:
        assert Path(refused.path).is_relative_to(mine)
    assert snapshot(mine) == before


def test_a_command_that_sets_the_path_of_python_is_guarded(mine: Path) -> None:
    (mine / "train.py").write_text("import helper; open('old/file', 'w')")
    (mine / "src").mkdir()
    (mine / "src" / "helper.py").touch()
    ran = run_command(["env", "PYTHONPATH=src", sys.executable, "train.py"])
    assert ran.events.first(Refused) is not None, ran.state.printed


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("/usr/lib/python3.12/zipfile.py", True),
        ("/usr/lib/python3.12/multiprocessing/connection.py", True),
        ("/usr/lib/python3.12/site-packages/numpy/_core/memmap.py", False),
        ("/usr/lib/python3.12/dist-packages/numpy/_core/memmap.py", False),
        ("/home/me/train.py", False),
    ],
)
def test_installed_packages_are_not_the_standard_library(path: str, expected: bool) -> None:
    assert is_standard(path, "/usr/lib/python3.12/") is expected


UPDATED = "assert pathlib.Path('old/file').open('r+').read() == \"the user's\"\n"


@pytest.mark.parametrize("version", ["3.8", "3.9", "3.10", "3.11", "3.12", "3.13"])
def test_in_a_python_of_that_version(mine: Path, version: str) -> None:
    python = shutil.which(f"python{version}")
    shown = [str(python), "-c", "import sys; print('%d.%d' % sys.version_info[:2])"]
    if python is None or subprocess.run(shown, check=False, capture_output=True, text=True).stdout.strip() != version:
        pytest.skip(f"there is no python{version} here")
    before = snapshot(mine)
    ran = run_command([python, "-c", f"{PREAMBLE}open('mine', 'w').close()\n{UPDATED}open('old/file', 'w')"])
    assert ran.events.of(Hello)
    assert ran.events.first(Refused) is not None, ran.state.printed
    assert not ran.events.of(Error)
    assert snapshot(mine) == before


ALLOWED = """
import copy, inspect, io, multiprocessing, pickle, subprocess, tempfile
given = pathlib.Path(sys.argv[1])
open('new', 'w').close()
open('new', 'a').close()
os.remove('new')
open('kept', 'x').close()
os.makedirs('made/inner')
pathlib.Path('made/inner/file').write_text('1')
pathlib.Path('made/inner/file').write_text('2')
os.rename('made/inner', 'made/other')
os.replace('made/other/file', 'moved')
shutil.rmtree('made/other')
shutil.rmtree('never there', ignore_errors=True)
(given / 'file').write_text('2')
tempfile.TemporaryFile(dir='.').close()
tempfile.NamedTemporaryFile(dir='.').close()
tempfile.TemporaryDirectory().cleanup()
open(os.devnull, 'w').close()
pathlib.Path('data.lock').write_text('')
pathlib.Path('__pycache__/old.pyc').write_text('')
pathlib.Path.home().joinpath('.cache/old').write_text('2')
pathlib.Path(os.environ['HF_HOME'], 'old').write_text('2')
pathlib.Path(os.environ['MLFLOW_TRACKING_URI'].partition('://')[2]).mkdir()
os.utime('old/file')
os.symlink('old/file', 'latest')
os.remove('latest')
assert open('old/file').read() == "the user's"
for mode, buffering in (('r+', -1), ('r+b', -1), ('rb+', 0), ('r+t', 1)):
    with open('old/file', mode, buffering) as updated:
        assert updated.read() in ("the user's", b"the user's")
        assert (updated.name, updated.seek(4), updated.readable(), updated.writable()) == ('old/file', 4, True, True)
with pathlib.Path('old/file').open('r+', encoding='utf-8') as updated:
    assert list(updated) == ["the user's"] and updated.encoding == 'utf-8'
with open('kept', 'r+') as updated:
    updated.write('1')
class Opener:
    open = open
class IoOpener:
    open = io.open
for opener in (Opener(), IoOpener()):
    for mode in ('r', 'r+'):
        with opener.open(pathlib.Path('old/file'), mode=mode) as opened:
            assert opened.read() == "the user's"
assert pickle.loads(pickle.dumps(open)) is copy.copy(open) is open and inspect.signature(open).parameters['mode']
zipfile.ZipFile('old/archive', 'a').close()
assert sqlite3.connect('old/database').execute('select count(*) from runs').fetchone() == (0,)
sqlite3.connect('new.db').execute('create table runs (number)')
subprocess.run([sys.executable, '-c', 'open("by a child", "w").close()'], check=True)
open('by a child', 'a').close()
os._exit(0) if os.fork() == 0 else os.wait()
print('went on')
"""


def test_what_is_its_own_is_free_and_what_it_made_elsewhere_is_listed(
    mine: Path, train: Callable[..., CompletedRun], tmp_path_factory: pytest.TempPathFactory
) -> None:
    home, given = tmp_path_factory.mktemp("home"), tmp_path_factory.mktemp("given")
    for folder in (home / ".cache", home / "hub", mine / "__pycache__"):
        folder.mkdir()
    for file in (home / ".cache" / "old", home / "hub" / "old", given / "file", mine / "__pycache__" / "old.pyc"):
        file.write_text("1")
    (mine / "data.lock").touch()
    (mine / "train.py").write_text(PREAMBLE + ALLOWED)
    environment = {"HOME": str(home), "HF_HOME": str(home / "hub"), "XDG_CACHE_HOME": ""}
    ran = run_command([sys.executable, "train.py", str(given)], environment=environment, output=given / "agent")
    assert ran.events.first(Refused) is None
    assert "went on" in ran.state.printed, ran.state.printed
    assert {str(Path(path).relative_to(mine)) for path in ran.kept} == {"kept", "made", "moved", "new.db", "by a child"}

    again = "open('kept', 'w').close(); open('made/more', 'w').close(); open('new', 'w').close(); print('went on')"
    assert "went on" in train(again, kept=ran.kept).state.printed
    assert train(again).events.first(Refused) is not None, "of a run that is none of ours"


def test_of_the_folder_that_holds_tritons_cache_nothing_else_is_free(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRITON_HOME", str(tmp_path))
    guard = _Guard(Mock(), [], str(tmp_path / "made"), str(tmp_path / "opened"))
    assert guard._is_free(f"{tmp_path}/.triton/cache/kernel")
    assert not guard._is_free(f"{tmp_path}/run/model.pt")


def test_a_process_in_a_removed_folder_is_guarded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.getcwd", Mock(side_effect=FileNotFoundError))
    assert _Guard(Mock(), [], str(tmp_path / "made"), str(tmp_path / "opened"))._is_free("/dev/null")
    monkeypatch.undo()
    assert where.working_folder() == str(Path.cwd())


LEAVES = """
import torch
from torch.utils.data import Dataset
os.mkdir('out')
torch.save({}, 'out/model.pt')
torch.save({}, sys.argv[1] + '/model.pt')
pathlib.Path('old/log').write_text('1')
class Digits(Dataset):
    def __init__(self):
        os.mkdir('data')
        open('data/digits', 'w').close()
Digits()
pathlib.Path('data/model.pt').write_text('1')
shutil.make_archive('packed', 'zip', 'old')
shutil.unpack_archive('packed.zip', 'unpacked')
os.mkdir('cache')
open('cache/tokens', 'w').close()
open('labels.cache', 'w').close()
import time
if sys.argv[2] == 'interrupted':
    open('ready', 'w').close()
    time.sleep(1000)
time.sleep(0.2)
model = torch.nn.Linear(1, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
class Late(Dataset):
    def __getitem__(self, index):
        open(f'data/{index}', 'w').close()
        return torch.ones(1)
late = Late()
for step in range(100):
    model(late[step] if step > 1 else torch.ones(1)).sum().backward()
    optimizer.step()
"""


@pytest.mark.parametrize("how", ["trains", "interrupted"])
def test_what_a_run_leaves_is_moved_and_data_that_are_complete_stay(
    mine: Path, tmp_path_factory: pytest.TempPathFactory, how: str
) -> None:
    study, elsewhere = tmp_path_factory.mktemp("study"), tmp_path_factory.mktemp("elsewhere")
    before = snapshot(mine)

    def is_enough(heard: RunEvents) -> bool:
        assert len(list(study.glob("created-*"))) == 1, "it outlives the run"
        if (mine / "ready").exists():
            raise KeyboardInterrupt
        return heard.num_steps >= 8

    (mine / "train.py").write_text(PREAMBLE + LEAVES)
    command = [sys.executable, "train.py", str(elsewhere), how]
    with pytest.raises(KeyboardInterrupt) if how == "interrupted" else nullcontext():
        run_command(command, is_enough=is_enough, memory=study / "made.json", aside=study / "aside")
    assert not list(study.glob("created-*"))
    unpacked = {f"unpacked/{name}" for name in ("archive", "database", "file", "log")}
    complete = {"data/digits", "cache/tokens", "labels.cache", *unpacked}
    left = {name for name in set(snapshot(mine)) - set(before) if not (mine / name).is_dir()}
    assert left == (complete if how == "trains" else set())
    assert not any(elsewhere.iterdir())
    moved = {"out/model.pt", "old/log", "data/model.pt", "packed.zip", f"root{elsewhere}/model.pt"}
    moved |= {"data/4"} if how == "trains" else complete
    assert all((study / "aside" / name).exists() for name in moved)
    kept = {str(Path(path).relative_to(mine)) for path in load_kept(study / "made.json")}
    assert {"data", "unpacked", "cache", "labels.cache"} <= kept if how == "trains" else not kept


KEEPS = """
import weakref
from torch.utils.data import Dataset
class Data(Dataset):
    def prepare(self): ...
class Tensor: ...
class Trainer:
    def fit(self):
        tensor = Tensor()
        open('log', 'w').close()
        reference = weakref.ref(tensor)
        del tensor
        print('went on', reference())
Trainer().fit()
"""


def test_creating_a_file_keeps_no_variable_of_the_training_loop_alive(
    train: Callable[..., CompletedRun], fork_server: ForkServer
) -> None:
    with forked_programs(fork_server):
        assert "went on None" in train(KEEPS).state.printed


RENAMES = """
os.makedirs('out/tmp/optimizer')
for name in ('out/tmp/model', 'out/tmp/optimizer/state', 'out/tmp/optimizer/more'):
    open(name, 'w').close()
import subprocess
subprocess.run([sys.executable, '-c', "import os; os.mkdir('out/tmp/rank'); open('out/tmp/rank/state', 'w')"])
os.rename('out/tmp', 'out/checkpoint')
open('out/checkpoint/model', 'w').close()
made = tempfile.mkdtemp()
os.mkdir(made + '/inner')
open(made + '/inner/state', 'w').close()
shutil.move(made, 'moved')
os.mkdir('unpacked')
subprocess.run(['mkdir', 'unpacked/data'])
os.rename('unpacked/data', 'data')
open('data/labels', 'w').close()
print('went on')
"""


def test_a_folder_that_is_renamed_is_moved_with_all_that_is_in_it(
    mine: Path, train: Callable[..., CompletedRun], tmp_path_factory: pytest.TempPathFactory
) -> None:
    study, before = tmp_path_factory.mktemp("study"), snapshot(mine)
    ran = train(RENAMES, memory=study / "made.json", aside=study / "aside")
    assert "went on" in ran.state.printed
    assert snapshot(mine) == before
    names = ("model", "optimizer/state", "rank/state")
    assert all((study / "aside" / "out" / "checkpoint" / name).exists() for name in names)
    assert (study / "aside" / "moved" / "inner" / "state").exists()
    assert (study / "aside" / "data" / "labels").exists()


def test_a_script_that_writes_where_it_is_runs_in_a_folder_of_its_own(
    mine: Path, train: Callable[..., CompletedRun], tmp_path_factory: pytest.TempPathFactory
) -> None:
    given = tmp_path_factory.mktemp("given")
    (mine / "log").write_text("the user's")
    text = "open('log', 'a').write('x'); print('went on')"
    assert train(text).events.first(Refused) is not None
    ran = run_command(["bash", "-c", f"cd {given} && {sys.executable} {mine}/train.py"], output=given / "agent")
    assert "went on" in ran.state.printed
    assert ran.kept == ()
    assert (mine / "log").read_text() == "the user's"


READING = """
import importlib, json, subprocess
sys.path.append('.')
for _ in range(2):
    importlib.import_module('plugins.one')
json.load(open('settings.json'))
pathlib.Path('mine.json').write_text('{}')
json.load(open('mine.json'))
open('old/file').read()
subprocess.run(['bash', '-c', 'python=$0; "$python" called.py', sys.executable], check=True)
subprocess.run([sys.executable, '-c', "import json; json.load(open('mine.json'))"], check=True)
"""


def test_code_and_settings_that_are_read_are_noted(mine: Path, train: Callable[..., CompletedRun]) -> None:
    (mine / "plugins").mkdir()
    for name in ("plugins/__init__.py", "plugins/one.py", "plugins/two.py", "called.py", "unrelated.py"):
        (mine / name).write_text("")
    (mine / "settings.json").write_text("{}")
    expected = {"train.py", "plugins/__init__.py", "plugins/one.py", "settings.json", "called.py"}
    for _ in range(2):  # the second time from byte code
        (mine / "mine.json").unlink(missing_ok=True)
        ran = train(READING)
        assert ran.events.first(Refused) is None
        named = {str(Path(path).relative_to(mine)) for path in ran.opened}
        assert named - {"mine.json"} == expected, ran.state.printed
