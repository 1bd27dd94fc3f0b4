"""What was measured, as rows and as the answer that they make: compared, cut, failed, refused; what is advised."""

from __future__ import annotations

import math
from typing import Any

import pytest

from autotune_amp.core.hardware import (
    Capability,
    DeviceIdentity,
    DeviceMemory,
    Hardware,
)
from autotune_amp.core.outcome import Failure, FailureKind, Measurement
from autotune_amp.core.setting import Precision
from autotune_amp.profile.job import Lane, Profiled, ProfiledStep, Split
from autotune_amp.profile.results import AmpProfile, Gap, Part, PrecisionRow
from autotune_amp.profile.rows import (
    Found,
    answer,
    cut_step_seconds,
    first_step_deadline_seconds,
    rows,
    step_deadline_seconds,
    verdict,
)


def measured(step_seconds: float, **changes: Any) -> Measurement:
    fields: dict[str, Any] = {
        "step_seconds": step_seconds,
        "step_seconds_interval": (step_seconds, step_seconds),
        "samples_per_second": 8 / step_seconds,
        "data_seconds": 0.0,
        "peak_memory_bytes": 1000,
        "reserved_memory_bytes": 1000,
        "raw_step_seconds": (step_seconds,),
        "build_seconds": 0.1,
        "context_seconds": 0.0,
        "first_step_seconds": 2 * step_seconds,
    }
    return Measurement(**{**fields, **changes})


def lane(precision: Precision, *block_seconds: float, **changes: Any) -> Lane:
    fields: dict[str, Any] = {"data_seconds": (1.0,) * len(block_seconds)}
    return Lane(precision=precision, block_seconds=block_seconds, **{**fields, **changes})


def profiled(*lanes: Lane) -> Profiled:
    return Profiled(lanes=lanes)


def second_row(alone: Measurement | Failure, beside: Profiled) -> PrecisionRow:
    found = Found({}, {"fp32": measured(4.0), "bf16": alone}, beside, {}, "cpu")
    reference, row = rows(("fp32", "bf16"), found)
    assert reference.precision == "fp32"
    assert reference.speedup is None
    return row


def test_the_speedup_is_that_of_processes_of_one_round_with_the_wait_for_their_data() -> None:
    row = second_row(measured(9.0), profiled(lane("fp32", 3.0, 7.0, num_steps=6), lane("bf16", 1.0, 3.0, num_steps=6)))
    assert row.speedup == pytest.approx(2.0)  # (3 + 1) / (1 + 1) and (7 + 1) / (3 + 1)
    # Alike in both, they leave the prior: 0.05 sqrt(2) on 3 degrees of 4, t(4) = 2.776, over two processes.
    half = 2.776 * 0.05 * 2**0.5 * (3 / 4) ** 0.5 / 2**0.5
    assert row.speedup_interval == pytest.approx((2 * math.exp(-half), 2 * math.exp(half)))
    assert (row.verdict, row.verdicts) == ("excellent", ("excellent", "excellent"))
    assert row.step_seconds == pytest.approx(8**0.5)
    assert row.process_step_seconds == (2.0, 4.0)
    assert row.num_steps == 6
    assert row.peak_memory_bytes == 1000


def test_the_parts_of_a_step_add_up_to_the_rows_step() -> None:
    split = Split(steps=(ProfiledStep(operation_seconds={"casts": 1.0}, step_seconds=4.0),), largest={})
    row = second_row(measured(9.0), profiled(lane("fp32", 3.0, 7.0), lane("bf16", 1.0, 3.0, split=split)))
    assert row.gap is not None
    assert row.step_seconds == pytest.approx(sum(part.seconds for part in row.gap.parts))
    assert row.gap.share("loader") == pytest.approx(1 / 3)
    (loader,) = (part for part in row.gap.parts if part.name == "loader")
    assert loader.share_range == (1 / 4, 1 / 2), "of the two processes"
    assert row.gap.share("casts") == pytest.approx(2 / 3 / 4)


@pytest.mark.parametrize("failing", ["fp32", "bf16"])
def test_there_is_no_speedup_where_one_of_the_two_failed_in_mid_run(failing: str) -> None:
    failure = Failure(kind="nonfinite", message="the loss is not finite")
    fp32 = lane("fp32", 3.0, 3.0, failure=failure if failing == "fp32" else None)
    bf16 = lane("bf16", 1.0, failure=failure if failing == "bf16" else None)
    row = second_row(measured(9.0), profiled(fp32, bf16))
    assert (row.speedup, row.speedup_interval, row.verdict, row.verdicts) == (None, None, None, None)
    assert row.failure == ("nonfinite" if failing == "bf16" else None)
    assert row.step_seconds == pytest.approx(2.0)
    if failing == "fp32":
        cut = second_row(measured(20.0, was_cut=True), profiled(fp32))
        assert (cut.speedup, cut.verdict, cut.was_cut) == (None, None, True)


@pytest.mark.parametrize("kind", ["oom", "timeout"])
def test_what_fails_alone_is_a_row_with_its_reason_and_no_speedup(kind: FailureKind) -> None:
    row = second_row(Failure(kind=kind, message="too much"), profiled(lane("fp32", 3.0)))
    assert (row.failure, row.reason, row.speedup, row.verdict) == (kind, "too much", None, None)
    beside = profiled(lane("fp32", 3.0), lane("bf16", failure=Failure(kind=kind, message="too much")))
    row = second_row(measured(9.0), beside)
    assert (row.step_seconds, row.step_seconds_interval, row.reason) == (None, None, "too much")


def test_what_is_hopelessly_slow_is_cut_with_how_slow_at_least() -> None:
    cut = second_row(measured(20.0, was_cut=True), profiled(lane("fp32", 3.0)))
    assert cut.was_cut
    assert cut.speedup == pytest.approx(0.2)
    assert cut.reason == "cut: at least 5 times slower than fp32"
    beside = profiled(lane("fp32", 3.0, 3.0), lane("bf16", 31.0, was_cut=True))
    later = second_row(measured(5.0), beside)
    assert later.was_cut
    assert later.reason == "cut: 8 times slower than fp32"
    too_slow = second_row(measured(21.0), profiled(lane("fp32", 3.0)))
    assert too_slow.was_cut, "a trial that was short enough not to be cut"


def test_how_long_a_step_of_another_precision_may_take_goes_by_fp32s() -> None:
    assert [cut_step_seconds(measured(seconds)) for seconds in (4.0, 0.02)] == [20.0, 1.0]
    assert [step_deadline_seconds(measured(seconds)) for seconds in (4.0, 0.02)] == [40.0, 5.0]
    assert first_step_deadline_seconds(measured(4.0)) == 3 * 8.0 + 40.0
    assert first_step_deadline_seconds(measured(0.02, first_step_seconds=0.1)) == 30.0


def test_a_precision_that_the_device_lacks_has_the_hardwares_reason() -> None:
    found = Found({"tf32": "a CPU has none"}, {"fp32": measured(4.0)}, profiled(lane("fp32", 3.0)), {}, "cpu")
    _, row = rows(("fp32", "tf32"), found)
    assert row == PrecisionRow(precision="tf32", reason="a CPU has none")


def test_without_fp32_there_is_no_speedup() -> None:
    alone: dict[Precision, Measurement | Failure] = {
        "fp32": Failure(kind="oom", message="too much"),
        "bf16": measured(1.0),
    }
    reference, row = rows(("fp32", "bf16"), Found({}, alone, profiled(lane("bf16", 3.0)), {}, "cpu"))
    assert reference.failure == "oom"
    assert row.speedup is None
    assert row.step_seconds is not None
    assert math.isclose(row.step_seconds, 4.0)


@pytest.mark.parametrize(
    ("speedup", "expected"),
    [
        (2.0, "excellent"),
        (1.501, "excellent"),
        (1.5, "significant"),
        (1.2, "significant"),
        (1.199, "modest"),
        (1.05, "modest"),
        (1.049, "negligible"),
        (0.95, "negligible"),
        (0.949, "slower"),
        (0.02, "slower"),
    ],
)
def test_what_a_speedup_is_called(speedup: float, expected: str) -> None:
    assert verdict(speedup) == expected


HARDWARE = Hardware(
    device="cpu",
    identity=DeviceIdentity(type="cpu", name="test", num_cpus=2, total_memory_bytes=1 << 30),
    memory=DeviceMemory(total=1 << 30, free=1 << 30, available=1000),
    precisions={
        "fp32": Capability(level="native", reason="Every CPU."),
        "bf16": Capability(level="native", reason="amx_bf16."),
        "fp16": Capability(level="emulated", reason="No fp16 arithmetic."),
    },
)


def made_gap(optimizer: float) -> Gap:
    parts = (
        Part(name="matrix_products", seconds=1 - optimizer, share=1 - optimizer, share_range=(0.1, 0.9)),
        Part(name="optimizer", seconds=optimizer, share=optimizer, share_range=(optimizer, optimizer)),
    )
    return Gap(machine_flops_per_second=None, attained_flops_per_second=None, flops_per_step=None, parts=parts)


FP32 = PrecisionRow(precision="fp32", step_seconds=1.0, gap=made_gap(0.2))


def answered(*rows: PrecisionRow) -> AmpProfile:
    return answer(
        (FP32, *rows),
        Profiled(),
        workload="made",
        hardware=HARDWARE,
        batch_size=8,
        accumulation_steps=1,
        num_batches=10,
        trace=None,
        notes=("First.",),
    )


def test_the_faster_of_bf16_and_fp16_is_the_answer_and_its_step_is_what_to_mend() -> None:
    bf16 = PrecisionRow(precision="bf16", speedup=1.3, verdict="significant", gap=made_gap(0.5))
    fp16 = PrecisionRow(precision="fp16", speedup=1.2, verdict="significant", gap=made_gap(0.9))
    tf32 = PrecisionRow(precision="tf32", speedup=2.0, verdict="excellent", gap=made_gap(0.9))
    found = answered(tf32, bf16, fp16)
    assert (found.best_precision, found.speedup, found.verdict) == ("bf16", 1.3, "significant")
    assert found.gap == made_gap(0.5)
    assert [(step.precision, step.part, step.max_speedup) for step in found.next_steps] == [("bf16", "optimizer", 2.0)]
    assert found.notes == ("First.", "fp16 is emulated: No fp16 arithmetic.")


def test_where_mixed_precision_does_not_pay_it_is_fp32s_step_that_is_to_be_mended() -> None:
    found = answered(PrecisionRow(precision="bf16", speedup=0.9, verdict="slower", gap=made_gap(0.5)))
    assert found.speedup == 0.9
    assert (found.gap_precision, found.gap) == ("fp32", FP32.gap)
    assert [(step.precision, step.max_speedup) for step in found.next_steps] == [("fp32", 1.25)]
    gaps = [line for line in found.explain().splitlines() if line.startswith(("gap", "next step"))]
    assert [line.partition(": ")[2] for line in gaps] == [
        "fp32: 20 % optimizer",
        "bf16: 50 % optimizer",  # why it does not
        "optimizer, 20 % of a step in fp32: fewer updates: a larger batch; at most 1.25x if it vanished",
    ]


def test_of_the_faster_one_that_could_not_be_taken_apart_there_is_no_gap_and_no_advice() -> None:
    found = answered(PrecisionRow(precision="bf16", speedup=1.3, verdict="significant"))
    assert (found.gap_precision, found.gap, found.next_steps) == ("bf16", None, ())


def test_what_failed_is_never_the_answer_whatever_it_reached_before() -> None:
    failed = PrecisionRow(precision="fp16", speedup=3.0, verdict="excellent", failure="nonfinite", reason="NaN")
    assert answered(failed).best_precision is None
    found = answered(PrecisionRow(precision="bf16", speedup=0.9, verdict="slower"), failed)
    assert (found.best_precision, found.speedup, found.verdict) == ("bf16", 0.9, "slower")
