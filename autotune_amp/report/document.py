"""Self-contained HTML page with sections and charts, in the dark or light theme of the reader's browser.

Colours are CSS variables (page.css), also in figures: page.js resolves them when it draws, and draws again when the
theme changes. plotly.js is embedded in compressed form, at two fifths of its size.
"""

from __future__ import annotations

import base64
import gzip
from collections.abc import Mapping
from functools import cache
from importlib.resources import files
from typing import TYPE_CHECKING

from autotune_amp.core.markup import style, text

if TYPE_CHECKING:
    from plotly.graph_objects import Figure


def marker(kind: str) -> str:
    """Return the tag of autotune_amp pages, which `files` checks before overwriting; `kind` is "search" or "run"."""
    return f'<meta name="generator" content="autotune_amp {kind}">'


def page(
    title: str,
    sections: Mapping[str, str],
    details: Mapping[str, str] | None = None,
    *,
    kind: str,
    lead: str,
    reload_seconds: int | None = None,
) -> str:
    """Return an HTML document; its `kind` is "search" or "run".

    `sections` maps titles to HTML and is shown below `lead`, which is HTML too; `details` are further sections, each of
    which unfolds when its title is clicked. Empty sections are left out. A browser reloads the page every
    `reload_seconds`, if given.
    """
    reloads = "" if reload_seconds is None else f'<meta http-equiv="refresh" content="{reload_seconds}">\n'
    parts = [f"<section><h2>{text(name)}</h2>{body}</section>" for name, body in sections.items() if body]
    parts += [
        f'<section class="folded"><details><summary><h2>{text(name)}</h2></summary>{body}</details></section>'
        for name, body in (details or {}).items()
        if body
    ]
    return (
        f'<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n{marker(kind)}\n{reloads}'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{text(title)}</title>\n<style>\n{style()}{_page_file('page.css')}</style>\n</head>\n<body>\n"
        '<header><span class="brand">autotune_amp</span><button id="theme" type="button">Dark</button></header>\n'
        f'<main class="amp-pieces">\n<h1>{text(title)}</h1>\n{lead}\n' + "\n".join(parts) + "\n</main>\n"
        f'<script type="application/octet-stream" id="plotly">{_plotly()}</script>\n'
        f"<script>\n{_page_file('page.js')}</script>\n</body>\n</html>\n"
    )


def chart(figure: Figure, caption: str = "") -> str:
    """Return a figure as HTML, with a caption below it."""
    below = f"<figcaption>{text(caption)}</figcaption>" if caption else ""
    return (
        f'<figure class="chart"><div class="plot" style="min-height:{figure.layout.height}px">'
        '<p class="absent">JavaScript draws this chart, in any browser from 2024 on.</p></div>'
        f'<script type="application/json">{figure.to_json()}</script>{below}</figure>'
    )


def code(title: str, lines: str) -> str:
    """Return HTML that shows lines of code with a button that copies them."""
    return (
        f'<div class="code"><div><span>{text(title)}</span><button type="button" class="copy">Copy</button></div>'
        f"<pre>{text(lines)}</pre></div>"
    )


def _page_file(name: str) -> str:
    return files("autotune_amp.report").joinpath("page", name).read_text("utf-8")


@cache
def _plotly() -> str:
    from plotly.offline import get_plotlyjs

    return base64.b64encode(gzip.compress(get_plotlyjs().encode(), mtime=0)).decode()
