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
from autotune_amp.report.page.marks import LOOKS, framed, said
from autotune_amp.runtime.run_log import BeginLine, MoveLine, Run, SampleLine

if TYPE_CHECKING:
    from collections.abc import Sequence

    from autotune_amp.core.setting import Precision
    from autotune_amp.runtime.run_log import Line, Run


_MAX_NUMBERED = 24  # more moves are in the table without a number here
_PADDING = 0.04  # of the updates, at both ends: a run that stops does so at its last
# Of the updates, that a label takes on a phone, where the chart is 220 pixels wide: of each letter, and beside them.
_LETTER, _GAP = 0.032, 0.05
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
    top = high + room
    updates = [line.update for line in run.lines]
    bands = rungs(run)
    for trace in (*_rows(bands, low - 0.5), _scale(run.lines), *_marks(run, low - 1, top)):
        figure.add_trace(trace, row=1, col=1)
    figure.add_trace(
        Scatter(
            x=updates,
            y=[line.num_skips for line in run.lines],
            name="steps skipped so far",
            mode="lines",
            line={"color": "var(--bad)", "width": 2, "shape": "hv", "dash": "dash"},
            hovertemplate="%{y:,} skipped by update %{x:,}<extra></extra>",
        ),
        row=2,
        col=1,
    )
    if losses:
        figure.add_trace(_loss(run.lines), row=3, col=1)
    framed(figure, 660 if losses else 480, shapes=_shading(bands), annotations=_names(bands, low - 0.5))
    step = math.ceil((high - low + 1) / 8)
    figure.update_yaxes(
        title_text="loss scale",
        range=[low - 1, top + room],
        tickprefix="2<sup>",
        ticksuffix="</sup>",
        tick0=low,
        dtick=step,
        row=1,
        col=1,
    )
    figure.update_yaxes(title_text="skipped", rangemode="tozero", tickformat="~s", row=2, col=1)
    padding = _PADDING * _length(run)
    figure.update_xaxes(range=[updates[0] - padding, updates[0] + _length(run) + padding])
    figure.update_xaxes(title_text="update", tickformat=",d", row=len(heights), col=1)
    if losses:
        is_wide = 0 < _WIDE * min(losses) < max(losses)
        figure.update_yaxes(
            title_text="loss", type="log" if is_wide else "linear", exponentformat="power", row=3, col=1
        )
    return figure


def rungs(run: Run) -> list[Rung]:
    """The stretches of one precision, in order; a later one begins at the update where the one before it ends."""
    starts = [run.lines[0]]
    for before, after in pairwise(run.lines):
        if after.precision != before.precision:
            starts.append(after)
    ends = [line.update for line in starts[1:]] + [run.lines[-1].update]
    return [Rung(start.precision, start.update, end) for start, end in zip(starts, ends, strict=True)]


def numbers(updates: Sequence[int], length: int) -> list[str]:
    """The label of each move: its number, or on the first of those too near for one each, "1-4", and "" on the rest.

    `length` is that of the run in updates.
    """
    groups: list[list[int]] = []
    for place, update in enumerate(updates):
        letters = max(len(_span(groups[-1])), len(str(place + 1))) if groups else 0
        if groups and update - updates[groups[-1][0]] < length * (_GAP + _LETTER * letters):
            groups[-1].append(place)
        else:
            groups.append([place])
    return [_span(group) if place == group[0] else "" for group in groups for place in group]


def _span(places: Sequence[int]) -> str:
    first, last = places[0] + 1, places[-1] + 1
    return str(first) if first == last else f"{first}-{last}"


def _length(run: Run) -> int:
    """Of the run in updates; 1 where it has only begun."""
    return max(1, run.lines[-1].update - run.lines[0].update)


def _scale(lines: Sequence[Line]) -> Scatter:
    return Scatter(
        x=[line.update for line in lines],
        y=[math.log2(line.scale) if line.scale else None for line in lines],
        customdata=[line.scale for line in lines],
        name="loss scale",
        mode="lines+markers",
        line={"color": LOOKS["fp16"].color, "width": 2, "shape": "hv"},
        marker={"size": 4},
        hovertemplate="loss scale %{customdata:,} at update %{x:,}<extra></extra>",
    )


def _loss(lines: Sequence[Line]) -> Scatter:
    samples = [line for line in lines if isinstance(line, SampleLine)]
    return Scatter(
        x=[line.update for line in samples],
        y=[line.loss for line in samples],
        name="loss",
        mode="lines+markers",
        line={"color": "var(--ink)", "width": 1.5},
        marker={"size": 4},
        hovertemplate="loss %{y:.4g} at update %{x:,}<extra></extra>",
    )


def _marks(run: Run, bottom: float, top: float) -> list[Scatter]:
    """Moves and resumptions: a line across, and at its top a mark that says why."""
    resumed = [line for line in run.lines if isinstance(line, BeginLine) and line.is_resumed]
    kinds: list[tuple[str, str, Sequence[Line]]] = [("move", "dot", run.moves), ("resumed", "longdash", resumed)]
    traces = []
    for name, dash, lines in kinds:
        if not lines:
            continue
        are_moves = name == "move"
        is_numbered = are_moves and len(lines) <= _MAX_NUMBERED
        color = "var(--accent)" if are_moves else "var(--muted)"
        traces.append(
            Scatter(
                x=[x for line in lines for x in (line.update, line.update, None)],
                y=[y for _ in lines for y in (bottom, top, None)],
                legendgroup=name,
                showlegend=False,
                mode="lines",
                line={"color": color, "width": 1.5, "dash": dash},
                hoverinfo="skip",
            )
        )
        traces.append(
            Scatter(
                x=[line.update for line in lines],
                y=[top] * len(lines),
                name=name,
                legendgroup=name,
                mode="markers+text" if is_numbered else "markers",
                text=numbers([line.update for line in lines], _length(run)) if is_numbered else None,
                textposition="top center",
                cliponaxis=False,
                marker={
                    "symbol": [
                        _SYMBOLS.get(line.kind, "diamond") if isinstance(line, MoveLine) else "star-triangle-up"
                        for line in lines
                    ],
                    "size": 11,
                    "color": color,
                },
                hovertext=[_hover(line) for line in lines],
                hoverinfo="text",
            )
        )
    return traces


def _hover(line: Line) -> str:
    if isinstance(line, MoveLine):
        return said(f"update {line.update:,}: {kind(line)}, {way(line)}", reason(line))
    return said(f"update {line.update:,}: resumed in {line.precision}")


def _rows(found: Sequence[Rung], height: float) -> list[Scatter]:
    """The precision's symbol where each band begins: without colour too, and however short the band is."""
    traces = []
    for precision in dict.fromkeys(rung.precision for rung in found):
        ours = [rung for rung in found if rung.precision == precision]
        traces.append(
            Scatter(
                x=[rung.first_update for rung in ours],
                y=[height] * len(ours),
                name=precision,
                mode="markers",
                cliponaxis=False,
                marker={"symbol": LOOKS[precision].symbol, "size": 9, "color": LOOKS[precision].color},
                hovertext=[
                    said(f"{precision} from update {rung.first_update:,} to {rung.last_update:,}") for rung in ours
                ],
                hoverinfo="text",
            )
        )
    return traces


def _shading(found: Sequence[Rung]) -> list[dict[str, object]]:
    """A band over the whole height for each rung."""
    return [
        {
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
        for rung in found
    ]


def _names(found: Sequence[Rung], bottom: float) -> list[dict[str, object]]:
    """The precision of each band that has room for it, beside its symbol below the lowest loss scale."""
    length = max(1, found[-1].last_update - found[0].first_update)
    return [
        {
            "text": rung.precision,
            "x": rung.first_update,
            "y": bottom,
            "xanchor": "left",
            "xshift": 8,
            "yanchor": "middle",
            "showarrow": False,
        }
        for rung in found
        if rung.last_update - rung.first_update > 0.18 * length
    ]


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


_MAX_ROWS = 200  # of the table of moves: a run that goes on skipping for ever stops every ten updates


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
    "each with its symbol where it begins; numbered marks are the moves in the table below, those close together under "
    "one label. Only fp16 scales the loss."
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
            ("steps skipped", f"{100 * share:.2g} %", f"{last.num_skips:,} of {_updates(num_updates)}"),
            ("moves", f"{len(moves):,}", latest),
        ]
    )
    if not (isinstance(last, MoveLine) and last.kind == "stop"):
        return tiles
    return tiles + document.paragraph(f"The run was stopped at update {last.update:,}: {reason(last)}.", "warning")


def _updates(num_updates: int) -> str:
    return f"{num_updates:,} update{'' if num_updates == 1 else 's'}"


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
    resumed = [line for line in run.lines if isinstance(line, BeginLine) and line.is_resumed]
    lines = [
        ("began", one_line(begin.time)),
        ("device", one_line(begin.device)),
        ("ranks", f"{begin.num_ranks}, logged by rank {begin.rank}"),
        (
            "updates",
            f"{_updates(last.num_steps + last.num_skips)}: {last.num_steps:,} taken, {last.num_skips:,} skipped",
        ),
    ]
    lines += [("resumed", f"at update {line.update:,} in {line.precision}, {one_line(line.time)}") for line in resumed]
    if run.num_other_runs:
        lines.append(("not shown", f"{count(run.num_other_runs, 'other run')} in the same log"))
    if run.num_cut_lines:
        lines.append(("cut short", f"{count(run.num_cut_lines, 'line')} that a kill left half written"))
    return document.facts(lines)
