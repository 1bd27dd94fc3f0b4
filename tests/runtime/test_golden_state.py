"""Scripted runs end in the state and the history of `golden_state.json`: what checkpoints hold, and every decision.

Gradients are set by hand, to powers of two, so that every CPU computes the same. To write the file anew:
``python tests/runtime/test_golden_state.py``.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from training import timeless

from autotune_amp.core.config import AmpConfig, LossScale
from autotune_amp.runtime.controller import PrecisionController

GOLDEN = Path(__file__).with_name("golden_state.json")
CLEAN, OVERFLOW, NAN_LOSS, TINY, HUGE = "clean", "overflow", "nan loss", "tiny gradients", "beyond fp16"
# What happens in each update, or the precision that is set by hand before the next.
RUNS: dict[str, tuple[dict[str, Any], list[str]]] = {
    "it grows, backs off and goes on": (
        {"loss_scale": LossScale(init_scale=1024.0, growth_interval=3, hysteresis=2)},
        [*5 * [OVERFLOW], *8 * [CLEAN], OVERFLOW, *4 * [CLEAN], OVERFLOW, CLEAN, CLEAN],
    ),
    "stepped down, which helped": ({}, [*6 * [CLEAN], *8 * [OVERFLOW, CLEAN], *6 * [CLEAN]]),
    "stepped down twice, back up, stopped": (
        {},
        [*5 * [CLEAN], *2 * [NAN_LOSS], *3 * [NAN_LOSS], *3 * [CLEAN], *12 * [NAN_LOSS]],
    ),
    "the floor": (
        {"loss_scale": LossScale(init_scale=8.0, min_scale=2.0), "fallback": ["fp32"]},
        [*5 * [CLEAN], OVERFLOW, OVERFLOW, OVERFLOW, *3 * [CLEAN]],
    ),
    "too small for fp16, raised": ({}, [*12 * [TINY]]),
    "too small for fp16 at the largest scale allowed": (
        {"loss_scale": LossScale(init_scale=1.0, max_scale=4.0)},
        [*80 * [TINY]],
    ),
    "by hand": ({}, [*3 * [CLEAN], "fp32", *2 * [CLEAN], OVERFLOW, "fp16", *2 * [CLEAN], OVERFLOW]),
    "diagnosed, and pinned": ({"is_attached": True}, [*5 * [CLEAN], *8 * [HUGE], *2 * [CLEAN]]),
}


class Script:
    """A run of updates whose gradients are given."""

    def __init__(self, *, is_attached: bool = False, **options: Any) -> None:
        config = {"loss_scale": LossScale(init_scale=1024.0), "fallback": ["bf16", "fp32"], **options}
        self.controller = PrecisionController(
            AmpConfig(precision="fp16", batch_size=4, **config), device="cpu", halt=False
        )
        self.model = nn.Sequential(nn.Linear(1, 1, bias=False))
        self.weight = self.model[0].weight
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.0)
        self.input = 1.0
        nn.init.constant_(self.weight, 1024.0)  # type: ignore[arg-type] # a parameter
        if is_attached:
            self.controller.attach(self.model, self.loss)

    def loss(self) -> Tensor:
        output: Tensor = self.model(torch.full((1, 1), self.input))
        return output.float().sum() * 2.0**-20

    def play(self, event: str) -> None:
        controller = self.controller
        if event in ("fp16", "fp32"):
            controller.set_precision(event)  # type: ignore[arg-type] # it is one
            return
        self.input = 1024.0 if event == HUGE else 1.0
        with controller.autocast():
            loss = self.loss() if event == HUGE else torch.tensor(math.nan if event == NAN_LOSS else 0.5)
        if event == HUGE:
            controller.backward(loss)
        else:
            controller.scale(loss)
            gradient = {OVERFLOW: math.inf, NAN_LOSS: math.nan, TINY: 2.0**-23}.get(event, controller.get_scale())
            self.weight.grad = torch.full((1, 1), gradient)
        controller.step(self.optimizer)
        controller.update()


def played(name: str) -> PrecisionController:
    options, events = RUNS[name]
    script = Script(**options)
    for event in events:
        script.play(event)
    return script.controller


def plain(state: dict[str, Any]) -> dict[str, Any]:
    """As JSON gives it back; but configs as objects, whose document may gain keys, and reasons in any words."""
    document: dict[str, Any] = json.loads(json.dumps(timeless(state)))
    for record in document["autotune_amp"]["history"]:
        record["config"] = AmpConfig.from_json(record["config"])
        assert record.pop("reason")
    return document


@pytest.mark.parametrize("name", RUNS)
def test_a_scripted_run_ends_as_it_always_did(name: str) -> None:
    golden = json.loads(GOLDEN.read_text())[name]

    controller = played(name)

    assert plain(controller.state_dict()) == plain(golden)


@pytest.mark.parametrize("name", RUNS)
def test_a_state_that_an_earlier_version_saved_is_loaded_whole(name: str) -> None:
    golden = json.loads(GOLDEN.read_text())[name]
    script = Script(**RUNS[name][0])

    script.controller.load_state_dict(golden)

    state = script.controller.state_dict()
    script.play(CLEAN)  # which does not reach into what was saved
    assert plain(state) == plain(golden)


def test_a_state_without_the_counts_of_the_scale_begins_them_at_zero() -> None:
    name = "it grows, backs off and goes on"
    golden = json.loads(GOLDEN.read_text())[name]
    for name_of_count in ("num_scaler_updates", "num_growths", "num_backoffs"):
        del golden["autotune_amp"]["counters"]["totals"][name_of_count]
    script = Script(**RUNS[name][0])
    script.controller.load_state_dict(golden)
    script.play(OVERFLOW)
    status = script.controller.status()
    assert (status.num_scaler_updates, status.num_growths, status.num_backoffs) == (1, 0, 1)


def write() -> None:
    states = [f"{json.dumps(name)}: {json.dumps(played(name).state_dict())}" for name in RUNS]
    GOLDEN.write_text("{\n" + ",\n".join(states) + "\n}\n")


if __name__ == "__main__":
    write()
