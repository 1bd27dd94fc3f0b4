"""The check of accumulation in real child processes, on data as users have it."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from autotune_amp.core.fidelity import Accumulation
from autotune_amp.core.outcome import CheckOutcome, Failure
from autotune_amp.isolation.local import LocalBackend, Payload
from autotune_amp.isolation.process import Watcher
from autotune_amp.trial.jobs import Check

WORKLOAD = """
import pathlib
import torch
from torch import nn
from torch.utils.data import DataLoader
from autotune_amp import Workload

def mode():
    return pathlib.Path(__file__).with_name("mode").read_text()

class Texts:
    def __len__(self):
        return 64

    def __getitem__(self, index):
        if not 0 <= index < 64:
            raise IndexError(index)
        generator = torch.Generator().manual_seed(index)
        length = int(torch.randint(3, 20, (), generator=generator))
        if mode() == "mostly full" and index not in (5, 50):
            length = 20
        return {"ids": torch.randint(1, 20, (length,), generator=generator)}

def padded(samples):
    ids = [sample.pop("ids") for sample in samples]
    if mode() == "graph":
        return {"nodes": torch.cat(ids), "first": torch.tensor([len(part) for part in ids]).cumsum(0)}
    tokens = nn.utils.rnn.pad_sequence(ids, batch_first=True)
    return {"ids": tokens, "labels": tokens.masked_fill(tokens == 0, -100)}

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(20, 16)
        self.norm = nn.BatchNorm1d(16) if mode() == "batch norm" else nn.LayerNorm(16)
        self.dropout = nn.Dropout(0.5)
        self.head = nn.Linear(16, 20, bias=False)
        self.head.weight = self.words.weight

    def forward(self, ids):
        hidden = self.words(ids)
        return self.head(self.dropout(self.norm(hidden.flatten(0, -2)).view_as(hidden)))

def loss(model, batch):
    if mode() == "graph":
        return model(batch["nodes"]).square().mean()
    labels = batch.pop("labels")  # as many do: the next pass needs them again
    if mode() == "oom" or (mode() == "oom above 8" and len(labels) > 8):
        raise torch.OutOfMemoryError(f"{len(labels)} samples are too many")
    if mode() == "wrong":
        raise ValueError("no good")
    return nn.functional.cross_entropy(model(batch["ids"]).flatten(0, 1), labels.flatten())

def workload():
    loader = DataLoader(Texts(), batch_size=32, shuffle=True, collate_fn=padded)
    return Workload(Model, loss, loader)
"""


class Folder:
    def __init__(self, path: Path) -> None:
        self._path = path
        (path / "train.py").write_text(WORKLOAD)
        self._set("")
        self.runner = LocalBackend(Payload(target="train:workload", path=(str(path), *sys.path)), "forked", Watcher())
        self.runner.load(60)
        self.state = self.runner.open("cpu", 1, 60)[0]

    def _set(self, mode: str) -> None:
        (self._path / "mode").write_text(mode)

    def check(self, mode: str = "", batch_size: int = 32, **fields: Any) -> CheckOutcome:
        self._set(mode)
        asked = {"what": "accumulation", "precision": "fp32", "device": "cpu", "torch_state": self.state}
        return self.runner.submit(Check(**{**asked, "batch_size": batch_size, **fields})).result()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Folder]:
    made = Folder(tmp_path_factory.mktemp("accumulation"))
    with made.runner:
        yield made


@pytest.mark.parametrize("mode", ["", "mostly full"])
def test_padded_texts_are_weighted_by_their_tokens(folder: Folder, mode: str) -> None:
    for seed in range(3):
        found = folder.check(mode, seed=seed)
        assert isinstance(found, Accumulation)
        assert (found.verdict, found.weighted_by) == ("weighted", "labels != -100"), found.reason
        assert (found.batch_size, found.num_micro_batches, found.num_passes) == (16, 4, 7)
        assert "its share of the window's tokens (labels != -100)" in found.next_step
        assert found.seconds > 0


def test_batch_norm_is_found_in_the_users_own_model(folder: Folder) -> None:
    found = folder.check("batch norm")
    assert isinstance(found, Accumulation)
    assert found.verdict == "inexact"
    assert "(norm)" in found.reason


def test_samples_that_their_collate_function_joins_are_cut_before_it(folder: Folder) -> None:
    found = folder.check("graph")
    assert isinstance(found, Accumulation)
    assert (found.verdict, found.weighted_by) == ("weighted", "nodes.numel()"), found.reason


def test_a_smaller_batch_where_memory_is_short_and_none_where_it_is_too_short(folder: Folder) -> None:
    found = folder.check("oom above 8")
    assert isinstance(found, Accumulation)
    assert (found.verdict, found.batch_size) == ("weighted", 8)
    failed = folder.check("oom", batch_size=8)
    assert isinstance(failed, Failure)
    assert (failed.kind, failed.message) == ("oom", "OutOfMemoryError: 4 samples are too many")


def test_what_cannot_be_cut_is_unchecked_and_what_the_user_raises_is_told(folder: Folder) -> None:
    found = folder.check(batch_size=3)
    assert isinstance(found, Accumulation)
    assert (found.verdict, found.batch_size) == ("unchecked", 3)
    assert "fewer than 4 samples cannot be cut" in found.reason
    failed = folder.check("wrong")
    assert isinstance(failed, Failure)
    assert failed.kind == "workload_error"
    assert "no good" in failed.message
