"""Steps taken apart, and what is advised: shares that sum to one, gains that follow from them."""

from __future__ import annotations

import pytest

from autotune_amp.core.config import Precision
from autotune_amp.profile.gap import Conditions, Step, gap, next_steps
from autotune_amp.profile.results import Gap
from autotune_amp.profile.spec import ProfiledStep, Split

KNOWN = Conditions(unfused_optimizer="AdamW", is_compiled=False, num_loader_workers=0)


def timed(data_seconds: float, compute_seconds: float) -> Step:
    share = data_seconds / (data_seconds + compute_seconds)
    return Step(data_seconds, compute_seconds, (share, share))


def host_step(step_seconds: float = 2.0, **operation_seconds: float) -> ProfiledStep:
    return ProfiledStep(operation_seconds=operation_seconds, step_seconds=step_seconds)


def host_split(step_seconds: float = 2.0, **operation_seconds: float) -> Split:
    return Split(steps=(host_step(step_seconds, **operation_seconds),), largest={})


def device_split(busy_seconds: float, **operation_seconds: float) -> Split:
    step = ProfiledStep(operation_seconds=operation_seconds, step_seconds=9.0, busy_seconds=busy_seconds)
    return Split(steps=(step,), largest={}, is_device=True)


def seconds(found: Gap) -> dict[str, float]:
    assert sum(part.share for part in found.parts) == pytest.approx(1)
    return {part.name: round(part.seconds, 6) for part in found.parts if part.seconds}


def test_on_a_cpu_the_profile_is_stretched_to_the_step_that_was_timed() -> None:
    split = host_split(matrix_products=1.0, casts=0.2, fp32_operations=0.4, optimizer=0.2)
    found = gap(timed(data_seconds=0.5, compute_seconds=1.0), split, flops=100, rate=400.0, device_type="cpu")
    assert seconds(found) == {
        "matrix_products": 0.25,
        "slow_matrix_products": 0.25,
        "casts": 0.1,
        "fp32_operations": 0.2,
        "optimizer": 0.1,
        "loader": 0.5,
        "rest": 0.1,
    }
    assert found.attained_flops_per_second == pytest.approx(100 / 1.5)
    assert found.share("idle") == 0


def test_products_faster_than_the_machines_rate_leave_nothing_below_it() -> None:
    found = gap(timed(0.0, 1.0), host_split(1.0, matrix_products=0.5), flops=100, rate=50.0, device_type="cpu")
    assert seconds(found) == {"matrix_products": 0.5, "rest": 0.5}


@pytest.mark.parametrize(("flops", "rate"), [(None, 50.0), (100, None)])
def test_without_a_rate_or_a_count_products_are_one_part(flops: int | None, rate: float | None) -> None:
    found = gap(timed(0.0, 1.0), host_split(1.0, matrix_products=0.5), flops=flops, rate=rate, device_type="cpu")
    assert seconds(found) == {"matrix_products": 0.5, "rest": 0.5}
    assert "slow_matrix_products" not in [part.name for part in found.parts]


def test_on_an_accelerator_what_no_kernel_fills_is_idle() -> None:
    split = device_split(0.6, matrix_products=0.3, optimizer=0.1, other=0.2)
    found = gap(timed(0.2, 1.0), split, flops=None, rate=None, device_type="cuda")
    assert seconds(found) == {"matrix_products": 0.3, "optimizer": 0.1, "loader": 0.2, "idle": 0.4, "rest": 0.2}


def test_kernels_side_by_side_and_slower_for_being_profiled_fit_into_the_step() -> None:
    found = gap(timed(0.0, 1.0), device_split(2.0, matrix_products=3.0, casts=1.0), None, None, "cuda")
    assert seconds(found) == {"matrix_products": 0.75, "casts": 0.25}


def test_what_could_not_be_told_is_said() -> None:
    assert gap(timed(0.0, 1.0), host_split(1.0), None, None, "mps").note == "torch.profiler sees no kernels of mps"


def test_the_largest_gain_comes_first_and_small_parts_are_left_alone() -> None:
    split = host_split(1.0, matrix_products=0.1, casts=0.02, optimizer=0.3, fp32_operations=0.5)
    found = gap(timed(1.0, 1.0), split, None, None, "cpu")
    steps = next_steps(found, "bf16", KNOWN)
    assert [step.part for step in steps] == ["loader", "fp32_operations", "optimizer"]
    assert [step.max_speedup for step in steps] == pytest.approx([2.0, 1 / 0.75, 1 / 0.85])
    assert "num_workers=2" in steps[0].action
    assert "torch.compile" in steps[1].action
    assert "AdamW(..., fused=True)" in steps[2].action


def test_what_is_done_already_is_not_advised() -> None:
    split = host_split(1.0, optimizer=0.3, fp32_operations=0.5)
    found = gap(timed(1.0, 1.0), split, None, None, "cpu")
    conditions = Conditions(unfused_optimizer=None, is_compiled=True, num_loader_workers=4)
    loader, kept, optimizer, *_ = (step.action for step in next_steps(found, "bf16", conditions))
    assert loader.startswith("more num_workers than 4")
    assert "torch.compile" not in kept
    assert "fused" not in optimizer


UNEVEN = [  # one of three steps was disturbed in its casts, another in its optimizer
    host_step(1.0, matrix_products=0.5, casts=0.1, optimizer=0.2),
    host_step(1.9, matrix_products=0.5, casts=1.0, optimizer=0.2),
    host_step(1.2, matrix_products=0.5, casts=0.1, optimizer=0.4),
]


@pytest.mark.parametrize("order", [(0, 1, 2), (1, 2, 0), (2, 0, 1)])
def test_parts_are_medians_over_the_profiled_steps_with_their_least_and_largest_share(
    order: tuple[int, int, int],
) -> None:
    found = gap(timed(1.0, 1.0), Split(steps=tuple(UNEVEN[i] for i in order), largest={}), None, None, "cpu")
    assert seconds(found) == {"matrix_products": 0.5, "casts": 0.1, "optimizer": 0.2, "loader": 1.0, "rest": 0.2}
    ranges = {part.name: part.share_range for part in found.parts}
    assert ranges["casts"] == pytest.approx((0.1 / 2.4, 1.0 / 3.8))
    assert ranges["optimizer"] == pytest.approx((0.2 / 3.8, 0.4 / 2.4))
    assert ranges["loader"] == (0.5, 0.5)


def test_medians_that_do_not_fit_into_the_step_are_scaled_to_it() -> None:
    steps = tuple(host_step(1.0, casts=casts, optimizer=1 - casts) for casts in (0.2, 0.5, 0.6))
    more = host_step(1.3, casts=0.6, optimizer=0.7)
    found = gap(timed(0.0, 1.0), Split(steps=(*steps, more), largest={}), None, None, "cpu")
    assert seconds(found) == {"casts": round(0.55 / 1.15, 6), "optimizer": round(0.6 / 1.15, 6)}


def test_on_an_accelerator_the_parts_are_medians_too() -> None:
    steps = tuple(
        ProfiledStep(operation_seconds={"matrix_products": busy}, step_seconds=9.0, busy_seconds=busy)
        for busy in (0.6, 0.5, 0.9)
    )
    found = gap(timed(0.0, 1.0), Split(steps=steps, largest={}, is_device=True), None, None, "cuda")
    assert seconds(found) == {"matrix_products": 0.6, "idle": 0.4}
    assert found.parts[0].share_range == pytest.approx((0.5, 0.9))


def test_a_part_that_its_spread_undoes_is_not_advised() -> None:
    found = gap(timed(0.0, 1.0), Split(steps=tuple(UNEVEN), largest={}), None, None, "cpu")
    assert [step.part for step in next_steps(found, "bf16", KNOWN)] == ["optimizer", "rest", "casts"]
    quiet = host_step(1.0, matrix_products=0.7, casts=0.01, optimizer=0.2)
    less = gap(timed(0.0, 1.0), Split(steps=(*UNEVEN, quiet), largest={}), None, None, "cpu")
    optimizer, rest = next_steps(less, "bf16", KNOWN)
    assert less.share("casts") > 0.05
    assert optimizer.share_range == pytest.approx((0.2 / 1.9, 0.4 / 1.2))
    assert rest.part == "rest"


@pytest.mark.parametrize("precision", ["fp32", "tf32"])
def test_where_autocast_makes_no_casts_there_is_no_advice_on_casts(precision: Precision) -> None:
    found = gap(timed(0.0, 1.0), host_split(1.0, casts=0.5, optimizer=0.3), None, None, "cpu")
    assert [step.part for step in next_steps(found, "bf16", KNOWN)] == ["casts", "optimizer", "rest"]
    assert [step.part for step in next_steps(found, precision, KNOWN)] == ["optimizer", "rest"]
