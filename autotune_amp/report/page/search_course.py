"""The chart of the search as it went: what was tried when, what it cost, and the fastest so far. Pure."""

from __future__ import annotations

from itertools import accumulate
from typing import TYPE_CHECKING, NamedTuple

from plotly.graph_objects import Bar, Scatter
from plotly.subplots import make_subplots

from autotune_amp.core.outcome import Failure, Measurement, Record
from autotune_amp.core.setting import PRECISIONS, Setting
from autotune_amp.core.text import duration
from autotune_amp.report.page.marks import LOOKS, Drawn, framed, hatched, legend_entry, said
from autotune_amp.report.page.speed_memory import RATES
from autotune_amp.report.rows import outcome_line

if TYPE_CHECKING:
    from collections.abc import Sequence

    from autotune_amp.core.recommendation import Recommendation

# What a record was made for, in the order in which a search comes to it; the last stands lowest.
PURPOSES = ("accumulation", "search", "fidelity", "calibration", "fallback", "confirm", "plain")


class Span(NamedTuple):
    """A record with the seconds of measuring before it and up to its end."""

    record: Record
    start_seconds: float
    end_seconds: float


def course(recommendation: Recommendation | None, records: Sequence[Record]) -> Drawn:
    """Above, samples per second of each trial as it ended, with the fastest so far; below, how long each record took.

    There is no best where nothing was recommended.
    """
    if not records:
        return "No chart of the search: outcomes.jsonl holds nothing of it."
    figure = make_subplots(rows=2, cols=1, shared_xaxes=True, vertical_spacing=0.06, row_heights=[0.55, 0.45])
    spans = _spans(records)
    best = [] if recommendation is None else [_best(spans, recommendation)]
    for trace in (*_trials(spans), *best):
        figure.add_trace(trace, row=1, col=1)
    for bar in _bars(spans):
        figure.add_trace(bar, row=2, col=1)
    used = [purpose for purpose in PURPOSES if any(r.purpose == purpose for r in records)]
    framed(figure, 330 + 26 * len(used), barmode="overlay")
    figure.update_yaxes(RATES | {"rangemode": "tozero"}, row=1, col=1)
    figure.update_yaxes(categoryorder="array", categoryarray=used[::-1], row=2, col=1)
    figure.update_xaxes(title_text="seconds of measuring", rangemode="tozero", row=2, col=1)
    return figure


def _spans(records: Sequence[Record]) -> list[Span]:
    ends = list(accumulate(record.seconds for record in records))
    return [Span(record, end - record.seconds, end) for record, end in zip(records, ends, strict=True)]


def _trials(spans: Sequence[Span]) -> list[Scatter]:
    traces = []
    for precision in PRECISIONS:
        ours = [s for s in spans if s.record.candidate.precision == precision]
        measured = [(s, s.record.outcome) for s in ours if isinstance(s.record.outcome, Measurement)]
        look = LOOKS[precision]
        if measured:
            traces.append(legend_entry(precision))
            traces.append(
                Scatter(
                    x=[span.end_seconds for span, _ in measured],
                    y=[found.samples_per_second for _, found in measured],
                    name=precision,
                    legendgroup=precision,
                    showlegend=False,
                    mode="markers",
                    hovertext=[_hover(span) for span, _ in measured],
                    hoverinfo="text",
                    marker={
                        "color": look.color,
                        "size": 8,
                        "symbol": [f"{look.symbol}-open" if found.was_cut else look.symbol for _, found in measured],
                    },
                )
            )
    failed = [s for s in spans if isinstance(s.record.outcome, Failure)]
    if failed:
        traces.append(
            Scatter(
                x=[span.end_seconds for span in failed],
                y=[0] * len(failed),
                name="failed",
                mode="markers",
                cliponaxis=False,
                hovertext=[_hover(span) for span in failed],
                hoverinfo="text",
                marker={"symbol": "x", "size": 9, "color": "var(--bad)"},
            )
        )
    return traces


def _best(spans: Sequence[Span], recommendation: Recommendation) -> Scatter:
    """The fastest of the search's own trials so far, without what a check has ruled out since."""
    out = {Setting.of(row) for row in recommendation.candidates if row.status == "excluded"}
    seconds: list[float] = []
    rates: list[float] = []
    for span in spans:
        found = span.record.outcome
        is_own = span.record.purpose == "search" and span.record.candidate not in out
        if isinstance(found, Measurement) and is_own:
            seconds.append(span.end_seconds)
            rates.append(max([found.samples_per_second, *rates[-1:]]))
    return Scatter(
        x=[*seconds, *([spans[-1].end_seconds] if seconds else [])],
        y=[*rates, *rates[-1:]],
        name="fastest so far",
        mode="lines",
        line={"color": "var(--ink)", "width": 1.5, "shape": "hv"},
        hoverinfo="skip",
    )


def _bars(spans: Sequence[Span]) -> list[Bar]:
    bars = []
    for precision in PRECISIONS:
        ours = [s for s in spans if s.record.candidate.precision == precision]
        if ours:
            look = LOOKS[precision]
            bars.append(
                Bar(
                    base=[s.start_seconds for s in ours],
                    x=[s.record.seconds for s in ours],
                    y=[s.record.purpose for s in ours],
                    orientation="h",
                    name=precision,
                    legendgroup=precision,
                    showlegend=False,
                    hovertext=[_hover(s) for s in ours],
                    hoverinfo="text",
                    marker=hatched(look.color, look.pattern),
                )
            )
    return bars


def _hover(span: Span) -> str:
    record = span.record
    return said(
        f"{record.number}: {record.candidate}, {record.purpose}",
        outcome_line(record.outcome),
        f"took {duration(record.seconds)}, from {span.start_seconds:.1f} s to {span.end_seconds:.1f} s",
    )
