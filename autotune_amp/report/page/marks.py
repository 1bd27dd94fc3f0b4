"""How charts look, and the marks that they share: colours and frame, which record is drawn where. Pure."""

from __future__ import annotations

import textwrap
from html import escape
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from plotly.graph_objects import Scatter

from autotune_amp.core.dimensions import PRECISIONS
from autotune_amp.core.outcome import Failure, Measurement
from autotune_amp.core.text import duration, one_line, outcome_name, rate, size
from autotune_amp.search.ranking import is_trial

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from plotly.graph_objects import Figure

    from autotune_amp.core.dimensions import Precision
    from autotune_amp.core.outcome import Record


# A figure, or the sentence that says why there is none.
Drawn: TypeAlias = "Figure | str"


class Look(NamedTuple):
    """How a precision is drawn; any one of the four tells it from the others."""

    color: str
    symbol: str
    dash: str
    pattern: str

    def symbols(self, are_open: Iterable[bool]) -> list[str]:
        """The symbol of each mark; an open one was cut short, or may not be recommended."""
        return [f"{self.symbol}-open" if is_open else self.symbol for is_open in are_open]


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


def marks(name: str, x: Sequence[Any], y: Sequence[Any], hovers: Sequence[str], **more: Any) -> Scatter:
    """Marks of which each says on hover what it is."""
    return Scatter(name=name, x=x, y=y, hovertext=hovers, hoverinfo="text", **{"mode": "markers"} | more)


def rule(name: str, x: Sequence[Any], y: Sequence[Any], hover: str | None = "", **look: Any) -> Scatter:
    """A line that says on hover what it is, by its name unless told otherwise; nothing where `hover` is None."""
    look = {"color": "var(--bad)", "width": 1.5} | look
    said_on_hover = {"hoverinfo": "skip"} if hover is None else {"hoverinfo": "text", "hovertext": hover or name}
    return Scatter(name=name, x=x, y=y, mode="lines", line=look, **said_on_hover)


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


class Point(NamedTuple):
    """A record that holds a measurement."""

    record: Record
    measurement: Measurement

    @property
    def batch_size(self) -> int:
        """Samples of one forward pass."""
        return self.record.candidate.batch_size

    @property
    def rate_interval(self) -> tuple[float, float]:
        """Samples per second at the ends of the 95 % interval of the step time within this process.

        The upper end is the rate itself where the interval reaches down to no time at all, which bounds nothing.
        """
        low, high = self.measurement.step_seconds_interval
        samples_per_second, seconds = self.measurement.samples_per_second, self.measurement.step_seconds
        return samples_per_second * seconds / high, samples_per_second * (seconds / low if low > 0 else 1.0)

    @property
    def hover(self) -> str:
        """What is known of it."""
        record, found = self.record, self.measurement
        low, high = found.step_seconds_interval
        return said(
            str(record.candidate),
            rate(found.samples_per_second),
            f"{duration(found.step_seconds)} a step ({duration(low)} to {duration(high)})",
            f"{size(found.reserved_memory_bytes)} counted, {size(found.peak_memory_bytes)} at the peak",
            f"trial {record.number}, {_PURPOSES.get(record.purpose, record.purpose)}" + ", cut" * found.was_cut,
        )


_PURPOSES = {"plain": "without the recommended environment", "confirm": "confirmation, in a fresh process"}


class Points(NamedTuple):
    """The measurements of one precision.

    `looks` are the search's first of each of its own batch sizes, in rising order; `again` all others: repeated,
    confirmed, with pinned modules, other loader workers, or as found.
    """

    precision: Precision
    looks: tuple[Point, ...]
    again: tuple[Point, ...]


def points(records: Iterable[Record]) -> list[Points]:
    """The measurements of each precision that has some, from the one with least to go wrong."""
    measured = [Point(r, r.outcome) for r in records if isinstance(r.outcome, Measurement)]
    found = []
    for precision in PRECISIONS:
        ours = [p for p in measured if p.record.candidate.precision == precision]
        looks: dict[int, Point] = {}
        for point in ours:
            if is_look(point.record):
                looks.setdefault(point.batch_size, point)
        again = tuple(p for p in ours if looks.get(p.batch_size) is not p)
        if ours:
            found.append(Points(precision, tuple(looks[size] for size in sorted(looks)), again))
    return found


def is_look(record: Record) -> bool:
    """Whether it is the search's own, of a candidate on which the models of memory and time are fitted."""
    return record.purpose in ("search", "fallback") and record.candidate.is_ordinary


def failures(records: Iterable[Record]) -> list[tuple[Record, Failure]]:
    """The trials that did not run, in order."""
    return [(r, r.outcome) for r in records if isinstance(r.outcome, Failure) and is_trial(r)]


def crosses(failed: Sequence[tuple[Record, Failure]], name: str) -> Scatter:
    """A cross on the axis for each failure, so that those of a batch size cover each other.

    The first of them is labelled with all their precisions, one below the other so that neighbours have room on a
    phone, and each tells of them all.
    """
    precisions: dict[int, list[str]] = {}
    hovers: dict[int, list[str]] = {}
    for record, failure in failed:
        about = (str(record.candidate), outcome_name(failure.kind), failure.message[:400], f"trial {record.number}")
        precisions.setdefault(record.candidate.batch_size, []).append(record.candidate.precision)
        hovers.setdefault(record.candidate.batch_size, []).append(said(*about))
    sizes = [record.candidate.batch_size for record, _ in failed]
    return marks(
        name,
        sizes,
        [0] * len(failed),
        ["<br>".join(hovers[size]) for size in sizes],
        mode="markers+text",
        text=["<br>".join(dict.fromkeys(precisions.pop(size, ()))) for size in sizes],
        textposition="top left",
        cliponaxis=False,
        marker={"symbol": "x", "size": 10, "color": "var(--bad)"},
    )


def ticks(records: Iterable[Record]) -> dict[str, object]:
    """An axis of the batch sizes that were tried: each a tick of its own, distances by ratio."""
    sizes = sorted({r.candidate.batch_size for r in records if is_trial(r)})
    return {"type": "log", "tickvals": sizes, "ticktext": list(map(str, sizes)), "title_text": "batch size"}
