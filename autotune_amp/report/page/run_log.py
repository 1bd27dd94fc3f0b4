"""The page of a training run, from the log that the controller wrote."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from autotune_amp.core.text import count, one_line
from autotune_amp.report.page import shell
from autotune_amp.report.page.run_course import Rung, course, kind, reason, rungs, way
from autotune_amp.report.page.shell import Section, chart
from autotune_amp.report.write import write_page
from autotune_amp.runtime.run_log import BeginLine, MoveLine, Run, read

if TYPE_CHECKING:
    from collections.abc import Sequence

    from autotune_amp.runtime.run_log import Line

_MAX_ROWS = 200  # of the table of moves: a run that goes on skipping for ever stops every ten updates


def write_run_report(path: Path, out: Path | None = None) -> Path:
    """Draw the last run in the log at `path` as the file `out`, or beside it with a name that ends in .html.

    Returns the page's path. Raises `FormatError` for what is no run log, damaged or of a newer format, `StudyError`
    where the page cannot be written.
    """
    page = out or path.with_suffix(".html")
    write_page(page, run_page(read(path), path.name), "run")
    return page


def run_page(run: Run, name: str) -> str:
    """The HTML document; `name` is the log's."""
    last = run.lines[-1]
    return shell.page(
        f"{one_line(name)}: {_course(rungs(run))}",
        [
            Section("The run as it went", chart(course(run), _CAPTION)),
            Section("Moves", _moves(run.moves)),
            Section("The run", _about(run)),
            Section(
                "Config",
                shell.code(
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
    share = last.num_skips / max(1, last.update)
    scale = "the loss is not scaled" if last.scale is None else f"loss scale {last.scale:,g}"
    moves = run.moves
    latest = f"the last: {kind(moves[-1])} at update {moves[-1].update:,}" if moves else "nothing made it move"
    tiles = shell.tiles(
        [
            ("precision at the end", last.precision, scale),
            ("steps skipped", f"{100 * share:.2g} %", f"{last.num_skips:,} of {_updates(last.update)}"),
            ("moves", f"{len(moves):,}", latest),
        ]
    )
    if not (isinstance(last, MoveLine) and last.kind == "stop"):
        return tiles
    return tiles + shell.paragraph(f"The run was stopped at update {last.update:,}: {reason(last)}.", "warning")


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
        return shell.paragraph("None: nothing made the controller move.")
    rows = [
        [str(place), f"{move.update:,}", f"{move.num_skips:,}", kind(move), way(move), reason(move)]
        for place, move in enumerate(moves, start=1)
    ]
    columns = ["move", "update", "skipped so far", "what", "precision", "reason"]
    table = shell.table(columns, rows[:_MAX_ROWS], num_numeric=2)
    left_out = len(rows) - _MAX_ROWS
    return table + (shell.paragraph(f"{left_out:,} more are in the log.", "absent") if left_out > 0 else "")


def _about(run: Run) -> str:
    begin, last = run.begin, run.lines[-1]
    resumed = [line for line in run.lines if isinstance(line, BeginLine) and line.is_resumed]
    lines = [
        ("began", one_line(begin.time)),
        ("device", one_line(begin.device)),
        ("ranks", f"{begin.num_ranks}, logged by rank {begin.rank}"),
        ("steps", f"{last.num_steps:,} taken in {_updates(last.update)}, {last.num_skips:,} skipped"),
    ]
    lines += [("resumed", f"at update {line.update:,} in {line.precision}, {one_line(line.time)}") for line in resumed]
    if run.num_other_runs:
        lines.append(("not shown", f"{count(run.num_other_runs, 'other run')} in the same log"))
    if run.num_cut_lines:
        lines.append(("cut short", f"{count(run.num_cut_lines, 'line')} that a kill left half written"))
    return shell.facts(lines)
