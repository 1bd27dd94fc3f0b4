"""What the README shows works: its Python runs, its commands exist, its tree is there."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import CommandLine

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()


def blocks(language: str) -> list[str]:
    found: list[str] = []
    opened: str | None = None
    for line in README.splitlines(keepends=True):
        if line.startswith("```"):
            opened = line.strip("`\n") if opened is None else None
            found += [""] if opened == language else []
        elif opened == language:
            found[-1] += line
    return found


@pytest.mark.slow
def test_the_python_example_runs(cli: CommandLine) -> None:
    example, _, _ = blocks("python")
    (cli.folder / "example.py").write_text(example.replace("budget=60", "budget=20"))
    done = subprocess.run(
        [sys.executable, "example.py"], cwd=cli.folder, env=cli.environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert re.match(r"(fp32|bf16|fp16) \d+ ", done.stdout)


@pytest.mark.slow
def test_the_check_of_a_precision_runs(cli: CommandLine) -> None:
    _, example, _ = blocks("python")
    (cli.folder / "check.py").write_text(example)
    done = subprocess.run(
        [sys.executable, "check.py"], cwd=cli.folder, env=cli.environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "unfaithful ('encoder.block.1.layer.1.DenseReluDense.wo',)\n"


def test_the_training_loop_runs(cli: CommandLine) -> None:
    _, _, example = blocks("python")
    (cli.folder / "loop.py").write_text(example)
    done = subprocess.run(
        [sys.executable, "loop.py"], cwd=cli.folder, env=cli.environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "fp16 0 ()\n"


COMMANDS = [
    line.partition("#")[0].strip() for block in blocks("sh") for line in block.splitlines() if "autotune-amp" in line
]


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_line_shown_is_understood(cli: CommandLine, command: str) -> None:
    words = shlex.split(command.partition(" > ")[0])[1:]
    helped = cli(words[0], "--help")
    assert helped.code == 0
    for option in (word for word in words if word.startswith("--")):
        assert option in helped.out


def test_commands_are_shown() -> None:
    assert {shlex.split(command)[1] for command in COMMANDS} == {"search", "probe", "show"}


def test_the_tree_is_there() -> None:
    (tree,) = [block for block in blocks("") if "autotune_amp/" in block]
    named = re.findall(r"^  (\w+(?:\.py|/))", tree, re.MULTILINE)
    there = {p.name + ("/" if p.is_dir() else "") for p in (ROOT / "autotune_amp").iterdir()}
    assert set(named) == there - {"__pycache__/", "__init__.py", "__main__.py", "py.typed"}


def test_ci_runs_the_readmes_own_test_command() -> None:
    command = "pip install -e '.[test]' && pytest"
    assert f"```sh\n{command}\n```" in README
    assert re.search(r"^pip install -e '\.\[test\]' .*&& pytest", (ROOT / ".ci/run").read_text(), re.MULTILINE)
