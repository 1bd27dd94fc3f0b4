"""Rows from what trials and the side-by-side run found: compared, cut, failed, refused."""

from __future__ import annotations

import math
from typing import Any

import pytest

from autotune_amp.core.config import Precision
from autotune_amp.core.outcome import Failure, Measurement
from autotune_amp.profile.results import PrecisionRow
from autotune_amp.profile.rows import Found, first_step_deadline_seconds, rows
from autotune_amp.profile.spec import Lane, Profiled, ProfiledStep, Split


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


def second_row(
    alone: Measurement | Failure, beside: Profiled, overdue_seconds: dict[Precision, float] | None = None
) -> PrecisionRow:
    found = Found({}, {"fp32": measured(4.0), "bf16": alone}, beside, {}, "cpu", overdue_seconds or {})
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


def test_what_ended_before_its_first_block_has_no_step() -> None:
    failure = Failure(kind="nonfinite", message="gradients still overflow")
    row = second_row(measured(9.0), profiled(lane("fp32", 3.0), lane("bf16", failure=failure)))
    assert (row.step_seconds, row.step_seconds_interval, row.reason) == (None, None, "gradients still overflow")


def test_out_of_memory_is_a_row_and_not_a_speedup() -> None:
    row = second_row(Failure(kind="oom", message="too much"), profiled(lane("fp32", 3.0)))
    assert (row.failure, row.reason, row.speedup, row.verdict) == ("oom", "too much", None, None)


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


def test_a_later_step_that_hangs_is_slow_and_a_first_one_says_nothing_of_speed() -> None:
    hung = Failure(kind="timeout", message="a step took longer than 40.0 s")
    later = second_row(hung, profiled(lane("fp32", 3.0)), {"bf16": 40.0})
    assert later.speedup == pytest.approx(0.1)
    assert later.reason == "cut: at least 10 times slower than fp32"
    assert (later.verdict, later.step_seconds) == ("slower", None)
    first = second_row(hung, profiled(lane("fp32", 3.0)))
    assert (first.failure, first.reason) == ("timeout", "a step took longer than 40.0 s")
    assert (first.speedup, first.verdict, first.was_cut) == (None, None, False)


def test_a_first_step_may_take_three_of_fp32s_and_a_late_step_more_and_half_a_minute_at_least() -> None:
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
