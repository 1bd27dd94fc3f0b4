"""What misses and what hits, seen from real processes: a script is run, changed, and run again."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from forked_python import ForkServer

from autotune_amp.core.recommendation import Fingerprint

SCRIPT = """
import dataclasses, enum, functools, json, os, sys
from os import environ
import torch
import helpers
import unrelated
import pkg.layers
import pkg.registry
from autotune_amp.fingerprint import compute_fingerprint
from autotune_amp.core.hardware import DeviceIdentity

LEARNING_RATE = 0.1
COLORS = {"red", "green", "blue", "cyan"}

class Mode(enum.Enum):
    FAST = "fast"

@dataclasses.dataclass
class Settings:
    rate: float = 0.5
    names: list = dataclasses.field(default_factory=lambda: ["a", "b"])

settings = Settings()

def collate(samples, scale=lambda x: x * 8):
    return scale(torch.stack(samples)) * settings.rate

def train_step(state, batch, amp):
    return pkg.registry.get("step")(batch) * float(environ.get("STEP_SCALE", 1))

class Net(pkg.layers.Base):
    width = 4

    def __init__(self, depth):
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(4, 4) for _ in range(depth))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x) * helpers.SCALE
        return pkg.layers.activate(x)

def make_model(depth):
    def build():
        return Net(depth)
    return build

def loss(model, batch, weight=1.0):
    if batch[1] in {"a", "b", "c"}:
        return 0
    return (model(batch[0]) - batch[1]).pow(2).mean() * weight * float(os.environ.get("LOSS_SCALE", 1))

def lazily():
    import late
    return late.value(), COLORS, Mode.FAST

class Workload:
    pass

workload = Workload()
workload.model = make_model(2)
workload.loss = loss
workload.data = torch.utils.data.TensorDataset(torch.zeros(32, 4), torch.zeros(32, 4))
workload.optimizer = functools.partial(torch.optim.SGD, lr=LEARNING_RATE)
workload.extra = lazily
workload.train_step = functools.partial(train_step, amp=16)
workload.evaluate = torch.utils.data.DataLoader(workload.data, batch_size=4, num_workers=2, collate_fn=collate)
workload.checkpoint = Net(3).checkpoint

identity = DeviceIdentity(type="cpu", name="cpu", num_cpus=4, total_memory_bytes=1024)
found = compute_fingerprint(workload, {"budget": 90.0}, identity, {"allow_tf32": False})
print(json.dumps([found.digest, found.parts, found.unknown]))
"""

FILES = {
    "train.py": SCRIPT,
    "helpers.py": "SCALE = 2\n\n\ndef unused():\n    return 1\n",
    "unrelated.py": "from pkg import (  # (all of it)\n    deep,\n)\n",
    "elsewhere.py": "VALUE = 1\n",
    "pkg/deep.py": "VALUE = 1\n",
    "late.py": "def value():\n    from later import VALUE\n    return VALUE\n",
    "later.py": "VALUE = 1\n",
    "pkg/__init__.py": "",
    "pkg/layers.py": (
        "import torch\n\n\ndef activate(x):\n    return torch.relu(x)\n\n\n"
        "class Base(torch.nn.Module):\n    def checkpoint(self, folder):\n        return folder / 'last'\n"
    ),
    # The step is found by its name in a table that an import fills.
    "pkg/registry.py": (
        "STEPS = {}\n\n\ndef register(step):\n    STEPS[step.__name__] = step\n    return step\n\n\n"
        "def get(name):\n    return STEPS[name]\n\n\nfrom pkg import steps\n"
    ),
    "pkg/steps.py": "from pkg.registry import register\n\n\n@register\ndef step(x):\n    return x * 3\n",
}


# An edit, and the line that says so; None where it changes nothing that is reached.
EDITS = [
    (("elsewhere.py", "VALUE = 1", "VALUE = 2"), None),
    (("train.py", "RATE = 0.1", "RATE = 0.2"), "workload.optimizer changed"),
    (("train.py", '"a", "b", "c"', '"a", "b", "d"'), "source file train.py changed"),
    (("train.py", "make_model(2)", "make_model(3)"), "workload.model changed"),
    (("train.py", "width = 4", "width = 5"), "workload.model changed"),
    (("train.py", "x = layer(x)", "x = -layer(x)"), "workload.model changed"),
    (("train.py", '"cyan"', '"pink"'), "workload.extra changed"),
    (("train.py", 'FAST = "fast"', 'FAST = "slow"'), "workload.extra changed"),
    (("train.py", "zeros(32, 4)", "zeros(32, 5)"), "workload.data changed"),
    (("train.py", "SGD, lr", "Adam, lr"), "workload.optimizer changed"),
    (("train.py", '"budget": 90.0', '"budget": 60.0'), "option budget changed from 90.0 to 60.0"),
    (("train.py", '"allow_tf32": False', '"allow_tf32": True'), "torch flag allow_tf32 changed from False to True"),
    (("train.py", "import unrelated", "import unrelated\nOTHER = 1"), "source file train.py changed"),
    (("helpers.py", "SCALE = 2", "SCALE = 3"), "source file helpers.py changed"),
    (("helpers.py", "return 1", "return 2"), "source file helpers.py changed"),
    (("later.py", "VALUE = 1", "VALUE = 2"), "source file later.py changed"),
    (("pkg/deep.py", "VALUE = 1", "VALUE = 2"), "source file pkg/deep.py changed"),
    (("pkg/layers.py", "relu(x)", "tanh(x)"), "source file pkg/layers.py changed"),
    (("pkg/layers.py", "'last'", "'best'"), "workload.checkpoint changed"),
    (("pkg/steps.py", "x * 3", "x * 4"), "source file pkg/steps.py changed"),
    (("train.py", "rate: float = 0.5", "rate: float = 0.6"), "workload.evaluate changed"),
    (("train.py", "amp=16", "amp=8"), "workload.train_step changed"),
    (("train.py", "Net(3).checkpoint", "Net(4).checkpoint"), "workload.checkpoint changed"),
]

# Runs each script in a process of its own, forked where all that it imports is there already.
FORKING = """
import os, runpy, sys
import torch
import autotune_amp.fingerprint
for folder in sys.argv[1:]:
    child = os.fork()
    if not child:
        os.chdir(folder)
        sys.path.insert(0, folder)
        runpy.run_path(os.path.join(folder, "train.py"), run_name="__main__")
        sys.stdout.flush()
        os._exit(0)
    if os.waitpid(child, 0)[1]:
        sys.exit(f"{folder} failed")
"""


def environment(**more: str) -> dict[str, str]:
    return {**os.environ, "PYTHONDONTWRITEBYTECODE": "1", **more}


def printed(done: subprocess.CompletedProcess[str]) -> list[Fingerprint]:
    """Read the fingerprints that a program has printed."""
    assert done.returncode == 0, done.stderr
    found = [json.loads(line) for line in done.stdout.splitlines()]
    return [Fingerprint(digest=digest, parts=parts, unknown=tuple(unknown)) for digest, parts, unknown in found]


def write(folder: Path, files: dict[str, str]) -> Path:
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(content)
    return folder


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Fingerprint:
    folder = write(tmp_path_factory.mktemp("original"), FILES)
    # In a process of its own: the others are forked from one that draws its hash seed.
    command = [sys.executable, str(folder / "train.py")]
    (found,) = printed(subprocess.run(command, env=environment(PYTHONHASHSEED="1"), capture_output=True, text=True))
    return found


def test_everything_in_the_script_is_known_and_the_same_elsewhere(
    original: Fingerprint, fork_server: ForkServer, tmp_path: Path
) -> None:
    assert original.unknown == ()
    sources = {f"source file {name}" for name in FILES if name not in ("elsewhere.py", "pkg/__init__.py")}
    others = {"workload.data", "environment variable LOSS_SCALE", "version of torch"}
    assert sources | others <= set(original.parts)
    assert "source file elsewhere.py" not in original.parts
    moved = write(tmp_path / "moved", FILES) / "train.py"
    (found,) = printed(fork_server.run([str(moved)], cwd=tmp_path, env=environment()))
    assert original.differences(found) == ()
    assert found.digest == original.digest


def test_what_changes_misses_and_is_named(original: Fingerprint, fork_server: ForkServer, tmp_path: Path) -> None:
    folders = []
    for number, ((file, old, new), _) in enumerate(EDITS):
        assert old in FILES[file]
        folders.append(str(write(tmp_path / str(number), {**FILES, file: FILES[file].replace(old, new)})))
    done = fork_server.run(["-c", FORKING, *folders], cwd=tmp_path, env=environment())
    found = [original.differences(edited) for edited in printed(done)]
    wrong = [
        (edit, line, lines)
        for (edit, line), lines in zip(EDITS, found, strict=True)
        if (lines if line is None else line not in lines)
    ]
    assert wrong == []


def test_an_environment_variable_that_the_code_reads_is_a_part(
    original: Fingerprint, fork_server: ForkServer, tmp_path: Path
) -> None:
    env = environment(LOSS_SCALE="2", STEP_SCALE="2", ANOTHER="3", MASTER_PORT="4")
    (found,) = printed(fork_server.run([str(write(tmp_path, FILES) / "train.py")], cwd=tmp_path, env=env))
    changes = {f"environment variable {name} changed" for name in ("LOSS_SCALE", "STEP_SCALE")}
    assert set(original.differences(found)) == changes


def test_importing_the_fingerprint_imports_no_torch() -> None:
    code = "import sys, autotune_amp.fingerprint as f; f.versions(); print({'torch', 'optuna'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"
