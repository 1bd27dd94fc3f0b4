"""Back up to a faster precision: only where asked for, and where a rerun of the batch there is finite."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from training import Loop, batches, fp16

from autotune_amp.runtime import policy
from autotune_amp.runtime.controller import PrecisionController

WAIT = 6  # clean steps before a probe, in place of 2000


@pytest.fixture(autouse=True)
def _short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(policy, "PROMOTION_STEPS", WAIT)


def stepped_down(gradient: float = 1.0, *, reruns: bool = True, **options: Any) -> Loop:
    """After two steps in fp16, where gradients are the loss scale times `gradient`, by hand to bf16."""
    controller = PrecisionController(fp16(fallback=["bf16"]), device="cpu", **{"promote": True, **options})
    model = nn.Linear(8, 1, bias=False)
    nn.init.zeros_(model.weight)

    def loss(output: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
        return output.float().mean() * gradient

    loop = Loop(model, controller, reruns=reruns, loss=loss, learning_rate=0.0).run(batches(2))
    controller.set_precision("bf16")
    return loop


def test_it_goes_back_up_after_enough_clean_steps_and_trains_on_there() -> None:
    loop = stepped_down().run(batches(WAIT + 2))
    status = loop.controller.status()  # type: ignore[union-attr] # it has one
    assert [(move.update, move.kind, move.after) for move in status.history[1:]] == [(2 + WAIT, "promotion", "fp16")]
    assert (status.precision, status.scale, status.num_skips) == ("fp16", 1024.0, 0)


@pytest.mark.parametrize(
    ("options", "goes_up"),
    [
        ({"promote": False}, False),
        ({"reruns": False}, False),
        ({"gradient": 32.0}, False),  # 2^13 at the scale; not finite at 2^4 times as much
        ({"gradient": 0.25}, True),
    ],
)
def test_it_goes_up_only_where_asked_and_where_a_rerun_at_16_times_the_scale_is_finite(
    options: dict[str, Any], goes_up: bool
) -> None:
    loop = stepped_down(**options).run(batches(WAIT))
    assert loop.controller.config.precision == ("fp16" if goes_up else "bf16")  # type: ignore[union-attr]


def test_a_closure_that_fails_in_a_probe_does_not_end_the_run(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(Loop, "rerun", lambda _: 1 // 0)
    loop = stepped_down().run(batches(2 * WAIT))
    assert loop.controller.config.precision == "bf16"  # type: ignore[union-attr]
    assert caplog.text.count("goes on without it") == 1
