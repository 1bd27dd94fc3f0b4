"""The view of candidates, exclusions and trials that the terminal and the page share."""

from __future__ import annotations

from typing import Any

import made_study
import msgspec
import pytest
from report_samples import measurement, recommendation, record, row
from scripted_backend import described

from autotune_amp.core.command_template import CommandTemplate
from autotune_amp.core.config import AmpConfig
from autotune_amp.core.outcome import Accumulation, Failure, Fidelity
from autotune_amp.report import rows
from autotune_amp.report.progress import trial_line

BF16: dict[str, Any] = {"precision": "bf16", "batch_size": 64}


@pytest.mark.parametrize(
    ("chosen", "others"),
    [
        ({}, [{"pinned_modules": ("head",)}, {"num_workers": 2}, {"accumulation_steps": 2}, {"batch_size": 32}]),
        ({"pinned_modules": ("head",)}, [{}, {"pinned_modules": ("body",)}]),
        ({"num_workers": 2}, [{}, {"num_workers": 1}]),
        ({"accumulation_steps": 2}, [{}]),
        ({"as_found": True}, [{}]),
        ({}, [{"as_found": True}, {"has_environment": True}, {"samples_per_second": None, "step_seconds": None}]),
    ],
)
def test_the_recommended_row_is_the_one_with_the_configs_own_setting(
    chosen: dict[str, Any], others: list[dict[str, Any]]
) -> None:
    ours, *rest = (row(**BF16 | {"samples_per_second": 400.0} | of) for of in (chosen, *others))
    for candidates in ((ours, *rest), (*rest, ours)):
        shown = recommendation(config=AmpConfig(**BF16 | chosen), candidates=candidates)
        assert rows.recommended_row(shown) is ours


def test_with_the_variables_the_row_measured_in_them_is_recommended_and_the_other_is_the_baseline() -> None:
    today, ours = row("fp32", 32, 307.1), row("fp32", 32, 398.2, has_environment=True)
    config = AmpConfig(precision="fp32", batch_size=32, environment={"MALLOC_TRIM_THRESHOLD_": "1"})
    shown = recommendation(config=config, candidates=(ours, today))
    assert rows.recommended_row(shown) is ours
    assert rows.baseline_row(shown) is today
    assert rows.outcome_words(ours, ours, today) == "recommended, measured, with the variables"


def test_the_baseline_is_the_row_as_found_where_there_is_one_without_pins_and_workers() -> None:
    strict, found = row("fp32", 32, 300.0), row("fp32", 32, 307.1, as_found=True)
    changed = (row("fp32", 32, 1.0, pinned_modules=("a",)), row("fp32", 32, 2.0, num_workers=2))
    assert rows.baseline_row(recommendation(candidates=(*changed, found, strict))) is found
    assert rows.baseline_row(recommendation(candidates=(*changed, strict))) is strict
    assert rows.baseline_row(recommendation(candidates=changed)) is None


def test_columns_that_say_nothing_are_left_out_and_missing_numbers_are_dashes() -> None:
    plain = recommendation(candidates=(row("fp32", 32, 307.1), row("bf16", 64, None)))
    (_, measured), (_, failed) = rows.table(plain)
    assert list(measured) == ["precision", "batch", "samples/s", "step", "memory"]
    assert list(measured.values()) == ["fp32", "32", "307", "104 ms", "612 MiB"]
    assert list(failed.values()) == ["bf16", "64", "-", "-", "-"]
    other = row("fp32", 8, 9.0, accumulation_steps=4, num_workers=2, joules_per_sample=0.3512, as_found=True)
    (_, cells), (_, rest) = rows.table(recommendation(candidates=(other, row("bf16", 32, 9.0, pinned_modules=("a",)))))
    assert (cells["accum"], cells["workers"], cells["J/sample"]) == ("4", "2", "0.351")
    assert (rest["accum"], rest["workers"], rest["J/sample"]) == ("1", "-", "-")
    assert (cells["precision"], rest["precision"]) == ("fp32 as found", "bf16 pinned")


CHECK: dict[str, Any] = {"batch_size": 16, "reason": "r", "next_step": "n"}
FAITHFUL = Fidelity(**CHECK, precision="bf16", verdict="faithful", noise_ratio=0.0042, training_gap=1.234)
ACCUMULATION = Accumulation(**CHECK, verdict="weighted", num_micro_batches=4, error=3.2e-7, weighted_by="labels")
CALIBRATION = msgspec.structs.replace(made_study.CALIBRATION, init_scale=8192.0)


@pytest.mark.parametrize(
    ("outcome", "purpose", "words"),
    [
        (FAITHFUL, "fidelity", ["faithful", "0.0042", "fidelity"]),
        (CALIBRATION, "calibration", ["8,192", "calibration"]),
        (ACCUMULATION, "accumulation", ["weighted by labels", "3.2e-07", "accumulation"]),
        (measurement(was_cut=True), "search", ["412 samples/s", "77.6 ms", "612 MiB", "3.1 s", "cut"]),
        (measurement(), "confirm", ["412 samples/s", "confirm"]),
        (Failure(kind="oom", message="too\nlarge"), "search", ["out of memory", "3.1 s", "too large"]),
    ],
)
def test_what_came_out_of_a_trial_or_a_check_is_one_line(outcome: Any, purpose: Any, words: list[str]) -> None:
    line = trial_line(record(outcome, 7, purpose=purpose))
    assert line.startswith("  7  fp32 batch 32")
    assert [word for word in words if word not in line] == []
    assert "\n" not in line
    assert rows.outcome_line(outcome)


def test_a_reason_does_not_repeat_the_outcome() -> None:
    assert rows.reason_words(row("fp32", 8, None, status="oom", reason="out of memory: 8 GiB")) == "8 GiB"
    assert "slower" in rows.reason_words(row("fp32", 8, 1.0, status="cut"))


def test_values_set_from_outside_have_the_command_that_edits_the_script_too() -> None:
    found = recommendation(
        config=AmpConfig(**BF16), command_template=CommandTemplate.of("python t.py"), workload=described()
    )
    shown = [lines for _, lines in rows.usage_lines(found, "studies/s/recommendation.json")]
    assert shown == [[f"autotune-amp {verb} studies/s -- python t.py"] for verb in ("run", "apply")]
