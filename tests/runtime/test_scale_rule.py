"""The loss scale's rule: GradScaler's to the bit, its bounds, and how many steps it costs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from autotune_amp.core.config import MIN_LOSS_SCALE, LossScale
from autotune_amp.runtime.policy import Policy
from autotune_amp.runtime.policy_state import ScaleRule, Signal

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
