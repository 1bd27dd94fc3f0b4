"""HTML fragments for reports and notebooks. All text passed in is escaped here."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from importlib.resources import files

from autotune_amp.core.text import printable


def fragment(title: str, *pieces: str) -> str:
    """Return a box with a title, the `pieces` and their style, for a notebook; dark on a dark page."""
    return f'<div class="autotune-amp amp-pieces"><style>{style()}</style><h4>{text(title)}</h4>{"".join(pieces)}</div>'


def table(columns: Sequence[str], rows: Iterable[Sequence[str]], *, num_numeric: int = 0) -> str:
    """Return a table; the `num_numeric` columns after the first hold numbers, the last one text.

    In a narrow window the last cell of a row has a line of its own below the others.
    """

    def cells(row: Sequence[str], name: str) -> str:
        kinds = (' class="number"' if 0 < index <= num_numeric else "" for index in range(len(row)))
        return "".join(f"<{name}{kind}>{text(cell)}</{name}>" for kind, cell in zip(kinds, row, strict=True))

    head, body = cells(columns, "th"), "".join(f"<tr>{cells(row, 'td')}</tr>" for row in rows)
    opened = f'<table style="--columns: {len(columns) - 1}">'
    return f'<div class="wide">{opened}<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def facts(pairs: Iterable[tuple[str, str]]) -> str:
    """Return a definition list of (label, text) pairs."""
    return "<dl>" + "".join(f"<dt>{text(label)}</dt><dd>{text(words)}</dd>" for label, words in pairs) + "</dl>"


def tiles(key_numbers: Iterable[tuple[str, str, str]]) -> str:
    """Return a row of tiles for (label, number, note) triples."""
    boxes = (
        f'<div class="tile"><span>{text(label)}</span><b>{text(value)}</b><span>{text(note)}</span></div>'
        for label, value, note in key_numbers
    )
    return f'<div class="tiles">{"".join(boxes)}</div>'


def paragraph(words: str, kind: str = "") -> str:
    """Return a paragraph; `kind` is a class of pieces.css: ``reason``, ``warning``, ``absent``."""
    return f'<p class="{kind}">{text(words)}</p>' if kind else f"<p>{text(words)}</p>"


def folded(title: str, body: str) -> str:
    """Return a section that unfolds when its title is clicked."""
    return f"<details><summary>{text(title)}</summary>{body}</details>"


def style() -> str:
    """Return the style sheet for the fragments of this module."""
    return files("autotune_amp.core").joinpath("pieces.css").read_text("utf-8")


def text(words: str) -> str:
    """Escape HTML markup and control characters in `words`."""
    return escape(printable(words))
