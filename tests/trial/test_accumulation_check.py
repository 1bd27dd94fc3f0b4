"""The check of accumulation on data as users have it."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import pytest

from autotune_amp.core.outcome import Accumulation, CheckOutcome, Failure
from autotune_amp.precision import torch_state
from autotune_amp.trial import checks
from autotune_amp.trial.context import Context
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
    """A workload in a folder, in which `mode` says how it is to misbehave."""

    def __init__(self, path: Path) -> None:
        self._path = path
        (path / "train.py").write_text(WORKLOAD)

    def check(self, mode: str = "", batch_size: int = 32, **fields: Any) -> CheckOutcome:
        (self._path / "mode").write_text(mode)
        namespace = runpy.run_path(str(self._path / "train.py"))
        asked = {"what": "accumulation", "precision": "fp32", "device": "cpu", "torch_state": torch_state.capture()}
        spec = Check(**{**asked, "batch_size": batch_size, **fields})
        return checks.check(Context(namespace["workload"](), is_kept=False), spec, lambda event: None)


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    return Folder(tmp_path)


@pytest.mark.parametrize("mode", ["", "mostly full"])
def test_padded_texts_are_weighted_by_their_tokens(folder: Folder, mode: str) -> None:
    for seed in range(3):
        found = folder.check(mode, seed=seed)
        assert isinstance(found, Accumulation)
        assert (found.verdict, found.weighted_by) == ("weighted", "labels != -100"), found.reason
        assert (found.batch_size, found.num_micro_batches, found.num_passes) == (16, 4, 7)


def test_batch_norm_is_found_in_the_users_own_model(folder: Folder) -> None:
    found = folder.check("batch norm")
    assert isinstance(found, Accumulation)
    assert found.verdict == "inexact"
    assert "(norm)" in found.reason


def test_samples_that_their_collate_function_joins_are_cut_before_it(folder: Folder) -> None:
    found = folder.check("graph")
    assert isinstance(found, Accumulation)
    assert (found.verdict, found.weighted_by) == ("weighted", "nodes.numel()"), found.reason


def test_what_cannot_be_cut_is_unchecked_and_what_the_user_raises_is_told(folder: Folder) -> None:
    found = folder.check(batch_size=3)
    assert isinstance(found, Accumulation)
    assert (found.verdict, found.batch_size) == ("unchecked", 3)
    assert "fewer than 4 samples cannot be cut" in found.reason
    failed = folder.check("wrong")
    assert isinstance(failed, Failure)
    assert failed.kind == "workload_error"
    assert "no good" in failed.message
