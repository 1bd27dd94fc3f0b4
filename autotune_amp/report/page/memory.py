"""The chart of memory against batch size, with the search's own fit. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from plotly.graph_objects import Figure, Scatter

from autotune_amp.core.outcome import Measurement
from autotune_amp.core.text import size
from autotune_amp.report.page.marks import LOOKS, Drawn, framed, legend_entry, said
from autotune_amp.report.page.points import (
    Point,
    crosses,
    failures,
    hover_of,
    is_look,
    points,
    symbols,
    ticks,
)
from autotune_amp.search.evidence import is_trial
from autotune_amp.search.seeding import MemoryModel, fit_memory

if TYPE_CHECKING:
    from collections.abc import Sequence

    from autotune_amp.core.config import Precision
    from autotune_amp.core.outcome import Failure, Record
    from autotune_amp.core.recommendation import Recommendation

MIB = 2**20
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
        look = LOOKS[precision]
        figure.add_trace(legend_entry(precision))
        for some, marker_size, opacity in ((looks, 9, 1.0), (again, 6, 0.6)):
            figure.add_trace(
                Scatter(
                    **_peaks(some),
                    name=precision if some is looks else f"{precision} again",
                    legendgroup=precision,
                    showlegend=False,
                    mode="markers",
                    opacity=opacity,
                    marker={"color": look.color, "size": marker_size, "symbol": symbols(look.symbol, some)},
                )
            )
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


def _peaks(some: Sequence[Point]) -> dict[str, Any]:
    return {
        "x": [p.batch_size for p in some],
        "y": [p.measurement.reserved_memory_bytes / MIB for p in some],
        "hovertext": [hover_of(p) for p in some],
        "hoverinfo": "text",
    }


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
