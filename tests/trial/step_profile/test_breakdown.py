"""Traces whose every microsecond is known, steps taken apart into shares that sum to one, and what is advised."""

from __future__ import annotations

import pytest
from profile_samples import host_step, measured, profiled

from autotune_amp.core.errors import WorkloadError
from autotune_amp.core.outcome import Failure, Profiled, ProfiledStep, StepSplit
from autotune_amp.core.precisions import Precision
from autotune_amp.core.setting import Setting
from autotune_amp.trial.jobs import Trial
from autotune_amp.trial.step_profile.breakdown import ProfileJob, StepBreakdown, break_down, max_speedups, next_steps
from autotune_amp.trial.step_profile.child import Event, Trace, split, step_mark


def apart(data_seconds: float, compute_seconds: float, found: Profiled) -> StepBreakdown:
    """A step of which so much is the wait for its data; the machine's rate is 400 FLOP/s."""
    process = measured(data_seconds + compute_seconds, data_seconds=data_seconds)
    made = break_down([process], found, 400.0)
    assert made is not None
    assert sum(part.share for part in made.parts) == pytest.approx(1)
    return made


def seconds(found: StepBreakdown) -> dict[str, float]:
    return {part.name: round(part.seconds, 6) for part in found.parts if part.seconds}


def test_on_a_cpu_the_profile_is_stretched_to_the_step_that_was_timed() -> None:
    step = host_step(2.0, matrix_products=1.0, casts=0.2, fp32_operations=0.4, optimizer=0.2)
    found = apart(0.5, 1.0, profiled(step, flops_per_step=100))
    assert seconds(found) == {
        "matrix_products": 0.25,  # 100 FLOPs at 400 a second
        "slow_matrix_products": 0.25,
        "casts": 0.1,
        "fp32_operations": 0.2,
        "optimizer": 0.1,
        "loader": 0.5,
        "rest": 0.1,
    }
    assert found.attained_flops_per_second == pytest.approx(100 / 1.5)
    assert found.share("idle") == 0
    uncounted = apart(0.5, 1.0, profiled(step))
    assert uncounted.share("matrix_products") == pytest.approx(1 / 3)
    assert uncounted.share("slow_matrix_products") == 0


def test_on_an_accelerator_what_no_kernel_fills_is_idle() -> None:
    operations = {"matrix_products": 0.3, "optimizer": 0.1, "other": 0.2}
    step = ProfiledStep(operation_seconds=operations, step_seconds=9.0, busy_seconds=0.6)
    found = apart(0.2, 1.0, profiled(step, is_device=True, device_type="cuda"))
    assert seconds(found) == {"matrix_products": 0.3, "optimizer": 0.1, "loader": 0.2, "idle": 0.4, "rest": 0.2}
    # Kernels side by side, slower for being profiled, fit into the step.
    step = ProfiledStep(operation_seconds={"matrix_products": 3.0, "casts": 1.0}, step_seconds=9.0, busy_seconds=2.0)
    found = apart(0.0, 1.0, profiled(step, is_device=True, device_type="cuda"))
    assert seconds(found) == {"matrix_products": 0.75, "casts": 0.25}
    assert "no kernels of mps" in (apart(0.0, 1.0, profiled(host_step(), device_type="mps")).note or "")


UNEVEN = [  # one of three steps was disturbed in its casts, another in its optimizer
    host_step(1.0, matrix_products=0.5, casts=0.1, optimizer=0.2),
    host_step(1.9, matrix_products=0.5, casts=1.0, optimizer=0.2),
    host_step(1.2, matrix_products=0.5, casts=0.1, optimizer=0.4),
]


def test_parts_are_medians_over_the_profiled_steps_with_their_least_and_largest_share() -> None:
    found = apart(1.0, 1.0, profiled(*UNEVEN))
    assert seconds(found) == {"matrix_products": 0.5, "casts": 0.1, "optimizer": 0.2, "loader": 1.0, "rest": 0.2}
    ranges = {part.name: part.share_range for part in found.parts}
    assert ranges["casts"] == pytest.approx((0.1 / 2.4, 1.0 / 3.8))
    assert ranges["optimizer"] == pytest.approx((0.2 / 3.8, 0.4 / 2.4))


def test_the_largest_gain_comes_first_and_what_is_small_in_any_step_is_left_alone() -> None:
    made = profiled(host_step(matrix_products=0.1, casts=0.02, optimizer=0.3, fp32_operations=0.5))
    steps = next_steps(apart(1.0, 1.0, made), "bf16", "AdamW")
    assert [step.part for step in steps] == ["loader", "fp32_operations", "optimizer"]
    assert [step.max_speedup for step in steps] == pytest.approx([2.0, 1 / 0.75, 1 / 0.85])
    assert [step.dimensions for step in steps] == [("num_workers",), ("compile",), ("optimizer_impl", "batch_size")]
    found = apart(0.0, 1.0, profiled(*UNEVEN, host_step(1.0, matrix_products=0.7, casts=0.01, optimizer=0.2)))
    assert found.share("casts") > 0.05
    optimizer, _ = next_steps(found, "bf16", None)
    assert (optimizer.part, optimizer.dimensions) == ("optimizer", ("batch_size",)), "it is fused already"


def test_where_autocast_makes_no_casts_there_is_no_advice_on_casts() -> None:
    found = apart(0.0, 1.0, profiled(host_step(casts=0.5, optimizer=0.3)))
    assert [step.part for step in next_steps(found, "bf16", None)] == ["casts", "optimizer", "rest"]
    assert [step.part for step in next_steps(found, "tf32", None)] == ["optimizer", "rest"]


def test_a_dimension_gains_at_most_the_parts_that_it_bears_on() -> None:
    step = host_step(matrix_products=0.5, convolution_seconds=0.3, casts=0.1, optimizer=0.2)
    found = apart(0.0, 1.0, profiled(step, flops_per_step=100))
    assert max_speedups(found) == pytest.approx(
        {
            **{"num_workers": 1.0, "optimizer_impl": 1 / 0.8, "compile": 1 / 0.7, "memory_format": 1 / 0.7},
            "cudnn_benchmark": 1 / 0.7,
            "fp8_recipe": 1 / 0.6,  # what compiling gains, and half of the products that are no convolution
        }
    )
    slow = next(step for step in next_steps(found, "fp32", None) if step.part == "slow_matrix_products")
    assert slow.dimensions == ("memory_format", "batch_size")
    assert max_speedups(apart(0.0, 1.0, profiled(host_step(casts=1.0))))["compile"] == pytest.approx(100)


def test_the_share_of_convolutions_is_of_the_step_however_long_it_is() -> None:
    step = host_step(matrix_products=0.5, convolution_seconds=0.3, casts=0.1, optimizer=0.2)
    for step_seconds in (1.0, 4.0):
        assert apart(0.0, step_seconds, profiled(step)).convolution_share == pytest.approx(0.3)


def test_a_process_that_does_not_come_back_is_no_end_of_a_search() -> None:
    job = ProfileJob(device="cpu", trial=Trial(candidate=Setting(precision="fp32", batch_size=1), device="cpu"))
    late = Failure(kind="timeout", message="It takes long to load.", is_loading=True)
    assert job.after(late, None) == late
    assert job.after(WorkloadError("It is gone.", "Look."), None).message == "It is gone."


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


def kernel(ts: float, dur: float, number: int) -> Event:
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


def found(events: list[Event], precision: Precision = "bf16") -> StepSplit:
    steps = [mark(step_mark(precision, 0), -900, 500), mark(step_mark(precision, 1), 0, 500)]
    answer = split(Trace(events=[*steps, *events]), precision, [1])
    assert answer is not None
    return answer


def only(split: StepSplit) -> ProfiledStep:
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


def test_a_step_of_a_command() -> None:
    """Its batch is fetched in it, its optimizer may run the passes in a closure, and ends after the step does."""
    loading = [mark("enumerate(DataLoader)#Iter.__next__", 330, 30), op("stack", 335, 20, FP32)]
    closure = [mark("Optimizer.step#AdamW.step", 5, 1000), mark("autotune_amp closure", 8, 420)]
    update = [op("add_", 440, 30, FP32)]
    step = only(found([*closure, *LINEAR, *SOFTMAX, *loading, *update]))
    assert step.step_seconds == pytest.approx(470e-6)
    assert microseconds(step) == {
        "casts": 20,
        "matrix_products": 60,
        "fp32_operations": 200,
        "optimizer": 75,
        "other": 20,
    }


def test_an_operation_that_begins_where_another_ends_was_not_called_by_it() -> None:
    step = only(found([op("softmax", 10, 100, FP32), op("mul", 110, 50, BF16)]))
    assert microseconds(step) == {"fp32_operations": 100, "other": 50}


def test_convolutions_are_matrix_products_that_are_known_apart() -> None:
    events = [op("conv2d", 10, 100, FP32), op("mkldnn_convolution", 20, 80, FP32), op("mm", 200, 40, FP32)]
    step = only(found(events, "fp32"))
    assert microseconds(step)["matrix_products"] == 120
    assert step.convolution_seconds == pytest.approx(80e-6)


def test_what_is_kept_in_fp32_is_so_beside_a_low_precision_alone() -> None:
    answer = found([op("addmm", 10, 60, FP32, FP32), *SOFTMAX], "fp32")
    assert microseconds(only(answer)) == {"matrix_products": 60, "other": 200}
    assert microseconds(only(found([op("mm", 10, 60, FP32, FP32)]))) == {"fp32_operations": 60}
    assert microseconds(only(found([op("stack", 10, 400, FP32, tid=2)]))) == {}, "a thread of the loader's"


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
