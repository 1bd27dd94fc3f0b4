"""Charts of a search: throughput and memory against batch size and each other, and the search as it went. Pure."""

from __future__ import annotations

from itertools import accumulate
from typing import TYPE_CHECKING, Any, NamedTuple

from plotly.graph_objects import Bar, Figure, Scatter
from plotly.subplots import make_subplots

from autotune_amp.core.dimensions import PRECISIONS
from autotune_amp.core.outcome import Failure, Measurement
from autotune_amp.core.setting import Setting
from autotune_amp.core.text import count, duration, number, one_line, outcome_name, rate, size
from autotune_amp.report.page.marks import (
    LOOKS,
    Drawn,
    crosses,
    failures,
    framed,
    hatched,
    is_look,
    legend_entry,
    marks,
    points,
    rule,
    said,
    ticks,
)
from autotune_amp.report.rows import baseline_row, outcome_line, recommended_row
from autotune_amp.search.ranking import is_trial
from autotune_amp.search.stages.explore import MemoryModel, fit_memory

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from autotune_amp.core.config import AmpConfig
    from autotune_amp.core.dimensions import Precision
    from autotune_amp.core.outcome import Record
    from autotune_amp.core.recommendation import CandidateRow, Recommendation
    from autotune_amp.report.page.marks import Points


MIB = 2**20
# Around the mark of what is run today, and of what is recommended.
_AROUND: dict[str, dict[str, Any]] = {
    "baseline": {"symbol": "square-open", "size": 19, "color": "var(--muted)", "line_width": 2},
    "recommended": {"symbol": "circle-open", "size": 19, "color": "var(--ink)", "line_width": 2},
}
_RATES = {"title_text": "samples/s", "tickformat": ",~f"}


# --- throughput ----------------------------------------------------------------------------------------------------


def throughput(recommendation: Recommendation | None, records: Sequence[Record]) -> Drawn:
    """Samples per second against batch size: every measurement and failure, and what was recommended."""
    measured, failed = points(records), failures(records)
    if not measured:
        return "No chart of throughput: outcomes.jsonl holds no measurement of this search."
    figure = Figure()
    for ours in measured:
        look = LOOKS[ours.precision]
        first, again = _measured(ours, lambda found: found.samples_per_second)
        whiskers = _whiskers([(p.measurement.samples_per_second, p.rate_interval) for p in ours.looks], look.color)
        style = {"color": look.color, "dash": look.dash, "width": 2}
        first.update(error_y=whiskers, mode="lines+markers", line=style)
        figure.add_traces([legend_entry(ours.precision, "lines+markers"), first, again])
    rings = [] if recommendation is None else list(_rings(recommendation))
    top = max(p.measurement.samples_per_second for ours in measured for p in (*ours.looks, *ours.again))
    highest = max([top, *(ring.y[0] + max(ring.error_y.array or [0]) for ring in rings)])
    figure.add_traces([*([crosses(failed, "failed")] if failed else []), *rings])
    # The interval of a few steps of one trial may reach to many times any rate: it runs out of the chart.
    return framed(figure, 430, xaxis=ticks(records), yaxis=_RATES | {"range": [0, 1.12 * highest]})


def _measured(ours: Points, height: Callable[[Measurement], float]) -> Iterable[Scatter]:
    """The marks of a precision: large ones for the first look at each batch size, small ones for what came again."""
    look = LOOKS[ours.precision]
    for some, name, width, opacity in ((ours.looks, "", 9, 1.0), (ours.again, " again", 6, 0.6)):
        yield marks(
            ours.precision + name,
            [p.batch_size for p in some],
            [height(p.measurement) for p in some],
            [p.hover for p in some],
            legendgroup=ours.precision,
            showlegend=False,
            opacity=opacity,
            marker={"color": look.color, "size": width, "symbol": look.symbols(p.measurement.was_cut for p in some)},
        )


def _whiskers(centred: Sequence[tuple[float, tuple[float, float]]], color: str, **more: Any) -> dict[str, Any]:
    return {
        "type": "data",
        "symmetric": False,
        "array": [high - center for center, (_, high) in centred],
        "arrayminus": [center - low for center, (low, _) in centred],
        "color": color,
        "thickness": 1.5,
        "width": 4,
    } | more


def _rings(recommendation: Recommendation) -> Iterable[Scatter]:
    evidence, baseline = recommendation.evidence, recommendation.evidence.baseline
    if baseline.samples_per_second is not None and baseline.config != recommendation.config:
        interval = baseline.samples_per_second_interval
        yield _ring("baseline", baseline.config, baseline.samples_per_second, interval)
    interval = evidence.samples_per_second_interval
    yield _ring("recommended", recommendation.config, evidence.samples_per_second, interval)


def _ring(name: str, config: AmpConfig, speed: float, interval: tuple[float, float] | None) -> Scatter:
    """Around a median over processes, with where a new run is expected to land; None where nobody can say."""
    landing, whiskers = [], None
    if interval is not None:
        landing = [f"a new run: {number(interval[0])} to {number(interval[1])}"]
        whiskers = _whiskers([(speed, interval)], _AROUND[name]["color"], width=9, thickness=2)
    hover = said(f"{name}: {Setting.of(config)}", rate(speed), *landing)
    return marks(name, [config.batch_size], [speed], [hover], error_y=whiskers, marker=_AROUND[name])


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
    for precision in dict.fromkeys(row.precision for row in rows):
        ours, look = [row for row in rows if row.precision == precision], LOOKS[precision]
        symbols = look.symbols(row.status in ("cut", "excluded") for row in ours)
        drawn = marks(
            precision,
            list(map(_memory, ours)),
            list(map(_speed, ours)),
            [_row_hover(row, row is chosen, row is today) for row in ours],
            legendgroup=precision,
            showlegend=False,
            mode="markers+text",
            text=[_batch_label(row) if row in front and row not in (chosen, today) else "" for row in ours],
            textposition="top left",
            marker={"color": look.color, "size": 10, "symbol": symbols},
        )
        figure.add_traces([legend_entry(precision), drawn])
    for name, row in (("baseline", None if today is chosen else today), ("recommended", chosen)):
        if row is not None and row in rows:
            text = {"mode": "markers+text", "text": [_batch_label(row)], "textposition": "top left"}
            place = {"x": [_memory(row)], "y": [_speed(row)]}
            figure.add_trace(Scatter(name=name, **place, **text, hoverinfo="skip", marker=_AROUND[name]))
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


def _row_hover(row: CandidateRow, is_chosen: bool, is_today: bool) -> str:
    return said(
        str(Setting.of(row)),
        rate(_speed(row)),
        f"{duration(row.step_seconds or 0)} a step",
        f"{size(row.peak_memory_bytes or 0)} at the peak",
        ", ".join(["recommended"] * is_chosen + ["baseline"] * is_today + [outcome_name(row.status)]),
        one_line(row.reason or "")[:300],
    )


# --- memory --------------------------------------------------------------------------------------------------------

# A limit further above everything measured would press that flat: then it is said instead of drawn.
_MAX_LIMIT_RATIO = 2.5


def memory(recommendation: Recommendation | None, records: Sequence[Record]) -> Drawn:
    """MiB that count against the limit against batch size, with M(b) = max(m0, m1 + m2·b) as the search fitted it.

    What ran out of memory stands on the axis. A fit may leave the chart above the limit.
    """
    measured, failed = points(records), _out_of_memory(records)
    if not measured:
        return "No chart of memory: outcomes.jsonl holds no measurement of this search."
    figure, fits = Figure(), fitted(records)
    for ours in measured:
        drawn = _measured(ours, lambda found: found.reserved_memory_bytes / MIB)
        figure.add_traces([legend_entry(ours.precision), *drawn])
        if ours.precision in fits:
            figure.add_trace(_fit(ours.precision, fits[ours.precision], records))
    axis: dict[str, Any] = {"title_text": "memory in MiB", "rangemode": "tozero", "tickformat": ",d"}
    limit = limit_bytes(recommendation)
    highest = max(p.measurement.reserved_memory_bytes for ours in measured for p in (*ours.looks, *ours.again))
    if limit is not None and (failed or limit <= _MAX_LIMIT_RATIO * highest):
        sizes = [r.candidate.batch_size for r in records if is_trial(r)]
        ends, height = [min(sizes), max(sizes)], limit / MIB
        figure.add_trace(rule("limit", ends, [height] * 2, f"A trial may take {size(limit)}", dash="dashdot"))
        axis["range"] = [0, 1.12 * max(limit, highest) / MIB]
    if failed:
        figure.add_trace(crosses(failed, "out of memory"))
    return framed(figure, 380, xaxis=ticks(records), yaxis=axis)


def fitted(records: Sequence[Record]) -> dict[Precision, MemoryModel]:
    """The memory model of each precision of which two batch sizes were measured."""
    seen: dict[Precision, list[tuple[int, int]]] = {}
    for record in records:
        candidate, outcome = record.candidate, record.outcome
        if isinstance(outcome, Measurement) and is_look(record):
            seen.setdefault(candidate.precision, []).append((candidate.batch_size, outcome.reserved_memory_bytes))
    models = {precision: fit_memory(pairs) for precision, pairs in seen.items()}
    return {precision: model for precision, model in models.items() if model is not None}


def limit_bytes(recommendation: Recommendation | None) -> int | None:
    """What a trial might take; None where an earlier version did not keep its options, or nothing was recommended."""
    if recommendation is None:
        return None
    share = recommendation.options.get("memory_fraction")
    return None if share is None else int(share * recommendation.hardware.memory.available)


def memory_caption(recommendation: Recommendation | None, records: Sequence[Record]) -> str:
    """What the marks and the curves are, and at which batch size the fit of each precision meets the limit."""
    fits, limit = fitted(records), limit_bytes(recommendation)
    parts = [
        "What counts against the limit: on an accelerator what a trial reserves, on a CPU what it takes beyond the "
        "process that it starts in."
    ]
    if fits:
        parts.append("The curves are the fit max(m0, m1 + m2 x batch) that the search steers by.")
    if limit is not None:
        reached = [
            f"{precision} at about batch {float(f'{(limit - model.m1) / model.m2:.2g}'):,.0f}"
            for precision, model in fits.items()
            if model.m2 > 0 and model.m1 < limit
        ]
        by_fit = f", which by these fits is reached by {', '.join(reached)}" if reached else ""
        parts.append(f"A trial may take {size(limit)}{by_fit}.")
    if _out_of_memory(records):
        parts.append("Crosses on the axis ran out of memory: nobody knows what they would have taken.")
    return " ".join(parts)


def _fit(precision: Precision, model: MemoryModel, records: Sequence[Record]) -> Scatter:
    """Over the batch sizes that were tried, as a curve: on an axis of ratios a straight line is none."""
    tried = [r.candidate.batch_size for r in records if r.candidate.precision == precision and is_look(r)]
    low, high = min(tried), max(tried)
    sizes = [low * (high / low) ** (step / 40) for step in range(41)]
    look = LOOKS[precision]
    base = f"{'-' * (model.m1 < 0)}{size(abs(model.m1))}"
    hover = said(f"{precision}: max({size(model.m0)}, {base} + {size(model.m2)} x batch)")
    heights = [model.bytes_at(b) / MIB for b in sizes]
    drawn = rule(f"{precision} fit", sizes, heights, hover, color=look.color, dash=look.dash)
    return drawn.update(legendgroup=precision)


def _out_of_memory(records: Sequence[Record]) -> list[tuple[Record, Failure]]:
    return [(record, failure) for record, failure in failures(records) if failure.kind == "oom"]


# --- the search as it went -----------------------------------------------------------------------------------------

# What a record was made for, in the order in which a search comes to it; the last stands lowest.
_PURPOSES = ("accumulation", "search", "fidelity", "calibration", "fallback", "confirm", "plain", "outlook")


class Span(NamedTuple):
    """A record with the seconds of measuring up to its end."""

    record: Record
    end_seconds: float

    @property
    def hover(self) -> str:
        """What it was, and when."""
        record, end = self.record, self.end_seconds
        return said(
            f"{record.number}: {record.candidate}, {record.purpose}",
            outcome_line(record.outcome),
            f"took {duration(record.seconds)}, from {end - record.seconds:.1f} s to {end:.1f} s",
        )


def course(recommendation: Recommendation | None, records: Sequence[Record]) -> Drawn:
    """Above, samples per second of each trial as it ended, with the fastest so far; below, how long each record took.

    There is no best where nothing was recommended.
    """
    if not records:
        return "No chart of the search: outcomes.jsonl holds nothing of it."
    figure = make_subplots(rows=2, cols=1, shared_xaxes=True, vertical_spacing=0.06, row_heights=[0.55, 0.45])
    spans = list(map(Span, records, accumulate(record.seconds for record in records)))
    for precision in PRECISIONS:
        ours = [s for s in spans if s.record.candidate.precision == precision]
        measured = [(s, s.record.outcome) for s in ours if isinstance(s.record.outcome, Measurement)]
        look = LOOKS[precision]
        style: dict[str, Any] = {"name": precision, "legendgroup": precision, "showlegend": False}
        if measured:
            marker = {"color": look.color, "size": 8, "symbol": look.symbols(m.was_cut for _, m in measured)}
            x, y = [s.end_seconds for s, _ in measured], [m.samples_per_second for _, m in measured]
            drawn = marks(**style, x=x, y=y, hovers=[s.hover for s, _ in measured], marker=marker)
            figure.add_traces([legend_entry(precision), drawn], rows=1, cols=1)
        if ours:
            bar = Bar(
                **style,
                base=[s.end_seconds - s.record.seconds for s in ours],
                x=[s.record.seconds for s in ours],
                y=[s.record.purpose for s in ours],
                orientation="h",
                hovertext=[s.hover for s in ours],
                hoverinfo="text",
                marker=hatched(look.color, look.pattern),
            )
            figure.add_trace(bar, row=2, col=1)
    failed = [s for s in spans if isinstance(s.record.outcome, Failure)]
    if failed:
        x, hovers = [s.end_seconds for s in failed], [s.hover for s in failed]
        marker = {"symbol": "x", "size": 9, "color": "var(--bad)"}
        figure.add_trace(marks("failed", x, [0] * len(x), hovers, cliponaxis=False, marker=marker), row=1, col=1)
    if recommendation is not None:
        figure.add_trace(_best(spans, recommendation), row=1, col=1)
    used = [purpose for purpose in _PURPOSES if any(r.purpose == purpose for r in records)]
    framed(figure, 330 + 26 * len(used), barmode="overlay")
    figure.update_yaxes(_RATES | {"rangemode": "tozero"}, row=1, col=1)
    figure.update_yaxes(categoryorder="array", categoryarray=used[::-1], row=2, col=1)
    figure.update_xaxes(title_text="seconds of measuring", rangemode="tozero", row=2, col=1)
    return figure


def _best(spans: Sequence[Span], recommendation: Recommendation) -> Scatter:
    """The fastest of the search's own trials so far, without what a check has ruled out since."""
    out = {Setting.of(row) for row in recommendation.candidates if row.status == "excluded"}
    own = [
        (s.end_seconds, s.record.outcome)
        for s in spans
        if s.record.purpose == "search" and s.record.candidate not in out
    ]
    found = [(seconds, outcome.samples_per_second) for seconds, outcome in own if isinstance(outcome, Measurement)]
    speeds = list(accumulate((speed for _, speed in found), max))
    x = [*(seconds for seconds, _ in found), *([spans[-1].end_seconds] if found else [])]
    return rule("fastest so far", x, [*speeds, *speeds[-1:]], None, color="var(--ink)", shape="hv")
