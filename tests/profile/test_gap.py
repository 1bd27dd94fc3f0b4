"""Traces whose every microsecond is known, steps taken apart into shares that sum to one, and what is advised."""

from __future__ import annotations

from typing import Any

import pytest

from autotune_amp.core.setting import Precision
from autotune_amp.profile.gap import Conditions, Event, Step, Trace, gap, next_steps, split, step_mark
from autotune_amp.profile.job import ProfiledStep, Split
from autotune_amp.profile.results import Gap

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


def test_parts_are_medians_over_the_profiled_steps_with_their_least_and_largest_share() -> None:
    found = gap(timed(1.0, 1.0), Split(steps=tuple(UNEVEN), largest={}), None, None, "cpu")
    assert seconds(found) == {"matrix_products": 0.5, "casts": 0.1, "optimizer": 0.2, "loader": 1.0, "rest": 0.2}
    ranges = {part.name: part.share_range for part in found.parts}
    assert ranges["casts"] == pytest.approx((0.1 / 2.4, 1.0 / 3.8))
    assert ranges["optimizer"] == pytest.approx((0.2 / 3.8, 0.4 / 2.4))
    assert ranges["loader"] == (0.5, 0.5)


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


FP32, BF16 = "float", "c10::BFloat16"


def op(name: str, ts: float, dur: float, *types: str, tid: int = 1, number: int = 0) -> Event:
    return Event(
        ph="X",
        name=f"aten::{name}",
        cat="cpu_op",
        ts=ts,
        dur=dur,
        tid=tid,
        args={"Input type": types, "External id": number},
    )


def mark(name: str, ts: float, dur: float) -> Event:
    return Event(ph="X", name=name, cat="user_annotation", ts=ts, dur=dur, tid=1)


def kernel(ts: float, dur: float, number: int, **changes: Any) -> Event:
    return Event(ph="X", name="gemm", cat="kernel", ts=ts, dur=dur, tid=7, args={"External id": number})


# A linear layer casts its weight inside of itself, calls itself again, and is followed by a softmax in fp32.
LINEAR = [
    op("linear", 10, 100, BF16, FP32),
    op("to", 12, 20, FP32),
    op("_to_copy", 14, 16, FP32),
    op("empty_strided", 15, 1, "ScalarList"),
    op("copy_", 17, 12, BF16, FP32),
    op("linear", 40, 68, BF16, BF16),
    op("addmm", 45, 60, BF16, BF16, BF16),
    op("copy_", 46, 10, BF16, BF16),
]
SOFTMAX = [op("softmax", 120, 200, FP32), op("_softmax", 125, 190, FP32)]
UPDATE = [mark("autotune_amp update", 400, 90), mark("Optimizer.step#AdamW.step", 410, 60), op("add_", 420, 30, FP32)]


def found(events: list[Event], precision: Precision = "bf16") -> Split:
    steps = [mark(step_mark(precision, 0), -900, 500), mark(step_mark(precision, 1), 0, 500)]
    answer = split(Trace(events=[*steps, *events]), precision, [1])
    assert answer is not None
    return answer


def only(split: Split) -> ProfiledStep:
    (step,) = split.steps
    return step


def microseconds(step: ProfiledStep) -> dict[str, float]:
    return {kind: round(seconds * 1e6, 3) for kind, seconds in step.operation_seconds.items() if seconds}


def test_a_step_on_the_host() -> None:
    answer = found([*LINEAR, *SOFTMAX, *UPDATE])
    assert microseconds(only(answer)) == {
        "casts": 20,
        "matrix_products": 60,
        "fp32_operations": 200,
        "optimizer": 90,
        "other": 20,  # the two linear operations' own
    }
    assert answer.largest["fp32_operations"] == ("_softmax", "softmax")
    assert only(answer).step_seconds == pytest.approx(500e-6)
    assert not answer.is_device


def test_in_fp32_nothing_is_kept_in_fp32() -> None:
    answer = found([op("addmm", 10, 60, FP32, FP32), *SOFTMAX], "fp32")
    assert microseconds(only(answer)) == {"matrix_products": 60, "other": 200}


def test_a_matrix_product_left_in_fp32_is_one_of_the_operations_kept_there() -> None:
    assert microseconds(only(found([op("mm", 10, 60, FP32, FP32)]))) == {"fp32_operations": 60}


def test_threads_of_the_loader_take_none_of_the_step() -> None:
    assert microseconds(only(found([op("stack", 10, 400, FP32, tid=2)]))) == {}


def test_every_one_of_the_steps_asked_for() -> None:
    steps = [
        mark(step_mark("bf16", 0), -100, 90),
        mark(step_mark("bf16", 1), 0, 300),
        mark(step_mark("bf16", 2), 400, 100),
    ]
    operations = [
        op("mm", -90, 80, BF16, BF16),
        op("mm", 10, 250, BF16, BF16),
        op("addmm", 410, 40, BF16, BF16),
        op("bmm", 460, 30, BF16, BF16),
        op("mm", 500, 30, BF16, BF16),
    ]
    answer = split(Trace(events=[*steps, *reversed(operations)]), "bf16", range(1, 8))
    assert answer is not None
    assert [step.step_seconds for step in answer.steps] == pytest.approx([300e-6, 100e-6])
    assert [microseconds(step) for step in answer.steps] == [{"matrix_products": 250}, {"matrix_products": 70}]
    assert answer.largest["matrix_products"] == ("mm", "addmm", "bmm")
    assert split(Trace(events=steps), "fp16", [1, 2]) is None


def test_on_a_device_it_is_the_kernels_that_count() -> None:
    events = [
        op("mm", 10, 5, BF16, BF16, number=1),
        kernel(20, 100, 1),
        op("copy_", 16, 5, BF16, FP32, tid=3, number=2),  # the backward pass has a thread of its own
        kernel(100, 50, 2),  # beside the other for 20
        *UPDATE[:2],
        op("_foreach_add_", 412, 5, "TensorList", number=3),
        kernel(430, 40, 3),
        kernel(480, 10, 99),  # of a CUDA graph
        kernel(900, 40, 1),  # another step's
    ]
    answer = found(events)
    assert answer.is_device
    assert microseconds(only(answer)) == {"matrix_products": 100, "casts": 50, "optimizer": 40, "other": 10}
    assert only(answer).busy_seconds == pytest.approx((130 + 40 + 10) * 1e-6)
