"""The page of a training run, from the log that the controller wrote. Pure."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

import msgspec
from plotly.graph_objects import Figure, Scatter
from plotly.subplots import make_subplots

from autotune_amp.core.text import count, one_line
from autotune_amp.report.page import document
from autotune_amp.report.page.document import Section, chart
from autotune_amp.report.page.marks import LOOKS, framed, marks, rule, said
from autotune_amp.runtime.run_log import BeginLine, MoveLine, Run, SampleLine

if TYPE_CHECKING:
    from collections.abc import Sequence

    from autotune_amp.core.dimensions import Precision
    from autotune_amp.runtime.run_log import Line


_MAX_ROWS = 200  # of the table of moves: a run that goes on skipping for ever stops every ten updates
_PADDING = 0.04  # of the updates, at both ends: a run that stops does so at its last
_HEADROOM = 0.12  # of the powers of two shown: the marks are this far above the scale, their numbers above them
_WIDE = 20  # times its least: from there on the loss is drawn on a logarithmic axis
_SYMBOLS = {"demotion": "triangle-down", "promotion": "triangle-up", "revert": "triangle-up", "stop": "octagon"}


class Rung(NamedTuple):
    """Updates in one precision, from the first to the last."""

    precision: Precision
    first_update: int
    last_update: int


def course(run: Run) -> Figure:
    """Loss scale with the moves, steps skipped so far, and the loss where it was seen, over the updates."""
    losses = [line.loss for line in run.lines if isinstance(line, SampleLine) and line.loss is not None]
    heights = [0.5, 0.22, 0.28] if losses else [0.7, 0.3]
    figure = make_subplots(rows=len(heights), cols=1, shared_xaxes=True, vertical_spacing=0.05, row_heights=heights)
    exponents = [math.log2(line.scale) for line in run.lines if line.scale]
    low, high = (math.floor(min(exponents)), math.ceil(max(exponents))) if exponents else (0, 1)
    room = _HEADROOM * (high - low + 2)
    updates = [line.update for line in run.lines]
    bands = rungs(run)
    scale = Scatter(
        x=updates,
        y=[math.log2(line.scale) if line.scale else None for line in run.lines],
        customdata=[line.scale for line in run.lines],
        name="loss scale",
        mode="lines+markers",
        line={"color": LOOKS["fp16"].color, "width": 2, "shape": "hv"},
        marker={"size": 4},
        hovertemplate="loss scale %{customdata:,} at update %{x:,}<extra></extra>",
    )
    top = [*_names(bands, low - 0.5), scale, *_marks(run, low - 1, high + room)]
    figure.add_traces(top, rows=1, cols=1)
    skips = Scatter(
        x=updates,
        y=[line.num_skips for line in run.lines],
        name="steps skipped so far",
        mode="lines",
        line={"color": "var(--bad)", "width": 2, "shape": "hv", "dash": "dash"},
        hovertemplate="%{y:,} skipped by update %{x:,}<extra></extra>",
    )
    figure.add_trace(skips, row=2, col=1)
    framed(figure, 660 if losses else 480, shapes=[_shade(rung) for rung in bands])
    figure.update_yaxes(
        title_text="loss scale",
        range=[low - 1, high + 2 * room],
        tickprefix="2<sup>",
        ticksuffix="</sup>",
        tick0=low,
        dtick=math.ceil((high - low + 1) / 8),
        row=1,
        col=1,
    )
    figure.update_yaxes(title_text="skipped", rangemode="tozero", tickformat="~s", row=2, col=1)
    if losses:
        samples = [line for line in run.lines if isinstance(line, SampleLine)]
        loss = Scatter(
            x=[line.update for line in samples],
            y=[line.loss for line in samples],
            name="loss",
            mode="lines+markers",
            line={"color": "var(--ink)", "width": 1.5},
            marker={"size": 4},
            hovertemplate="loss %{y:.4g} at update %{x:,}<extra></extra>",
        )
        figure.add_trace(loss, row=3, col=1)
        scaling = "log" if 0 < _WIDE * min(losses) < max(losses) else "linear"
        figure.update_yaxes(title_text="loss", type=scaling, exponentformat="power", row=3, col=1)
    padding = _PADDING * max(1, updates[-1] - updates[0])
    figure.update_xaxes(range=[updates[0] - padding, max(updates[-1], updates[0] + 1) + padding])
    figure.update_xaxes(title_text="update", tickformat=",d", row=len(heights), col=1)
    return figure


def rungs(run: Run) -> list[Rung]:
    """The stretches of one precision, in order; a later one begins at the update where the one before it ends."""
    starts = [run.lines[0]]
    for before, after in pairwise(run.lines):
        if after.precision != before.precision:
            starts.append(after)
    ends = [line.update for line in starts[1:]] + [run.lines[-1].update]
    return [Rung(start.precision, start.update, end) for start, end in zip(starts, ends, strict=True)]


def _marks(run: Run, bottom: float, top: float) -> list[Scatter]:
    """Moves, numbered as in the table, and resumptions: a line across, and at its top a mark that says why."""
    traces = []
    for name, dash, color, lines in (
        ("move", "dot", "var(--accent)", run.moves),
        ("resumed", "longdash", "var(--muted)", _resumptions(run)),
    ):
        if not lines:
            continue
        across = [x for line in lines for x in (line.update, line.update, None)]
        dashed = rule(name, across, [bottom, top, None] * len(lines), None, color=color, dash=dash)
        dashed.update(legendgroup=name, showlegend=False)
        symbols = [
            _SYMBOLS.get(line.kind, "diamond") if isinstance(line, MoveLine) else "star-triangle-up" for line in lines
        ]
        numbers = [str(place) if place <= _MAX_ROWS else "" for place in range(1, len(lines) + 1)]
        mark = marks(
            name,
            [line.update for line in lines],
            [top] * len(lines),
            [_hover(line) for line in lines],
            legendgroup=name,
            mode="markers+text" if name == "move" else "markers",
            text=numbers,
            textposition="top center",
            cliponaxis=False,
            marker={"symbol": symbols, "size": 11, "color": color},
        )
        traces += [dashed, mark]
    return traces


def _hover(line: Line) -> str:
    if isinstance(line, MoveLine):
        return said(f"update {line.update:,}: {kind(line)}, {way(line)}", reason(line))
    return said(f"update {line.update:,}: resumed in {line.precision}")


def _names(found: Sequence[Rung], height: float) -> list[Scatter]:
    """The precision's symbol and name where each band begins: without colour too, and however short the band is."""
    traces = []
    for precision in dict.fromkeys(rung.precision for rung in found):
        ours = [rung for rung in found if rung.precision == precision]
        traces.append(
            marks(
                precision,
                [rung.first_update for rung in ours],
                [height] * len(ours),
                [f"{precision} from update {rung.first_update:,} to {rung.last_update:,}" for rung in ours],
                mode="markers+text",
                text=[precision] * len(ours),
                textposition="middle right",
                cliponaxis=False,
                marker={"symbol": LOOKS[precision].symbol, "size": 9, "color": LOOKS[precision].color},
            )
        )
    return traces


def _shade(rung: Rung) -> dict[str, object]:
    """The band of a rung, over the whole height."""
    return {
        "type": "rect",
        "xref": "x",
        "yref": "paper",
        "x0": rung.first_update,
        "x1": rung.last_update,
        "y0": 0,
        "y1": 1,
        "layer": "below",
        "line": {"width": 0},
        "fillcolor": LOOKS[rung.precision].color,
        "opacity": 0.13,
    }


def _resumptions(run: Run) -> list[BeginLine]:
    return [line for line in run.lines if isinstance(line, BeginLine) and line.is_resumed]


def kind(move: MoveLine) -> str:
    """What kind of move, in words."""
    return one_line(move.kind).replace("_", " ")


def way(move: MoveLine) -> str:
    """Its precisions: ``fp16 to bf16``."""
    return move.after if move.before == move.after else f"{move.before} to {move.after}"


def reason(move: MoveLine) -> str:
    """Its reason, and the modules that it pins."""
    pinned = f"; in fp32 now: {', '.join(move.pinned_modules)}" if move.kind == "pin" else ""
    return one_line(move.reason + pinned)


def run_page(run: Run, name: str) -> str:
    """The HTML document; `name` is the log's."""
    last = run.lines[-1]
    return document.page(
        f"{one_line(name)}: {_course(rungs(run))}",
        [
            Section("The run as it went", chart(course(run), _CAPTION)),
            Section("Moves", _moves(run.moves)),
            Section("The run", _about(run)),
            Section(
                "Config",
                document.code(
                    "What it was made with, as AmpConfig.from_json reads it",
                    msgspec.json.format(run.begin.config.to_json(), indent=2),
                ),
            ),
        ],
        kind="run",
        lead=_lead(run, last),
    )


_CAPTION = (
    "What was seen at every 64th update and wherever the loss scale changed. Bands are the precisions that it ran in, "
    "each with its symbol where it begins; marks are the moves, with their number in the table below where there is "
    "room. Only fp16 scales the loss."
)


def _lead(run: Run, last: Line) -> str:
    num_updates = last.num_steps + last.num_skips
    share = last.num_skips / max(1, num_updates)
    scale = "the loss is not scaled" if last.scale is None else f"loss scale {last.scale:,g}"
    moves = run.moves
    latest = f"the last: {kind(moves[-1])} at update {moves[-1].update:,}" if moves else "nothing made it move"
    tiles = document.tiles(
        [
            ("precision at the end", last.precision, scale),
            ("steps skipped", f"{100 * share:.2g} %", f"{last.num_skips:,} of {num_updates:,} updates"),
            ("moves", f"{len(moves):,}", latest),
        ]
    )
    if not (isinstance(last, MoveLine) and last.kind == "stop"):
        return tiles
    return tiles + document.paragraph(f"The run was stopped at update {last.update:,}: {reason(last)}.", "warning")


def _course(found: Sequence[Rung]) -> str:
    first, *later = found
    shown = [first.precision, *(f"{rung.precision} from update {rung.first_update:,}" for rung in later)]
    if len(shown) > 4:
        return f"{shown[0]}, then {shown[-1]} after {len(shown) - 2} more changes"
    return ", then ".join(shown)


def _moves(moves: Sequence[MoveLine]) -> str:
    if not moves:
        return document.paragraph("None: nothing made the controller move.")
    rows = [
        [str(place), f"{move.update:,}", f"{move.num_skips:,}", kind(move), way(move), reason(move)]
        for place, move in enumerate(moves, start=1)
    ]
    columns = ["move", "update", "skipped so far", "what", "precision", "reason"]
    table = document.table(columns, rows[:_MAX_ROWS], num_numeric=2)
    left_out = len(rows) - _MAX_ROWS
    return table + (document.paragraph(f"{left_out:,} more are in the log.", "absent") if left_out > 0 else "")


def _about(run: Run) -> str:
    begin, last = run.begin, run.lines[-1]
    lines = [
        ("began", one_line(begin.time)),
        ("device", one_line(begin.device)),
        ("ranks", f"{begin.num_ranks}, logged by rank {begin.rank}"),
        (
            "updates",
            f"{last.num_steps + last.num_skips:,}: {last.num_steps:,} taken, {last.num_skips:,} skipped",
        ),
    ]
    lines += [
        ("resumed", f"at update {line.update:,} in {line.precision}, {one_line(line.time)}")
        for line in _resumptions(run)
    ]
    if run.num_other_runs:
        lines.append(("not shown", f"{count(run.num_other_runs, 'other run')} in the same log"))
    if run.num_cut_lines:
        lines.append(("cut short", f"{count(run.num_cut_lines, 'line')} that a kill left half written"))
    return document.facts(lines)
