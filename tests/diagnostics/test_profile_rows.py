"""What was measured, as rows and as the answer that they make: compared, cut, failed, refused; what is advised."""

from __future__ import annotations

import math
from typing import Any

import pytest
from profile_samples import HARDWARE, host_step, measured, profiled

from autotune_amp.core.outcome import Failure, FailureKind, Outcome, Profiled
from autotune_amp.core.precisions import Precision
from autotune_amp.core.setting import Setting
from autotune_amp.diagnostics.profile_amp import (
    AmpProfile,
    PrecisionRow,
    ProfileResults,
    facts,
    make_profile,
    make_rows,
    verdict,
)


def failure(kind: FailureKind = "oom") -> Failure:
    return Failure(kind=kind, message="too much")


def found(*fp32: Outcome, taken_apart: dict[Precision, Profiled] | None = None, **others: Any) -> ProfileResults:
    """What came of the precisions, a process each round."""
    return ProfileResults(HARDWARE, {}, {"fp32": fp32, **others}, taken_apart or {})  # type: ignore[dict-item]


def bf16(*fp32: Outcome, ours: list[Outcome], **changes: Any) -> PrecisionRow:
    return make_rows(("fp32", "bf16"), found(*fp32, bf16=ours, **changes))[1]


def test_the_speedup_is_that_of_processes_of_one_round() -> None:
    row = bf16(measured(4.0), measured(8.0), ours=[measured(2.0), measured(4.0)])
    assert row.speedup == pytest.approx(2.0)
    # Alike in both, they leave the prior: 0.05 sqrt(2) on 3 degrees of 4, t(4) = 2.776, over two processes.
    half = 2.776 * 0.05 * 2**0.5 * (3 / 4) ** 0.5 / 2**0.5
    assert row.speedup_interval == pytest.approx((2 * math.exp(-half), 2 * math.exp(half)))
    assert (row.verdict, row.verdicts) == ("excellent", ("excellent", "excellent"))
    assert row.step_seconds == pytest.approx(8**0.5)
    assert row.process_step_seconds == (2.0, 4.0)
    assert (row.num_steps, row.peak_memory_bytes) == (6, 1000)
    assert make_rows(("fp32",), found(measured(4.0)))[0].speedup is None


@pytest.mark.parametrize("failing", ["fp32", "bf16"])
def test_there_is_no_speedup_where_one_of_the_two_failed_in_a_later_round(failing: str) -> None:
    fp32, ours = (
        [measured(s), failure("nonfinite") if name == failing else measured(s)]
        for s, name in ((4.0, "fp32"), (2.0, "bf16"))
    )
    row = bf16(*fp32, ours=ours)
    assert (row.speedup, row.speedup_interval, row.verdict, row.verdicts) == (None, None, None, None)
    assert row.failure == ("nonfinite" if failing == "bf16" else None)
    assert row.step_seconds == pytest.approx(2.0)


def test_what_fails_refuses_or_has_nothing_to_be_compared_with_is_a_row_without_a_speedup() -> None:
    row = bf16(measured(4.0), ours=[failure()])
    assert (row.failure, row.reason, row.speedup, row.step_seconds) == ("oom", "too much", None, None)
    reference, row = make_rows(("fp32", "bf16"), found(failure(), bf16=[measured(4.0)]))
    assert (reference.failure, row.speedup) == ("oom", None)
    assert row.step_seconds == pytest.approx(4.0)
    refused = found(measured(4.0))._replace(refused={"tf32": "a CPU has none"})
    assert make_rows(("fp32", "tf32"), refused)[1] == PrecisionRow(precision="tf32", reason="a CPU has none")


@pytest.mark.parametrize("ours", [measured(20.0, was_cut=True), measured(20.1)])
def test_what_is_hopelessly_slow_is_cut_with_how_slow_at_least(ours: Outcome) -> None:
    row = bf16(measured(4.0), ours=[ours])
    assert (row.was_cut, row.verdict, row.speedup_interval) == (True, "slower", None)
    assert row.speedup == pytest.approx(0.2, rel=0.01)
    assert row.reason is not None
    assert row.reason.startswith("cut: at least 5.0")


def test_a_step_on_bf16_weights_is_held_against_the_rate_of_bf16() -> None:
    on_bf16 = found(measured(1.0))._replace(weights="bf16")
    assert make_rows(("fp32",), on_bf16)[0].product_precision == "bf16"


def test_what_a_speedup_is_called() -> None:
    least = {1.501: "excellent", 1.2: "significant", 1.05: "modest", 0.95: "negligible", 0.0: "slower"}
    assert [verdict(speedup) for speedup in least] == list(least.values())
    below = (1.5, 1.199, 1.049, 0.949)
    assert [verdict(speedup) for speedup in below] == ["significant", "modest", "negligible", "slower"]


def answered(optimizer_shares: dict[Precision, float], **step_seconds: float) -> AmpProfile:
    """Of steps of these seconds, in fp32 of 1.0, with so much of each in the optimizer."""
    seconds = {"fp32": 1.0, **step_seconds}
    taken_apart = {
        name: profiled(host_step(matrix_products=1 - share, optimizer=share))
        for name, share in optimizer_shares.items()
    }
    made = ProfileResults(HARDWARE, {}, {name: [measured(s)] for name, s in seconds.items()}, taken_apart)  # type: ignore[misc]
    return make_profile(
        make_rows(tuple(made.outcomes), made),
        made,
        workload="made",
        setting=Setting(precision="fp32", batch_size=8),
        num_batches=10,
        notes=("First.",),
    )


def test_the_faster_of_bf16_and_fp16_is_the_answer_and_its_step_is_what_to_mend() -> None:
    shares: dict[Precision, float] = {"fp32": 0.2, "tf32": 0.9, "bf16": 0.5, "fp16": 0.9}
    made = answered(shares, tf32=0.5, bf16=0.8, fp16=0.9)
    assert (made.best_precision, made.speedup, made.verdict) == ("bf16", 1.25, "significant")
    assert made.gap is made.row("bf16").gap is not None
    assert [(step.precision, step.part, step.max_speedup) for step in made.next_steps] == [("bf16", "optimizer", 2.0)]
    assert made.notes == ("First.", "fp16 is emulated: No fp16 arithmetic.")


def test_where_mixed_precision_does_not_pay_it_is_fp32s_step_that_is_to_be_mended() -> None:
    made = answered({"fp32": 0.2, "bf16": 0.5}, bf16=1.25)
    assert (made.speedup, made.gap_precision) == (0.8, "fp32")
    assert [(step.precision, step.max_speedup) for step in made.next_steps] == [("fp32", 1.25)]
    told = [text for label, text in facts(made) if label in ("gap", "next step")]
    assert [text.partition(",")[0] for text in told] == [
        "fp32: 80 % matrix products",
        "bf16: 50 % matrix products",
        "optimizer",
    ]
