"""Draws the pictures of the README: a committed study's report in both themes, and another's search in a terminal.

Needs a chromium on PATH.
"""

from __future__ import annotations

import io
import shutil
import tempfile
from pathlib import Path

from playwright.sync_api import sync_playwright
from rich.console import Console
from rich.text import Text

from autotune_amp.recommendation import Recommendation
from autotune_amp.report.progress import TerminalProgress
from autotune_amp.report.terminal import print_recommendation
from autotune_amp.report.write import write_report
from autotune_amp.search.folder import StudyFolder

HERE = Path(__file__).parent
SHOWN_AS_REPORT = HERE.parent / "truth/results/idle/vit_wall"
SHOWN_IN_TERMINAL = HERE.parent / "real_training/results/slow_images"
WIDTH, HEIGHT = 1200, 1356
NUM_COLUMNS = 90
COMMAND = "$ autotune-amp search studies/real_training/workloads.py:slow_images"


def main() -> None:
    draw_report()
    draw_terminal()


def draw_terminal() -> None:
    """What a terminal shows once the search has ended: a line for each trial, then the recommendation."""
    path = SHOWN_IN_TERMINAL / "recommendation.json"
    recommendation = Recommendation.load(path)
    lines = io.StringIO()
    progress = TerminalProgress(lines)
    for record in StudyFolder(str(SHOWN_IN_TERMINAL.parent), SHOWN_IN_TERMINAL.name).records(
        recommendation.search.search_id
    ):
        progress.trial_ended(record, None)
    console = Console(record=True, width=NUM_COLUMNS, file=io.StringIO(), force_terminal=True)
    console.print(Text(COMMAND, "bold"))
    console.print(Text(lines.getvalue()))
    print_recommendation(recommendation, console, "studies/slow_images/recommendation.json")
    picture = HERE / "terminal.svg"
    console.save_svg(str(picture), title="autotune-amp search")
    print(f"{picture}: {picture.stat().st_size / 1024:.0f} KiB")


def draw_report() -> None:
    with tempfile.TemporaryDirectory() as out, sync_playwright() as playwright:
        report = write_report(Path(shutil.copytree(SHOWN_AS_REPORT, Path(out, SHOWN_AS_REPORT.name))))
        executable = shutil.which("chromium-headless-shell") or shutil.which("chromium")
        browser = playwright.chromium.launch(executable_path=executable, args=["--no-sandbox"])
        for theme in ("light", "dark"):
            page = browser.new_page(viewport={"width": WIDTH, "height": HEIGHT}, color_scheme=theme)
            page.goto(report.resolve().as_uri())
            page.wait_for_selector("html[data-drawn]")
            picture = HERE / f"report_{theme}.png"
            page.screenshot(path=picture)
            print(f"{picture}: {picture.stat().st_size / 1024:.0f} KiB")
            page.close()
        browser.close()


if __name__ == "__main__":
    main()
