"""Steps taken apart, and what is advised: shares that sum to one, gains that follow from them."""

from __future__ import annotations

import pytest

from autotune_amp.profile.gap import Conditions, Step, gap, next_steps
from autotune_amp.profile.results import Gap
from autotune_amp.profile.spec import Split

KNOWN = Conditions(unfused_optimizer="AdamW", is_compiled=False, num_loader_workers=0)


def host_split(step_seconds: float = 2.0, **operation_seconds: float) -> Split:
    return Split(operation_seconds=operation_seconds, largest={}, step_seconds=step_seconds)


def device_split(busy_seconds: float, **operation_seconds: float) -> Split:
    return Split(
        operation_seconds=operation_seconds, largest={}, step_seconds=9.0, busy_seconds=busy_seconds, is_device=True
    )


def seconds(found: Gap) -> dict[str, float]:
    assert sum(part.share for part in found.parts) == pytest.approx(1)
    return {part.name: round(part.seconds, 6) for part in found.parts if part.seconds}


def test_on_a_cpu_the_profile_is_stretched_to_the_step_that_was_timed() -> None:
    split = host_split(matrix_products=1.0, casts=0.2, fp32_operations=0.4, optimizer=0.2)
    found = gap(Step(data_seconds=0.5, compute_seconds=1.0), split, flops=100, rate=400.0, device_type="cpu")
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
    found = gap(Step(0.0, 1.0), host_split(1.0, matrix_products=0.5), flops=100, rate=50.0, device_type="cpu")
    assert seconds(found) == {"matrix_products": 0.5, "rest": 0.5}


@pytest.mark.parametrize(("flops", "rate"), [(None, 50.0), (100, None)])
def test_without_a_rate_or_a_count_products_are_one_part(flops: int | None, rate: float | None) -> None:
    found = gap(Step(0.0, 1.0), host_split(1.0, matrix_products=0.5), flops=flops, rate=rate, device_type="cpu")
    assert seconds(found) == {"matrix_products": 0.5, "rest": 0.5}
    assert "slow_matrix_products" not in [part.name for part in found.parts]


def test_on_an_accelerator_what_no_kernel_fills_is_idle() -> None:
    split = device_split(0.6, matrix_products=0.3, optimizer=0.1, other=0.2)
    found = gap(Step(0.2, 1.0), split, flops=None, rate=None, device_type="cuda")
    assert seconds(found) == {"matrix_products": 0.3, "optimizer": 0.1, "loader": 0.2, "idle": 0.4, "rest": 0.2}


def test_kernels_side_by_side_and_slower_for_being_profiled_fit_into_the_step() -> None:
    found = gap(Step(0.0, 1.0), device_split(2.0, matrix_products=3.0, casts=1.0), None, None, "cuda")
    assert seconds(found) == {"matrix_products": 0.75, "casts": 0.25}


def test_what_could_not_be_told_is_said() -> None:
    assert gap(Step(0.0, 1.0), host_split(1.0), None, None, "mps").note == "torch.profiler sees no kernels of mps"


def test_the_largest_gain_comes_first_and_small_parts_are_left_alone() -> None:
    split = host_split(1.0, matrix_products=0.1, casts=0.02, optimizer=0.3, fp32_operations=0.5)
    found = gap(Step(1.0, 1.0), split, None, None, "cpu")
    steps = next_steps(found, "bf16", KNOWN)
    assert [step.part for step in steps] == ["loader", "fp32_operations", "optimizer"]
    assert [step.max_speedup for step in steps] == pytest.approx([2.0, 1 / 0.75, 1 / 0.85])
    assert "num_workers=2" in steps[0].action
    assert "torch.compile" in steps[1].action
    assert "AdamW(..., fused=True)" in steps[2].action


def test_what_is_done_already_is_not_advised() -> None:
    split = host_split(1.0, optimizer=0.3, fp32_operations=0.5)
    found = gap(Step(1.0, 1.0), split, None, None, "cpu")
    conditions = Conditions(unfused_optimizer=None, is_compiled=True, num_loader_workers=4)
    loader, kept, optimizer, *_ = (step.action for step in next_steps(found, "bf16", conditions))
    assert loader.startswith("more num_workers than 4")
    assert "torch.compile" not in kept
    assert "fused" not in optimizer
