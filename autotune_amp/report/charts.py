"""Charts of a search: throughput and memory against batch size and each other, and the search over time. Pure.

The parts that all charts share come first: the style of each precision, the layout, marks and lines with hover labels.
"""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterable, Sequence
from html import escape
from itertools import accumulate
from typing import Any, NamedTuple, TypeAlias, get_args

from plotly.graph_objects import Bar, Figure, Scatter
from plotly.subplots import make_subplots

from autotune_amp.core.config import AmpConfig
from autotune_amp.core.evidence import is_wide, new_run_line
from autotune_amp.core.outcome import Failure, Measurement, Purpose, Record
from autotune_amp.core.precisions import PRECISIONS, Precision
from autotune_amp.core.recommendation import CandidateRow, Recommendation
from autotune_amp.core.setting import Setting
from autotune_amp.core.text import count, duration, one_line, outcome_name, rate, size
from autotune_amp.report.rows import baseline_row, outcome_line, recommended_row
from autotune_amp.search.options import SearchOptions
from autotune_amp.search.ranking import BEFORE_CONFIRMATION, is_trial

# A figure, or a sentence with the reason that it cannot be drawn.
FigureOrReason: TypeAlias = "Figure | str"

MIB = 2**20


class Style(NamedTuple):
    """Style of a precision in charts: each precision has its own colour, symbol and dash."""

    color: str
    symbol: str
    dash: str

    def symbols(self, are_open: Iterable[bool]) -> list[str]:
        """Return the symbol of each mark. An open one stands for a trial that was cut short, or an excluded setting."""
        return [f"{self.symbol}-open" if is_open else self.symbol for is_open in are_open]


PRECISION_STYLES: dict[Precision, Style] = {
    "fp32": Style("var(--fp32)", "circle", "solid"),
    "tf32": Style("var(--tf32)", "diamond", "longdash"),
    "bf16": Style("var(--bf16)", "square", "dash"),
    "fp16": Style("var(--fp16)", "triangle-up", "dot"),
    "fp8": Style("var(--fp8)", "star", "dashdot"),
}


def legend_entry(precision: Precision, mode: str = "markers") -> Scatter:
    """Return a trace without points that adds a precision to the legend, with the filled symbol."""
    style = PRECISION_STYLES[precision]
    return Scatter(
        x=[None],
        y=[None],
        name=precision,
        legendgroup=precision,
        mode=mode,
        line={"color": style.color, "dash": style.dash, "width": 2},
        marker={"color": style.color, "symbol": style.symbol, "size": 9},
    )


def marker_trace(name: str, x: Sequence[Any], y: Sequence[Any], hovers: Sequence[str], **more: Any) -> Scatter:
    """Return a trace of marks, each with its own hover label."""
    return Scatter(name=name, x=x, y=y, hovertext=hovers, hoverinfo="text", **{"mode": "markers"} | more)


def line_trace(name: str, x: Sequence[Any], y: Sequence[Any], hover: str | None = "", **line_style: Any) -> Scatter:
    """Return a trace of a line. Its hover label is `hover`, `name` if that is empty, or none if it is None."""
    line_style = {"color": "var(--bad)", "width": 1.5} | line_style
    hover_options = {"hoverinfo": "skip"} if hover is None else {"hoverinfo": "text", "hovertext": hover or name}
    return Scatter(name=name, x=x, y=y, mode="lines", line=line_style, **hover_options)


def apply_layout(figure: Figure, height: int, **layout: Any) -> Figure:
    """Give `figure` the page's theme, legend and hover style, and a height in pixels; return the figure."""
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


def hover_label(*lines: str) -> str:
    """Return a hover label with these lines, wrapped for a phone and escaped, since plotly interprets HTML tags."""
    wrapped = (part for line in lines for part in textwrap.wrap(one_line(line), 48))
    return "<br>".join(escape(part, quote=False) for part in wrapped)


# --- against batch size --------------------------------------------------------------------------------------------

# Markers drawn around the marks of the baseline and of the recommended setting.
_ROLE_MARKERS: dict[str, dict[str, Any]] = {
    "baseline": {"symbol": "square-open", "size": 19, "color": "var(--muted)", "line_width": 2},
    "recommended": {"symbol": "circle-open", "size": 19, "color": "var(--ink)", "line_width": 2},
}
_SPEED_AXIS = {"title_text": "samples/s", "tickformat": ",~f"}


def throughput(recommendation: Recommendation | None, records: Sequence[Record]) -> FigureOrReason:
    """Draw samples per second against batch size: measurements, failures, the baseline and the recommendation."""
    measured, failed = measurements(records), failures(records)
    if not measured:
        return "No chart of throughput: outcomes.jsonl holds no measurement of this search."
    figure = Figure(list(_measurement_traces(records, lambda measurement: measurement.samples_per_second)))
    if failed:
        figure.add_trace(_failure_marks(failed, "failed"))
    if recommendation is not None:
        figure.add_traces(list(_role_rings(recommendation)))
    return apply_layout(figure, 430, xaxis=_batch_size_axis(records), yaxis=_SPEED_AXIS | {"rangemode": "tozero"})


def measurements(records: Iterable[Record]) -> list[tuple[Record, Measurement]]:
    """Return the records that hold a measurement, each with it, in order."""
    return [(r, r.outcome) for r in records if isinstance(r.outcome, Measurement)]


def failures(records: Iterable[Record]) -> list[tuple[Record, Failure]]:
    """Return the trials that failed, each with its failure, in order."""
    return [(r, r.outcome) for r in records if isinstance(r.outcome, Failure) and is_trial(r)]


def _measurement_traces(records: Sequence[Record], height: Callable[[Measurement], float]) -> Iterable[Scatter]:
    """Yield the traces of each precision: its legend entry, large marks joined by a line, and small marks.

    Large marks are the first trial of an ordinary setting at each batch size, small ones all other measurements.
    `height` returns the y value of a measurement.
    """
    for precision in PRECISIONS:
        measured = [(r, measurement) for r, measurement in measurements(records) if r.candidate.precision == precision]
        if not measured:
            continue
        trials = [
            (r, measurement)
            for r, measurement in measured
            if r.purpose in BEFORE_CONFIRMATION and r.candidate.is_ordinary
        ]
        first = {r.candidate.batch_size: (r, measurement) for r, measurement in reversed(trials)}
        first_trials = [first[batch_size] for batch_size in sorted(first)]
        repeated = [pair for pair in measured if first.get(pair[0].candidate.batch_size) != pair]
        style = PRECISION_STYLES[precision]
        yield legend_entry(precision, "lines+markers")
        for shown, name, width, opacity in ((first_trials, "", 9, 1.0), (repeated, " again", 6, 0.6)):
            yield marker_trace(
                precision + name,
                [r.candidate.batch_size for r, _ in shown],
                [height(measurement) for _, measurement in shown],
                [_measurement_hover(r, measurement) for r, measurement in shown],
                legendgroup=precision,
                showlegend=False,
                opacity=opacity,
                mode="markers" if name else "lines+markers",
                line={"color": style.color, "dash": style.dash, "width": 2},
                marker={"color": style.color, "size": width, "symbol": style.symbols(f.was_cut for _, f in shown)},
            )


def _measurement_hover(record: Record, measurement: Measurement) -> str:
    low, high = measurement.step_seconds_interval
    return hover_label(
        str(record.candidate),
        rate(measurement.samples_per_second),
        f"{duration(measurement.step_seconds)} a step ({duration(low)} to {duration(high)})",
        f"{size(measurement.reserved_memory_bytes)} counted, {size(measurement.peak_memory_bytes)} at the peak",
        f"trial {record.number}, {record.purpose}" + ", cut" * measurement.was_cut,
    )


def _failure_marks(failed: Sequence[tuple[Record, Failure]], name: str) -> Scatter:
    """Return a trace of crosses on the axis, at each batch size with failures; hover labels list them."""
    by_batch_size: dict[int, list[tuple[Record, Failure]]] = {}
    for record, failure in failed:
        by_batch_size.setdefault(record.candidate.batch_size, []).append((record, failure))
    hovers = [
        "<br>".join(
            hover_label(str(r.candidate), outcome_name(f.kind), f.message[:400], f"trial {r.number}") for r, f in group
        )
        for group in by_batch_size.values()
    ]
    return marker_trace(
        name,
        list(by_batch_size),
        [0] * len(by_batch_size),
        hovers,
        mode="markers+text",
        # One label below the other, so that neighbours have room on a phone.
        text=["<br>".join(dict.fromkeys(r.candidate.precision for r, _ in group)) for group in by_batch_size.values()],
        textposition="top left",
        cliponaxis=False,
        marker={"symbol": "x", "size": 10, "color": "var(--bad)"},
    )


def _batch_size_axis(records: Iterable[Record]) -> dict[str, object]:
    """Return the layout of an axis of batch sizes: logarithmic, with a tick at each size that was tried."""
    sizes = sorted({r.candidate.batch_size for r in records if is_trial(r)})
    return {"type": "log", "tickvals": sizes, "ticktext": list(map(str, sizes)), "title_text": "batch size"}


def _role_rings(recommendation: Recommendation) -> Iterable[Scatter]:
    evidence, baseline = recommendation.evidence, recommendation.evidence.baseline
    if baseline.samples_per_second is not None and baseline.config != recommendation.config:
        interval = baseline.samples_per_second_interval
        yield _ring("baseline", baseline.config, baseline.samples_per_second, interval)
    interval = evidence.samples_per_second_interval
    yield _ring("recommended", recommendation.config, evidence.samples_per_second, interval)


def _ring(name: str, config: AmpConfig, speed: float, interval: tuple[float, float] | None) -> Scatter:
    """Return a ring at `speed`, a median over processes, with whiskers for the `interval` expected of a new run.

    There are no whiskers if the interval is unknown (None) or wide.
    """
    # A wide interval would stretch the axis and flatten all measurements.
    low, high = (speed, speed) if interval is None or is_wide(interval) else interval
    landing = [] if interval is None else [new_run_line(interval)]
    hover = hover_label(f"{name}: {Setting.of(config)}", rate(speed), *landing)
    whiskers = {"type": "data", "symmetric": False, "array": [high - speed], "arrayminus": [speed - low]}
    return marker_trace(name, [config.batch_size], [speed], [hover], error_y=whiskers, marker=_ROLE_MARKERS[name])


def memory(recommendation: Recommendation | None, records: Sequence[Record]) -> FigureOrReason:
    """Draw peak memory in MiB against batch size.

    Trials that ran out of memory are crosses on the axis. The limit of a trial is drawn only if there are such trials,
    since otherwise it is far from the measurements.
    """
    measured = measurements(records)
    if not measured:
        return "No chart of memory: outcomes.jsonl holds no measurement of this search."
    figure = Figure(list(_measurement_traces(records, lambda measurement: measurement.peak_memory_bytes / MIB)))
    out_of_memory = [(record, failure) for record, failure in failures(records) if failure.kind == "oom"]
    highest = max(measurement.peak_memory_bytes for _, measurement in measured)
    if out_of_memory and recommendation is not None and recommendation.options:
        limit = _peak_at_limit(recommendation, [measurement for _, measurement in measured])
        sizes = [r.candidate.batch_size for r in records if is_trial(r)]
        ends, height = [min(sizes), max(sizes)], limit / MIB
        figure.add_trace(line_trace(f"limit: {size(limit)}", ends, [height] * 2, dash="dashdot"))
        highest = max(highest, limit)
    if out_of_memory:
        figure.add_trace(_failure_marks(out_of_memory, "out of memory"))
    axis = {"title_text": "peak memory in MiB", "tickformat": ",d", "range": [0, 1.12 * highest / MIB]}
    return apply_layout(figure, 380, xaxis=_batch_size_axis(records), yaxis=axis)


def _peak_at_limit(recommendation: Recommendation, measured: Sequence[Measurement]) -> int:
    """Return the peak memory in bytes that corresponds to the limit of a trial.

    On a CPU the limit counts only the memory that a trial adds to its process, while the measured peak includes the
    process itself.
    """
    limit = recommendation.options_as(SearchOptions).limit_bytes(recommendation.available_bytes)
    return limit + min(
        max(0, measurement.peak_memory_bytes - measurement.reserved_memory_bytes) for measurement in measured
    )


# --- throughput against memory -------------------------------------------------------------------------------------


def pareto(recommendation: Recommendation) -> FigureOrReason:
    """Draw throughput against peak memory: all measured candidates, and the Pareto front of those not excluded.

    The front is extended down from its first candidate and right from its last, so that a front of a single candidate
    is a line too.
    """
    rows = [r for r in recommendation.candidates if r.samples_per_second is not None and r.peak_memory_bytes]
    if len(rows) < 2:
        return "No chart of throughput against memory: fewer than two candidates were measured."
    chosen, baseline = recommended_row(recommendation), baseline_row(recommendation)
    front = _pareto_front([row for row in rows if row.status != "excluded"])
    right = 1.05 * max(map(_memory_mib, rows))
    top = 1.12 * max(map(_samples_per_second, rows))  # with room for the highest label
    x = [*map(_memory_mib, [*front[:1], *front]), right]
    y = [0, *map(_samples_per_second, [*front, *front[-1:]])]
    figure = Figure(line_trace("front", x, y, None, color="var(--muted)", shape="hv"))
    roles = {"baseline": None if baseline is chosen else baseline, "recommended": chosen}
    for precision in dict.fromkeys(row.precision for row in rows):
        precision_rows, style = [row for row in rows if row.precision == precision], PRECISION_STYLES[precision]
        trace = marker_trace(
            precision,
            list(map(_memory_mib, precision_rows)),
            list(map(_samples_per_second, precision_rows)),
            [_row_hover(row) for row in precision_rows],
            legendgroup=precision,
            showlegend=False,
            mode="markers+text",
            text=[_batch_label(row) if row in (*front, *roles.values()) else "" for row in precision_rows],
            textposition="top left",
            marker={
                "color": style.color,
                "size": 10,
                "symbol": style.symbols(row.status in ("cut", "excluded") for row in precision_rows),
            },
        )
        figure.add_traces([legend_entry(precision), trace])
    for name, row in roles.items():
        if row is not None and row in rows:
            figure.add_trace(
                line_trace(name, [_memory_mib(row)], [_samples_per_second(row)], None).update(
                    mode="markers", marker=_ROLE_MARKERS[name]
                )
            )
    xaxis = {"title_text": "peak memory in MiB", "range": [0, right], "tickformat": ",d"}
    return apply_layout(figure, 400, xaxis=xaxis, yaxis=_SPEED_AXIS | {"range": [0, top]})


def _memory_mib(row: CandidateRow) -> float:
    return (row.peak_memory_bytes or 0) / MIB


def _samples_per_second(row: CandidateRow) -> float:
    return row.samples_per_second or 0.0


def _pareto_front(rows: Sequence[CandidateRow]) -> list[CandidateRow]:
    """Return the candidates that no other one beats in both throughput and memory, by rising memory."""
    front: list[CandidateRow] = []
    for row in sorted(rows, key=lambda row: (_memory_mib(row), -_samples_per_second(row))):
        if not front or _samples_per_second(row) > _samples_per_second(front[-1]):
            front.append(row)
    return front


def _batch_label(row: CandidateRow) -> str:
    accumulated = "" if row.accumulation_steps == 1 else f" x {row.accumulation_steps}"
    workers = "" if row.num_workers is None else f", {count(row.num_workers, 'worker')}"
    return f"{row.batch_size}{accumulated}{workers}"


def _row_hover(row: CandidateRow) -> str:
    return hover_label(
        str(Setting.of(row)),
        rate(_samples_per_second(row)),
        f"{duration(row.step_seconds or 0)} a step",
        f"{size(row.peak_memory_bytes or 0)} at the peak",
        outcome_name(row.status),
        (row.reason or "")[:300],
    )


# --- the search over time -----------------------------------------------------------------------------------------


class Span(NamedTuple):
    """Record of a trial or check with its end, in seconds of measuring since the search began."""

    record: Record
    end_seconds: float

    @property
    def row(self) -> str:
        """Return the label of the record's bar: its slot if there are several, else its purpose."""
        return self.record.slot or self.record.purpose

    @property
    def hover(self) -> str:
        """Return the hover label: the record's setting, purpose, slot, outcome and times."""
        where = "" if self.record.slot is None else f" on {self.record.slot}"
        return hover_label(
            f"{self.record.number}: {self.record.candidate}, {self.record.purpose}{where}",
            outcome_line(self.record.outcome),
            f"took {duration(self.record.seconds)}, until {self.end_seconds:.1f} s",
        )


def record_spans(records: Sequence[Record]) -> list[Span]:
    """Return each record with its end, computed from the seconds that the records of its slot took.

    `records` are in the order in which they ended.
    """
    spans: list[Span] = []
    ends: dict[str | None, float] = {}
    last = 0.0
    for record in records:
        began = last if record.slot is None else ends.get(record.slot, 0.0)
        last = max(last, began + record.seconds)
        ends[record.slot] = last
        spans.append(Span(record, last))
    return spans


def course(recommendation: Recommendation | None, records: Sequence[Record]) -> FigureOrReason:
    """Draw the search over time: above, each trial's samples per second at its end; below, a bar for each record.

    The line of the fastest trial so far is left out if nothing was recommended.
    """
    if not records:
        return "No chart of the search: outcomes.jsonl has no record of it."
    figure = make_subplots(rows=2, cols=1, shared_xaxes=True, vertical_spacing=0.06, row_heights=[0.55, 0.45])
    spans = record_spans(records)
    for precision in PRECISIONS:
        precision_spans = [s for s in spans if s.record.candidate.precision == precision]
        if not precision_spans:
            continue
        measured = [(s, s.record.outcome) for s in precision_spans if isinstance(s.record.outcome, Measurement)]
        precision_style = PRECISION_STYLES[precision]
        style: dict[str, Any] = {"name": precision, "legendgroup": precision, "showlegend": False}
        trace = marker_trace(
            **style,
            x=[s.end_seconds for s, _ in measured],
            y=[m.samples_per_second for _, m in measured],
            hovers=[s.hover for s, _ in measured],
            marker={
                "color": precision_style.color,
                "size": 8,
                "symbol": precision_style.symbols(m.was_cut for _, m in measured),
            },
        )
        figure.add_traces([legend_entry(precision), trace], rows=1, cols=1)
        bar = Bar(
            **style,
            base=[s.end_seconds - s.record.seconds for s in precision_spans],
            x=[s.record.seconds for s in precision_spans],
            y=[s.row for s in precision_spans],
            orientation="h",
            hovertext=[s.hover for s in precision_spans],
            hoverinfo="text",
            marker={"color": precision_style.color, "line": {"color": "var(--panel)", "width": 1}},
        )
        figure.add_trace(bar, row=2, col=1)
    if failed := [s for s in spans if isinstance(s.record.outcome, Failure)]:
        x, hovers = [s.end_seconds for s in failed], [s.hover for s in failed]
        marker = {"symbol": "x", "size": 9, "color": "var(--bad)"}
        figure.add_trace(marker_trace("failed", x, [0] * len(x), hovers, cliponaxis=False, marker=marker), row=1, col=1)
    if recommendation is not None:
        figure.add_trace(_fastest_line(spans, recommendation), row=1, col=1)
    rows = {s.row for s in spans}
    purposes = get_args(Purpose)
    labels = [*sorted(rows.difference(purposes)), *(purpose for purpose in purposes if purpose in rows)]
    apply_layout(figure, 330 + 26 * len(labels), barmode="overlay")
    figure.update_yaxes(_SPEED_AXIS | {"rangemode": "tozero"}, row=1, col=1)
    figure.update_yaxes(categoryorder="array", categoryarray=labels[::-1], row=2, col=1)
    figure.update_xaxes(title_text="seconds of measuring", rangemode="tozero", row=2, col=1)
    return figure


def _fastest_line(spans: Sequence[Span], recommendation: Recommendation) -> Scatter:
    """Return the line of the fastest trial so far, among the search's own trials of settings that are not excluded."""
    excluded = {Setting.of(row) for row in recommendation.candidates if row.status == "excluded"}
    points = [
        (s.end_seconds, s.record.outcome.samples_per_second)
        for s in spans
        if s.record.purpose == "search"
        and s.record.candidate not in excluded
        and isinstance(s.record.outcome, Measurement)
    ]
    speeds = list(accumulate((speed for _, speed in points), max))
    x = [*(seconds for seconds, _ in points), *([spans[-1].end_seconds] if points else [])]
    return line_trace("fastest so far", x, [*speeds, *speeds[-1:]], None, color="var(--ink)", shape="hv")
