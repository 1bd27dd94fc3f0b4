"""Traces taken apart: made ones whose every microsecond is known."""

from __future__ import annotations

from typing import Any

import pytest

from autotune_amp.core.config import Precision
from autotune_amp.profile.spec import ProfiledStep, Split
from autotune_amp.profile.trace import Event, Trace, split, step_mark

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
