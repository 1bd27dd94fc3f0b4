"""Charts of a search: throughput and memory against batch size and each other, and the search as it went. Pure.

What all charts share stands first: how a precision looks, the frame, marks and lines that say on hover what they are.
"""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterable, Sequence
from html import escape
from itertools import accumulate
from typing import Any, NamedTuple, TypeAlias

from plotly.graph_objects import Bar, Figure, Scatter
from plotly.subplots import make_subplots

from autotune_amp.core.config import AmpConfig
from autotune_amp.core.dimensions import PRECISIONS, Precision
from autotune_amp.core.evidence import is_wide, landing_line
from autotune_amp.core.outcome import Failure, Measurement, Record
from autotune_amp.core.recommendation import CandidateRow, Recommendation
from autotune_amp.core.setting import Setting
from autotune_amp.core.text import count, duration, one_line, outcome_name, rate, size
from autotune_amp.report.rows import baseline_row, outcome_line, recommended_row
from autotune_amp.search.options import SearchOptions
from autotune_amp.search.ranking import BEFORE_CONFIRMATION, is_trial

# A figure, or the sentence that says why there is none.
Drawn: TypeAlias = "Figure | str"

MIB = 2**20


class Style(NamedTuple):
    """How a precision is drawn; any one of the three tells it from the others."""

    color: str
    symbol: str
    dash: str

    def symbols(self, are_open: Iterable[bool]) -> list[str]:
        """The symbol of each mark; an open one was cut short, or may not be recommended."""
        return [f"{self.symbol}-open" if is_open else self.symbol for is_open in are_open]


LOOKS: dict[Precision, Style] = {
    "fp32": Style("var(--fp32)", "circle", "solid"),
    "tf32": Style("var(--tf32)", "diamond", "longdash"),
    "bf16": Style("var(--bf16)", "square", "dash"),
    "fp16": Style("var(--fp16)", "triangle-up", "dot"),
    "fp8": Style("var(--fp8)", "star", "dashdot"),
}


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
    lines = dict.fromkeys(("linecolor", "zerolinecolor", "tickcolor"), "var(--line)")
    axis = {"gridcolor": "var(--grid)", "ticks": "outside", "automargin": True, "title_standoff": 8} | lines
    return figure.update_xaxes(**axis).update_yaxes(**axis)


def said(*lines: str) -> str:
    """Lines for a hover label, foreign text among them: escaped, since plotly reads tags, and wrapped for a phone."""
    wrapped = (part for line in lines for part in textwrap.wrap(one_line(line), 48))
    return "<br>".join(escape(part, quote=False) for part in wrapped)


# --- against batch size --------------------------------------------------------------------------------------------

# Around the mark of what is run today, and of what is recommended.
_AROUND: dict[str, dict[str, Any]] = {
    "baseline": {"symbol": "square-open", "size": 19, "color": "var(--muted)", "line_width": 2},
    "recommended": {"symbol": "circle-open", "size": 19, "color": "var(--ink)", "line_width": 2},
}
_RATES = {"title_text": "samples/s", "tickformat": ",~f"}


def throughput(recommendation: Recommendation | None, records: Sequence[Record]) -> Drawn:
    """Samples per second against batch size: every measurement and failure, and what was recommended."""
    measured, failed = measurements(records), failures(records)
    if not measured:
        return "No chart of throughput: outcomes.jsonl holds no measurement of this search."
    figure = Figure(list(_measured(records, lambda found: found.samples_per_second)))
    if failed:
        figure.add_trace(_crosses(failed, "failed"))
    if recommendation is not None:
        figure.add_traces(list(_rings(recommendation)))
    return framed(figure, 430, xaxis=_batch_sizes(records), yaxis=_RATES | {"rangemode": "tozero"})


def measurements(records: Iterable[Record]) -> list[tuple[Record, Measurement]]:
    """The records that hold one, in order."""
    return [(r, r.outcome) for r in records if isinstance(r.outcome, Measurement)]


def failures(records: Iterable[Record]) -> list[tuple[Record, Failure]]:
    """The trials that did not run, in order."""
    return [(r, r.outcome) for r in records if isinstance(r.outcome, Failure) and is_trial(r)]


def _measured(records: Sequence[Record], height: Callable[[Measurement], float]) -> Iterable[Scatter]:
    """Large marks for the first look at each batch size, joined by a line; small ones for what came again."""
    for precision in PRECISIONS:
        ours = [(r, found) for r, found in measurements(records) if r.candidate.precision == precision]
        if not ours:
            continue
        tried = [(r, found) for r, found in ours if r.purpose in BEFORE_CONFIRMATION and r.candidate.is_ordinary]
        first = {r.candidate.batch_size: (r, found) for r, found in reversed(tried)}
        looks = [first[batch_size] for batch_size in sorted(first)]
        again = [pair for pair in ours if first.get(pair[0].candidate.batch_size) != pair]
        look = LOOKS[precision]
        yield legend_entry(precision, "lines+markers")
        for some, name, width, opacity in ((looks, "", 9, 1.0), (again, " again", 6, 0.6)):
            yield marks(
                precision + name,
                [r.candidate.batch_size for r, _ in some],
                [height(found) for _, found in some],
                [_hover(r, found) for r, found in some],
                legendgroup=precision,
                showlegend=False,
                opacity=opacity,
                mode="markers" if name else "lines+markers",
                line={"color": look.color, "dash": look.dash, "width": 2},
                marker={"color": look.color, "size": width, "symbol": look.symbols(f.was_cut for _, f in some)},
            )


def _hover(record: Record, found: Measurement) -> str:
    low, high = found.step_seconds_interval
    return said(
        str(record.candidate),
        rate(found.samples_per_second),
        f"{duration(found.step_seconds)} a step ({duration(low)} to {duration(high)})",
        f"{size(found.reserved_memory_bytes)} counted, {size(found.peak_memory_bytes)} at the peak",
        f"trial {record.number}, {record.purpose}" + ", cut" * found.was_cut,
    )


def _crosses(failed: Sequence[tuple[Record, Failure]], name: str) -> Scatter:
    """A cross on the axis for each batch size at which something failed, which tells of all that did."""
    at: dict[int, list[tuple[Record, Failure]]] = {}
    for record, failure in failed:
        at.setdefault(record.candidate.batch_size, []).append((record, failure))
    hovers = [
        "<br>".join(said(str(r.candidate), outcome_name(f.kind), f.message[:400], f"trial {r.number}") for r, f in some)
        for some in at.values()
    ]
    return marks(
        name,
        list(at),
        [0] * len(at),
        hovers,
        mode="markers+text",
        # One below the other, so that neighbours have room on a phone.
        text=["<br>".join(dict.fromkeys(r.candidate.precision for r, _ in some)) for some in at.values()],
        textposition="top left",
        cliponaxis=False,
        marker={"symbol": "x", "size": 10, "color": "var(--bad)"},
    )


def _batch_sizes(records: Iterable[Record]) -> dict[str, object]:
    """An axis of the batch sizes that were tried: each a tick of its own, distances by ratio."""
    sizes = sorted({r.candidate.batch_size for r in records if is_trial(r)})
    return {"type": "log", "tickvals": sizes, "ticktext": list(map(str, sizes)), "title_text": "batch size"}


def _rings(recommendation: Recommendation) -> Iterable[Scatter]:
    evidence, baseline = recommendation.evidence, recommendation.evidence.baseline
    if baseline.samples_per_second is not None and baseline.config != recommendation.config:
        interval = baseline.samples_per_second_interval
        yield _ring("baseline", baseline.config, baseline.samples_per_second, interval)
    interval = evidence.samples_per_second_interval
    yield _ring("recommended", recommendation.config, evidence.samples_per_second, interval)


def _ring(name: str, config: AmpConfig, speed: float, interval: tuple[float, float] | None) -> Scatter:
    """Around a median over processes, with where a new run is expected to land; None where nobody can say."""
    # An interval that says nothing would press all that was measured flat.
    low, high = (speed, speed) if interval is None or is_wide(interval) else interval
    landing = [] if interval is None else [landing_line(interval)]
    hover = said(f"{name}: {Setting.of(config)}", rate(speed), *landing)
    whiskers = {"type": "data", "symmetric": False, "array": [high - speed], "arrayminus": [speed - low]}
    return marks(name, [config.batch_size], [speed], [hover], error_y=whiskers, marker=_AROUND[name])


def memory(recommendation: Recommendation | None, records: Sequence[Record]) -> Drawn:
    """Peak memory in MiB against batch size, as the answer and the table have it; what ran out of memory stands on the
    axis, and only then the limit of a trial is near enough to be drawn."""
    measured = measurements(records)
    if not measured:
        return "No chart of memory: outcomes.jsonl holds no measurement of this search."
    figure = Figure(list(_measured(records, lambda found: found.peak_memory_bytes / MIB)))
    out_of_memory = [(record, failure) for record, failure in failures(records) if failure.kind == "oom"]
    highest = max(found.peak_memory_bytes for _, found in measured)
    if out_of_memory and recommendation is not None and recommendation.options:
        limit = _peak_at_limit(recommendation, [found for _, found in measured])
        sizes = [r.candidate.batch_size for r in records if is_trial(r)]
        ends, height = [min(sizes), max(sizes)], limit / MIB
        figure.add_trace(rule(f"limit: {size(limit)}", ends, [height] * 2, dash="dashdot"))
        highest = max(highest, limit)
    if out_of_memory:
        figure.add_trace(_crosses(out_of_memory, "out of memory"))
    axis = {"title_text": "peak memory in MiB", "tickformat": ",d", "range": [0, 1.12 * highest / MIB]}
    return framed(figure, 380, xaxis=_batch_sizes(records), yaxis=axis)


def _peak_at_limit(recommendation: Recommendation, measured: Sequence[Measurement]) -> int:
    """Bytes of a peak at which a trial ran out of memory: on a CPU the limit is for what it takes beyond the process
    that it starts in, which is in the peak."""
    limit = recommendation.options_as(SearchOptions).limit_bytes(recommendation.available_bytes)
    return limit + min(max(0, found.peak_memory_bytes - found.reserved_memory_bytes) for found in measured)


# --- throughput against memory -------------------------------------------------------------------------------------


def pareto(recommendation: Recommendation) -> Drawn:
    """Throughput against peak memory: each candidate that was measured, and the front of those not excluded.

    The front goes on down from its first and to the right of its last, so that one of a single candidate is a line too.
    """
    rows = [r for r in recommendation.candidates if r.samples_per_second is not None and r.peak_memory_bytes]
    if len(rows) < 2:
        return "No chart of throughput against memory: fewer than two candidates were measured."
    chosen, today = recommended_row(recommendation), baseline_row(recommendation)
    front = _front([row for row in rows if row.status != "excluded"])
    right, top = 1.05 * max(map(_memory, rows)), 1.12 * max(map(_speed, rows))  # with room for the highest label
    x = [*map(_memory, [*front[:1], *front]), right]
    y = [0, *map(_speed, [*front, *front[-1:]])]
    figure = Figure(rule("front", x, y, None, color="var(--muted)", shape="hv"))
    roles = {"baseline": None if today is chosen else today, "recommended": chosen}
    for precision in dict.fromkeys(row.precision for row in rows):
        ours, look = [row for row in rows if row.precision == precision], LOOKS[precision]
        drawn = marks(
            precision,
            list(map(_memory, ours)),
            list(map(_speed, ours)),
            [_row_hover(row) for row in ours],
            legendgroup=precision,
            showlegend=False,
            mode="markers+text",
            text=[_batch_label(row) if row in (*front, *roles.values()) else "" for row in ours],
            textposition="top left",
            marker={
                "color": look.color,
                "size": 10,
                "symbol": look.symbols(row.status in ("cut", "excluded") for row in ours),
            },
        )
        figure.add_traces([legend_entry(precision), drawn])
    for name, row in roles.items():
        if row is not None and row in rows:
            figure.add_trace(
                rule(name, [_memory(row)], [_speed(row)], None).update(mode="markers", marker=_AROUND[name])
            )
    xaxis = {"title_text": "peak memory in MiB", "range": [0, right], "tickformat": ",d"}
    return framed(figure, 400, xaxis=xaxis, yaxis=_RATES | {"range": [0, top]})


def _memory(row: CandidateRow) -> float:
    return (row.peak_memory_bytes or 0) / MIB


def _speed(row: CandidateRow) -> float:
    return row.samples_per_second or 0.0


def _front(rows: Sequence[CandidateRow]) -> list[CandidateRow]:
    """What no other beats in both, by rising memory."""
    front: list[CandidateRow] = []
    for row in sorted(rows, key=lambda row: (_memory(row), -_speed(row))):
        if not front or _speed(row) > _speed(front[-1]):
            front.append(row)
    return front


def _batch_label(row: CandidateRow) -> str:
    accumulated = "" if row.accumulation_steps == 1 else f" x {row.accumulation_steps}"
    workers = "" if row.num_workers is None else f", {count(row.num_workers, 'worker')}"
    return f"{row.batch_size}{accumulated}{workers}"


def _row_hover(row: CandidateRow) -> str:
    return said(
        str(Setting.of(row)),
        rate(_speed(row)),
        f"{duration(row.step_seconds or 0)} a step",
        f"{size(row.peak_memory_bytes or 0)} at the peak",
        outcome_name(row.status),
        (row.reason or "")[:300],
    )


# --- the search as it went -----------------------------------------------------------------------------------------

# What a record was made for, in the order in which a search comes to it; the last stands lowest.
_PURPOSES = (
    "accumulation",
    "search",
    "fidelity",
    "calibration",
    "profile",
    "fallback",
    "confirm",
    "plain",
    "one_rank",
    "outlook",
)


class Span(NamedTuple):
    """A record with the seconds of measuring up to its end."""

    record: Record
    end_seconds: float

    @property
    def row(self) -> str:
        """The bar that it is drawn in: what it was for, or the slot where there are several."""
        return self.record.slot or self.record.purpose

    @property
    def hover(self) -> str:
        """What it was, where and when."""
        where = "" if self.record.slot is None else f" on {self.record.slot}"
        return said(
            f"{self.record.number}: {self.record.candidate}, {self.record.purpose}{where}",
            outcome_line(self.record.outcome),
            f"took {duration(self.record.seconds)}, until {self.end_seconds:.1f} s",
        )


def timed(records: Sequence[Record]) -> list[Span]:
    """The records, in the order in which they ended, with their ends: one job at a time on each slot."""
    spans: list[Span] = []
    ends: dict[str | None, float] = {}
    last = 0.0
    for record in records:
        began = last if record.slot is None else ends.get(record.slot, 0.0)
        last = max(last, began + record.seconds)
        ends[record.slot] = last
        spans.append(Span(record, last))
    return spans


def course(recommendation: Recommendation | None, records: Sequence[Record]) -> Drawn:
    """Above, samples per second of each trial as it ended, with the fastest so far; below, how long each record took.

    There is no best where nothing was recommended.
    """
    if not records:
        return "No chart of the search: outcomes.jsonl holds nothing of it."
    figure = make_subplots(rows=2, cols=1, shared_xaxes=True, vertical_spacing=0.06, row_heights=[0.55, 0.45])
    spans = timed(records)
    for precision in PRECISIONS:
        ours = [s for s in spans if s.record.candidate.precision == precision]
        if not ours:
            continue
        measured = [(s, s.record.outcome) for s in ours if isinstance(s.record.outcome, Measurement)]
        look = LOOKS[precision]
        style: dict[str, Any] = {"name": precision, "legendgroup": precision, "showlegend": False}
        drawn = marks(
            **style,
            x=[s.end_seconds for s, _ in measured],
            y=[m.samples_per_second for _, m in measured],
            hovers=[s.hover for s, _ in measured],
            marker={"color": look.color, "size": 8, "symbol": look.symbols(m.was_cut for _, m in measured)},
        )
        figure.add_traces([legend_entry(precision), drawn], rows=1, cols=1)
        bar = Bar(
            **style,
            base=[s.end_seconds - s.record.seconds for s in ours],
            x=[s.record.seconds for s in ours],
            y=[s.row for s in ours],
            orientation="h",
            hovertext=[s.hover for s in ours],
            hoverinfo="text",
            marker={"color": look.color, "line": {"color": "var(--panel)", "width": 1}},
        )
        figure.add_trace(bar, row=2, col=1)
    if failed := [s for s in spans if isinstance(s.record.outcome, Failure)]:
        x, hovers = [s.end_seconds for s in failed], [s.hover for s in failed]
        marker = {"symbol": "x", "size": 9, "color": "var(--bad)"}
        figure.add_trace(marks("failed", x, [0] * len(x), hovers, cliponaxis=False, marker=marker), row=1, col=1)
    if recommendation is not None:
        figure.add_trace(_best(spans, recommendation), row=1, col=1)
    rows = {s.row for s in spans}
    used = [*sorted(rows.difference(_PURPOSES)), *(purpose for purpose in _PURPOSES if purpose in rows)]
    framed(figure, 330 + 26 * len(used), barmode="overlay")
    figure.update_yaxes(_RATES | {"rangemode": "tozero"}, row=1, col=1)
    figure.update_yaxes(categoryorder="array", categoryarray=used[::-1], row=2, col=1)
    figure.update_xaxes(title_text="seconds of measuring", rangemode="tozero", row=2, col=1)
    return figure


def _best(spans: Sequence[Span], recommendation: Recommendation) -> Scatter:
    """The fastest of the search's own trials so far, without what a check has ruled out since."""
    out = {Setting.of(row) for row in recommendation.candidates if row.status == "excluded"}
    found = [
        (s.end_seconds, s.record.outcome.samples_per_second)
        for s in spans
        if s.record.purpose == "search" and s.record.candidate not in out and isinstance(s.record.outcome, Measurement)
    ]
    speeds = list(accumulate((speed for _, speed in found), max))
    x = [*(seconds for seconds, _ in found), *([spans[-1].end_seconds] if found else [])]
    return rule("fastest so far", x, [*speeds, *speeds[-1:]], None, color="var(--ink)", shape="hv")
