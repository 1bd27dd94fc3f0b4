"""recommend_config() end to end: what answers from the cache of another process, and what searches again."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

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
    return Workload(model_of(4), loss, loader, torch.optim.SGD, "cached", evaluate=evaluate)

def evaluate(model):
    return 1
"""
FILES = {
    "train.py": TRAIN,
    "layers.py": "import torch\n\n\ndef make(width):\n    return torch.nn.Linear(width, 1)\n",
    "unrelated.py": "VALUE = 1\n",
}
OPTIONS = "budget=16, precision='fp32', batch_size=(4, 4), trials=1, device='cpu', quiet=True, out=OUT"
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
from autotune_amp.search import cache, search
import msgspec

OUT = sys.argv[1]
identify = cache.identify

def device(**changes):
    cache.identify = lambda name: msgspec.structs.replace(identify(name), **changes)

def searched(origin, options, progress, folder, settings, cached, fingerprint, *_, **__):
    raise LookupError(cached.fingerprint.differences(fingerprint))

search.search_anew = searched
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
NO_EDIT = ("train.py", "", "")


def hit(*edit: str, run: str = "", call: str = CALL) -> tuple[tuple[str, ...], str, str]:
    """An edit of a file, what runs before the workload is imported, and the call."""
    return edit or NO_EDIT, run, call


def miss(line: str, *edit: str, run: str = "", call: str = CALL) -> tuple[tuple[str, ...], str, str, str]:
    """The same with the line that says what changed."""
    return *hit(*edit, run=run, call=call), line


def options(more: str) -> str:
    return f"recommend_config(train.workload(), **{{**dict({OPTIONS}), **dict({more})}})"


HITS = {
    "another process and folder": hit(),
    "an unrelated module": hit("unrelated.py", "VALUE = 1", "VALUE = 2", run="import unrelated"),
    "an unrelated variable": hit(run="os.environ['UNRELATED'] = '1'"),
    "another way to write an option": hit(call=options("batch_size='4:4', precision=['fp32']")),
    "a launcher's variable": hit(run="os.environ |= {'LOCAL_RANK': '0', 'TORCHELASTIC_RUN_ID': '7'}"),
}
MISSES = {
    "driver": miss("device driver changed from None to 570.1", run="device(driver='570.1')"),
    "torch": miss("version of torch changed", run="torch.__version__ = '9.9'"),
    "loss": miss("workload.loss (function loss of train.py) changed", "train.py", "pow(2)", "pow(4)"),
    "model": miss("function make of layers.py changed", "layers.py", "(width, 1)", "(width, 2)"),
    "evaluation": miss("workload.evaluate (function evaluate of train.py) changed", "train.py", "return 1", "return 2"),
    "closure": miss("closure width of model_of changed", "train.py", "model_of(4)", "model_of(5)"),
    "data's length": miss("workload.data changed", "train.py", "length=32", "length=33"),
    "loader": miss("workload.data changed", "train.py", "batch_size=4", "batch_size=8"),
    "optimizer": miss("workload.optimizer changed", "train.py", "optim.SGD", "optim.Adam"),
    "seed": miss("option seed changed from 0 to 1", call=options("seed=1")),
    "memory fraction": miss("option memory_fraction changed from 0.9 to 0.8", call=options("memory_fraction=0.8")),
    "ranks": miss(
        "option num_ranks changed from 1 to 2",
        run="import autotune_amp.api as api; api.place = lambda where=api.place(): where._replace(num_ranks=2); "
        "api.answer_on_first = lambda find, *_: find()",
    ),
    "TF32": miss(
        "torch flag cuda.matmul.fp32_precision changed", run="torch.backends.cuda.matmul.fp32_precision='tf32'"
    ),
    "autocast": miss("torch flag autocast.cpu changed", run="torch.set_autocast_enabled('cpu', True)"),
    "threads": miss("torch flag num_threads changed", run="torch.set_num_threads(torch.get_num_threads() + 1)"),
    "oneDNN": miss("torch flag mkldnn.enabled changed", run="torch.backends.mkldnn.enabled = False"),
    "a library's method": miss(
        "workload.data changed",
        "unrelated.py",
        "VALUE = 1",
        "import torch\ntorch.utils.data.TensorDataset.__len__ = lambda self: 1",
        run="import unrelated",
    ),
    "allocator": miss("environment variable MALLOC_ARENA_MAX is new", run="os.environ['MALLOC_ARENA_MAX'] = '7'"),
}


def python(code: str, *arguments: str | Path, text: str = "") -> str:
    environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, "-c", code, *arguments]
    done = subprocess.run(command, input=text, env=environment, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    return done.stdout


def written(folder: Path, file: str, old: str, new: str) -> str:
    assert old in FILES[file]
    folder.mkdir()
    for name, content in FILES.items():
        (folder / name).write_text(content.replace(old, new) if name == file and old else content)
    return str(folder)


@pytest.mark.slow
def test_the_cache_answers_what_it_holds_for_and_nothing_else(tmp_path: Path) -> None:
    python(SEARCH, written(tmp_path / "searched", *NO_EDIT), tmp_path / "studies")
    outcomes = (tmp_path / "studies" / "cached" / "outcomes.jsonl").read_bytes()
    rows = [*HITS.values(), *MISSES.values()]
    tried = [(written(tmp_path / str(n), *edit), run, call) for n, (edit, run, call, *_) in enumerate(rows)]
    said: list[Any] = [
        json.loads(line) for line in python(ROWS, tmp_path / "studies", text=json.dumps(tried)).splitlines()
    ]
    assert len(said) == len(rows)
    assert {name: answer for name, answer in zip(HITS, said, strict=False) if answer != "hit"} == {}
    wrong = {
        name: answer
        for (name, (*_, line)), answer in zip(MISSES.items(), said[len(HITS) :], strict=True)
        if not any(found.startswith(line) for found in answer if answer != "hit")
    }
    assert wrong == {}
    assert (tmp_path / "studies" / "cached" / "outcomes.jsonl").read_bytes() == outcomes
