"""report.html in a real browser: every mark against the raw outcomes, hover, themes, a phone, hostile text."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import made_study
import pytest
from browser import chromium, hover, num_bars, num_marks, opened, overflow, section
from playwright.sync_api import Browser, FloatRect, Page

from autotune_amp.core.config import AmpConfig
from autotune_amp.core.recommendation import Recommendation
from autotune_amp.report.files import write_report
from autotune_amp.report.rows import baseline_row, recommended_row

STUDIES = Path(__file__).parents[2] / "studies"
COMMITTED = [STUDIES / "real_training/results/slow_images", STUDIES / "truth/results/idle/transformer_medium_wall"]


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as found:
        yield found


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Studies with their reports, by name."""
    out = tmp_path_factory.mktemp("studies")
    copied = [Path(shutil.copytree(study, out / study.name)) for study in COMMITTED]
    found = {folder.name: folder for folder in (made_study.write(out), *copied)}
    for folder in found.values():
        write_report(folder)
    return found


def raw(folder: Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    recommendation = json.loads((folder / "recommendation.json").read_text())
    lines = [json.loads(line) for line in (folder / "outcomes.jsonl").read_text().splitlines()]
    return recommendation, [line for line in lines if line["search_id"] == recommendation["search"]["search_id"]]


@pytest.fixture(scope="module")
def made(browser: Browser, folders: dict[str, Path]) -> Iterator[Page]:
    """The made study's page, for the tests that change nothing of it."""
    with opened(browser, folders["made"] / "report.html", permissions=["clipboard-read", "clipboard-write"]) as page:
        yield page


@pytest.mark.parametrize("name", ["made", *(study.name for study in COMMITTED)])
def test_every_mark_stands_for_an_outcome_and_a_phone_is_wide_enough(
    name: str, browser: Browser, folders: dict[str, Path]
) -> None:
    recommendation, records = raw(folders[name])
    kinds = [record["outcome"]["outcome"] for record in records]
    num_measured = kinds.count("measurement")
    failed = [r for r in records if r["outcome"]["outcome"] == "failure"]
    num_oom = sum(record["outcome"]["kind"] == "oom" for record in failed)
    candidates = [row for row in recommendation["candidates"] if row["samples_per_second"] is not None]
    with opened(browser, folders[name] / "report.html") as page:
        speed = section(page, "Throughput against batch size")
        is_apart = recommendation["evidence"]["baseline"]["config"] != recommendation["config"]
        assert num_marks(speed) == num_measured + len(failed) + 1 + is_apart
        assert num_marks(section(page, "Memory against batch size")) == num_measured + num_oom
        shown = Recommendation.load(folders[name] / "recommendation.json")
        is_other_row = baseline_row(shown) is not recommended_row(shown)
        assert num_marks(section(page, "Throughput against memory")) == len(candidates) + 1 + is_other_row
        course = section(page, "The search as it went")
        assert (num_marks(course), num_bars(course)) == (num_measured + len(failed), len(records))
        noise = section(page, "Fidelity to fp32")
        checks = recommendation["fidelity"]
        assert num_marks(noise) == sum(
            1 + len(check.get("modules", [])) + len(check["worst_parameters"]) for check in checks
        )
        scale = section(page, "The loss scale of fp16")
        assert ("fp16 was not calibrated, because" in (scale.text_content() or "")) == ("calibration" not in kinds)
        assert section(page, "Failures").locator("tbody tr").count() == len(failed)
        assert section(page, "All candidates").locator("tbody tr").count() == len(recommendation["candidates"])
        page.set_viewport_size({"width": 380, "height": 800})
        page.wait_for_function("[...document.querySelectorAll('.main-svg')].every((svg) => svg.clientWidth < 380)")
        assert overflow(page) <= 0
        assert covering(page) == []


def _overlap(a: FloatRect, b: FloatRect) -> bool:
    is_beside = a["x"] >= b["x"] + b["width"] or b["x"] >= a["x"] + a["width"]
    return not is_beside and a["y"] < b["y"] + b["height"] and b["y"] < a["y"] + a["height"]


def covering(page: Page) -> list[tuple[str, str]]:
    """Pairs of labels beside marks of which one is printed over the other."""
    found: list[tuple[str, str]] = []
    for figure in page.locator("figure.chart").all():
        shown: list[tuple[str, FloatRect]] = []
        for label in figure.locator(".textpoint text").filter(visible=True).all():
            box, text = label.bounding_box(), label.text_content()
            if box is not None and text:
                found += [(text, other) for other, beside in shown if _overlap(box, beside)]
                shown.append((text, box))
    return found


def test_resting_on_a_mark_says_what_it_is(made: Page) -> None:
    speed = section(made, "Throughput against batch size")
    assert "fp32 batch 64" in hover(made, speed.locator(".scatterlayer .trace").nth(1).locator(".point").nth(1))
    course = section(made, "The search as it went")
    assert "fp32 batch 16, accumulation" in hover(made, course.locator(".barlayer .point").first)


def test_the_config_is_copied(made: Page) -> None:
    made.get_by_text("The config as JSON").click()
    block = section(made, "Use it").locator(".code").last
    block.get_by_role("button").click()
    block.get_by_role("button", name="Copied").wait_for()
    assert AmpConfig.from_json(made.evaluate("navigator.clipboard.readText()")) == made_study.made().config


def test_foreign_text_is_text(made: Page) -> None:
    assert made.title() == "made: fp16, batch size 64"
    assert made.locator("img").count() == 0
    assert made_study.HOSTILE in (made.locator("main").text_content() or "")
    failed = section(made, "Memory against batch size").locator(".scatterlayer .trace").last.locator(".point")
    assert "</script>" in hover(made, failed.nth(1))


def _ground(page: Page) -> tuple[str, str]:
    body = page.evaluate("getComputedStyle(document.body).backgroundColor")
    paper = page.evaluate("getComputedStyle(document.querySelector('.main-svg .bg')).fill")
    return body, paper


def test_light_and_dark(browser: Browser, folders: dict[str, Path]) -> None:
    with opened(browser, folders["slow_images"] / "report.html", color_scheme="light") as page:
        light = _ground(page)
        page.emulate_media(color_scheme="dark")
        page.wait_for_selector("html[data-drawn=dark]")
        dark = _ground(page)
        assert light[0] != dark[0]
        assert light[1] != dark[1]
        page.get_by_role("button", name="Light").click()
        page.wait_for_selector("html[data-drawn=light]")
        assert _ground(page) == light
