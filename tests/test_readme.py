"""What the README and the docstrings show works: their Python runs, its commands exist, the tree is there."""

from __future__ import annotations

import ast
import inspect
import json
import re
import shlex
import shutil
import signal
import subprocess
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

import pytest
from conftest import CommandLine

import autotune_amp
from autotune_amp.cli import run
from autotune_amp.processes import on_ray

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
DOCSTRINGS = [ast.get_docstring(ast.parse(path.read_text())) or "" for path in (ROOT / "autotune_amp").rglob("*.py")]
MAX_LINES, MAX_COLUMNS = 220, 88  # of columns in code


def blocks(language: str, text: str = README) -> list[str]:
    found: list[str] = []
    opened: str | None = None
    for line in text.splitlines(keepends=True):
        if line.startswith("```"):
            opened = line.strip("`\n") if opened is None else None
            found += [""] if opened == language else []
        elif opened == language:
            found[-1] += line
    return found


BUDGET = 30  # seconds of a search, in the place of what the README gives it


class Example(NamedTuple):
    """A Python block of the README or of a module's docstring by a part that no other has, and what it prints."""

    word: str
    printed: str


FIRST = Example("def workload()", r"\A(fp32|tf32|bf16|fp16|fp8) \d+ ")  # what the commands are shown with
QUICK = [
    Example("AutotuneAccelerator", r"\Afp16\n\Z"),
    Example("from autotune_amp import AmpConfig, prepare", r"\ATrue True\n\Z"),
    Example("controller.attach(model", r"\A\Z"),
    Example("sinks = [", r"\A\{'autotune_amp/update': 64, 'autotune_amp/precision': 'bf16'[^\n]*\nTrue tensor"),
]
SLOW = [
    FIRST,
    Example("def train_step", r"\A(fp32|tf32|bf16|fp16) 32\n\Z"),
    Example("check_fidelity", r"\Aunfaithful \('encoder\.block\.1\.layer\.1\.DenseReluDense\.wo',\)\n\Z"),
    Example("LightningModule", r"^(32-true|bf16-mixed|16-mixed) \d+$"),
    Example("from_trainer", r"^16 10\n\Z"),
    Example("profile_amp", r"\A(tf32|bf16|fp16) \d+\.\d+ (excellent|significant|modest|negligible|slower) "),
]


PYTHON = [block for text in (README, *DOCSTRINGS) for block in blocks("python", text + "\n")]


def block_of(example: Example) -> str:
    """The one Python block with the example's word, whole."""
    (found,) = [block for block in PYTHON if example.word in block]
    return found


@pytest.mark.parametrize(
    "example",
    [
        *(pytest.param(one, id=one.word) for one in QUICK),
        *(pytest.param(one, id=one.word, marks=[pytest.mark.slow, pytest.mark.real_time]) for one in SLOW),
    ],
)
def test_what_is_shown_in_python_runs(cli: CommandLine, example: Example) -> None:
    source = block_of(example)
    (cli.folder / "example.py").write_text(re.sub(r"budget=\d+", f"budget={BUDGET}", source))
    done = cli.python("example.py")
    assert done.code == 0, done.err
    assert re.search(example.printed, done.out, re.MULTILINE)


@pytest.mark.slow
@pytest.mark.real_time
def test_the_commands_work_on_the_first_example(cli: CommandLine) -> None:
    (cli.folder / "train.py").write_text(block_of(FIRST))
    searched = cli("search", "train.py:workload", "--budget", str(BUDGET))
    assert searched.code == 0, searched.err
    for arguments in (["show", "--steps", "100000"], ["report"], ["export", "--to", "torch"]):
        done = cli(*arguments)
        assert done.code == 0, done.err
    assert "DataLoader(dataset, batch_size=" in done.out
    profiled = cli("profile", "train.py:workload", "--batches", "6", "--precision", "bf16")
    assert profiled.code == 0, profiled.err
    assert re.search(r"excellent|significant|modest|negligible|slower", profiled.out)


@pytest.mark.slow
@pytest.mark.real_time
@pytest.mark.skipif(shutil.which("curl") is None, reason="needs curl")
def test_the_service_works_as_shown(cli: CommandLine) -> None:
    """On a free port, and with a budget."""

    def shell(line: str) -> str:
        done = subprocess.run(line, shell=True, cwd=cli.folder, stdout=subprocess.PIPE, text=True, timeout=60)
        return done.stdout

    (block,) = [block for block in blocks("sh") if "autotune-amp serve" in block]
    write, serve, begin, again, wait = [re.sub(r"\s+# .*", "", line) for line in block.splitlines()]
    (cli.folder / "train.py").write_text(block_of(FIRST))
    shell(f"echo port = 0 > serve.toml; {write.replace('> serve', '>> serve')}")
    service = cli.start(*shlex.split(serve)[1:], "--json")
    assert service.stdout is not None
    address = json.loads(service.stdout.readline())["url"].removeprefix("http://")
    begin, again, wait = (line.replace("localhost:8321", address) for line in (begin, again, wait))
    options = json.dumps({"target": "mlp", "options": {"budget": BUDGET}})
    begun = json.loads(shell(begin.replace('{"target": "mlp"}', options)))
    waited = cli(*shlex.split(wait)[1:], "--budget", str(BUDGET), "--json")
    assert waited.code == 0, waited.err
    assert json.loads(shell(again))["search"] == begun["id"]
    service.send_signal(signal.SIGTERM)
    service.communicate(timeout=60)


def test_everything_shown_in_python_is_run() -> None:
    assert sorted(map(block_of, QUICK + SLOW)) == sorted(PYTHON)
    assert set(re.findall(r"^```(\S+)$", README, re.MULTILINE)) == {"diff", "python", "sh", "text"}


def helped(capsys: pytest.CaptureFixture[str], command: str) -> str:
    assert run([command, "--help"]) == 0
    return capsys.readouterr().out


def test_the_job_for_kubernetes_is_a_ray_job_whose_command_is_one_of_ours(capsys: pytest.CaptureFixture[str]) -> None:
    yaml = pytest.importorskip("yaml")
    (job,) = map(yaml.safe_load, blocks("yaml", inspect.getdoc(on_ray) or ""))
    assert (job["apiVersion"], job["kind"]) == ("ray.io/v1", "RayJob")
    words = shlex.split(job["spec"]["entrypoint"])
    assert words[:2] == ["autotune-amp", "search"]
    shown = helped(capsys, words[1])
    assert all(word in shown for word in words if word.startswith("--"))
    cluster = job["spec"]["rayClusterSpec"]
    for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"]):
        assert "rayStartParams" in group
        assert group["template"]["spec"]["containers"][0]["image"]


SHOWN = [
    shlex.split(arguments.partition(" > ")[0].partition(" -- ")[0])  # what follows is a training's own
    for block in blocks("sh")
    for line in block.splitlines()
    for arguments in line.partition("#")[0].split("autotune-amp ")[1:]
]
COMMANDS = sorted({words[0] for words in SHOWN})


@pytest.mark.parametrize("command", COMMANDS)
def test_every_option_shown_is_there(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    there = set(re.findall(r"^  (?:-\w, )?(--[\w-]+)", helped(capsys, command), re.MULTILINE))
    assert {word for words in SHOWN if words[0] == command for word in words if word.startswith("--")} <= there


def test_commands_are_shown() -> None:
    judging = ["check", "fidelity", "memory", "profile"]
    assert sorted([*judging, "apply", "dashboard", "export", "report", "run", "search", "serve", "show"]) == COMMANDS


def test_the_tree_is_there() -> None:
    named = re.findall(r"^      (\w+(?:\.py|/))", autotune_amp.__doc__ or "", re.MULTILINE)
    there = {p.name + ("/" if p.is_dir() else "") for p in (ROOT / "autotune_amp").iterdir()}
    assert set(named) == there - {"__pycache__/", "__init__.py", "__main__.py", "py.typed"}


def test_it_is_short() -> None:
    lines = README.splitlines()
    assert len(lines) <= MAX_LINES
    code = [line for language in ("diff", "python", "sh", "text") for line in "".join(blocks(language)).splitlines()]
    assert [line for line in code if len(line) > MAX_COLUMNS] == []


def test_what_it_refers_to_is_there() -> None:
    """Its modules, studies, pictures and sections."""
    modules = set(re.findall(r"`(autotune_amp(?:\.\w+)+)`", README))
    assert [name for name in sorted(modules) if find_spec(name) is None] == []
    studies = [
        name for row in re.findall(r"\| ([^|]*) \|$", README, re.MULTILINE) for name in re.findall(r"`(\w+)`", row)
    ]
    assert [name for name in studies if not (ROOT / "studies" / name).is_dir()] == []
    assert studies
    assert [path for path in re.findall(r"!\[.*?\]\((.*?)\)", README) if not (ROOT / path).is_file()] == []
    titles = {title.lower().replace(" ", "-") for title in re.findall(r"^#+ (.*)$", README, re.MULTILINE)}
    assert set(re.findall(r"\]\(#(.*?)\)", README)) <= titles


def test_ci_runs_the_readmes_own_test_command() -> None:
    command = "pip install -e '.[test]' && pytest"
    assert f"```sh\n{command}\n```" in README
    assert re.search(r"^pip install -e '\.\[test\]' .*&& pytest", (ROOT / ".ci/run").read_text(), re.MULTILINE)
