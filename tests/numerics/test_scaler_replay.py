"""The replay of GradScaler's rule: skip for skip the real one, its closed forms, and what it makes of a choice."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from autotune_amp.core.config import MIN_LOSS_SCALE, LossScale
from autotune_amp.numerics.scaler_replay import (
    FlushedShares,
    SafeScaleTrace,
    extend_trace,
    replay,
    skipped_steps,
    starting_scale,
)
from autotune_amp.precision.torch_state import scaler_arguments
from autotune_amp.runtime.policy import ScaleRule

NEVER_FINITE = -math.inf
WIDE: dict[str, Any] = {"min_scale": MIN_LOSS_SCALE, "max_scale": 2.0**100}  # what GradScaler does not know
REACHES_FAR_DOWN = FlushedShares(dict.fromkeys(range(-44, -4), 1.0))

init_log2s = st.floats(-20.0, 30.0)
octaves_off = st.floats(-8.0, 8.0)  # of S*, from init_scale: near enough to be crossed in a short trace
factors = {"growth_factor": st.floats(1.01, 8.0), "backoff_factor": st.floats(0.05, 0.99)}
specials = st.sampled_from([NEVER_FINITE] * 3 + [math.inf])


def float32(value: float) -> float:
    return torch.tensor(value, dtype=torch.float32).item()


@st.composite
def traces(draw: st.DrawFn, init_log2: float, max_size: int = 60) -> list[float]:
    """S*(t), exact in float32, around 2^init_log2; 0 for a batch that is non-finite at any scale, or infinite."""
    scales = draw(st.lists(st.one_of(octaves_off, octaves_off, specials), min_size=1, max_size=max_size))
    return [float32(2.0 ** (init_log2 + off)) if math.isfinite(off) else 2.0**off for off in scales]


def trace_of(safe_scales: list[float]) -> SafeScaleTrace:
    return SafeScaleTrace([math.log2(scale) if scale else NEVER_FINITE for scale in safe_scales])


# -- skip for skip -----------------------------------------------------------------------------------------------------


def real_gradscaler(safe_scales: list[float], loss_scale: LossScale) -> tuple[list[int], float]:
    """The steps skipped and the final scale; the gradient, which is the scale, turns infinite where it is too high."""
    scaler = torch.amp.GradScaler("cpu", **scaler_arguments(loss_scale))
    weight = torch.zeros(1, requires_grad=True)
    optimizer = torch.optim.SGD([weight], lr=0.0)
    taken: list[int] = []
    skipped = []
    optimizer.register_step_post_hook(lambda *_: taken.append(1))
    for step, safe_scale in enumerate(safe_scales):

        def overflow(gradient: torch.Tensor, safe_scale: float = safe_scale) -> torch.Tensor:
            if safe_scale == 0:
                return torch.full_like(gradient, math.nan)
            return torch.where(gradient > safe_scale, math.inf, gradient)

        optimizer.zero_grad()
        hook = weight.register_hook(overflow)  # type: ignore[no-untyped-call]
        scaler.scale(weight.sum()).backward()  # type: ignore[no-untyped-call]
        hook.remove()
        scaler.step(optimizer)
        scaler.update()
        if not taken:
            skipped.append(step)
        taken.clear()
    return skipped, scaler.get_scale()


@given(
    data=st.data(),
    init_log2=st.integers(-20, 30) | init_log2s,
    growth_interval=st.integers(1, 9),
    **{name: st.just(default) | factors[name] for name, default in (("growth_factor", 2.0), ("backoff_factor", 0.5))},
)
def test_skip_for_skip_and_to_the_bit_it_is_gradscaler(
    data: st.DataObject, init_log2: float, **parameters: Any
) -> None:
    safe_scales = data.draw(traces(init_log2))
    loss_scale = LossScale(init_scale=2.0**init_log2, **WIDE, **parameters)
    skipped, final_scale = real_gradscaler(safe_scales, loss_scale)
    trace = trace_of(safe_scales)
    result = replay(trace, loss_scale)
    assert skipped_steps(trace, loss_scale) == skipped
    assert result.num_skips == len(skipped)
    assert result.applied_share == pytest.approx(1 - len(skipped) / len(safe_scales), abs=1e-12)
    assert result.final_scale == final_scale


@given(
    data=st.data(),
    bounds=st.lists(st.floats(-20, 24), min_size=3, max_size=3).map(sorted),
    growth_interval=st.integers(1, 9),
    hysteresis=st.integers(1, 3),
    has_min_scale=st.booleans(),
    **factors,
)
def test_bounded_it_is_the_controllers_rule_and_what_is_applied_is_the_mean_over_every_step(
    data: st.DataObject, bounds: list[float], has_min_scale: bool, **parameters: Any
) -> None:
    low, init, high = (2.0**bound for bound in bounds)
    loss_scale = LossScale(init_scale=init, min_scale=low if has_min_scale else None, max_scale=high, **parameters)
    safe_scales = data.draw(traces(bounds[1], max_size=200))
    rule, skipped, applied = ScaleRule(loss_scale), [], 0.0
    for step, safe_scale in enumerate(safe_scales):
        if rule.scale > safe_scale or safe_scale == 0:
            skipped.append(step)
            rule.overflow()
        else:
            applied += 1 - REACHES_FAR_DOWN.at(math.log2(rule.scale))
            rule.clean()
    trace = trace_of(safe_scales)
    assert skipped_steps(trace, loss_scale, is_bounded=True) == skipped
    result = replay(trace, loss_scale, REACHES_FAR_DOWN, is_bounded=True)
    assert result.final_scale == rule.scale
    assert result.applied_share == pytest.approx(applied / len(safe_scales), abs=1e-12)


# -- flushed and applied shares ----------------------------------------------------------------------------------------


def test_flushed_share_of_a_histogram_by_hand() -> None:
    histogram = {-30: 1.0, -28: 2.0, -20: 1.0, -19: 0.0}
    flushed, divided = FlushedShares(histogram), FlushedShares(histogram, log2_divisor=3.0)
    # Threshold 2^-25 / scale: between the octaves, at their edges, and inside them.
    expected = {0.0: 0.75, 1.0: 0.75, 2.0: 0.75, 2.5: 0.5, 3.0: 0.25, 4.0: 0.25, 4.75: 0.0625, 5.0: 0.0, 24.0: 0.0}
    assert {log2_scale: flushed.at(log2_scale) for log2_scale in expected} == expected
    assert {log2_scale: divided.at(log2_scale + 3.0) for log2_scale in expected} == expected
    assert flushed.at(-6.0) == flushed.at(-100.0) == flushed.at(-math.inf) == 1.0
    assert FlushedShares({}).at(0.0) == FlushedShares({-40: 0.0}).at(-200.0) == 0.0


# -- the horizon -------------------------------------------------------------------------------------------------------


def log2_scales_of(trace: SafeScaleTrace) -> list[float]:
    return list(trace._log2_scales)


def test_a_stretch_is_extended_by_its_second_half_with_one_burst() -> None:
    stretch = [float(step) for step in range(8)]
    extended = log2_scales_of(extend_trace(stretch, 300))
    assert extended[:8] == stretch
    assert [step for step, log2_scale in enumerate(extended) if log2_scale == NEVER_FINITE] == list(range(100, 105))
    assert set(extended[8:100] + extended[105:]) == {4.0, 5.0, 6.0, 7.0}
    assert log2_scales_of(extend_trace(stretch, 300)) == extended
    assert log2_scales_of(extend_trace(stretch, 300, seed=1)) != extended
    assert log2_scales_of(extend_trace(stretch, 3)) == stretch[:3]
    for nothing in ([], [1.0, math.nan]):
        with pytest.raises(ValueError, match="at least one step"):
            SafeScaleTrace(nothing)
    late = log2_scales_of(extend_trace(stretch, 12, num_burst_steps=3))  # never in what was recorded
    assert (late[:8], late[8:11]) == (stretch, [NEVER_FINITE] * 3)


@given(
    stretch=st.lists(st.one_of(st.floats(-30, 30), st.just(NEVER_FINITE)), min_size=1, max_size=40),
    num_passes=st.integers(1, 8),
)
def test_a_window_is_as_bad_as_its_worst_pass(stretch: list[float], num_passes: int) -> None:
    windows = log2_scales_of(extend_trace(stretch, 60, num_burst_steps=0, num_passes_per_step=num_passes))
    whole = [min(stretch[i : i + num_passes]) for i in range(0, len(stretch) - num_passes + 1, num_passes)]
    assert windows[: len(whole)] == whole
    # Drawn as the passes of a longer horizon are, and the least of each window taken.
    num_drawn = 60 - len(whole)
    passes = random.Random(0).choices(stretch[len(stretch) // 2 :], k=num_drawn * num_passes)
    assert windows[len(whole) :] == [min(passes[i * num_passes :][:num_passes]) for i in range(num_drawn)]


# -- the choice --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("log2_scales", "expected"),
    [
        ([12.0, 14.5, 13.0], 2.0**11),
        ([12.9], 2.0**11),
        ([0.3, 5.0], 0.5),  # a sum-reduced loss
        ([40.0], 2.0**24),
        ([math.inf], 2.0**24),
        ([-40.0], 2.0**-24),
        ([12.0, NEVER_FINITE, 13.0], 2.0**11),  # a single bad batch
        ([12.0, NEVER_FINITE], 2.0**-24),
    ],
)
def test_starting_scale(log2_scales: list[float], expected: float) -> None:
    assert starting_scale(log2_scales) == expected
