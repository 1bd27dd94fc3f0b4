"""HTML fragments for reports and notebooks. Text is escaped here; fragments passed in as HTML are not."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from importlib.resources import files

from autotune_amp.core.text import printable


def notebook_box(title: str, *contents: str) -> str:
    """Return a box for a notebook: the title, the `contents` (HTML of this module's functions) and their style sheet.

    Its colours derive from the notebook's text colour, so that it suits dark themes too.
    """
    return (
        f'<div class="autotune-amp amp-pieces"><style>{style()}</style><h4>{text(title)}</h4>{"".join(contents)}</div>'
    )


def table(columns: Sequence[str], rows: Iterable[Sequence[str]], *, num_numeric: int = 0) -> str:
    """Return a table with a heading for each of the `columns`. The `num_numeric` columns after the first are aligned
    to the right, for numbers.

    In a narrow window the last cell of a row, which may be a long text, has a line of its own below the others.
    """

    def cells(row: Sequence[str], tag: str) -> str:
        attributes = (' class="number"' if 0 < index <= num_numeric else "" for index in range(len(row)))
        return "".join(f"<{tag}{each}>{text(cell)}</{tag}>" for each, cell in zip(attributes, row, strict=True))

    head, body = cells(columns, "th"), "".join(f"<tr>{cells(row, 'td')}</tr>" for row in rows)
    opening_tag = f'<table style="--columns: {len(columns) - 1}">'  # columns beside the last, in a narrow window
    return f'<div class="wide">{opening_tag}<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def definition_list(pairs: Iterable[tuple[str, str]]) -> str:
    """Return a two-column list (``<dl>``) of (label, text) pairs."""
    return "<dl>" + "".join(f"<dt>{text(label)}</dt><dd>{text(words)}</dd>" for label, words in pairs) + "</dl>"


def tiles(key_numbers: Iterable[tuple[str, str, str]]) -> str:
    """Return a row of boxes, each with a number in large type between its label and a note: (label, number, note)."""
    boxes = (
        f'<div class="tile"><span>{text(label)}</span><b>{text(value)}</b><span>{text(note)}</span></div>'
        for label, value, note in key_numbers
    )
    return f'<div class="tiles">{"".join(boxes)}</div>'


def paragraph(words: str, kind: str = "") -> str:
    """Return a paragraph. `kind` is its class in markup.css, not escaped: ``reason``, ``warning`` or ``absent``."""
    return f'<p class="{kind}">{text(words)}</p>' if kind else f"<p>{text(words)}</p>"


def collapsible(title: str, body: str) -> str:
    """Return a section that unfolds when its title is clicked. `body` is HTML and not escaped."""
    return f"<details><summary>{text(title)}</summary>{body}</details>"


def style() -> str:
    """Return the style sheet for the fragments of this module."""
    return files("autotune_amp.core").joinpath("markup.css").read_text("utf-8")


def text(words: str) -> str:
    """Return `words` with HTML markup and control characters escaped."""
    return escape(printable(words))
