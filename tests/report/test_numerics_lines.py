"""What is said of checks and loss scales."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from report_samples import evidence, recommendation, record, row

from autotune_amp.core.config import AmpConfig, LossScale
from autotune_amp.core.evidence import LossScaleEvidence
from autotune_amp.core.explain import check_line, loss_scale_line
from autotune_amp.core.fidelity import Accumulation, Calibration, Fidelity, LowWeights
from autotune_amp.core.outcome import Failure
from autotune_amp.core.recommendation import Exclusion, Recommendation
from autotune_amp.report.progress import trial_line
from autotune_amp.report.rows import recommended_row
from autotune_amp.report.usage import python_lines

SCALES = LossScaleEvidence(
    num_steps=10_000,
    num_skips=9,
    applied_share=0.99871,
    default_num_skips=12,
    default_applied_share=1.0,
    num_confirming_steps=1200,
    num_skips_seen=1,
    num_skips_foretold=0,
    num_calibrated_steps=12,
    log2_safe_scale_min=14.52,
    log2_safe_scale_median=15.04,
    flushed_share=0.00004,
)


def fidelity(**changes: Any) -> Fidelity:
    values: dict[str, Any] = {
        "precision": "bf16",
        "batch_size": 16,
        "verdict": "faithful",
        "reason": "bf16 is faithful: its rounding is small.",
        "next_step": "Train in bf16.",
        "noise_ratio": 0.0042,
        "flushed_share": 0.0,
        "forward_max": 12.34,
        "format_max": 65504.0,
        "training_gap": 1.234,
        "num_paired_steps": 8,
    }
    return Fidelity(**(values | changes))


def test_a_check_is_told_with_its_numbers() -> None:
    assert check_line(fidelity()) == (
        "bf16 is faithful: its rounding is small; noise ratio 0.0042; 0 % flushed; activations up to 12.3 of 65504; "
        "training gap 1.2 over 8 steps"
    )


def test_a_check_of_accumulation_is_one_line() -> None:
    found = Accumulation(
        verdict="weighted",
        reason="They add up.",
        next_step="Multiply.",
        batch_size=16,
        num_micro_batches=4,
        error=3.2e-7,
        weighted_by="labels != -100",
    )
    unchecked = msgspec.structs.replace(found, verdict="unchecked", error=None, weighted_by=None)
    failed = record(Failure(kind="oom", message="full"))
    lines = [trial_line(msgspec.structs.replace(failed, outcome=outcome)) for outcome in (found, unchecked)]
    assert "accumulation weighted by labels != -100, gradients part by 3.2e-07  " in lines[0]
    assert "accumulation unchecked  " in lines[1]


def test_pins_and_lost_updates_are_told_and_missing_numbers_left_out() -> None:
    bare = {"noise_ratio": None, "flushed_share": None, "forward_max": None, "training_gap": None}
    healed = fidelity(reason="bf16 is bad.", verdict="unfaithful", healing_pins=("a.b", ""), **bare)
    assert check_line(healed) == "bf16 is bad; with a.b, code outside of every module in fp32 it is faithful"
    pinned = fidelity(pinned_modules=("a.b",), **bare)
    assert check_line(pinned) == "with a.b in fp32 bf16 is faithful: its rounding is small"
    low = LowWeights(weights="bf16", lost_share=0.84, applied_share=0.2, stochastic_noise=1.0)
    assert check_line(fidelity(low_weights=low, **bare)).endswith("84 % of the updates round away")


def test_a_loss_scale_is_told_with_what_it_is_based_on() -> None:
    scale = LossScale(init_scale=8192.0)
    assert loss_scale_line(scale, None) == "starts at 8192, growth interval 2000"
    assert loss_scale_line(scale, SCALES) == (
        "starts at 8192, growth interval 2000; over 10,000 steps 9 skips foretold, 99.9 % of the gradient applied "
        "(GradScaler's defaults: 12, 100 %); in 1,200 measured steps 1 skip seen, 0 foretold; largest safe scale "
        "2^14.5 at the least and 2^15.0 in the median of 12 steps, 0.004 % of the gradient's entries flushed"
    )
    unseen = msgspec.structs.replace(SCALES, num_confirming_steps=0)
    assert "seen" not in loss_scale_line(scale, unseen)


def test_everything_is_in_the_explanation_and_in_the_document() -> None:
    own = fidelity(precision="fp16", reason="fp16 is faithful: so.", pinned_modules=("head",))
    shown = recommendation(
        config=AmpConfig(precision="fp16", batch_size=64, loss_scale=LossScale(), pinned_modules=("head",)),
        evidence=evidence(fidelity=own, loss_scale=SCALES),
        fidelity=(fidelity(reason="bf16 is unfaithful: so.", verdict="unfaithful"), own),
    )
    text = shown.explain()
    assert "loss scale: starts at 65536" in text
    assert "pinned: head in fp32" in text
    assert text.count("fidelity: ") == 2
    assert "head" in "\n".join(python_lines(shown))
    compile("\n".join(python_lines(shown)), "shown", "exec")
    assert msgspec.json.decode(shown.to_json(), type=Recommendation) == shown
    unchecked = fidelity(reason="bf16 is unchecked: the budget ended.", verdict="unchecked")
    assert "fidelity: bf16 is unchecked" in recommendation(evidence=evidence(fidelity=unchecked)).explain()


def test_the_recommended_row_is_the_one_with_its_pins() -> None:
    plain, pinned = row("bf16", 64, 412.3), row("bf16", 64, 400.0, pinned_modules=("head",))
    config = AmpConfig(precision="bf16", batch_size=64, pinned_modules=("head",))
    assert recommended_row(recommendation(config=config, candidates=(plain, pinned))) is pinned
    assert recommended_row(recommendation(candidates=(pinned, plain))) is plain


@pytest.mark.parametrize(
    ("outcome", "purpose", "said"),
    [
        (fidelity(), "fidelity", "faithful, rounding 0.0042 of batch noise, training gap 1.2"),
        (Failure(kind="oom", message="too much"), "fidelity", "out of memory after"),
        (
            Calibration(
                batch_size=32,
                log2_scales=(14.5,) * 12,
                bisected_log2_scales={},
                gradient_histogram=(),
                init_scale=8192.0,
                forward_max=1.0,
            ),
            "calibration",
            "loss scale 8,192, from 12 steps",
        ),
    ],
)
def test_a_check_has_a_line_while_it_goes(outcome: Any, purpose: str, said: str) -> None:
    line = trial_line(record(outcome, purpose=purpose))
    assert said in line
    assert "\n" not in line


def test_a_measured_row_that_is_out_keeps_its_line_and_names_the_reason_once(capsys: Any) -> None:
    from rich.console import Console

    from autotune_amp.report.terminal import print_recommendation

    reason = "bf16 is unfaithful: it rounds"
    rows = tuple(row("bf16", size, 100.0 + size, status="excluded", reason=reason) for size in (16, 32))
    excluded = (Exclusion(precision="bf16", batch_size=None, reason=reason),)
    print_recommendation(recommendation(candidates=rows, excluded=excluded), Console(width=120))
    out = capsys.readouterr().out
    assert out.count("it rounds") == 1
    assert "116" in out
    assert "132" in out
