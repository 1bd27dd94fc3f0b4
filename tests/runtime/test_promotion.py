"""Back up to a faster precision: only where asked for, where it is faster and safe, and three times at most."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autotune_amp import AmpConfig, LossScale
from autotune_amp.core.config import FallbackPlan
from autotune_amp.core.dimensions import Precision
from autotune_amp.runtime import policy
from autotune_amp.runtime import status as metrics
from autotune_amp.runtime.controller import PrecisionController

WAIT = 6  # clean steps before a probe, in place of 2000
SCALE = 1024.0


@pytest.fixture(autouse=True)
def _short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(policy, "PROMOTION_STEPS", WAIT)


def config(**options: Any) -> AmpConfig:
    loss_scale = LossScale(init_scale=SCALE)
    return AmpConfig(
        **{"precision": "fp16", "batch_size": 4, "loss_scale": loss_scale, "fallback": ["bf16"], **options}
    )


class Run:
    """A model whose activations are about `level` and whose fp16 gradients are the scale times `gradient`.

    A step takes as many seconds as `seconds` says for its precision.
    """

    def __init__(
        self,
        monkeypatch: pytest.MonkeyPatch,
        given: AmpConfig | None = None,
        *,
        level: float = 1.0,
        gradient: float = 1.0,
        seconds: dict[Precision, float] | None = None,
        promote: bool = True,
        reruns: bool = True,
    ) -> None:
        self.controller = PrecisionController(given or config(), device="cpu", promote=promote)
        self.model = nn.Linear(4, 1, bias=False)
        with torch.no_grad():
            self.model.weight.copy_(torch.tensor([[0.1, 0.2, 0.3, 0.4]]))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-4)
        self.level, self.gradient = level, gradient
        self.seconds = seconds or {"fp16": 1.0, "bf16": 2.0, "fp32": 2.0}
        self.used: list[Precision] = []
        self.now = 0.0
        monkeypatch.setattr(metrics, "time", SimpleNamespace(perf_counter=self._clock))
        self.controller.attach(self.model, self._rerun if reruns else None)

    def _clock(self) -> float:
        self.now += self.seconds[self.controller.config.precision]
        return self.now

    def _loss(self) -> Tensor:
        loss: Tensor = self.model(torch.full((4, 4), self.level)).float().mean() * self.gradient
        return loss

    def _rerun(self) -> Tensor:
        with self.controller.autocast():
            return self._loss()

    def step(self, num_steps: int = 1) -> Run:
        for _ in range(num_steps):
            self.used.append(self.controller.config.precision)
            self.optimizer.zero_grad()
            with self.controller.autocast():
                loss = self._loss()
            self.controller.backward(loss)
            self.controller.step(self.optimizer)
            self.controller.update()
        return self

    def down(self, num_steps: int = 2) -> Run:
        """Some steps in fp16, then by hand to bf16."""
        self.step(num_steps).controller.set_precision("bf16")
        return self

    @property
    def promotions(self) -> list[int]:
        return [record.update for record in self.controller.status().history if record.kind == "promotion"]


def test_it_goes_back_up_after_enough_clean_steps_and_trains_on_there(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(monkeypatch).down().step(WAIT)
    assert run.promotions == [2 + WAIT]
    assert run.controller.config.precision == "fp16"
    assert run.controller.get_scale() == SCALE
    run.step(2)
    assert run.used == ["fp16"] * 2 + ["bf16"] * WAIT + ["fp16"] * 2


@pytest.mark.parametrize(
    ("conditions", "fits"),
    [
        ({"promote": False}, False),
        ({"reruns": False}, False),
        ({"seconds": {"fp16": 1.0, "bf16": 1.04}}, False),
        ({"seconds": {"fp16": 1.0, "bf16": 1.06}}, True),
        ({"level": 9000.0, "gradient": 2.0**-14}, False),  # 65504 / 8 is 8188
        ({"level": 7000.0, "gradient": 2.0**-14}, True),
        ({"gradient": 32.0}, False),  # 2^15 at the scale, not finite at 2^4 times as much
        ({"gradient": 3.0}, True),
    ],
)
def test_it_goes_up_only_where_every_condition_is_met(
    monkeypatch: pytest.MonkeyPatch, conditions: dict[str, Any], fits: bool
) -> None:
    run = Run(monkeypatch, **conditions).down().step(WAIT)
    assert run.promotions == [2 + WAIT] * fits
    assert run.controller.config.precision == ("fp16" if fits else "bf16")


@pytest.mark.parametrize(("slowdown", "ends_in"), [(1.52, "fp32"), (3.0, "bf16")])
def test_without_a_time_of_its_own_the_measured_plans_are_compared(
    monkeypatch: pytest.MonkeyPatch, slowdown: float, ends_in: Precision
) -> None:
    """With each other: the next rung up need not be the config's own."""
    plans = [
        FallbackPlan(precision="bf16", batch_size=4, slowdown=1.5),
        FallbackPlan(precision="fp32", batch_size=4, slowdown=slowdown),
    ]
    run = Run(monkeypatch, config(fallback=plans))
    run.controller.set_precision("fp32")
    run.step(WAIT)
    assert run.controller.config.precision == ends_in


def test_a_closure_that_fails_in_a_probe_does_not_end_the_run(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def rerun(_: Run) -> Tensor:
        raise ValueError("no batch is kept")

    monkeypatch.setattr(Run, "_rerun", rerun)
    run = Run(monkeypatch).down().step(2 * WAIT)
    assert run.promotions == []
    assert run.controller.config.precision == "bf16"
    assert caplog.text.count("goes on without it") == 1
