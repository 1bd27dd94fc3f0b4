"""A profile on a terminal: what each precision is worth, where a step's time goes, what to try."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich import box
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from autotune_amp.core.text import duration
from autotune_amp.profile.results import PART_NAMES, facts, heading, row_cells
from autotune_amp.report.terminal import grid

if TYPE_CHECKING:
    from rich.console import Console

    from autotune_amp.profile.results import AmpProfile, Part

_LEAST_SHARE = 0.0005  # of a step; less is not worth a number
_AT_RATE = "matrix products at the machine's rate"
_STYLES = {"excellent": "bold green", "significant": "green", "slower": "yellow"}


def print_profile(profile: AmpProfile, console: Console) -> None:
    """The precisions, where a step's time goes in fp32 and in the best of the others, and what to try."""
    console.print(Text(heading(profile)))
    console.print(_rows(profile))
    if any(row.gap is not None for row in profile.rows):
        console.print(_parts(profile))
    title = Text("Does mixed precision pay here?", "bold")
    console.print(Panel(grid(facts(profile)), title=title, title_align="left", border_style="green"))


def _rows(profile: AmpProfile) -> Table:
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column("precision", no_wrap=True)
    for name in ("step", "speed-up", "memory"):  # where it is narrow the speed-up and the verdict share what there is
        table.add_column(name, justify="right", no_wrap=name != "speed-up")
    table.add_column("verdict", overflow="fold")
    for row in profile.rows:
        step, speedup, memory, verdict = row_cells(row)
        style = "dim" if row.step_seconds is None else _STYLES.get(row.verdict or "", "")
        table.add_row(row.precision, step or "-", speedup or "-", memory or "-", Text(verdict), style=style)
    return table


def _parts(profile: AmpProfile) -> Table:
    shown = {
        row.precision: row.gap
        for row in profile.rows
        if row.gap is not None and row.precision in ("fp32", profile.best_precision)
    }
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column("where a step's time goes")
    for precision in shown:
        table.add_column(precision, justify="right", no_wrap=True)
        table.add_column("", justify="right", no_wrap=True)
    for name, words in PART_NAMES.items():
        found = [next((part for part in gap.parts if part.name == name), None) for gap in shown.values()]
        if any(found):
            has_rate = name == "matrix_products" and any(gap.share("slow_matrix_products") for gap in shown.values())
            cells = [cell for part in found for cell in _part_cells(part)]
            table.add_row(_AT_RATE if has_rate else words, *cells)
    return table


def _part_cells(part: Part | None) -> tuple[str, str]:
    if part is None or part.share < _LEAST_SHARE:
        return "-", ""
    return duration(part.seconds), f"{100 * part.share:.0f} %"
