"""Terminal output of a finished search and of a hardware probe."""

from __future__ import annotations

from itertools import groupby
from typing import TYPE_CHECKING

from rich import box
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from autotune_amp.core.text import count, duration, one_line
from autotune_amp.report import rows

if TYPE_CHECKING:
    from rich.console import Console

    from autotune_amp.core.hardware import Hardware
    from autotune_amp.core.recommendation import CandidateRow, Recommendation


def print_recommendation(recommendation: Recommendation, console: Console, path: str | None = None) -> None:
    """Print the answer with the lines to copy, the warnings, the candidates that ran, and the evidence.

    `path` is that of its recommendation.json, or None for the default.
    """
    search, hardware = recommendation.search, recommendation.hardware
    border_style = "blue" if recommendation.is_kept else "green" if recommendation.is_sure else "yellow"
    print_panel(recommendation.title(), recommendation.answer(), console, border_style)
    # Below the panel and never wrapped, so that they can be copied.
    for title, lines in rows.short_usage_lines(recommendation, path):
        _print_lines(f"{title}:", lines, console)
    if recommendation.warnings:
        console.print()
        console.print(label_table([("warning", one_line(warning)) for warning in recommendation.warnings]))
    console.print(_candidates(recommendation))
    if recommendation.evidence.search_samples_per_second is not None:
        console.print(
            Text("The machine's speed changed: compare confirmed rows only with each other, and so the others.")
        )
    tried_variants = [cells for row, cells in rows.variants(recommendation) if not rows.is_untried(row)]
    if tried_variants:
        first, *numbers, last = rows.VARIANT_COLUMNS
        table = new_table(first, *numbers, last=last)
        for cells in tried_variants:
            table.add_row(*map(Text, cells))
        console.print(table)
    facts = [*recommendation.further_facts(), *(("files", one_line(text)) for text in search.files)]
    if untried := rows.untried_line(recommendation):
        facts.append(("not tried", untried))
    device = f"{hardware.device} ({one_line(hardware.identity.name)})"
    trials = (
        f"{count(search.num_trials, 'trial')}, {search.num_failures} failed, {duration(search.seconds)} on {device}"
    )
    facts.append(("search", f"{one_line(search.study)}: {trials}"))
    notes = f"{count(len(recommendation.notes), 'note')}, " if recommendation.notes else ""
    facts.append(("report", f"{notes}every trial and every reason: {rows.report_path(recommendation, path)}"))
    console.print(label_table(facts))


def hardware_table(hardware: Hardware, console: Console) -> None:
    """Print the device, its memory, and each precision with its level, measured rate and reason."""
    console.print(label_table(hardware.facts()))
    table = new_table("precision", "level", "matmul rate", last="reason")
    styles = {"native": "green", "emulated": "yellow", "unsupported": "dim"}
    for precision, rate, level, reason in hardware.precision_rows():
        table.add_row(precision, Text(level, styles[level]), rate, Text(reason))
    console.print(table)


def _candidates(recommendation: Recommendation) -> Table:
    """Return the table of the candidates that ran or failed. Neighbours that failed for the same reason share a row."""
    recommended, baseline = rows.recommended_row(recommendation), rows.baseline_row(recommendation)
    columns = ["precision", "batch", "samples/s", "step", "memory"]
    table_rows: list[tuple[list[str], Text, str]] = []
    tried = [(row, cells) for row, cells in rows.table(recommendation) if not rows.is_untried(row)]
    for _, group in groupby(tried, lambda pair: _group_key(pair[0])):
        members = list(group)
        row, cells = members[0]
        cells |= {
            "batch": rows.value_range(*(other.batch_size for other, _ in members)),
            **(
                {"accum": rows.value_range(*(other.accumulation_steps for other, _ in members))}
                if "accum" in cells
                else {}
            ),
        }
        columns = list(cells)
        text = ": ".join(filter(None, [rows.outcome_words(row, recommended, baseline), rows.reason_words(row)]))
        style = "bold" if row is recommended else "dim" if row.samples_per_second is None else ""
        table_rows.append((list(cells.values()), Text(text), style))
    table = new_table(*columns, last="outcome")
    for cell_texts, outcome_text, style in table_rows:
        table.add_row(*map(Text, cell_texts), outcome_text, style=style)
    return table


def _group_key(row: CandidateRow) -> object:
    """Return the key that is equal for neighbours that share a row; it is unique if measured or without a reason."""
    if row.reason is None or row.samples_per_second is not None:
        return id(row)
    return row.precision, row.as_found, row.num_workers, row.status, row.reason


def new_table(first: str, *numbers: str, last: str, first_width: int = 24) -> Table:
    """Return a table with these columns but no rows.

    The first column is folded at `first_width` characters and the last one at the end of the line. Numbers are never
    wrapped, except a speed-up or gain, which has an interval.
    """
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column(Text(first), max_width=first_width, overflow="fold")
    for name in numbers:
        table.add_column(Text(name), justify="right", no_wrap=name not in ("speed-up", "gain"))
    table.add_column(Text(last), overflow="fold")
    return table


def print_panel(title: str, lines: list[tuple[str, str]], console: Console, border_style: str = "blue") -> None:
    """Print labels and their texts in a box. A green border stands for a sure improvement."""
    console.print(Panel(label_table(lines), title=Text(title, "bold"), title_align="left", border_style=border_style))


def label_table(lines: list[tuple[str, str]]) -> Table:
    """Return a table of labels and their texts, with warnings and notes highlighted."""
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for label, text in lines:
        table.add_row(Text(label, "dim"), Text(text, "yellow" if label in ("warning", "note") else ""))
    return table


def _print_lines(heading: str, lines: list[str], console: Console) -> None:
    if lines:
        console.print(Text(heading, "bold"))
        for line in lines:
            console.print(Text(f"  {line}"), soft_wrap=True)
