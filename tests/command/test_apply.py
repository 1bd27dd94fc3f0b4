"""A recommendation applied to scripts that run in real processes."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import msgspec
import pytest
from commands import INJECTED, TORCHRUN
from forked_python import ForkServer, forked_programs
from said import trained

from autotune_amp.cli import run
from autotune_amp.command.command import Command
from autotune_amp.command.editing.apply import _observe_run, _setting_of_rank
from autotune_amp.core.command_template import CommandTemplate
from autotune_amp.core.config import AmpConfig
from autotune_amp.core.outcome import Description, Failure
from autotune_amp.core.recommendation import Recommendation
from autotune_amp.search.storage.folder import StudyFolder

SAMPLE = Path(__file__).parents[1] / "golden/study/recommendation.json"
AGENT = INJECTED.parent
Apply = Callable[..., dict[str, Any]]

PREAMBLE = """
import torch
from torch import nn

torch.manual_seed(0)
data = torch.utils.data.TensorDataset(torch.randn(1024, 8), torch.randn(1024, 1))
model = nn.Linear(8, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
"""
LOOP = """
for x, y in loader:
    optimizer.zero_grad()
    loss = nn.functional.mse_loss(model(x), y)
    loss.backward()
    optimizer.step()
"""
PLAIN = PREAMBLE + "loader = torch.utils.data.DataLoader(data, batch_size=8, shuffle=True)\n" + LOOP


@pytest.fixture
def forked_apply(apply: Apply, fork_server: ForkServer) -> Iterator[Apply]:
    """`apply`, whose scripts are forked from a process that has imported torch."""
    with forked_programs(fork_server):
        yield apply


@pytest.fixture
def apply(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfdbinary: pytest.CaptureFixture[bytes]) -> Apply:
    """`autotune-amp apply --json -- COMMAND` in a folder whose study recommends bf16 and batch 16; its document."""
    monkeypatch.chdir(tmp_path)

    def applied(
        command: list[str],
        *options: str,
        fails: bool = False,
        description: Description | None = None,
        **config: Any,
    ) -> dict[str, Any]:
        study = tmp_path / "studies" / "it"
        study.mkdir(parents=True, exist_ok=True)
        wanted: dict[str, Any] = {"precision": "bf16", "batch_size": 16} | config
        sample = Recommendation.load(SAMPLE)
        recommended = msgspec.structs.replace(sample, config=AmpConfig(**wanted), workload=description)
        recommended.save(study / "recommendation.json")
        assert (run(["apply", *options, "--json", "--", *command]) != 0) is fails
        document: dict[str, Any] = json.loads(capfdbinary.readouterr().out)
        return document

    return applied


def seen(observed: dict[str, Any] | None) -> tuple[str, int, int]:
    assert observed is not None
    return observed["precision"], observed["batch_size"], observed["accumulation_steps"]


def test_a_plain_loop_is_shown_tried_and_written(forked_apply: Apply, tmp_path: Path) -> None:
    script, other = tmp_path / "train.py", tmp_path / "other"
    script.write_text(PLAIN)
    script.chmod(0o750)
    found = forked_apply([sys.executable, "train.py"], "--write")
    assert (found["verified"], found["by_hand"], found["command"]) == (True, [], None)
    assert seen(found["today"]) == ("fp32", 8, 1)
    assert seen(found["observed"]) == ("bf16", 16, 1)
    assert (found["written"], script.stat().st_mode & 0o777) == (["train.py"], 0o750)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["studies", "train.py"]
    other.mkdir()
    (other / "train.py").write_text(PLAIN)
    subprocess.run(["git", "apply", "-"], input=found["diff"].encode(), cwd=other, check=True)
    assert (other / "train.py").read_text() == script.read_text() != PLAIN


def test_what_the_command_makes_is_moved_away_and_said(forked_apply: Apply, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("open('log', 'x').close()\n" + PLAIN)
    for _ in range(2):
        found = forked_apply([sys.executable, "train.py"])
        assert found["verified"]
        assert "log" in found["left"][0]
        assert not (tmp_path / "log").exists()
    (tmp_path / "log").write_text("the user's")
    assert "log" in forked_apply([sys.executable, "train.py"], fails=True)["error"]["message"]


def test_a_copy_that_does_something_else_is_not_written(forked_apply: Apply, tmp_path: Path) -> None:
    stubborn = PREAMBLE + "size = 32\nglobals()['size'] = 8\nloader = torch.utils.data.DataLoader(data, size)\n" + LOOP
    (tmp_path / "train.py").write_text(stubborn)
    refused = forked_apply([sys.executable, "train.py"], "--write", precision="fp32", fails=True)
    assert all(word in refused["error"]["message"] for word in ("batch size", "8", "16"))
    assert (tmp_path / "train.py").read_text() == stubborn


def test_the_batch_of_a_rank_counts_for_all_that_share_it() -> None:
    rank = next(iter(trained([9, 9]).ranks.values()))
    for num_sharing, batch_size in ((1, 8), (2, 16)):
        observed = _setting_of_rank(rank, has_own_weights=False, num_sharing=num_sharing)
        assert (observed.batch_size, observed.accumulation_steps) == (batch_size, 1)


def test_a_run_none_of_whose_steps_can_be_measured_is_ended() -> None:
    failure = Failure(kind="timeout", message="it was still running")
    command = Mock(spec=Command, line=CommandTemplate.of(["train"]))
    command.run.return_value = Mock(verdict=failure)
    assert _observe_run(command) is failure
    assert command.run.call_args.args[1].whole_seconds is not None


def test_arguments_that_the_command_has_are_not_asked_for(forked_apply: Apply, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(PLAIN)
    recommended = {"precision": "fp32", "batch_size": 8, "arguments": (("attn", "eager"), ("optim", "adamw"))}
    found = forked_apply([sys.executable, "train.py", "--attn", "eager"], **recommended)
    assert [each["what"] for each in found["by_hand"]] == ["set optim to adamw"]


def test_a_copy_that_fails_is_said_with_its_error(forked_apply: Apply, tmp_path: Path) -> None:
    picky = PLAIN.replace("    loss.backward()", "    assert len(x) != 16, 'not sixteen'\n    loss.backward()")
    (tmp_path / "train.py").write_text(picky)
    found = forked_apply([sys.executable, "train.py"], precision="fp32")
    assert (found["verified"], found["observed"]) == (False, None)
    assert "not sixteen" in found["problem"]
    assert (tmp_path / "train.py").read_text() == picky


RECURRENT = """
import torch
torch.manual_seed(0)
model = torch.nn.RNN(4, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
words = torch.randn(7, 16, 4)
while True:
    loss = model(words)[0].square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def test_samples_are_counted_along_the_dimension_that_the_search_found(forked_apply: Apply, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(RECURRENT)
    description = Recommendation.load(SAMPLE).workload
    assert description is not None
    description = msgspec.structs.replace(description, sample_dim=1)
    found = forked_apply([sys.executable, "train.py"], description=description)
    assert (found["verified"], found["by_hand"]) == (True, [])
    assert seen(found["today"]) == ("fp32", 16, 1)
    assert seen(found["observed"]) == ("bf16", 16, 1)


# What must be the original's in an edited copy: its name, its folder, what it imports and what it is given.
TRAIN = """
import json, sys
from pathlib import Path
from torch import optim
import helper
model = helper.nn.Linear(8, 1)
optimizer = optim.SGD(model.parameters(), lr=0.01)
settings = json.loads(Path(__file__).with_name("settings.json").read_text())
assert Path(__file__).name == "train.py" and sys.argv[1:] == ["--flag"] and settings == {{}}
if __name__ == "__main__":
    for x, y in helper.loader(num_workers={num_workers}):
        optimizer.zero_grad()
        loss = helper.loss(model, x, y)
        loss.backward()
        optimizer.step()
"""
HELPER = """
import torch
from torch import nn

def loss(model, x, y):
    out = model(x)
    return (out - y).square().mean()

def loader(num_workers):
    data = torch.utils.data.TensorDataset(torch.randn(512, 8), torch.randn(512, 1))
    context = "spawn" if num_workers else None
    return torch.utils.data.DataLoader(data, 8, True, num_workers=num_workers, multiprocessing_context=context)
"""


@pytest.mark.slow
@pytest.mark.parametrize("how", ["script", "module", "shell", "spawned workers"])
def test_a_copy_runs_in_the_originals_place(apply: Apply, tmp_path: Path, how: str) -> None:
    """In fresh processes: how an interpreter comes by the text of its program is what differs."""
    package = tmp_path / "package"
    package.mkdir()
    (package / "train.py").write_text(TRAIN.format(num_workers=1 if how == "spawned workers" else 0))
    (package / "helper.py").write_text(HELPER)
    (package / "settings.json").write_text("{}")
    command = [sys.executable, "package/train.py", "--flag"]
    if how == "module":
        (tmp_path / "train.sh").write_text(f"cd package && exec {sys.executable} -m train --flag\n")
        command = ["bash", "train.sh"]
    elif how == "shell":
        (tmp_path / "train.sh").write_text(f"{sys.executable} package/train.py --flag\n")
        command = ["bash", "train.sh"]
    found = apply(command)
    assert (found["verified"], found["by_hand"]) == (True, [])
    assert seen(found["observed"]) == ("bf16", 16, 1)
    assert "--- a/package/helper.py" in found["diff"]
    cached = [path for path in package.glob("__pycache__/*") if b"autocast" in path.read_bytes()]
    assert not cached, "the edited text's code under the original's name"


def test_flags_of_the_command_and_regions_with_a_scaler(forked_apply: Apply, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(
        "import argparse\n"
        + PREAMBLE
        + """
parser = argparse.ArgumentParser()
parser.add_argument("--batch-size", type=int, default=32)
parser.add_argument("--amp", action="store_true")
args = parser.parse_args()
train, valid = (torch.utils.data.DataLoader(data, args.batch_size), torch.utils.data.DataLoader(data, batch_size=99))
scaler = torch.amp.GradScaler("cpu", enabled=args.amp)
for x, y in train:
    optimizer.zero_grad()
    with torch.autocast("cpu", torch.float16, args.amp):
        loss = nn.functional.mse_loss(model(x), y)
        with torch.autocast("cpu", enabled=False):  # on purpose
            loss = loss.float()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
"""
    )
    found = forked_apply([sys.executable, "train.py", "--batch-size", "8"])
    assert found["verified"] is True
    assert found["command"] == [sys.executable, "train.py", "--batch-size", "16", "--amp"]
    changed = [line for line in found["diff"].splitlines() if line.startswith("+")]
    assert changed == ["+++ b/train.py", '+    with torch.autocast("cpu", torch.bfloat16, args.amp):']


@pytest.mark.slow
def test_ranks(apply: Apply, tmp_path: Path) -> None:
    text = (
        PREAMBLE + "torch.distributed.init_process_group('gloo')\nmodel = nn.parallel.DistributedDataParallel(model)\n"
    )
    text += "sampler = torch.utils.data.DistributedSampler(data)\n"
    text += "loader = torch.utils.data.DataLoader(data, 8, sampler=sampler)\n" + LOOP
    (tmp_path / "train.py").write_text(text)
    found = apply([*TORCHRUN, "train.py"])
    assert (found["verified"], found["by_hand"]) == (True, [])
    assert seen(found["observed"]) == ("bf16", 16, 1)


def test_what_cannot_be_applied(forked_apply: Apply, tmp_path: Path) -> None:
    assert forked_apply([], fails=True)["error"]["kind"] == "invalid_request"
    assert run(["apply"]) == 2
    placeholder = forked_apply([sys.executable, "train.py", "--bs", "{batch_size=8}"], fails=True)["error"]
    assert "{batch_size}" in placeholder["message"]
    assert "prepare" in forked_apply([sys.executable, "train.py"], precision="fp8", fails=True)["error"]["next_step"]
    failing = [sys.executable, "-c", "import torch; open('log', 'x').close(); raise ValueError('the moon')"]
    message = forked_apply(failing, fails=True)["error"]["message"]
    assert "the moon" in message
    assert "trial_leftovers" in message, "what it made is no longer in its place"


def test_runs_of_a_search_in_the_same_study_are_not_cleared_up(apply: Apply, tmp_path: Path) -> None:
    with StudyFolder(str(tmp_path / "studies"), "it"):
        assert apply([sys.executable, "-c", ""], fails=True)["error"]["kind"] == "study_busy"


# --- frameworks ------------------------------------------------------------------------------------------------------

TRANSFORMERS = """
import torch
from transformers import BertConfig, BertForSequenceClassification, HfArgumentParser
from transformers import Seq2SeqTrainingArguments as TrainingArguments

class Sentences(torch.utils.data.Dataset):
    def __len__(self):
        return 256

    def __getitem__(self, index):
        return {"input_ids": torch.full((4,), index % 7), "labels": torch.tensor(index % 2)}

config = BertConfig(vocab_size=8, hidden_size=8, num_hidden_layers=1, num_attention_heads=1, intermediate_size=8)
ARGUMENTS
from transformers import Trainer  # as late as TRL's script of `trl sft`
Trainer(BertForSequenceClassification(config), args, train_dataset=Sentences()).train()
"""
LIGHTNING = """
import lightning
import torch

class Classifier(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(8, 1)

    def training_step(self, batch, _):
        return self.layer(batch[0]).square().mean()

    def train_dataloader(self):
        return torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.randn(512, 8)), batch_size=8)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.01)

lightning.Trainer(max_epochs=1, accelerator="cpu", logger=False, enable_checkpointing=False).fit(Classifier())
"""
ACCELERATE = (
    "from accelerate import Accelerator\n"
    + PREAMBLE
    + """
accelerator = Accelerator()
loader = torch.utils.data.DataLoader(data, batch_size=8, shuffle=True)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
for x, y in loader:
    WITH
        optimizer.zero_grad()
        accelerator.backward(nn.functional.mse_loss(model(x), y))
        optimizer.step()
"""
)


@pytest.mark.slow
@pytest.mark.parametrize("parses", [False, True])
def test_transformers(forked_apply: Apply, tmp_path: Path, parses: bool) -> None:
    own = "args = TrainingArguments('out', per_device_train_batch_size=8, report_to='none', use_cpu=True)"
    parsed = "args, = HfArgumentParser(TrainingArguments).parse_args_into_dataclasses()"
    (tmp_path / "train.py").write_text(TRANSFORMERS.replace("ARGUMENTS", parsed if parses else own))
    given = ["--output_dir", "out", "--use_cpu", "--report_to", "none"] if parses else []
    found = forked_apply([sys.executable, "train.py", *given], accumulation_steps=2)
    assert (found["verified"], found["by_hand"]) == (True, [])
    assert seen(found["observed"]) == ("bf16", 16, 2)
    assert (found["diff"] == "") is parses
    assert ("--bf16" in (found["command"] or [])) is parses


@pytest.mark.slow
@pytest.mark.parametrize("accumulates", [True, False])
def test_accelerate(forked_apply: Apply, tmp_path: Path, accumulates: bool) -> None:
    block = "with accelerator.accumulate(model):" if accumulates else "if True:"
    (tmp_path / "train.py").write_text(ACCELERATE.replace("WITH", block))
    found = forked_apply([sys.executable, "train.py"], accumulation_steps=2)
    assert found["verified"] is accumulates, "the argument alone does nothing"
    assert seen(found["observed"]) == ("bf16", 16, 2 if accumulates else 1)


@pytest.mark.slow
def test_lightning(forked_apply: Apply, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(LIGHTNING)
    found = forked_apply([sys.executable, "train.py"], accumulation_steps=2)
    assert (found["verified"], found["by_hand"]) == (True, [])
    assert seen(found["observed"]) == ("bf16", 16, 2)


# --- the agent's parts alone ----------------------------------------------------------------------------------------


def test_what_a_script_raises_and_returns_is_its_own(tmp_path: Path) -> None:
    """The overlay alone, without torch."""
    shutil.copy(AGENT / "overlay.py", tmp_path)
    (tmp_path / "train.py").write_text("import sys\nsys.exit(1)\n")
    (tmp_path / "copy.py.txt").write_text(
        "import sys\nprint(__file__, sys.path[0], *sys.argv)\nif sys.argv[1] != '0':\n    sys.exit(int(sys.argv[1]))\n"
    )
    overlay = {str(tmp_path / "train.py"): str(tmp_path / "copy.py.txt")}
    (tmp_path / "sitecustomize.py").write_text(f"import overlay\noverlay.arm({overlay!r})\n")
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    for argument, status in (("7", 7), ("0", 0), ("no number", 1)):
        command = [sys.executable, "train.py", argument]
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60)
        assert done.returncode == status
        assert done.stdout.split(" ", 2) == [str(tmp_path / "train.py"), str(tmp_path), f"train.py {argument}\n"]
        assert ("ValueError" in done.stderr) is (status == 1)


def test_a_module_that_is_being_imported_is_waited_for(tmp_path: Path) -> None:
    """A framework that is imported before torch imports torch before it is through itself."""
    shutil.copy(AGENT / "imports.py", tmp_path)
    (tmp_path / "framework.py").write_text("import library\nvalue = 1\n")
    act = "imports.after_import('framework', lambda module: print('value', module.value))\n"
    (tmp_path / "library.py").write_text(f"import imports\n{act}{act}print('library')\n")
    program = f"import framework\nprint('all')\nimport imports\n{act}"
    done = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.stdout.split("\n") == ["library", "value 1", "value 1", "all", "value 1", ""], done.stderr
