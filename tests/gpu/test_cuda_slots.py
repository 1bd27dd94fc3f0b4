"""A search on all cards of a host at the same time."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from conftest import SharedOnce, command_line
from virtual_gpu_plugin import VirtualMachine

pytestmark = [pytest.mark.gpu, pytest.mark.real_time]

# Every process leaves what it saw of the cards.
WORKLOAD = """
import os
from pathlib import Path
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from autotune_amp import Workload

def loss(model, batch):
    saw = f"{os.environ.get('CUDA_VISIBLE_DEVICES')} {torch.cuda.device_count()} {batch[0].device}"
    (Path(__file__).parent / f"saw-{os.getpid()}").write_text(saw)
    return nn.functional.cross_entropy(model(batch[0]), batch[1])

def workload():
    data = TensorDataset(torch.randn(512, 64), torch.randint(10, (512,)))
    return Workload(lambda: nn.Linear(64, 10), loss, DataLoader(data, batch_size=16), torch.optim.SGD)
"""
NUM_CARDS = 4


@pytest.fixture
def searched(shared_once: SharedOnce, virtual_machine: VirtualMachine) -> tuple[dict[str, Any], list[Any], list[str]]:
    """The document of a search on four cards, its records, and what its processes saw."""

    def search(folder: Path) -> tuple[dict[str, Any], list[Any], list[str]]:
        with command_line(folder) as cli:
            cli.environment |= virtual_machine(num=NUM_CARDS)
            target = cli.write("train.py", WORKLOAD)
            options = ("--precision", "fp32", "--precision", "bf16", "--try", "none", "--budget", "80")
            done = cli.search(target, "--devices", "all", *options)
        assert done.code == 0, done.err
        lines = (folder / "studies/train/outcomes.jsonl").read_text().splitlines()
        seen = [path.read_text() for path in folder.glob("saw-*")]
        return done.document, [json.loads(line) for line in lines], seen

    return shared_once("searched on four cards", search)


def test_each_job_sees_one_card_by_its_uuid(searched: Any) -> None:
    _, _, seen = searched
    assert {text.partition(" ")[2] for text in seen} == {"1 cuda:0"}
    uuids = {text.partition(" ")[0] for text in seen}
    assert len(uuids) == NUM_CARDS
    assert all(uuid.startswith("GPU-") for uuid in uuids)


def test_every_card_has_trials_and_begins_with_the_baseline(searched: Any) -> None:
    document, records, _ = searched
    trials = [record for record in records if record["purpose"] == "search"]
    names = [f"cuda:{number}" for number in range(NUM_CARDS)]
    assert sorted(record["slot"] for record in trials[:NUM_CARDS]) == names
    assert {record["candidate"]["precision"] for record in trials[:NUM_CARDS]} == {"fp32"}
    assert document["evidence"]["devices"] == names


def test_the_confirmation_runs_alone_on_the_first_card(searched: Any) -> None:
    _, records, _ = searched
    confirmed = [record for record in records if record["purpose"] == "confirm"]
    assert {(record["slot"], record["num_beside"]) for record in confirmed} == {("cuda:0", 0)}


def test_a_host_with_one_card_has_one_slot(virtual_machine: VirtualMachine, tmp_path: Path) -> None:
    with command_line(tmp_path) as cli:
        cli.environment |= virtual_machine(num=1)
        target = cli.write("train.py", WORKLOAD)
        done = cli.search(target, "--devices", "all", "--precision", "fp32", "--try", "none", "--budget", "120")
    assert done.code == 0, done.err
    assert done.document["evidence"]["is_confirmed"]
    assert done.document["evidence"]["devices"] == []


def test_a_card_that_is_not_there_is_refused(virtual_machine: VirtualMachine, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "autotune_amp", "search", "--devices", "0,4", "--json"],
        env={**os.environ, **virtual_machine(num=NUM_CARDS)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2
    assert "GPU 4" in json.loads(done.stdout)["error"]["message"]
