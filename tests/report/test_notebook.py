"""A real notebook: what it shows of each result, a search that its stop button ends, and its looks in a browser."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from conftest import SharedOnce, command_line
from notebook import SHOWN, Ran, run_notebook
from playwright.sync_api import Browser

pytestmark = [pytest.mark.slow, pytest.mark.real_time]


@pytest.fixture
def ran(shared_once: SharedOnce) -> Ran:
    def run(folder: Path) -> Ran:
        with command_line(folder) as cli:
            return run_notebook(cli, "cpu")

    return shared_once("a notebook", run)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("Recommendation", ["fp32", "speed-up", "peak memory", "Evidence"]),
        ("Hardware", ["cpu", "matrix products", "fp32"]),
        ("AmpProfile", ["precision", "verdict"]),
        ("Fidelity", ["fp16 against fp32", "next step", "layers.0"]),
        ("Status", ["updates", "16 tried", "memory"]),
    ],
)
def test_each_result_shows_itself_with_nothing_from_elsewhere(ran: Ran, name: str, words: list[str]) -> None:
    shown = ran.html[name]
    assert [word for word in words if word not in shown] == []
    assert re.search(r"<script|<link|url\(|https?:(?!//ui\.perfetto)", shown) is None


def test_a_stopped_search_keeps_the_best_so_far_and_goes_on(ran: Ran) -> None:
    assert ran.error == "SearchInterruptedError"
    assert "fp32" in ran.best_so_far
    assert "interrupted" not in ran.html["Recommendation"]
    numbers = re.findall(r"^ *(\d+)  (?:fp32|bf16|fp16) ", ran.text_after, re.MULTILINE)
    assert int(numbers[0]) > 1, "it began anew"


def test_progress_is_drawn_above_plain_lines(ran: Ran) -> None:
    assert "Searching" in ran.text
    assert re.search(r"\n +\d+  fp32 batch 32 .* samples/s", ran.text)
    assert "\x1b" not in ran.text
    assert "The stop button keeps the best so far" in ran.text
    assert "Ctrl-C" not in ran.text
    assert any("trial 1" in drawn and "best" in drawn for drawn in ran.drawn)
    assert ran.left == ""  # taken out of the cell at the end


@pytest.mark.parametrize(("ink", "paper"), [("rgb(20, 20, 20)", "white"), ("rgb(230, 230, 230)", "#111")])
def test_a_notebook_in_the_dark_and_on_a_phone(ran: Ran, browser: Browser, ink: str, paper: str) -> None:
    page = browser.new_page(viewport={"width": 380, "height": 800})
    try:
        beside = "<table id='theirs'><tr><td>of the notebook's own</td></tr></table>"
        shown = f"<main>{beside}{''.join(ran.html.values())}</main>"
        page.set_content(f'<body style="color: {ink}; background: {paper}">{shown}</body>')
        colors: Any = page.eval_on_selector_all("td, dd, b", "all => all.map(one => getComputedStyle(one).color)")
        assert set(colors) == {ink}
        assert page.evaluate("document.documentElement.scrollWidth") <= 380
        theirs = page.eval_on_selector("#theirs td", "one => getComputedStyle(one).whiteSpace + one.style.minWidth")
        assert theirs == "normal"
        assert page.locator(".autotune-amp").count() == len(SHOWN)
    finally:
        page.close()
