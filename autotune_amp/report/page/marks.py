"""What every chart looks like: a precision's colour, symbol, dash and pattern, and the frame of a figure."""

from __future__ import annotations

import textwrap
from html import escape
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from plotly.graph_objects import Scatter

from autotune_amp.core.text import one_line

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

    from autotune_amp.core.config import Precision

# A figure, or the sentence that says why there is none.
Drawn: TypeAlias = "Figure | str"


class Look(NamedTuple):
    """How a precision is drawn; any one of the four tells it from the others."""

    color: str
    symbol: str
    dash: str
    pattern: str


LOOKS: dict[Precision, Look] = {
    "fp32": Look("var(--fp32)", "circle", "solid", ""),
    "tf32": Look("var(--tf32)", "diamond", "longdash", "-"),
    "bf16": Look("var(--bf16)", "square", "dash", "/"),
    "fp16": Look("var(--fp16)", "triangle-up", "dot", "x"),
    "fp8": Look("var(--fp8)", "star", "dashdot", "+"),
}


def hatched(color: str, pattern: str) -> dict[str, Any]:
    """The fill of a bar: a colour with a pattern over it."""
    over = {"shape": pattern, "fillmode": "overlay", "fgcolor": "var(--panel)", "fgopacity": 0.6, "size": 7}
    return {"color": color, "pattern": over, "line": {"color": "var(--panel)", "width": 1}}


def legend_entry(precision: Precision, mode: str = "markers") -> Scatter:
    """A precision's line of the legend, which would otherwise show the symbol of whichever mark comes first."""
    look = LOOKS[precision]
    return Scatter(
        x=[None],
        y=[None],
        name=precision,
        legendgroup=precision,
        mode=mode,
        line={"color": look.color, "dash": look.dash, "width": 2},
        marker={"color": look.color, "symbol": look.symbol, "size": 9},
    )


_AXIS = {
    "gridcolor": "var(--grid)",
    "linecolor": "var(--line)",
    "zerolinecolor": "var(--line)",
    "tickcolor": "var(--line)",
    "ticks": "outside",
    "automargin": True,
    "title_standoff": 8,
}


def framed(figure: Figure, height: int, **layout: Any) -> Figure:
    """`figure` in the page's own frame, `height` pixels high: theme, legend above, hover; returns it."""
    figure.update_layout(
        template="none",
        height=height,
        autosize=True,
        uirevision="kept",  # a change of theme keeps the reader's zoom
        margin={"l": 8, "r": 12, "t": 12, "b": 8},
        paper_bgcolor="var(--panel)",
        plot_bgcolor="var(--panel)",
        font={"color": "var(--ink)", "size": 12, "family": "system-ui, -apple-system, Segoe UI, Roboto, sans-serif"},
        legend={"orientation": "h", "x": 0, "xanchor": "left", "y": 1.02, "yanchor": "bottom"},
        hoverlabel={"align": "left", "namelength": -1, "bgcolor": "var(--panel)", "font_color": "var(--ink)"},
        modebar={"bgcolor": "var(--panel)", "color": "var(--muted)", "activecolor": "var(--ink)"},
        **layout,
    )
    figure.update_xaxes(**_AXIS)
    figure.update_yaxes(**_AXIS)
    return figure


def said(*lines: str) -> str:
    """Lines for a hover label, foreign text among them: escaped, since plotly reads tags, and wrapped for a phone."""
    wrapped = (part for line in lines for part in textwrap.wrap(one_line(line), 48))
    return "<br>".join(escape(part, quote=False) for part in wrapped)


def label(text: str, width: int) -> str:
    """A module's name on an axis: escaped, its beginning left out where it is longer than `width`."""
    text = one_line(text)
    if len(text) > width:
        text = f"\N{HORIZONTAL ELLIPSIS}{text[1 - width :]}"
    return escape(text, quote=False)
