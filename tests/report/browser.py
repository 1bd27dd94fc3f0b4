"""Pages in a real headless Chromium that reaches no network, and what it says of them."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, Locator, Page, Route, sync_playwright

EXECUTABLE = shutil.which("chromium-headless-shell") or shutil.which("chromium")


@contextmanager
def chromium() -> Iterator[Browser]:
    """A browser; skips the test where the machine has none."""
    if EXECUTABLE is None:
        pytest.skip("neither chromium nor chromium-headless-shell is on PATH: a real browser is needed for this")
    with sync_playwright() as playwright:
        # Without a sandbox, which root may not have.
        browser = playwright.chromium.launch(executable_path=EXECUTABLE, args=["--no-sandbox"])
        yield browser
        browser.close()


@contextmanager
def opened(browser: Browser, path: Path, *, width: int = 1280, **options: Any) -> Iterator[Page]:
    """The page at `path`, its charts drawn; at the end it must have asked for nothing else and have had no error."""
    context = browser.new_context(viewport={"width": width, "height": 900}, **options)
    problems: list[str] = []
    asked: list[str] = []
    own = path.resolve().as_uri()

    def route(found: Route) -> None:
        asked.append(found.request.url)
        if found.request.url == own:
            found.continue_()
        else:
            found.abort()

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


def num_marks(where: Locator) -> int:
    """The marks of its scatter charts."""
    return where.locator(".scatterlayer .point").count()


def num_bars(where: Locator) -> int:
    """Their bars, in bar charts."""
    return where.locator(".barlayer .point").count()


def hover(page: Page, mark: Locator) -> str:
    """What the page shows once the mouse rests on a mark."""
    mark.scroll_into_view_if_needed()
    box = mark.bounding_box()
    assert box is not None
    page.mouse.move(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
    label = page.locator(".hoverlayer .hovertext").first
    label.wait_for(timeout=10_000)
    return label.text_content() or ""


def overflow(page: Page) -> int:
    """Pixels by which the page is wider than its window."""
    wider: int = page.evaluate("document.documentElement.scrollWidth - innerWidth")
    return wider
