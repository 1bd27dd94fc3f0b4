"""Pages in a real headless Chromium: every mark against the raw outcomes, hover, themes, a phone, hostile text."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import made_study
import pytest
from playwright.sync_api import Browser, Locator, Page, Route

from autotune_amp.core.config import AmpConfig
from autotune_amp.core.recommendation import Recommendation
from autotune_amp.report.files import write_report
from autotune_amp.report.rows import baseline_row, recommended_row

STUDIES = Path(__file__).parents[2] / "studies"
COMMITTED = STUDIES / "real_training/results/slow_images"


@contextmanager
def opened(browser: Browser, path: Path, **options: Any) -> Iterator[Page]:
    """The page at `path`, its charts drawn; at the end it must have asked for nothing else and have had no error."""
    context = browser.new_context(viewport={"width": 1280, "height": 900}, **options)
    problems: list[str] = []
    asked: list[str] = []
    own = path.resolve().as_uri()

    def route(found: Route) -> None:
        asked.append(found.request.url)
        found.continue_() if found.request.url == own else found.abort()

    page = context.new_page()
    page.on("console", lambda message: problems.append(f"{message.type}: {message.text}"))
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.route("**/*", route)
    try:
        page.goto(own)
        page.wait_for_selector("html[data-drawn]", timeout=60_000)
        yield page
        assert problems == []
        assert asked == [own]
    finally:
        context.close()


def section(page: Page, title: str) -> Locator:
    """The part of the page below a heading."""
    return page.locator("section", has=page.get_by_role("heading", name=title, exact=True))


def unfold(where: Locator) -> Locator:
    """A section that is closed at first, opened; its charts are drawn then."""
    where.locator("summary").first.click()
    for plot in where.locator(".plot").all():
        plot.locator(".main-svg").first.wait_for()
    return where


def num_marks(where: Locator) -> int:
    """The marks of its scatter charts."""
    return where.locator(".scatterlayer .point").count()


def hover(page: Page, mark: Locator) -> str:
    """What the page shows once the mouse rests on a mark."""
    mark.scroll_into_view_if_needed()
    box = mark.bounding_box()
    assert box is not None
    page.mouse.move(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
    label = page.locator(".hoverlayer .hovertext").first
    label.wait_for(timeout=10_000)
    return label.text_content() or ""


def assert_it_fits_a_phone(page: Page) -> None:
    """Nothing is wider than the window, and no table needs to be scrolled sideways to see a column."""
    page.set_viewport_size({"width": 380, "height": 800})
    page.wait_for_function("[...document.querySelectorAll('.main-svg')].every((svg) => svg.clientWidth < 380)")
    assert page.evaluate("document.documentElement.scrollWidth - innerWidth") <= 0
    hidden = (
        "[...document.querySelectorAll('.wide')].filter((box) => box.clientWidth && box.scrollWidth > box.clientWidth)"
    )
    assert page.evaluate(f"{hidden}.map((box) => box.innerText)") == []


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Studies with their reports, by name."""
    out = tmp_path_factory.mktemp("studies")
    found = [made_study.write(out), Path(shutil.copytree(COMMITTED, out / COMMITTED.name))]
    for folder in found:
        write_report(folder)
    return {folder.name: folder for folder in found}


@pytest.mark.parametrize("name", ["made", COMMITTED.name])
def test_every_mark_stands_for_an_outcome_and_a_phone_is_wide_enough(
    name: str, browser: Browser, folders: dict[str, Path]
) -> None:
    shown = Recommendation.load(folders[name] / "recommendation.json")
    lines = [json.loads(line) for line in (folders[name] / "outcomes.jsonl").read_text().splitlines()]
    lines = [line for line in lines if line["search_id"] == shown.search.search_id]
    kinds = [line["outcome"]["outcome"] for line in lines]
    num_measured, num_failed = kinds.count("measurement"), kinds.count("failure")
    failed_at = [(line["candidate"]["batch_size"], line["outcome"].get("kind")) for line in lines]
    num_crosses = len({size for (size, _), kind in zip(failed_at, kinds, strict=True) if kind == "failure"})
    num_oom = len({size for size, kind in failed_at if kind == "oom"})
    with opened(browser, folders[name] / "report.html") as page:
        is_apart = shown.evidence.baseline.config != shown.config
        speed = section(page, "Throughput against batch size")
        assert num_marks(speed) == num_measured + num_crosses + 1 + is_apart
        assert num_marks(unfold(section(page, "Memory against batch size"))) == num_measured + num_oom
        num_candidates = sum(row.samples_per_second is not None for row in shown.candidates)
        is_other_row = baseline_row(shown) is not recommended_row(shown)
        assert num_marks(unfold(section(page, "Throughput against memory"))) == num_candidates + 1 + is_other_row
        course = unfold(section(page, "The search over time"))
        assert num_marks(course) == num_measured + num_failed
        assert course.locator(".barlayer .point").count() == len(lines)
        num_damaged = sum(1 + len(check.modules) for check in shown.fidelity)
        assert num_marks(unfold(section(page, "Fidelity to fp32"))) == num_damaged
        assert section(page, "Failures").locator("tbody tr").count() == num_failed
        assert unfold(section(page, "All candidates")).locator("tbody tr").count() == len(shown.candidates)
        unfold(section(page, "Machine and versions"))
        assert_it_fits_a_phone(page)


def test_resting_on_a_mark_says_what_it_is_the_config_is_copied_and_foreign_text_is_text(
    browser: Browser, folders: dict[str, Path]
) -> None:
    permissions = ["clipboard-read", "clipboard-write"]
    with opened(browser, folders["made"] / "report.html", permissions=permissions) as page:
        speed = section(page, "Throughput against batch size")
        assert "fp32 batch 64" in hover(page, speed.locator(".scatterlayer .trace").nth(1).locator(".point").nth(1))
        course = unfold(section(page, "The search over time"))
        assert "fp32 batch 16, accumulation" in hover(page, course.locator(".barlayer .point").first)

        page.get_by_text("The config as JSON").click()
        block = section(page, "Use it").locator(".code").last
        block.get_by_role("button").click()
        block.get_by_role("button", name="Copied").wait_for()
        assert AmpConfig.from_json(page.evaluate("navigator.clipboard.readText()")) == made_study.made().config

        assert page.title() == "made: fp16, batch size 64"
        assert page.locator("img").count() == 0
        assert made_study.HOSTILE in (page.locator("main").text_content() or "")
        failed = (
            unfold(section(page, "Memory against batch size")).locator(".scatterlayer .trace").last.locator(".point")
        )
        assert "</script>" in hover(page, failed.nth(1))


def test_light_and_dark(browser: Browser, folders: dict[str, Path]) -> None:
    ground = "[getComputedStyle(document.body).backgroundColor, "
    ground += "getComputedStyle(document.querySelector('.main-svg .bg')).fill]"
    with opened(browser, folders["slow_images"] / "report.html", color_scheme="light") as page:
        light = page.evaluate(ground)
        page.emulate_media(color_scheme="dark")
        page.wait_for_selector("html[data-drawn=dark]")
        assert not {*light} & {*page.evaluate(ground)}
        page.get_by_role("button", name="Light").click()
        page.wait_for_selector("html[data-drawn=light]")
        assert page.evaluate(ground) == light
