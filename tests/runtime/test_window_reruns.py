"""A rerun of one batch where a window has several, and windows that the loop drops."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn
from training import fp16, same

from autotune_amp.runtime.controller import PrecisionController

LARGE = 1e6  # past fp16, not bf16


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


class Loop:
    """Windows of two passes; `rerun` is of the latest."""

    def __init__(self) -> None:
        self.net = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 1))
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=0.01)
        self.controller = PrecisionController(fp16(accumulation_steps=2), "cpu")
        self.controller.attach(self.net, self.loss)
        self.factor = 1.0
        self.inputs = torch.randn(4, 8)

    def loss(self) -> Tensor:
        loss: Tensor = self.net(self.inputs * self.factor).float().square().mean() / 2
        return loss

    def window(self, *factors: float, is_dropped: bool = False) -> None:
        for self.factor in factors:
            with self.controller.autocast():
                loss = self.loss()
            self.controller.backward(loss)
        if is_dropped:
            self.controller.discard_window()
        else:
            self.controller.step(self.optimizer)
            self.controller.update()
        self.optimizer.zero_grad()


def test_an_overflow_in_an_earlier_pass_than_the_one_run_again_is_stepped_down_from_at_once() -> None:
    loop = Loop()
    for factors in [(1.0, 1.0)] * 5 + [(LARGE, 1.0)] * 2:
        loop.window(*factors)
    (record,) = loop.controller.status().history
    assert (record.kind, record.update, record.after) == ("demotion", 7, "bf16")
    assert "an earlier pass" in record.reason


def test_an_overflow_in_the_pass_that_is_run_again_is_diagnosed() -> None:
    loop = Loop()
    for factors in [(1.0, 1.0)] * 5 + [(1.0, LARGE)] * 2:
        loop.window(*factors)
    assert "first in module 0" in loop.controller.status().history[0].reason


def test_a_dropped_window_leaves_no_trace() -> None:
    mine, theirs = Loop(), Loop()
    theirs.net.load_state_dict(mine.net.state_dict())
    theirs.inputs = mine.inputs
    for loop in (mine, theirs):
        loop.window(1.0, 1.0)
        if loop is mine:
            loop.window(math.inf, 1.0, is_dropped=True)
            loop.controller.discard_window()  # of which there is none
        loop.window(1.0, 1.0)
    assert same(mine.net, theirs.net)
    status = mine.controller.status()
    assert (status.num_updates, status.num_skips) == (2, 0)
