"""What is looked for before a command is started, and what words without ``--`` were meant as."""

from __future__ import annotations

import sys
from contextlib import nullcontext
from importlib.machinery import ModuleSpec
from pathlib import Path

import pytest

from autotune_amp.command.startable import likely_command, require_startable, with_agent_on_path
from autotune_amp.core.errors import WorkloadError

PROGRAMS = ("python", "torchrun", "accelerate", "bash", "env", "nice", "docker", "fit", "uv")


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A PATH with `PROGRAMS`, and a working directory with train.py and go.sh."""
    (tmp_path / "bin").mkdir()
    for name in PROGRAMS:
        (tmp_path / "bin" / name).touch(0o755)
    (tmp_path / "train.py").touch()
    (tmp_path / "go.sh").touch()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    return str(tmp_path / "bin")


@pytest.mark.parametrize(
    "command",
    [
        "python nope.py --x 1",
        "python -u -X dev nope.py",
        "python -O nope",
        "python -Wonce -Ximporttime nope.py",
        "python -mtorch.distributed.run --standalone nope.py train.py",
        "uv run python nope.py --directory=x",
        "torchrun --nproc_per_node 2 nope.py",
        "python -m torch.distributed.run --standalone nope.py train.py",
        "accelerate launch --mixed_precision no nope.py",
        "bash -e nope.sh train.py",
        "bash -euo pipefail nope.sh train.py",
        "bash +O extglob nope.sh",
        "env A=1 nice -n 5 python nope.py",
    ],
)
def test_a_script_that_is_not_there_is_named(path: str, command: str) -> None:
    with pytest.raises(WorkloadError, match="nope"):
        require_startable(command.split(), path)


@pytest.mark.parametrize(
    "command",
    [
        ["python", "train.py", "nope.py"],
        ["python", "-c", "nope.py"],
        ["python", "-uc", "nope.py"],
        ["python", "-cimport nope\nnope.fit()", "nope.py"],
        ["python", "-umjson.tool", "nope.py"],
        ["python", "-", "nope.py"],
        ["python", "-m", "nope"],  # of another Python than this one
        ["python", "{trial_dir}/nope.py"],
        ["torchrun", "-m", "package.train", "nope.py"],
        ["bash", "-ec", "cd elsewhere && python nope.py"],
        ["env", "-C", "elsewhere", "python", "nope.py"],
        ["env", "-Celsewhere", "python", "nope.py"],
        ["uv", "run", "--directory=elsewhere", "python", "nope.py"],
        ["uv", "--directory", "elsewhere", "run", "python", "nope.py"],
        ["env", "PYTHONPATH=src", "python", "nope.py"],
        ["docker", "run", "image", "python", "nope.py"],
        ["fit", "nope.py"],
        ["bash", "go.sh", "nope.py"],
        ["bash", "-euo", "pipefail", "go.sh", "nope.py"],
        ["bash", "-euo", "pipefail", "-c", "python nope.py"],
    ],
)
def test_what_cannot_be_told_to_be_missing_is_started(path: str, command: list[str]) -> None:
    require_startable(command, path)


def test_a_script_that_is_written_before_the_start_need_not_be_there(path: str) -> None:
    require_startable(["bash", "nope.sh"], path, ["nope.sh"])


def test_a_path_of_python_s_before_the_program_has_the_agent_first(path: str) -> None:
    command = ["timeout", "9", "env", "-u", "A", "PYTHONPATH=src", "python", "train.py", "PYTHONPATH=x"]
    found = with_agent_on_path(command, Path("/agent"))
    assert found == (*command[:5], "PYTHONPATH=/agent:src", *command[6:])
    assert with_agent_on_path(["env", "PYTHONPATH=", "./fit"], Path("/agent"))[1] == "PYTHONPATH=/agent"


@pytest.mark.parametrize(
    ("text", "is_kept"),
    [
        ("export PYTHONPATH=$PWD/src", False),
        ("set -e; PYTHONPATH=src python train.py", False),
        ("PYTHONPATH=src; echo $PYTHONPATH", False),
        ('export PYTHONPATH="src"\nexport PYTHONPATH=$PYTHONPATH:more', False),
        ("PYTHONPATH=src:$PYTHONPATH python train.py", True),
        ('export PYTHONPATH="$PWD/my src:${PYTHONPATH:-}"', True),
        ('export PYTHONPATH="$(cd "$(dirname "$0")/.." && pwd):$PYTHONPATH"', True),
        ("PYTHONPATH+=:src\nMY_PYTHONPATH=src\n# PYTHONPATH=src", True),
    ],
)
def test_shell_code_that_replaces_the_path_of_python_is_refused(path: str, text: str, is_kept: bool) -> None:
    Path("go.sh").write_text(text)
    Path("go.sh").chmod(0o755)
    Path("go").write_text(text)
    for command in (["bash", "go.sh"], ["./go.sh"], ["nice", "bash", "-e", "go", "1"], ["bash", "-ec", text]):
        with nullcontext() if is_kept else pytest.raises(WorkloadError, match="PYTHONPATH"):
            with_agent_on_path(command, Path("/agent"))
    with nullcontext() if is_kept else pytest.raises(WorkloadError, match="PYTHONPATH"):
        with_agent_on_path(["bash", "{trial_dir}/go.sh"], Path("/agent"), {"{trial_dir}/go.sh": text})


def test_the_nearest_script_is_named(path: str) -> None:
    with pytest.raises(WorkloadError) as raised:
        require_startable(["python", "trian.py"], path)
    assert "train.py" in raised.value.next_step


def test_a_module_that_this_python_does_not_find_is_named() -> None:
    require_startable([sys.executable, "-m", "json.tool"], None)
    with pytest.raises(WorkloadError, match="no_such_package"):
        require_startable([sys.executable, "-m", "no_such_package.train"], None)
    with pytest.raises(WorkloadError, match="no_such_package"):
        require_startable([sys.executable, "-umno_such_package.train", "x"], None)


def test_a_module_may_be_in_the_working_directory_or_in_a_folder_of_the_commands(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "package_of_this_folder").mkdir()
    monkeypatch.chdir(tmp_path)
    require_startable([sys.executable, "-m", "package_of_this_folder.train"], None)
    require_startable(["env", "PYTHONPATH=src", sys.executable, "-m", "no_such_package.train"], None)


def test_a_module_may_be_one_that_only_a_finder_finds(monkeypatch: pytest.MonkeyPatch) -> None:
    class Finder:
        @classmethod
        def find_spec(cls, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
            return ModuleSpec(name, None) if name == "editable_package" else None

    monkeypatch.setattr(sys, "meta_path", [object(), *sys.meta_path, Finder])
    require_startable([sys.executable, "-m", "editable_package.train"], None)
    with pytest.raises(WorkloadError, match="no_such_package"):
        require_startable([sys.executable, "-m", "no_such_package.train"], None)


@pytest.mark.parametrize(
    ("command", "named"), [("nope train.py", "nope"), ("A=1 python train.py", "env A=1"), ("./go.sh", "bash ./go.sh")]
)
def test_a_program_that_is_not_there_says_what_would_do(path: str, command: str, named: str) -> None:
    with pytest.raises(WorkloadError) as raised:
        require_startable(command.split(), path)
    assert named in str(raised.value)


@pytest.mark.usefixtures("path")
@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("train.py --bs 8", "python train.py --bs 8"),
        ("./go.sh", "bash ./go.sh"),
        ("torchrun train.py", "torchrun train.py"),
        ("fit train.py", "fit train.py"),
        ("a b", None),
        ("studies/train", None),
    ],
)
def test_words_are_taken_for_a_command_where_they_begin_like_one(words: str, expected: str | None) -> None:
    for given in (words.split(), [words]):
        found = likely_command(given)
        assert (found and " ".join(found)) == expected
