"""A real search in which fp8 wins, emulated: recommended with its fallbacks, and trained by what it recommends."""

from __future__ import annotations

import shutil

import msgspec
import pytest
from conftest import CommandLine
from forked_python import ForkServer
from real_searches import FP32, searched
from torch import nn

import autotune_amp
from autotune_amp.core.recommendation import Recommendation

# A step sleeps less where layers are in fp8: that wins on any machine, compiled or not.
WORKLOAD = """
import time
import torch
from torch import nn
from autotune_amp import Workload

def model():
    return nn.Sequential(*(nn.Linear(32, 32) for _ in range(3)), nn.Linear(32, 4))

def loss(model, batch):
    is_fp8 = any(type(layer).__name__ == "Fp8Linear" for layer in model)
    time.sleep(0.01 if is_fp8 else 0.1)
    return nn.functional.cross_entropy(model(batch[0]), batch[1])

def make_batch(size):
    return torch.randn(size, 32), torch.randint(0, 4, (size,))

def workload():
    return Workload(model, loss, make_batch, lambda parameters: torch.optim.SGD(parameters, lr=0.01))
"""
ASKED = ("--precision", "fp8", "--try", "rowwise", "--baseline", "fp32:16", "--batch-size", "16:16")


@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler, g++, on a CPU")
@pytest.mark.slow
def test_fp8_is_recommended_with_what_it_steps_down_to(cli_server: ForkServer | None, cli: CommandLine) -> None:
    pytest.importorskip("torchao")
    found = searched(
        cli_server, cli.folder, WORKLOAD, "train.py:workload", *FP32, *ASKED, "--budget", "200", "--steps", "100000"
    )
    assert found.done.code == 0, found.done.err
    config, evidence = found.document["config"], found.document["evidence"]
    assert (config["precision"], config["fp8_recipe"], config["compile"]) == ("fp8", "rowwise", "default")
    assert [plan["precision"] for plan in config["fallback"]] == ["fp32"], "bf16 was not asked for"
    assert evidence["fidelity"]["verdict"] == "faithful", evidence["fidelity"]["reason"]
    (row,) = (row for row in found.document["variants"] if row["value"] == "rowwise")
    assert (row["status"], row["beside"]) == ("chosen", "fp32 batch 16")
    kinds = {(record["purpose"], record["candidate"]["precision"]) for record in found.records}
    assert {("search", "fp8"), ("fidelity", "fp8"), ("confirm", "fp8")} <= kinds
    assert "fp8" in cli("show", str(found.study)).out
    text = cli("export", str(found.study), "--to", "torch").out
    assert "prepare(" in text
    chosen = Recommendation.load(found.study / "recommendation.json").config
    eager = msgspec.structs.replace(chosen, compile="off")  # the compiler leaves threads behind
    model = nn.Sequential(*(nn.Linear(32, 32) for _ in range(3)), nn.Linear(32, 4))
    autotune_amp.prepare(eager, model, None)
    assert [type(layer).__name__ for layer in model] == ["Linear", "Fp8Linear", "Fp8Linear", "Linear"]
