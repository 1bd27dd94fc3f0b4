"""The policy under half a million random signals, every answer drawn too; and the rule of its loss scale."""

from __future__ import annotations

import json
import math
import random
from collections import Counter
from typing import Any, get_args

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from autotune_amp.core.config import MIN_LOSS_SCALE, LossScale
from autotune_amp.core.dimensions import Precision
from autotune_amp.runtime.policy import DWELL_STEPS, MAX_PROMOTIONS, NUM_PROBATION_STEPS, PROMOTION_STEPS, Policy
from autotune_amp.runtime.policy_state import Action, Finding, MoveKind, ScaleRule, Signal

LADDERS: tuple[tuple[Precision, ...], ...] = (
    ("fp16",),
    ("fp16", "bf16", "fp32"),
    ("fp16", "bf16", "tf32", "fp32"),
    ("bf16", "fp32"),
)
# How likely an update overflows, has a non-finite loss, brings a sample of what is lost; and how long that lasts.
REGIMES: tuple[tuple[float, float, float, int], ...] = (
    (0.0, 0.0, 0.0, 5000),
    (0.0, 0.0, 0.01, 1000),
    (0.05, 0.02, 0.1, 300),
    (0.3, 0.3, 0.3, 100),
    (1.0, 0.0, 0.0, 60),
    (0.0, 1.0, 0.0, 30),
)


class Driver:
    """Drives a policy and a twin that is saved and loaded anew now and then; both must do the same for ever."""

    def __init__(self, draw: random.Random) -> None:
        self.draw = draw
        self.rungs = draw.choice(LADDERS)
        self.loss_scale = LossScale(
            init_scale=2.0 ** draw.randint(-4, 20),
            backoff_factor=draw.choice((0.5, 0.5, 0.25, 0.7)),
            growth_interval=draw.choice((1, 10, 100, 2000)),
            hysteresis=draw.randint(1, 3),
            min_scale=draw.choice((None, None, 2.0**-5)),
        )
        self.options = {"can_rerun": draw.random() < 0.7, "promotes": draw.random() < 0.7}
        self.policy = Policy(self.rungs, self.loss_scale, **self.options)
        self.resume()
        self.moved: Counter[str] = Counter()
        self.last_down = self.last_revert = -math.inf  # in updates

    def resume(self) -> None:
        saved = self.policy.state_dict()
        self.twin = Policy(self.rungs, self.loss_scale, **self.options)
        self.twin.load_state_dict(json.loads(json.dumps(saved)))
        assert self.twin.state_dict() == saved

    def both(self, method: str, *args: Any, **more: Any) -> Action | None:
        result: Action | None = getattr(self.policy, method)(*args, **more)
        assert getattr(self.twin, method)(*args, **more) == result, f"{method} differs after a save and load"
        return result

    def live(self, overflow: float, bad_loss: float, sampled: float, num_updates: int) -> None:
        draw = self.draw.random
        loss = self.draw.choice((None, None, None, -1.0, 0.1, 1.0, 10.0, math.inf)) if num_updates < 2000 else None
        for _ in range(num_updates):
            share = draw() ** 4 if draw() < sampled else None
            action = self.both("observe", Signal(draw() < overflow, draw() < bad_loss, share, loss))
            while action is not None:
                action = self.answer(action)
            rule = self.policy.scale
            assert 0 <= self.policy.rung < len(self.rungs)
            assert self.policy.precision not in self.policy.withdrawn
            assert MIN_LOSS_SCALE <= rule.floor <= rule.scale <= rule.max_scale < math.inf

    def answer(self, action: Action) -> Action | None:
        draw = self.draw.random
        if action.kind in ("stop", "warn"):
            return None
        if action.kind == "demotion" and draw() < 0.1:
            return self.both("decline") if draw() < 0.5 else self.both("refuse", action, "out of memory")
        if action.kind == "probe":
            assert all(self.options.values()), "promoted unasked"
            return self.both("probed", action, is_finite=draw() < 0.9)
        if action.kind == "diagnose":
            assert self.options["can_rerun"]
            finding = Finding(
                reproduced=draw() < 0.9,
                is_precision=self.draw.choice((True, True, True, False, None)),
                finite_in=tuple(rung for rung in self.rungs if draw() < 0.8),
                pins=("layer",) if draw() < 0.2 else (),
            )
            return self.both("judge", action.reason, finding)
        return self.confirm(action)

    def confirm(self, move: Action) -> Action | None:
        before, now = self.policy.rung, self.policy.num_updates
        follows = self.both("confirm", move)
        self.moved[move.kind] += 1
        rose, last_move = self.policy.rung < before, max(self.last_down, self.last_revert)
        if move.kind == "demotion":
            # A promotion that failed is undone at once; after a revert nothing moves before the dwell is over.
            assert before < self.policy.rung == move.rung
            assert now - self.last_revert >= DWELL_STEPS
            self.last_down = now
        elif move.kind == "promotion":
            assert rose
            assert now - last_move >= PROMOTION_STEPS
        elif move.kind == "revert" or rose:  # the demotion was made in error
            assert rose
            assert now - self.last_down < (DWELL_STEPS if move.kind == "not_precision" else NUM_PROBATION_STEPS + 1)
            self.last_revert = now
        else:
            assert self.policy.rung == before
        assert self.moved["promotion"] <= MAX_PROMOTIONS
        assert self.moved["pin"] <= 1
        return follows


def test_nothing_random_breaks_the_policy() -> None:
    draw = random.Random(0)
    num_left = 500_000
    moved: Counter[str] = Counter()
    while num_left > 0:
        driver = Driver(draw)
        for _ in range(draw.randint(1, 30)):
            overflow, bad_loss, sampled, longest = draw.choice(REGIMES)
            num_updates = draw.randint(1, longest)
            driver.live(overflow, bad_loss, sampled, num_updates)
            num_left -= num_updates
            if draw.random() < 0.7:
                driver.resume()
        moved += driver.moved
    assert set(moved) == set(get_args(MoveKind)), "some move was never tried"


# -- the loss scale's rule ---------------------------------------------------------------------------------------------


WIDE = 2.0**100  # a cap that no test here reaches
CPU = torch.device("cpu")
factors = st.floats(1.01, 8.0)
sequences = st.lists(st.booleans(), max_size=200)


def rule_of(init_scale: float = 65536.0, **more: Any) -> ScaleRule:
    return ScaleRule(LossScale(init_scale=init_scale, **more))


def tell(rule: ScaleRule, overflow: bool) -> float:
    """The octaves of scale that the step took away; negative where it gave."""
    return rule.overflow() if overflow else -rule.clean()


# -- GradScaler's rule -------------------------------------------------------------------------------------------------


class TorchScaler(torch.amp.GradScaler):
    """GradScaler itself, told of an overflow as an optimizer's step would tell it."""

    def __init__(self, loss_scale: LossScale) -> None:
        super().__init__(
            "cpu",
            init_scale=loss_scale.init_scale,
            growth_factor=loss_scale.growth_factor,
            backoff_factor=loss_scale.backoff_factor,
            growth_interval=loss_scale.growth_interval,
        )
        self.scale(torch.zeros(()))

    def tell(self, overflow: bool) -> None:
        self._per_optimizer_states[0]["found_inf_per_device"] = {CPU: torch.tensor(float(overflow))}
        self.update()


@given(
    overflows=sequences,
    init_scale=st.floats(2.0**-10, 2.0**30),
    growth_factor=factors,
    backoff_factor=st.floats(0.05, 0.99),
    growth_interval=st.integers(1, 6),
)
def test_within_its_bounds_the_scale_is_gradscalers_to_the_bit(overflows: list[bool], **parameters: Any) -> None:
    loss_scale = LossScale(min_scale=MIN_LOSS_SCALE, max_scale=WIDE, **parameters)
    rule, scaler = ScaleRule(loss_scale), TorchScaler(loss_scale)
    assert rule.scale == scaler.get_scale()
    for overflow in overflows:
        tell(rule, overflow)
        scaler.tell(overflow)
        if not MIN_LOSS_SCALE <= scaler.get_scale() <= WIDE:
            assert rule.scale == (MIN_LOSS_SCALE if overflow else WIDE)
            return
        assert rule.scale == scaler.get_scale()
        assert rule.growth_tracker == scaler._get_growth_tracker()


# -- hysteresis and the floor ------------------------------------------------------------------------------------------


@given(overflows=sequences, hysteresis=st.integers(1, 4), growth_interval=st.integers(1, 5))
def test_the_scale_backs_off_from_the_last_of_its_hysteresis_on_until_it_grows(
    overflows: list[bool], hysteresis: int, growth_interval: int
) -> None:
    rule = rule_of(2.0**-10, max_scale=2.0**1000, hysteresis=hysteresis, growth_interval=growth_interval)
    num_since_growth = 0
    for overflow in overflows:
        before = rule.scale
        tell(rule, overflow)
        if overflow:
            num_since_growth += 1
            halves = num_since_growth >= hysteresis and before > rule.floor
            assert rule.scale == (before / 2 if halves else before)
        elif rule.scale > before:
            num_since_growth = 0


@pytest.mark.parametrize(("init_scale", "hysteresis"), [(1.0, 5), (1.5, 1)])
def test_the_floor_is_crossed_by_the_overflow_that_it_alone_holds_up_and_the_octave_counts_in_full(
    init_scale: float, hysteresis: int
) -> None:
    rule = rule_of(init_scale, min_scale=1.0, hysteresis=hysteresis)
    for left in reversed(range(hysteresis)):
        assert rule.would_cross_floor == (left == 0)
        assert rule.overflow() == (left == 0)
    assert rule.scale == 1.0


# -- how many steps it costs -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("can_rerun", [False, True])
@pytest.mark.parametrize(("largest_safe", "num_skips"), [(1000.0, 16), (2.0**-6, 22 + (20_000 - 22) // 2001)])
def test_a_run_that_is_stable_at_some_scale_costs_a_few_skips_and_no_trip(
    largest_safe: float, num_skips: int, can_rerun: bool
) -> None:
    """As with a loss that is summed, far below 1."""
    policy = Policy(("fp16", "bf16", "fp32"), LossScale(), can_rerun=can_rerun)
    for _ in range(20_000):
        action = policy.observe(Signal(overflow=policy.scale.scale > largest_safe))
        assert action is None
    assert (policy.rung, policy.phase, policy.num_skips) == (0, "STEADY", num_skips)
