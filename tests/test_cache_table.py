"""recommend_config() end to end: what answers from the cache of another process, and what searches again."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from forked_python import ForkServer

TRAIN = """
import os
import torch
import layers
from autotune_amp import Workload

def model_of(width):
    return lambda: layers.make(width)

def loss(model, batch):
    return model(batch[0]).pow(2).mean()

def workload(length=32, size=4):
    data = torch.utils.data.TensorDataset(torch.zeros(length, size))
    loader = torch.utils.data.DataLoader(data, batch_size=4)
    return Workload(model_of(4), loss, loader, torch.optim.SGD, "cached")
"""
FILES = {
    "train.py": TRAIN,
    "layers.py": "import torch\n\n\ndef make(width):\n    return torch.nn.Linear(width, 1)\n",
    "unrelated.py": "VALUE = 1\n",
}
OPTIONS = "budget=40, precision='fp32', batch_size=(4, 4), trials=1, try_='none', device='cpu', quiet=True, out=OUT"
SEARCH = f"""
import sys
sys.path.insert(0, sys.argv[1])
OUT = sys.argv[2]
import train
from autotune_amp import recommend_config
recommend_config(train.workload(), {OPTIONS})
"""
# Answers each row in a process of its own, forked where everything is imported, and searches for none.
ROWS = """
import json, os, platform, sys
import torch
from autotune_amp import recommend_config
from autotune_amp import fingerprint
from autotune_amp.search import search
from autotune_amp import api
import msgspec

OUT = sys.argv[1]
identify = api.identify

def device(**changes):
    api.identify = lambda name: msgspec.structs.replace(identify(name), **changes)

def searched(origin, options, progress, folder, settings, cached, fingerprint, *_, **__):
    raise LookupError(cached.fingerprint.differences(fingerprint))

search.run_search = searched
for number, (folder, statement, call) in enumerate(json.loads(sys.stdin.read())):
    child = os.fork()
    if child:
        os.waitpid(child, 0)
        continue
    os.chdir(folder)
    sys.path.insert(0, folder)
    try:
        exec(statement)
        import train
        exec(call)
        said = "hit"
    except LookupError as changes:
        said = changes.args[0]
    except BaseException as error:
        said = repr(error)
    print(json.dumps(said), flush=True)
    os._exit(0)
"""
CALL = f"recommend_config(train.workload(), {OPTIONS})"


def options(more: str) -> str:
    return f"recommend_config(train.workload(), **{{**dict({OPTIONS}), **dict({more})}})"


# What changes before the call, as an edit of a file, a statement before the import of train.py, or another call; and
# the line that says so, None where the cache answers.
ROWS_TO_ASK: list[tuple[str | None, dict[str, Any]]] = [
    (None, {}),  # from another process, in another folder
    (None, {"edit": ("unrelated.py", "VALUE = 1", "VALUE = 2"), "run": "import unrelated"}),
    (None, {"run": "os.environ |= {'UNRELATED': '1', 'LOCAL_RANK': '0', 'TORCHELASTIC_RUN_ID': '7'}"}),
    (None, {"call": options("batch_size='4:4', precision=['fp32']")}),
    ("device driver changed from None to 570.1", {"run": "device(driver='570.1')"}),
    ("version of torch changed", {"run": "torch.__version__ = '9.9'"}),
    ("source file train.py changed", {"edit": ("train.py", "pow(2)", "pow(4)")}),
    ("workload.data changed", {"edit": ("train.py", "length=32", "length=33")}),
    ("option seed changed from 0 to 1", {"call": options("seed=1")}),
    ("option memory_limit changed", {"call": options("memory_limit='16GiB'")}),
    (
        "option num_ranks changed from 1 to 2",
        {
            "run": "import autotune_amp.api as api; "
            "api.place = lambda where=api.place(): where._replace(num_ranks=2); "
            "api.answer_on_first = lambda find, *_: find()"
        },
    ),
    (
        "torch flag cuda.matmul.fp32_precision changed",
        {"run": "torch.backends.cuda.matmul.fp32_precision='tf32'"},
    ),
    ("torch flag autocast.cpu changed", {"run": "torch.set_autocast_enabled('cpu', True)"}),
    ("torch flag num_threads changed", {"run": "torch.set_num_threads(torch.get_num_threads() + 1)"}),
    ("torch flag mkldnn.enabled changed", {"run": "torch.backends.mkldnn.enabled = False"}),
    ("environment variable MALLOC_ARENA_MAX is new", {"run": "os.environ['MALLOC_ARENA_MAX'] = '7'"}),
]


class Program:
    """Runs Python programs to their end in a folder."""

    def __init__(self, server: ForkServer, folder: Path) -> None:
        self._server = server
        self._folder = folder

    def __call__(self, code: str, *arguments: str | Path, text: str = "") -> str:
        environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1"}
        given = ["-c", code, *map(str, arguments)]
        done = self._server.run(given, cwd=self._folder, env=environment, stdin=text)
        assert done.returncode == 0, done.stderr
        return done.stdout


def written(folder: Path, file: str = "train.py", old: str = "", new: str = "") -> str:
    """A folder with the files, one of them edited."""
    assert old in FILES[file]
    folder.mkdir()
    for name, content in {**FILES, file: FILES[file].replace(old, new) if old else FILES[file]}.items():
        (folder / name).write_text(content)
    return str(folder)


@pytest.mark.slow
def test_the_cache_answers_what_it_holds_for_and_nothing_else(fork_server: ForkServer, tmp_path: Path) -> None:
    python = Program(fork_server, tmp_path)
    python(SEARCH, written(tmp_path / "searched"), tmp_path / "studies")
    outcomes = (tmp_path / "studies" / "cached" / "outcomes.jsonl").read_bytes()
    asked = [
        (written(tmp_path / str(number), *row.get("edit", ())), row.get("run", ""), row.get("call", CALL))
        for number, (_, row) in enumerate(ROWS_TO_ASK)
    ]
    said = map(json.loads, python(ROWS, tmp_path / "studies", text=json.dumps(asked)).splitlines())
    wrong = [
        (line, row, answer)
        for (line, row), answer in zip(ROWS_TO_ASK, said, strict=True)
        if (answer != "hit" if line is None else not any(found.startswith(line) for found in answer))
    ]
    assert wrong == []
    assert (tmp_path / "studies" / "cached" / "outcomes.jsonl").read_bytes() == outcomes
