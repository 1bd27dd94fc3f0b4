"""A real search in which another memory format wins, and what its recommendation does to live objects."""

from __future__ import annotations

import pytest
import torch
from conftest import CommandLine, SharedOnce
from forked_python import ForkServer
from real_searches import FP32, Searched, searched
from torch import nn

import autotune_amp
from autotune_amp.core.recommendation import Recommendation

pytestmark = pytest.mark.slow

# A step sleeps less where the convolution lies channels last: that wins on any machine.
WORKLOAD = """
import time
import torch
from torch import nn
from autotune_amp import Workload

def model():
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 2))

def loss(model, batch):
    is_last = model[0].weight.is_contiguous(memory_format=torch.channels_last)
    time.sleep(0.01 if is_last else 0.03)
    return nn.functional.cross_entropy(model(batch[0]), batch[1])

def make_batch(size):
    return torch.randn(size, 3, 8, 8), torch.randint(0, 2, (size,))

def workload():
    return Workload(model, loss, make_batch, lambda parameters: torch.optim.SGD(parameters, lr=0.01))
"""
TRIED = ("--try", "memory_format,compile,activation_checkpointing")
SETTINGS = (*TRIED, "--budget", "60", "--baseline", "fp32:4", "--batch-size", "4:4", "--steps", "100")


@pytest.fixture
def laid_out(shared_once: SharedOnce, cli_server: ForkServer | None) -> Searched:
    return shared_once(
        "laid out", lambda folder: searched(cli_server, folder, WORKLOAD, "train.py:workload", *FP32, *SETTINGS)
    )


def test_it_is_recommended_with_what_it_gains_and_every_other_has_its_reason(laid_out: Searched) -> None:
    assert laid_out.done.code == 0, laid_out.done.err
    config, evidence = laid_out.document["config"], laid_out.document["evidence"]
    assert (config["memory_format"], config["compile"], config["optimizer_impl"]) == (
        "channels_last",
        "off",
        "as_found",
    )
    assert evidence["speedup"] > 1.3
    assert evidence["fidelity"]["verdict"] == "faithful"
    rows = {row["value"]: row for row in laid_out.document["variants"]}
    assert rows["channels_last"]["status"] == "chosen"
    assert rows["channels_last"]["beside"] == "fp32 batch 4"
    low, high = rows["channels_last"]["speedup_interval"]
    assert 1.3 < low <= rows["channels_last"]["speedup"] <= high
    for value in ("channels_last_3d", "default", "blocks"):
        assert rows[value]["status"] == "untried", rows[value]
        assert rows[value]["reason"]
    kinds = {(record["purpose"], record["candidate"]["memory_format"]) for record in laid_out.records}
    assert {("search", "channels_last"), ("fidelity", "channels_last"), ("confirm", "channels_last")} <= kinds


def test_the_terminal_and_the_page_have_a_row_for_each(laid_out: Searched, cli: CommandLine) -> None:
    shown = cli("show", str(laid_out.study)).out
    assert "also tried" in shown
    assert "further value" in shown, "what was not tried is one line"
    page = (laid_out.study / "report.html").read_text()
    assert "Also tried" in page
    assert "channels_last_3d" in page
    assert "autotune_amp.prepare(controller.config, model, optimizer)" in page


def test_the_recommendation_sets_up_live_objects(laid_out: Searched) -> None:
    config = Recommendation.load(laid_out.study / "recommendation.json").config
    convolution = nn.Conv2d(3, 4, 3)
    model = nn.Sequential(convolution, nn.Flatten(), nn.Linear(144, 2))
    autotune_amp.prepare(config, model, torch.optim.SGD(model.parameters(), lr=0.01))
    assert convolution.weight.is_contiguous(memory_format=torch.channels_last)
    text = autotune_amp.AmpConfig.to_json(config)
    assert autotune_amp.AmpConfig.from_json(text) == config
