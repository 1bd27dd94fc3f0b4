"""The page of a run log in a real browser: its marks against the lines, what a mark says, both themes, a phone."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from browser import chromium, hover, num_marks, opened, overflow, section
from made_run_log import REASON, made_run
from playwright.sync_api import Browser

from autotune_amp.cli import run
from autotune_amp.runtime.run_log import BeginLine, MoveLine, SampleLine, read


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
