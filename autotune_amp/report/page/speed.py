"""Charts of throughput: against batch size, and against memory. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from plotly.graph_objects import Figure, Scatter

from autotune_amp.core.text import count, duration, number, one_line, outcome_name, rate, size
from autotune_amp.report.page.marks import LOOKS, Drawn, framed, legend_entry, said
from autotune_amp.report.page.points import (
    Point,
    crosses,
    failures,
    hover_of,
    points,
    symbols,
    ticks,
)
from autotune_amp.report.summary import baseline_row, recommended_row

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from autotune_amp.core.config import AmpConfig, Precision
    from autotune_amp.core.outcome import Failure, Record
    from autotune_amp.core.recommendation import CandidateRow, Recommendation

MIB = 2**20
# Around the mark of what is run today, and of what is recommended.
_AROUND: dict[str, dict[str, Any]] = {
    "baseline": {"symbol": "square-open", "size": 19, "color": "var(--muted)", "line_width": 2},
    "recommended": {"symbol": "circle-open", "size": 19, "color": "var(--ink)", "line_width": 2},
}
RATES = {"title_text": "samples/s", "tickformat": ",~f"}


def throughput(recommendation: Recommendation | None, records: Sequence[Record]) -> Drawn:
    """Samples per second against batch size: every measurement and failure, the memory wall, what was recommended."""
    measured, failed = points(records), failures(records)
    if not measured:
        return "No chart of throughput: outcomes.jsonl holds no measurement of this search."
    figure = Figure()
    for precision, looks, again in measured:
        look = LOOKS[precision]
        figure.add_trace(legend_entry(precision, "lines+markers"))
        figure.add_trace(
            Scatter(
                **_rates(looks),
                error_y=_whiskers([(p.measurement.samples_per_second, p.rate_interval) for p in looks], look.color),
                name=precision,
                legendgroup=precision,
                showlegend=False,
                mode="lines+markers",
                line={"color": look.color, "dash": look.dash, "width": 2},
                marker={"color": look.color, "size": 9, "symbol": symbols(look.symbol, looks)},
            )
        )
        figure.add_trace(
            Scatter(
                **_rates(again),
                name=f"{precision} again",
                legendgroup=precision,
                showlegend=False,
                mode="markers",
                opacity=0.6,
                marker={"color": look.color, "size": 6, "symbol": symbols(look.symbol, again)},
            )
        )
    rings = [] if recommendation is None else list(_rings(recommendation))
    top = max(p.measurement.samples_per_second for ours in measured for p in (*ours.looks, *ours.again))
    highest = max([top, *(ring.y[0] + max(ring.error_y.array or [0]) for ring in rings)])
    if failed:
        figure.add_trace(crosses(failed, 0, "failed"))
    for trace in _walls(failed, 1.05 * top):
        figure.add_trace(trace)
    for ring in rings:
        figure.add_trace(ring)
    # The interval of a few steps of one trial may reach to many times any rate: it runs out of the chart.
    return framed(figure, 430, xaxis=ticks(records), yaxis=RATES | {"range": [0, 1.12 * highest]})


def _rings(recommendation: Recommendation) -> Iterable[Scatter]:
    evidence, baseline = recommendation.evidence, recommendation.evidence.baseline
    if baseline.samples_per_second is not None and baseline.config != recommendation.config:
        interval = baseline.samples_per_second_interval
        yield _ring("baseline", baseline.config, baseline.samples_per_second, interval)
    interval = evidence.samples_per_second_interval
    yield _ring("recommended", recommendation.config, evidence.samples_per_second, interval)


def pareto(recommendation: Recommendation) -> Drawn:
    """Throughput against peak memory: each candidate that was measured, and the front of those not excluded.

    The front goes on down from its first and to the right of its last, so that one of a single candidate is a line too.
    """
    rows = [r for r in recommendation.candidates if r.samples_per_second is not None and r.peak_memory_bytes]
    if len(rows) < 2:
        return "No chart of throughput against memory: fewer than two candidates were measured."
    figure = Figure()
    front = _front([row for row in rows if row.status != "excluded"])
    right = 1.05 * max(row.peak_memory_bytes or 0 for row in rows) / MIB
    figure.add_trace(
        Scatter(
            x=[*((row.peak_memory_bytes or 0) / MIB for row in (*front[:1], *front)), right],
            y=[0, *(row.samples_per_second for row in (*front, *front[-1:]))],
            name="front",
            mode="lines",
            line={"color": "var(--muted)", "width": 1.5, "shape": "hv"},
            hoverinfo="skip",
        )
    )
    chosen, today = recommended_row(recommendation), baseline_row(recommendation)
    for precision in dict.fromkeys(row.precision for row in rows):
        ours, look = [row for row in rows if row.precision == precision], LOOKS[precision]
        figure.add_trace(legend_entry(precision))
        figure.add_trace(
            Scatter(
                x=[(row.peak_memory_bytes or 0) / MIB for row in ours],
                y=[row.samples_per_second for row in ours],
                name=precision,
                legendgroup=precision,
                showlegend=False,
                mode="markers+text",
                text=[_batch_label(row) if row in front and row not in (chosen, today) else "" for row in ours],
                textposition="top left",
                hovertext=[_row_hover(row, row is chosen, row is today) for row in ours],
                hoverinfo="text",
                marker={
                    "color": look.color,
                    "size": 10,
                    "symbol": [f"{look.symbol}-open" if _is_rough(row) else look.symbol for row in ours],
                },
            )
        )
    for name, row in (("baseline", None if today is chosen else today), ("recommended", chosen)):
        if row is not None and row in rows:
            figure.add_trace(
                Scatter(
                    x=[(row.peak_memory_bytes or 0) / MIB],
                    y=[row.samples_per_second],
                    name=name,
                    mode="markers+text",
                    text=[_batch_label(row)],
                    textposition="top left",
                    hoverinfo="skip",
                    marker=_AROUND[name],
                )
            )
    top = 1.12 * max(row.samples_per_second or 0 for row in rows)  # with room for the label of the highest
    xaxis = {"title_text": "peak memory in MiB", "range": [0, right], "tickformat": ",d"}
    return framed(figure, 400, xaxis=xaxis, yaxis=RATES | {"range": [0, top]})


def _rates(some: Sequence[Point]) -> dict[str, Any]:
    return {
        "x": [p.batch_size for p in some],
        "y": [p.measurement.samples_per_second for p in some],
        "hovertext": [hover_of(p) for p in some],
        "hoverinfo": "text",
    }


def _whiskers(centred: Iterable[tuple[float, tuple[float, float]]], color: str, **more: Any) -> dict[str, Any]:
    pairs = list(centred)
    return {
        "type": "data",
        "symmetric": False,
        "array": [high - center for center, (_, high) in pairs],
        "arrayminus": [center - low for center, (low, _) in pairs],
        "color": color,
        "thickness": 1.5,
        "width": 4,
    } | more


def _ring(name: str, config: AmpConfig, rate_found: float, interval: tuple[float, float] | None) -> Scatter:
    """Around a median over processes, with where a new run is expected to land; None where nobody can say."""
    about, marker = f"{name}: {config.precision} batch {config.batch_size}", _AROUND[name]
    landing, whiskers = [], None
    if interval is not None:
        landing = [f"a new run: {number(interval[0])} to {number(interval[1])}"]
        whiskers = _whiskers([(rate_found, interval)], marker["color"], width=9, thickness=2)
    return Scatter(
        x=[config.batch_size],
        y=[rate_found],
        name=name,
        mode="markers",
        hovertext=[said(about, rate(rate_found), *landing)],
        hoverinfo="text",
        error_y=whiskers,
        marker=marker,
    )


def _walls(failed: Sequence[tuple[Record, Failure]], top: float) -> Iterable[Scatter]:
    """For each precision that ran out of memory, a line at the least batch size that did."""
    walls: dict[Precision, int] = {}
    for record, failure in failed:
        if failure.kind == "oom":
            precision, batch_size = record.candidate.precision, record.candidate.batch_size
            walls[precision] = min(batch_size, walls.get(precision, batch_size))
    for precision, batch_size in walls.items():
        yield Scatter(
            x=[batch_size, batch_size],
            y=[0, top],
            name=f"{precision} {outcome_name('oom')}",
            mode="lines",
            line={"color": "var(--bad)", "dash": LOOKS[precision].dash, "width": 1.5},
            hovertext=said(f"{precision} runs out of memory at batch {batch_size}"),
            hoverinfo="text",
        )


def _front(rows: Sequence[CandidateRow]) -> list[CandidateRow]:
    """What no other beats in both, by rising memory."""
    front: list[CandidateRow] = []
    for row in sorted(rows, key=lambda r: (r.peak_memory_bytes or 0, -(r.samples_per_second or 0))):
        if not front or (row.samples_per_second or 0) > (front[-1].samples_per_second or 0):
            front.append(row)
    return front


def _is_rough(row: CandidateRow) -> bool:
    return row.status in ("cut", "excluded")


def _batch_label(row: CandidateRow) -> str:
    accumulated = "" if row.accumulation_steps == 1 else f" x {row.accumulation_steps}"
    workers = "" if row.num_workers is None else f", {count(row.num_workers, 'worker')}"
    return f"{row.batch_size}{accumulated}{workers}"


def _row_hover(row: CandidateRow, is_chosen: bool, is_today: bool) -> str:
    plan = f"{row.precision} batch {_batch_label(row)}" + " as found" * row.as_found
    plan += " with pinned modules" * bool(row.pinned_modules)
    names = ["recommended"] * is_chosen + ["baseline"] * is_today + [outcome_name(row.status)]
    return said(
        plan,
        rate(row.samples_per_second or 0),
        f"{duration(row.step_seconds or 0)} a step",
        f"{size(row.peak_memory_bytes or 0)} at the peak",
        ", ".join(names),
        one_line(row.reason or "")[:300],
    )
