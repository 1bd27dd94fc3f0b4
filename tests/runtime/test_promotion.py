"""Back up to a faster precision: only where asked for, where it is faster and safe, and three times at most."""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autotune_amp import AmpConfig, LossScale
from autotune_amp.core.config import FallbackPlan
from autotune_amp.core.errors import NotPrecisionError
from autotune_amp.core.setting import Precision
from autotune_amp.runtime import metrics, policy
from autotune_amp.runtime.controller import PrecisionController

WAIT = 6  # clean steps before a probe, in place of 2000
SCALE = 1024.0
DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}


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
        self.start = copy.deepcopy(self.model)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-4)
        self.level, self.gradient = level, gradient
        self.seconds = seconds or {"fp16": 1.0, "bf16": 2.0, "fp32": 2.0}
        self.is_poisoned = False
        self.probed_at: list[int] = []
        self.used: list[tuple[Precision, float, float, bool]] = []
        self.now = 0.0
        self.batch = torch.zeros(())
        monkeypatch.setattr(metrics, "time", SimpleNamespace(perf_counter=self._clock))
        self.controller.attach(self.model, self._rerun if reruns else None)

    def _clock(self) -> float:
        self.now += self.seconds[self.controller.config.precision]
        return self.now

    def _inputs(self) -> Tensor:
        step = len(self.used)
        return torch.full((4, 4), self.level) * (1 + torch.arange(4) * (step % 3) / 100)

    def _loss(self, model: nn.Module) -> Tensor:
        loss: Tensor = model(self._inputs()).float().mean() * self.gradient
        return loss * float("nan") if self.is_poisoned else loss

    def _rerun(self) -> Tensor:
        self.probed_at.append(len(self.used))
        with self.controller.autocast():
            return self._loss(self.model)

    def step(self, num_steps: int = 1) -> Run:
        for _ in range(num_steps):
            used = self.controller.config.precision, self.controller.get_scale(), self.level, self.is_poisoned
            self.used.append(used)
            self.optimizer.zero_grad()
            with self.controller.autocast():
                loss = self._loss(self.model)
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

    def assert_weights_are_those_of_a_plain_run(self) -> None:
        """One that used the same precision and loss scale in every step."""
        model: Any = self.start
        used = self.used
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
        self.used = []
        for entry in used:
            self.used.append(entry)
            precision, scale, self.level, self.is_poisoned = entry
            optimizer.zero_grad()
            with torch.autocast("cpu", dtype=DTYPES.get(precision), enabled=precision in DTYPES):
                loss = self._loss(model)
            (loss * scale).backward()  # type: ignore[no-untyped-call]
            gradient = model.weight.grad
            assert gradient is not None
            gradient /= scale  # a power of two: exact
            if loss.isfinite() and gradient.isfinite().all():
                optimizer.step()
        assert torch.equal(model.weight, self.model.weight)


def test_it_goes_back_up_after_enough_clean_steps_and_trains_on_there(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(monkeypatch).down().step(WAIT)
    assert run.promotions == [2 + WAIT]
    assert run.controller.config.precision == "fp16"
    assert run.controller.get_scale() == SCALE
    run.step(2)
    assert [precision for precision, *_ in run.used] == ["fp16"] * 2 + ["bf16"] * WAIT + ["fp16"] * 2
    run.assert_weights_are_those_of_a_plain_run()


@pytest.mark.parametrize(
    "unfit",
    [
        {"promote": False},
        {"reruns": False},
        {"seconds": {"fp16": 1.0, "bf16": 1.04}},
        {"level": 9000.0, "gradient": 2.0**-14},  # 65504 / 8 is 8188
        {"gradient": 32.0},  # 2^15 at the scale, not finite at 2^4 times as much
    ],
    ids=["not asked for", "no rerun", "hardly faster", "large activations", "no headroom"],
)
def test_it_stays_down_where_a_condition_is_not_met(monkeypatch: pytest.MonkeyPatch, unfit: dict[str, Any]) -> None:
    run = Run(monkeypatch, **unfit).down().step(WAIT + 4)
    assert run.promotions == []
    assert run.controller.config.precision == "bf16"
    run.assert_weights_are_those_of_a_plain_run()


@pytest.mark.parametrize(
    "fit",
    [
        {"seconds": {"fp16": 1.0, "bf16": 1.06}},
        {"level": 7000.0, "gradient": 2.0**-14},
        {"gradient": 3.0},
    ],
    ids=["6 % faster", "activations below an eighth", "headroom"],
)
def test_it_goes_up_where_every_condition_is_just_met(monkeypatch: pytest.MonkeyPatch, fit: dict[str, Any]) -> None:
    run = Run(monkeypatch, **fit).down().step(WAIT)
    assert run.promotions == [2 + WAIT]
    run.assert_weights_are_those_of_a_plain_run()


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
    run.assert_weights_are_those_of_a_plain_run()


def test_a_run_that_precision_is_not_to_blame_for_is_not_promoted(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(monkeypatch).down()
    run.is_poisoned = True
    with pytest.raises(NotPrecisionError):
        run.step(20)
    assert run.promotions == []
    run.assert_weights_are_those_of_a_plain_run()
