"""Charts of throughput and memory: against batch size, and against each other. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from plotly.graph_objects import Figure, Scatter

from autotune_amp.core.outcome import Measurement
from autotune_amp.core.text import count, duration, number, one_line, outcome_name, rate, size
from autotune_amp.report.page.marks import (
    LOOKS,
    Drawn,
    Point,
    crosses,
    failures,
    framed,
    hover_of,
    is_look,
    legend_entry,
    points,
    said,
    symbols,
    ticks,
)
from autotune_amp.report.rows import baseline_row, recommended_row
from autotune_amp.search.check_results import is_trial
from autotune_amp.search.stages.seeding import MemoryModel, fit_memory

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from autotune_amp.core.config import AmpConfig
    from autotune_amp.core.outcome import Failure, Record
    from autotune_amp.core.recommendation import CandidateRow, Recommendation
    from autotune_amp.core.setting import Precision


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
        whiskers = _whiskers([(p.measurement.samples_per_second, p.rate_interval) for p in looks], look.color)
        line = {"color": look.color, "dash": look.dash, "width": 2}
        for trace in _measured(precision, looks, again, lambda found: found.samples_per_second):
            figure.add_trace(trace)
        figure.data[-2].update(error_y=whiskers, mode="lines+markers", line=line)
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


def _measured(
    precision: Precision, looks: Sequence[Point], again: Sequence[Point], height: Callable[[Measurement], float]
) -> Iterable[Scatter]:
    """The marks of a precision: large ones for the first look at each batch size, small ones for what came again."""
    look = LOOKS[precision]
    for some, name, width, opacity in ((looks, precision, 9, 1.0), (again, f"{precision} again", 6, 0.6)):
        yield Scatter(
            x=[p.batch_size for p in some],
            y=[height(p.measurement) for p in some],
            hovertext=[hover_of(p) for p in some],
            hoverinfo="text",
            name=name,
            legendgroup=precision,
            showlegend=False,
            mode="markers",
            opacity=opacity,
            marker={"color": look.color, "size": width, "symbol": symbols(look.symbol, some)},
        )


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


# A limit further above everything measured would press that flat: then it is said instead of drawn.
MAX_LIMIT_RATIO = 2.5
_HEADROOM = 1.12  # above the limit, for the labels of what met it


def memory(recommendation: Recommendation | None, records: Sequence[Record]) -> Drawn:
    """MiB that count against the limit against batch size, with M(b) = max(m0, m1 + m2·b) as the search fitted it.

    What ran out of memory stands on the limit where that is drawn, on the axis where it is not. A fit may leave the
    chart above the limit.
    """
    measured, failed = points(records), _out_of_memory(records)
    if not measured:
        return "No chart of memory: outcomes.jsonl holds no measurement of this search."
    figure, fits = Figure(), fitted(records)
    for precision, looks, again in measured:
        figure.add_trace(legend_entry(precision))
        for trace in _measured(precision, looks, again, lambda found: found.reserved_memory_bytes / MIB):
            figure.add_trace(trace)
        if precision in fits:
            figure.add_trace(_fit(precision, fits[precision], _tried(precision, records)))
    axis: dict[str, Any] = {"title_text": "memory in MiB", "rangemode": "tozero", "tickformat": ",d"}
    limit = drawn_limit(recommendation, records)
    if limit is not None:
        figure.add_trace(_limit(limit, [r.candidate.batch_size for r in records if is_trial(r)]))
        axis["range"] = [0, _HEADROOM * max(limit, _highest(records)) / MIB]
    if failed:
        figure.add_trace(crosses(failed, (limit or 0) / MIB, "out of memory", f"drawn {_place(limit)}"))
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


def drawn_limit(recommendation: Recommendation | None, records: Sequence[Record]) -> int | None:
    """The limit where the chart holds it: something met it, or it is not far above what was measured and fitted."""
    limit = limit_bytes(recommendation)
    fits = fitted(records).items()
    reached = [model.bytes_at(max(_tried(precision, records))) for precision, model in fits]
    if limit is None or _out_of_memory(records) or limit <= MAX_LIMIT_RATIO * max([_highest(records), *reached]):
        return limit
    return None


def caption(recommendation: Recommendation | None, records: Sequence[Record]) -> str:
    """What the marks and the curves are, and where the limit is."""
    parts = [_COUNTED, _FITTED if fitted(records) else "", walls(recommendation, records)]
    if _out_of_memory(records):
        place = _place(drawn_limit(recommendation, records))
        parts.append(
            f"Crosses ran out of memory; they are drawn {place}, since nobody knows what they would have taken."
        )
    return " ".join(filter(None, parts))


_COUNTED = (
    "What counts against the limit: on an accelerator what a trial reserves, on a CPU what it takes beyond the process "
    "that it starts in."
)
_FITTED = "The curves are the fit max(m0, m1 + m2 x batch) that the search steers by."


def walls(recommendation: Recommendation | None, records: Sequence[Record]) -> str:
    """The limit, and the batch size at which the fit of each precision meets it, in a sentence."""
    limit = limit_bytes(recommendation)
    if limit is None:
        return ""
    reached = [
        f"{precision} at about batch {float(f'{(limit - model.m1) / model.m2:.2g}'):,.0f}"
        for precision, model in fitted(records).items()
        if model.m2 > 0 and model.m1 < limit
    ]
    by_fit = f", which by these fits is reached by {', '.join(reached)}" if reached else ""
    return f"A trial may take {size(limit)}{by_fit}."


def _fit(precision: Precision, model: MemoryModel, batch_sizes: Sequence[int]) -> Scatter:
    """As a curve: on an axis of ratios a straight line is none."""
    low, high = min(batch_sizes), max(batch_sizes)
    sizes = [low * (high / low) ** (step / 40) for step in range(41)]
    look = LOOKS[precision]
    base = f"{size(model.m1)} + " if model.m1 >= 0 else f"-{size(-model.m1)} + "
    formula = f"max({size(model.m0)}, {base}{size(model.m2)} x batch)"
    return Scatter(
        x=sizes,
        y=[model.bytes_at(b) / MIB for b in sizes],
        name=f"{precision} fit",
        legendgroup=precision,
        mode="lines",
        line={"color": look.color, "dash": look.dash, "width": 1.5},
        hovertext=said(f"{precision}: {formula}"),
        hoverinfo="text",
    )


def _limit(limit: int, batch_sizes: Sequence[int]) -> Scatter:
    return Scatter(
        x=[min(batch_sizes), max(batch_sizes)],
        y=[limit / MIB, limit / MIB],
        name="limit",
        mode="lines",
        line={"color": "var(--bad)", "width": 1.5, "dash": "dashdot"},
        hovertext=said(f"A trial may take {size(limit)}"),
        hoverinfo="text",
    )


def _place(limit: int | None) -> str:
    return "on the axis" if limit is None else "on the limit"


def _out_of_memory(records: Sequence[Record]) -> list[tuple[Record, Failure]]:
    return [(record, failure) for record, failure in failures(records) if failure.kind == "oom"]


def _highest(records: Sequence[Record]) -> int:
    """The most that a trial took, 0 where none was measured."""
    found = (r.outcome.reserved_memory_bytes for r in records if isinstance(r.outcome, Measurement))
    return max(found, default=0)


def _tried(precision: Precision, records: Sequence[Record]) -> list[int]:
    """The batch sizes over which its fit is drawn."""
    return [r.candidate.batch_size for r in records if r.candidate.precision == precision and is_look(r)]
