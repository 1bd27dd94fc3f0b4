"""The page of a run log in a real browser: its marks against the lines, what a mark says, both themes, a phone."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from browser import chromium, hover, num_marks, opened, overflow, section
from made_run_log import REASON, begin, made_run, move, sample
from playwright.sync_api import Browser

from autotune_amp.cli import run
from autotune_amp.report.files import write_run_report
from autotune_amp.runtime.run_log import BeginLine, Line, MoveLine, RunLog, SampleLine, read


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as found:
        yield found


def test_every_line_is_a_mark_and_a_move_says_its_reason(
    browser: Browser, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    log = made_run(tmp_path / "run.jsonl")
    assert run(["report", str(log)]) == 0
    written = Path(capfd.readouterr().out.strip())
    assert written == tmp_path / "run.html"
    lines = read(log).lines
    num_scaled = sum(line.scale is not None for line in lines)
    num_losses = sum(isinstance(line, SampleLine) and line.loss is not None for line in lines)
    num_moves = sum(isinstance(line, MoveLine) for line in lines)
    num_bands = 2  # fp16, then bf16
    num_resumed = sum(isinstance(line, BeginLine) and line.is_resumed for line in lines)
    with opened(browser, written) as page:
        chart = section(page, "The run as it went")
        assert num_marks(chart) == num_scaled + num_losses + num_moves + num_resumed + num_bands
        assert chart.locator(".shapelayer path").count() == num_bands
        assert section(page, "Moves").locator("tbody tr").count() == num_moves
        last_move = chart.locator(".scatterlayer .trace", has=page.locator(".textpoint")).locator(".point").last
        assert REASON in hover(page, last_move)
        light = chart.locator(".shapelayer path").first.get_attribute("style")
        page.get_by_role("button", name="Dark", exact=True).click()
        page.wait_for_selector("html[data-drawn=dark]")
        assert chart.locator(".shapelayer path").first.get_attribute("style") != light
        page.set_viewport_size({"width": 380, "height": 800})
        page.wait_for_function("[...document.querySelectorAll('.main-svg')].every((svg) => svg.clientWidth < 380)")
        assert overflow(page) <= 0


@pytest.mark.parametrize("width", [1280, 375])
def test_the_moves_of_a_stop_share_a_label_inside_of_the_chart(browser: Browser, tmp_path: Path, width: int) -> None:
    path = tmp_path / "run.jsonl"
    log = RunLog(path)
    lines: list[Line] = [
        begin(),
        *(sample(update, 65536.0, 0) for update in range(64, 4800, 64)),
        move(4810, "pin", "fp16", "fp16", 10, pinned_modules=("encoder.wo",)),
        move(4820, "demotion", "fp16", "bf16", 20),
        move(4830, "demotion", "bf16", "fp32", 30),
        move(4840, "stop", "fp32", "fp32", 40),
    ]
    for line in lines:
        log.write(line)
    with opened(browser, write_run_report(path), width=width) as page:
        chart = section(page, "The run as it went")
        (label,) = chart.locator(".textpoint text").filter(visible=True).all()
        assert label.text_content() == "1-4"
        box, frame = label.bounding_box(), chart.locator(".shapelayer path").first.bounding_box()
        plot = chart.locator(".draglayer .nsewdrag").first.bounding_box()
        assert box is not None
        assert frame is not None
        assert plot is not None
        assert box["x"] + box["width"] < plot["x"] + plot["width"] + 12, "within the margin"
        assert frame["x"] + frame["width"] < plot["x"] + plot["width"] - 5, "room after the last update"
        assert plot["y"] <= box["y"]
