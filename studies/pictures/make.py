"""Draws the pictures of the README: a committed search in a terminal, and its report in both themes.

Needs a chromium on PATH.
"""

from __future__ import annotations

import contextlib
import io
import shutil
import tempfile
from pathlib import Path

from playwright.sync_api import sync_playwright
from rich.console import Console
from rich.text import Text

from autotune_amp.core.recommendation import Recommendation
from autotune_amp.report.files import write_report
from autotune_amp.report.progress import TerminalProgress
from autotune_amp.report.terminal import print_recommendation
from autotune_amp.search.answer.decide import rerank_with_options
from autotune_amp.search.storage.folder import StudyFolder

HERE = Path(__file__).parent
SHOWN = HERE.parent / "truth/results/bf16_cpu/mlp"
WIDTH, HEIGHT = 1200, 1500
NUM_COLUMNS = 98
COMMAND = "$ autotune-amp search studies/landscapes/workloads.py:mlp"


def main() -> None:
    draw_report()
    draw_terminal()


def draw_terminal() -> None:
    """What a terminal shows once the search has ended: a line for each trial, then the recommendation."""
    path = SHOWN / "recommendation.json"
    recommendation = as_of_today(path)
    lines = io.StringIO()
    progress = TerminalProgress(lines)
    for record in StudyFolder(str(SHOWN.parent), SHOWN.name).records(recommendation.search.search_id):
        progress.trial_ended(record, None)
    console = Console(record=True, width=NUM_COLUMNS, file=io.StringIO(), force_terminal=True)
    console.print(Text(COMMAND, "bold"))
    console.print(Text(lines.getvalue()))
    print_recommendation(recommendation, console, "studies/mlp/recommendation.json")
    picture = HERE / "terminal.svg"
    console.save_svg(str(picture), title="autotune-amp search")
    print(f"{picture}: {picture.stat().st_size / 1024:.0f} KiB")


def as_of_today(path: Path) -> Recommendation:
    """The committed recommendation, put together by today's code from the same trials."""
    return rerank_with_options(Recommendation.load(path), path)


def draw_report() -> None:
    with tempfile.TemporaryDirectory() as out, contextlib.chdir(out), sync_playwright() as playwright:
        study = Path(shutil.copytree(SHOWN, Path("studies", "mlp")))
        as_of_today(study / "recommendation.json").save(study / "recommendation.json")
        report = write_report(study)
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
