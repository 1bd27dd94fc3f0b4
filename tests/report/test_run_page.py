"""The page of a run log: its figure and its text against the lines of a made run."""

from __future__ import annotations

import math
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import pytest
from made_run_log import begin, made_run, move, sample
from plotly.graph_objects import Figure

from autotune_amp.report.files import write_run_report
from autotune_amp.report.run_page import precision_starts, run_figure, run_page
from autotune_amp.runtime.run_log import LoggedRun, SampleLine, read


@pytest.fixture
def made(tmp_path: Path) -> LoggedRun:
    return read(made_run(tmp_path / "run.jsonl"))


def trace(figure: Figure, name: str) -> Any:
    (found,) = (trace for trace in figure.data if trace.name == name and trace.showlegend is not False)
    return found


def test_every_line_of_the_log_is_a_point(made: LoggedRun) -> None:
    figure = run_figure(made)
    scale, skips, loss = (trace(figure, name) for name in ("loss scale", "steps skipped so far", "loss"))
    assert list(skips.x) == [line.update for line in made.lines]
    points = [(line.update, None if line.scale is None else math.log2(line.scale)) for line in made.lines]
    drawn = list(zip(scale.x, scale.y, strict=True))
    (held,) = [point for point in drawn if point not in points]
    (end,) = [after for (_, y), (after, following) in pairwise(points) if y is not None and following is None]
    assert held[0] == end, "a scale holds until the precision that has none is taken up"
    assert [point for point in drawn if point != held] == points
    assert list(skips.y) == [line.num_skips for line in made.lines]
    assert list(loss.y) == [line.loss for line in made.lines if isinstance(line, SampleLine)]
    assert None in loss.y
    ticks = figure.layout.yaxis
    assert ticks.dtick == int(ticks.dtick) >= 1, "a scale is told in whole powers of two"


def test_moves_are_marked_with_their_reason_and_precisions_are_named(made: LoggedRun) -> None:
    figure: Any = run_figure(made)
    moves = trace(figure, "move")
    assert (list(moves.x), list(moves.text)) == ([300, 400], ["1", "2"])
    assert "fp16 to bf16<br>8 of 200 steps skipped &lt;b&gt;" in moves.hovertext[1]
    assert "encoder.wo" in moves.hovertext[0]
    named = [(t.name, t.x[0]) for t in figure.data if t.name in ("fp16", "bf16")]
    assert named == [(line.precision, line.update) for line in precision_starts(made)] == [("fp16", 0), ("bf16", 400)]


def test_the_page_says_what_happened_and_escapes_it(tmp_path: Path) -> None:
    path = made_run(tmp_path / "run.jsonl")
    page = write_run_report(path)
    assert sorted(tmp_path.iterdir()) == [tmp_path / "run.html", path]
    text = page.read_text()
    for told in (
        "run.jsonl: fp16, then bf16 from update 400",
        "9 overflows, 0 bad batches in 640 updates",
        "8 of 200 steps skipped &lt;b&gt;&amp; more&lt;/b&gt;",
        "in fp32 now: encoder.wo",
        "at update 512 in bf16",
    ):
        assert told in text
    assert "<b>& more" not in text


def test_shares_of_all_are_100_percent() -> None:
    line = msgspec.structs.replace(sample(64, 1.0, 64), num_steps=0, mfu=0.999)
    text = run_page(LoggedRun((begin(), line), 0, 0), "a.jsonl")
    assert text.count("100 %") == 2
    assert "1e+02" not in text


def test_a_stop_other_runs_and_cut_lines_are_said() -> None:
    stop = move(70, "stop", "fp16", "fp16", 12, reason="no finite loss")
    text = run_page(LoggedRun((begin(), sample(64, 1024.0, 2), stop), num_other_runs=2, num_cut_lines=1), "a.jsonl")
    for told in ("was stopped at update 70: no finite loss.", "2 other runs", "1 line that a kill"):
        assert told in text
    for last in (sample(128, 1024.0, 12), move(128, "demotion", "fp16", "bf16", 12)):
        assert "was stopped" not in run_page(LoggedRun((begin(), stop, last), 0, 0), "a.jsonl")


def test_the_temperature_is_drawn_with_a_mark_where_the_gpu_was_throttled(made: LoggedRun) -> None:
    degrees = {128: 61.0, 192: 91.0, 256: 90.0}
    lines = [
        msgspec.structs.replace(line, temperature_celsius=degrees.get(line.update), throttling=int(line.update == 192))
        if isinstance(line, SampleLine)
        else line
        for line in made.lines
    ]
    last = msgspec.structs.replace(lines[-1], temperature_celsius=62.0, sm_clock_mhz=1410.0, power_watts=301.4)
    run = LoggedRun((*lines[:-1], last), 0, 0)
    figure = run_figure(run)
    drawn = dict(zip(*(getattr(trace(figure, "GPU temperature"), axis) for axis in "xy"), strict=True))
    assert {update: value for update, value in drawn.items() if value is not None} == degrees | {640: 62.0}
    throttled = trace(figure, "throttled")
    assert (list(throttled.x), list(throttled.y)) == ([192], [91.0])
    page = run_page(run, "a.jsonl")
    assert "62 degrees C" in page
    assert "1,410 MHz, 301 W" in page
    assert "throttled in 9.1 % of the samples" in page
    assert all(t.name != "GPU temperature" for t in run_figure(made).data)


def test_a_run_whose_beginning_is_elsewhere_is_drawn_without_its_config() -> None:
    lines = (sample(64, 1024.0, 2), move(70, "demotion", "fp16", "bf16", 12), sample(128, None, 12, "bf16"))
    page = run_page(LoggedRun(lines, 0, 0), "train.py")
    assert "train.py: fp16, then bf16 from update 70" in page
    assert "AmpConfig" not in page
