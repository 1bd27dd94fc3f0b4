"""HTML page of a training run, from the log of its PrecisionController. Pure.

A move is a decision of the controller: to change the precision or the loss scale, to keep modules in fp32, or to stop.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise

import msgspec
from plotly.graph_objects import Figure, Scatter
from plotly.subplots import make_subplots

from autotune_amp.core import markup
from autotune_amp.core.text import count, number, one_line, percent
from autotune_amp.report import document
from autotune_amp.report.charts import PRECISION_STYLES, apply_layout, hover_label, line_trace, marker_trace
from autotune_amp.report.document import chart
from autotune_amp.runtime.run_log import BeginLine, Line, LoggedRun, MoveLine, SampleLine
from autotune_amp.runtime.status import gpu_state

_CAPTION = (
    "Logged at every 64th update and at each change of the loss scale. Marks below the scale show where each precision "
    "began, marks above it the controller's decisions (moves), numbered as in the table. Only fp16 scales the loss."
)

_MAX_TICKS = 8  # at most on the axis of loss scales, each at a whole power of two


def run_page(run: LoggedRun, name: str, reload_seconds: int | None = None) -> str:
    """Return the HTML document of a run. `name` is the name of its log's file, for the title.

    A browser reloads the page every `reload_seconds`; None for never.
    """
    details: Mapping[str, str] = {}
    if isinstance(begin := run.lines[0], BeginLine):
        config = msgspec.json.format(begin.config.to_json(), indent=2)
        details = {"Config": document.code("The controller's config, for AmpConfig.from_json", config)}
    return document.page(
        f"{one_line(name)}: {_title(precision_starts(run))}",
        {
            "The run over time": chart(run_figure(run), _CAPTION),
            "Moves": _moves_table(run.moves),
            "The run": _run_facts(run),
        },
        details,
        kind="run",
        lead=_summary(run),
        reload_seconds=reload_seconds,
    )


def run_figure(run: LoggedRun) -> Figure:
    """Return a figure over the updates: the loss scale with the moves, the skipped steps, the loss, the temperature.

    An update is an attempted optimizer step. The rows for the loss and the GPU's temperature are left out if none was
    logged.
    """
    samples = [line for line in run.lines if isinstance(line, SampleLine)]
    has_losses = any(line.loss is not None for line in samples)
    has_temperatures = any(line.temperature_celsius is not None for line in samples)
    # In pixels, of the plot without its margins.
    heights = [300, 130, *[170] * has_losses, *[130] * has_temperatures]
    figure = make_subplots(rows=len(heights), cols=1, shared_xaxes=True, vertical_spacing=0.05, row_heights=heights)
    updates = [line.update for line in run.lines]
    scales = [math.log2(line.scale) if line.scale else None for line in run.lines]
    logged_scales = [scale for scale in scales if scale is not None] or [0.0]
    low, high = math.floor(min(logged_scales)) - 1, math.ceil(max(logged_scales)) + 1  # of the axis, in log2
    scale_points = _step_points(updates, scales)
    scale = _run_trace("loss scale", *scale_points, "loss scale 2<sup>%{y}</sup>", "var(--fp16)", "hv")
    figure.add_traces([*_precision_marks(run, low), scale, *_move_traces(run.moves, low, high)], rows=1, cols=1)
    num_skips = [line.num_skips for line in run.lines]
    skips = _run_trace("steps skipped so far", updates, num_skips, "%{y:,} skipped", "var(--bad)", "hv")
    figure.add_trace(skips, row=2, col=1)
    apply_layout(figure, 60 + sum(heights))
    powers = {"tickprefix": "2<sup>", "ticksuffix": "</sup>", "tick0": 0, "dtick": math.ceil((high - low) / _MAX_TICKS)}
    figure.update_yaxes(title_text="loss scale", **powers, row=1, col=1)
    figure.update_yaxes(title_text="skipped", rangemode="tozero", tickformat="~s", row=2, col=1)
    if has_losses:
        loss_points = [line.update for line in samples], [line.loss for line in samples]
        figure.add_trace(_run_trace("loss", *loss_points, "loss %{y:.4g}", "var(--ink)", "linear"), row=3, col=1)
        figure.update_yaxes(title_text="loss", exponentformat="power", row=3, col=1)
    if has_temperatures:
        figure.add_traces(_temperature_traces(samples), rows=len(heights), cols=1)
        figure.update_yaxes(title_text="GPU, \u00b0C", row=len(heights), col=1)
    figure.update_xaxes(title_text="update", tickformat=",d", row=len(heights), col=1)
    return figure


def _temperature_traces(samples: Sequence[SampleLine]) -> list[Scatter]:
    """Return the line through the GPU's temperatures, with a mark for each sample in which the GPU was throttled."""
    degrees = [line.temperature_celsius for line in samples]
    hover = "%{y} degrees C"
    temperature = _run_trace("GPU temperature", [line.update for line in samples], degrees, hover, "var(--warn)", "hv")
    throttled = [line for line in samples if line.throttling and line.temperature_celsius is not None]
    if not throttled:
        return [temperature]
    marks = marker_trace(
        "throttled",
        [line.update for line in throttled],
        [line.temperature_celsius for line in throttled],
        [f"throttled at update {line.update:,}: {gpu_state(line)}" for line in throttled],
        marker={"symbol": "x", "size": 8, "color": "var(--bad)"},
    )
    return [temperature, marks]


def _step_points(x: Sequence[int], y: Sequence[float | None]) -> tuple[list[int], list[float | None]]:
    """Return x and y of a stepped line that extends each value to the next point, even if that has no value."""
    ends = [
        (after, value)
        for (value, next_value), after in zip(pairwise(y), x[1:], strict=True)
        if value is not None and next_value is None
    ]
    # At the same x, the end of a value comes before the point without a value.
    points = sorted(
        [*((at, 1, value) for at, value in zip(x, y, strict=True)), *((at, 0, v) for at, v in ends)],
        key=lambda point: point[:2],
    )
    return [at for at, _, _ in points], [value for _, _, value in points]


def _run_trace(name: str, x: Sequence[int], y: Sequence[float | None], hover: str, color: str, shape: str) -> Scatter:
    """Return the line through the values `y` at the updates `x`; `hover` is the plotly template of a value."""
    return Scatter(
        name=name,
        x=x,
        y=y,
        mode="lines+markers",
        line={"color": color, "width": 2, "shape": shape},
        marker={"size": 4},
        hovertemplate=f"{hover} at update %{{x:,}}<extra></extra>",
    )


def precision_starts(run: LoggedRun) -> list[Line]:
    """Return the first line of the run and every line at which the precision changes, in order."""
    return [run.lines[0], *(after for before, after in pairwise(run.lines) if after.precision != before.precision)]


def _precision_marks(run: LoggedRun, height: float) -> list[Scatter]:
    """Return a symbol with the precision's name for each update from which the run uses another precision.

    It is drawn at `height`, in log2 of the loss scale.
    """
    return [
        marker_trace(
            start.precision,
            [start.update],
            [height],
            [f"{start.precision} from update {start.update:,}"],
            showlegend=False,
            mode="markers+text",
            text=[start.precision],
            textposition="middle right",
            cliponaxis=False,
            marker={
                "symbol": PRECISION_STYLES[start.precision].symbol,
                "size": 9,
                "color": PRECISION_STYLES[start.precision].color,
            },
        )
        for start in precision_starts(run)
    ]


def _move_traces(moves: Sequence[MoveLine], bottom: float, top: float) -> list[Scatter]:
    """Return a vertical line for each move, and on top of it its number in the table, with the reason on hover.

    The lines run from `bottom` to `top`, in log2 of the loss scale.
    """
    line_updates = [x for move in moves for x in (move.update, move.update, None)]  # None ends each move's line
    lines = line_trace("move", line_updates, [bottom, top, None] * len(moves), None, color="var(--accent)", dash="dot")
    marks = marker_trace(
        "move",
        [move.update for move in moves],
        [top] * len(moves),
        [
            hover_label(f"update {move.update:,}: {_kind(move)}, {_precision_change(move)}", _reason(move))
            for move in moves
        ],
        legendgroup="move",
        mode="markers+text",
        text=[str(number) for number in range(1, len(moves) + 1)],
        textposition="top center",
        cliponaxis=False,
        marker={"symbol": "diamond", "size": 11, "color": "var(--accent)"},
    )
    return [lines.update(legendgroup="move", showlegend=False), marks]


def _kind(move: MoveLine) -> str:
    return one_line(move.kind).replace("_", " ")


def _precision_change(move: MoveLine) -> str:
    """Return the precisions before and after a move, as ``fp16 to bf16``, or the one if it did not change."""
    return move.after if move.before == move.after else f"{move.before} to {move.after}"


def _reason(move: MoveLine) -> str:
    """Return the reason of a move; for a pin also the modules that run in fp32 from then on."""
    pinned = f"; in fp32 now: {', '.join(move.pinned_modules)}" if move.kind == "pin" else ""
    return one_line(move.reason + pinned)


def _summary(run: LoggedRun) -> str:
    """Return the HTML of the key numbers at the end of the log, with a warning if the controller stopped the run."""
    last, moves = run.lines[-1], run.moves
    num_updates = last.num_steps + last.num_skips
    share = last.num_skips / max(1, num_updates)
    causes = f"{count(last.num_overflows, 'overflow')}, {count(last.num_bad_batches, 'bad batch', 'bad batches')}"
    scale = "the loss is not scaled" if last.scale is None else f"loss scale {last.scale:,g}"
    latest = (
        f"the last: {_kind(moves[-1])} at update {moves[-1].update:,}" if moves else "the controller changed nothing"
    )
    tiles = markup.tiles(
        [
            ("precision at the end", last.precision, scale),
            ("steps skipped", percent(share), f"{causes} in {num_updates:,} updates"),
            ("moves", f"{len(moves):,}", latest),
            *_speed_tiles(last),
            *_gpu_tiles(run.lines),
        ]
    )
    if not (isinstance(last, MoveLine) and last.kind == "stop"):
        return tiles
    return tiles + markup.paragraph(f"The run was stopped at update {last.update:,}: {_reason(last)}.", "warning")


def _speed_tiles(last: Line) -> list[tuple[str, str, str]]:
    """Return the tile for tokens per second and utilization at the end of the log; none if neither is known."""
    mfu = "" if last.mfu is None else f"{percent(last.mfu)} of the machine's own rate (MFU)"
    if last.tokens_per_second is not None:
        return [("tokens/s at the end", number(last.tokens_per_second), mfu or "without padding")]
    return [("MFU at the end", percent(last.mfu), "of the machine's own rate")] if last.mfu is not None else []


def _gpu_tiles(lines: Sequence[Line]) -> list[tuple[str, str, str]]:
    """Return the tile for the GPU's state at the end of the log; none if it is not known."""
    last = lines[-1]
    known = [line.throttling for line in lines if line.throttling is not None]
    share = f"throttled in {percent(sum(map(bool, known)) / len(known))} of the samples" if any(known) else ""
    state, _, more = gpu_state(last).partition(", ")
    return [("GPU at the end", state, ", ".join(filter(None, (more, share))))] if state else []


def _title(starts: Sequence[Line]) -> str:
    """Return the precisions of a run in order, given the line at which each starts (see `precision_starts`)."""
    first, *later = starts
    if len(later) > 3:
        return f"{first.precision}, and {len(later)} changes of precision"
    return ", then ".join([first.precision, *(f"{line.precision} from update {line.update:,}" for line in later)])


def _moves_table(moves: Sequence[MoveLine]) -> str:
    if not moves:
        return markup.paragraph("None: the controller changed nothing.")
    rows = [
        [str(number), f"{move.update:,}", f"{move.num_skips:,}", _kind(move), _precision_change(move), _reason(move)]
        for number, move in enumerate(moves, start=1)
    ]
    columns = ["move", "update", "skipped so far", "kind", "precision", "reason"]
    return markup.table(columns, rows, num_numeric=2)


def _run_facts(run: LoggedRun) -> str:
    begin, last = run.lines[0], run.lines[-1]
    lines = []
    if isinstance(begin, BeginLine):
        lines += [
            ("began", one_line(begin.time)),
            ("device", one_line(begin.device)),
            ("ranks", f"{begin.num_ranks}, logged by rank {begin.rank}"),
        ]
    updates = f"{last.num_steps + last.num_skips:,}: {last.num_steps:,} taken, {last.num_skips:,} skipped"
    lines.append(("updates", updates))
    if last.num_scaler_updates:
        lines.append(("loss scale", f"{count(last.num_growths, 'growth')}, {count(last.num_backoffs, 'backoff')}"))
    lines += [
        ("resumed", f"at update {line.update:,} in {line.precision}, {one_line(line.time)}")
        for line in run.lines
        if isinstance(line, BeginLine) and line.is_resumed
    ]
    if run.num_other_runs:
        lines.append(("not shown", f"{count(run.num_other_runs, 'other run')} in the same log"))
    if run.num_cut_lines:
        lines.append(("cut short", f"{count(run.num_cut_lines, 'line')} that a killed process left incomplete"))
    return markup.definition_list(lines)
