"""The report's figures and the file around them, without a browser."""

from __future__ import annotations

import math
import re
from itertools import pairwise
from pathlib import Path
from typing import Any

import made_study
import msgspec
import pytest
from report_samples import MIB, evidence, measurement, recommendation, record, row

from autotune_amp.core.markup import table
from autotune_amp.core.outcome import Failure, Measurement
from autotune_amp.core.recommendation import Exclusion
from autotune_amp.report.charts import PRECISION_STYLES, course, hover_label, memory, pareto, throughput
from autotune_amp.report.document import code
from autotune_amp.report.files import write_report
from autotune_amp.report.numerics_charts import (
    ChosenCalibration,
    chosen_calibration,
    gradients,
    module_label,
    predicted_loss_scale,
)
from autotune_amp.report.search_page import search_page

MADE, RECORDS = made_study.made(), made_study.records()
MEASURED = [(r, r.outcome) for r in RECORDS if isinstance(r.outcome, Measurement)]


def trace(figure: Any, name: str) -> Any:
    """The trace of this name that has marks."""
    (found,) = [t for t in figure.data if t.name == name and t.x[0] is not None]
    return found


def test_each_measurement_is_drawn_at_its_batch_size_and_rate() -> None:
    figure: Any = throughput(MADE, RECORDS)
    drawn = sorted(
        (x, y)
        for t in figure.data
        if t.name.split()[0] in PRECISION_STYLES and t.x and t.x[0] is not None
        for x, y in zip(t.x, t.y, strict=True)
    )
    assert drawn == sorted((r.candidate.batch_size, m.samples_per_second) for r, m in MEASURED)
    looks = trace(figure, "fp32")
    assert (looks.x, looks.marker.symbol) == ((32, 64), ("circle", "circle-open")), "one was cut"


def test_a_large_mark_is_the_first_trial_of_a_search_or_fallback_of_an_ordinary_candidate() -> None:
    fallback = record(measurement(samples_per_second=1.0), purpose="fallback")
    search = record(measurement(samples_per_second=2.0))
    confirm = record(measurement(samples_per_second=3.0), purpose="confirm")
    pinned = msgspec.structs.replace(search, candidate=msgspec.structs.replace(search.candidate, pinned_modules=("a",)))
    figure = throughput(recommendation(), [confirm, pinned, fallback, search])
    assert (trace(figure, "fp32").y, trace(figure, "fp32 again").y) == ((1.0,), (3.0, 2.0, 2.0))


def test_the_recommended_one_is_ringed_with_where_a_new_run_lands() -> None:
    ring = trace(throughput(MADE, RECORDS), "recommended")
    assert (ring.x, ring.y, ring.error_y.array, ring.error_y.arrayminus) == ((64,), (797.0,), (27.0,), (27.0,))


def test_an_interval_that_says_nothing_does_not_press_the_chart_flat() -> None:
    wide = msgspec.structs.replace(MADE.evidence, samples_per_second_interval=(18.5, 65_896.0))
    ring = trace(throughput(msgspec.structs.replace(MADE, evidence=wide), RECORDS), "recommended")
    assert (ring.error_y.array, ring.error_y.arrayminus) == ((0.0,), (0.0,))
    assert "too wide to promise a speed" in ring.hovertext[0].replace("<br>", " ")


def test_what_was_not_done_has_no_card_of_its_own() -> None:
    page = search_page(recommendation(), RECORDS[:1], "recommendation.json")
    bodies = re.findall(r"<section.*?<h2>(.*?)</h2>(.*?)</section>", page, re.DOTALL)
    assert all(body for _, body in bodies)
    titles = [title for title, _ in bodies]
    assert not {"Failures", "Left out", "Also tried", "The loss scale of fp16"} & set(titles)
    assert titles[-1] == "Not in this report"
    assert "fp16 was not calibrated" in bodies[-1][1]


def test_the_answer_comes_first_then_its_evidence_and_one_chart_and_all_else_unfolds() -> None:
    shown = recommendation(warnings=("Mind the gap.",))
    page = search_page(shown, RECORDS, "r.json")
    parts = re.findall(r"<section(.*?)>.*?<h2>(.*?)</h2>", page)
    in_sight = [title for kind, title in parts if not kind]
    assert in_sight == ["Use it", "Warnings", "Evidence", "Throughput against batch size"]
    assert [title for _, title in parts[:4]] == in_sight
    answer = page[: page.index("<section")]
    for words in ("speed-up", "<dt>sure</dt>", shown.reason):
        assert words in answer
    assert "<details open" not in page


@pytest.mark.parametrize(
    ("target", "advice"), [(None, "budget=300 or `a --budget 30`"), ("a.py:b", "--budget 300 or `a --budget 30`")]
)
def test_advice_names_what_the_user_called(target: str | None, advice: str) -> None:
    advised = {"warnings": ("Give --budget 300 or `a --budget 30`.",), "target": target}
    excluded = (Exclusion(precision="fp16", batch_size=None, reason="--budget 300 or `a --budget 30`"),)
    page = search_page(recommendation(**advised, excluded=excluded), RECORDS[:1], "r.json")
    assert page.count(advice) == 4, "in the warnings, beside fp16, and twice where its charts are missing"


def test_notes_unfold_below_the_warnings() -> None:
    page = search_page(recommendation(warnings=("Mind the gap.",), notes=("Old driver.",)), RECORDS, "r.json")
    assert page.index("Mind the gap.") < page.index("<summary><h2>Notes</h2></summary>") < page.index("Old driver.")
    page = search_page(recommendation(notes=("Old driver.",)), RECORDS, "r.json")
    assert "<h2>Warnings</h2>" not in page, "there are none"


def test_what_failed_is_a_cross_on_the_axis_that_says_why() -> None:
    crosses = trace(throughput(MADE, RECORDS), "failed")
    assert (crosses.x, crosses.text) == ((128, 256), ("fp32", "fp16<br>bf16<br>fp32")), "narrow enough for a phone"
    failed = trace(memory(MADE, RECORDS), "out of memory")
    assert (failed.x, failed.y) == ((128, 256), (0, 0)), "one timed out"
    assert "8.1 GiB over" in failed.hovertext[1], "those at one place tell of each other"


def test_memory_is_drawn_with_the_limit() -> None:
    figure: Any = memory(MADE, RECORDS)
    assert trace(figure, "limit: 5.40 GiB").y[0] == pytest.approx(5529.6)
    assert figure.layout.yaxis.range[1] > 5530, "something ran out of it"
    smaller = msgspec.structs.replace(MADE, options={"memory_fraction": 0.9, "memory_limit": 2**31})
    assert trace(memory(smaller, RECORDS), "limit: 2.00 GiB").y[0] == 2048
    fits: Any = memory(MADE, [r for r in RECORDS if not isinstance(r.outcome, Failure)])
    assert fits.layout.yaxis.range[1] < 2200, "what is far above everything would press that flat"
    assert not any("limit" in (drawn.name or "") for drawn in fits.data), "a line out of sight is none"


def test_memory_is_the_peak_that_the_answer_and_the_table_have() -> None:
    """On a CPU a trial takes less than it holds: what was there before it counts for no limit."""
    small = record(measurement(peak_memory_bytes=417 * MIB, reserved_memory_bytes=97 * MIB))
    failed = record(Failure(kind="oom", message="too large"))
    shown = recommendation(options={"memory_limit": 1024 * MIB})
    figure: Any = memory(shown, [small, failed])
    assert trace(figure, "fp32").y == (417.0,)
    assert trace(figure, "limit: 1.31 GiB").y == (1344.0,) * 2, "where the trial's share of the peak is at its limit"


def test_nothing_that_may_be_recommended_lies_above_and_left_of_the_front() -> None:
    out = row("fp16", 96, 1200.0, status="excluded", reason="unfaithful", peak_memory_bytes=500 * MIB)
    figure = pareto(msgspec.structs.replace(MADE, candidates=(*MADE.candidates, out)))
    front = trace(figure, "front")
    steps = list(zip(front.x, front.y, strict=True))
    assert steps == sorted(steps)
    assert 1200.0 not in front.y, "it is excluded"
    for candidate in MADE.candidates:
        if candidate.samples_per_second is not None and candidate.peak_memory_bytes is not None:
            reached = [y for x, y in steps if x <= candidate.peak_memory_bytes / MIB]
            assert candidate.samples_per_second <= max(reached)
    fp16 = trace(figure, "fp16")
    assert (fp16.y[-1], fp16.marker.symbol[-1]) == (1200.0, "triangle-up-open")


def test_the_course_holds_every_record_end_to_end_and_the_best_that_was_not_ruled_out() -> None:
    figure: Any = course(MADE, RECORDS)
    bars = sorted((b, b + x) for t in figure.data if t.type == "bar" for b, x in zip(t.base, t.x, strict=True))
    assert len(bars) == len(RECORDS)
    assert all(end == pytest.approx(start) for (_, end), (start, _) in pairwise(bars))
    best = trace(figure, "fastest so far")
    assert list(best.y) == sorted(best.y)
    assert best.y[-1] == 815
    out = row("fp16", 128, 815.0, status="excluded", reason="unfaithful")
    best = trace(course(msgspec.structs.replace(MADE, candidates=(out,)), RECORDS), "fastest so far")
    assert best.y[-1] == 800


def test_on_several_slots_the_course_has_a_bar_for_each_with_one_record_at_a_time() -> None:
    slots = ("cuda:0", "cuda:1")
    on_slots = [
        msgspec.structs.replace(r, slot=slots[number % 2], seconds=1.0 + number) for number, r in enumerate(RECORDS)
    ]
    figure: Any = course(MADE, on_slots)
    bars = sorted(
        (y, b, b + x) for t in figure.data if t.type == "bar" for y, b, x in zip(t.y, t.base, t.x, strict=True)
    )
    assert {slot for slot, _, _ in bars} == set(slots)
    for (slot, _, end), (other, start, _) in pairwise(bars):
        assert slot != other or start >= end - 1e-9
    assert max(end for _, _, end in bars) < sum(r.seconds for r in on_slots)


@pytest.mark.parametrize(("accumulation_steps", "moved_by"), [(1, 12), (4, 10)])
def test_the_histogram_moves_by_the_loss_scale_over_the_passes_of_a_window(
    accumulation_steps: int, moved_by: int
) -> None:
    steps = {"accumulation_steps": accumulation_steps}
    shown = msgspec.structs.replace(MADE, config=msgspec.structs.replace(MADE.config, **steps))
    calibration = next(r for r in RECORDS if r.purpose == "calibration")
    candidate = msgspec.structs.replace(calibration.candidate, **steps)
    found = chosen_calibration(shown, [msgspec.structs.replace(calibration, candidate=candidate)])
    assert isinstance(found, ChosenCalibration)
    figure = gradients(shown, found)
    computed, scaled = trace(figure, "as computed"), trace(figure, "at a loss scale of 4096")
    assert [x + moved_by for x in computed.x] == list(scaled.x)
    assert sum(computed.y) == pytest.approx(100)


def test_the_forecast_is_of_the_chosen_scale_and_of_gradscalers_defaults() -> None:
    figure: Any = predicted_loss_scale(chosen_calibration(MADE, RECORDS))
    names = [t.name.split(":")[0] for t in figure.data if t.mode == "lines"]
    assert names == ["chosen", "GradScaler's defaults", "least safe scale measured"]
    chosen, defaults, least = (t for t in figure.data if t.mode == "lines")
    assert (chosen.y[0], defaults.y[0]) == (12, 16)
    assert set(least.y) == {min(filter(None, made_study.CALIBRATION.log2_scales))}
    assert math.isclose(max(chosen.x), 10_000)


def test_the_calibration_is_that_of_the_config_else_the_histogram_is_that_of_a_check() -> None:
    own = next(r for r in RECORDS if r.purpose == "calibration")
    other = msgspec.structs.replace(own, candidate=msgspec.structs.replace(own.candidate, batch_size=8))
    found = chosen_calibration(MADE, [own, other])
    assert isinstance(found, ChosenCalibration)
    assert (found.about, found.pair) == ("fp16 batch 64", (2.0**12, 200))
    assert trace(gradients(MADE, "nothing was calibrated"), "as computed").x == (-19.5, -18.5)


def test_why_there_is_no_calibration() -> None:
    excluded = (Exclusion(precision="fp16", batch_size=None, reason="fp16 is slow."),)
    for shown, why in ((recommendation(excluded=excluded), "fp16 is slow"), (recommendation(), "no fp16 setting")):
        assert why in str(chosen_calibration(shown, []))


def test_the_file_stands_alone_is_small_and_escapes_foreign_text(tmp_path: Path) -> None:
    page = write_report(made_study.write(tmp_path)).read_text()
    assert not re.findall(r"<(?:link|img|iframe|object|embed|script [^>]*src)|@import|url\(", page)
    assert len(page) < 2_300_000
    assert "<script>document" not in page
    assert page.count("<script") == page.count("</script>")
    assert "<" not in hover_label(made_study.HOSTILE).replace("<br>", "")
    assert "<" not in module_label(made_study.HOSTILE)
    assert module_label("encoder.block.0.layer.1.wo").endswith(".block.0.layer.1.wo"), "what tells modules apart"
    assert "<b>" not in code("<b>", "<b>") + table(["<b>"], [["<b>"]])


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({}, "a new run: 398 to 426 samples/s"),
        ({"candidates": (row("bf16", 64, 412.3),)}, "fewer than two candidates"),
        ({"search": msgspec.structs.replace(MADE.search, was_interrupted=True)}, "search was interrupted"),
        ({"evidence": evidence(speedup=None, speedup_interval=None)}, "unknown"),
        ({"candidates": tuple(row("fp32", 2**n, None, status="untried") for n in range(3))}, "not tried"),
    ],
)
def test_an_odd_recommendation_has_a_page(changes: dict[str, Any], told: str) -> None:
    for num_records in (0, 1, len(RECORDS)):
        assert told in search_page(recommendation(**changes), RECORDS[:num_records], "recommendation.json")
