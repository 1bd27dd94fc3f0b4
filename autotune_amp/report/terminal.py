"""What a finished search and a probe look like on a terminal."""

from __future__ import annotations

from itertools import groupby
from typing import TYPE_CHECKING

from rich import box
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from autotune_amp.report.format import count, duration, flops, number, one_line, outcome_name, size
from autotune_amp.report.progress import TerminalProgress
from autotune_amp.report.summary import baseline_row, explain, export_lines, facts, python_lines, recommended_row

if TYPE_CHECKING:
    from rich.console import Console

    from autotune_amp.hardware.types import Hardware
    from autotune_amp.recommendation import CandidateRow, Recommendation

__all__ = ["TerminalProgress", "explain", "hardware_table", "print_recommendation"]


def print_recommendation(recommendation: Recommendation, console: Console) -> None:
    """All candidates with their outcome, the recommended config with its evidence, and how to use it."""
    search, hardware = recommendation.search, recommendation.hardware
    console.print(
        Text(
            f"Study {search.study}: {count(search.num_trials, 'trial')}, {search.num_failures} failed, "
            f"{duration(search.seconds)} on {hardware.device} ({one_line(hardware.identity.name)})"
        )
    )
    console.print(_candidates(recommendation))
    title = "Best so far: the search was interrupted" if search.was_interrupted else "Recommended"
    console.print(
        Panel(_grid(facts(recommendation)), title=Text(title, "bold"), title_align="left", border_style="green")
    )
    # Below the panel and never wrapped by us: these lines are there to be copied.
    _print_lines("In the shell, before Python starts:", export_lines(recommendation), console)
    _print_lines("In Python:", python_lines(recommendation), console)


def hardware_table(hardware: Hardware, console: Console) -> None:
    """The device, its memory, and each precision with its level, measured rate and reason."""
    identity, memory = hardware.identity, hardware.memory
    limit = "no container limit"
    if memory.container_limit is not None:
        limit = f"container limit {size(memory.container_limit)}"
    lines = [
        ("device", f"{hardware.device}: {one_line(identity.name)}"),
        ("compute", hardware.compute_capability or "-"),
        ("driver", identity.driver or "none"),
        ("memory", f"{size(memory.available)} available: {size(memory.free)} free of {size(memory.total)}, {limit}"),
        ("host", count(identity.num_cpus, "CPU")),
    ]
    if memory.held_by_caller:
        lines.append(("held", f"{size(memory.held_by_caller)} by the calling process itself"))
    console.print(_grid(lines + [("warning", one_line(note)) for note in hardware.notes]))

    table = Table(box=box.SIMPLE_HEAD)
    table.add_column("precision", no_wrap=True)
    table.add_column("level", no_wrap=True)
    table.add_column("matmul rate", justify="right", no_wrap=True)
    table.add_column("reason", overflow="fold")
    styles = {"native": "green", "emulated": "yellow", "unsupported": "dim"}
    for precision, capability in hardware.precisions.items():
        measured = capability.matmul_flops_per_second
        table.add_row(
            precision,
            Text(capability.level, styles[capability.level]),
            "-" if measured is None else flops(measured),
            Text(one_line(capability.reason)),
        )
    console.print(table)


def _candidates(recommendation: Recommendation) -> Table:
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    has_accumulation = any(row.accumulation_steps > 1 for row in recommendation.candidates)
    table.add_column("precision", no_wrap=True)
    for name in ("batch", *(["accum"] if has_accumulation else []), "samples/s", "step", "memory"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("outcome", overflow="fold")
    recommended, baseline = recommended_row(recommendation), baseline_row(recommendation)
    everywhere = {(e.precision, e.reason) for e in recommendation.excluded if e.batch_size is None}
    for _, group in groupby(recommendation.candidates, _fate):
        row, *others = group
        names = (["recommended"] if row is recommended else []) + (["baseline"] if row is baseline else [])
        table.add_row(
            row.precision + (" as found" if row.as_found else "") + (" pinned" if row.pinned_modules else ""),
            _span(row.batch_size, *(other.batch_size for other in others)),
            *([_span(row.accumulation_steps, *(o.accumulation_steps for o in others))] if has_accumulation else []),
            "-" if row.samples_per_second is None else number(row.samples_per_second),
            "-" if row.step_seconds is None else duration(row.step_seconds),
            "-" if row.peak_memory_bytes is None else size(row.peak_memory_bytes),
            Text(", ".join([*names, row.status if (row.precision, row.reason) in everywhere else _outcome(row)])),
            style="bold green" if row is recommended else "dim" if row.samples_per_second is None else "",
        )
    for precision, batch_sizes, reason in _exclusions(recommendation):
        blanks = ["-"] * (4 if has_accumulation else 3)
        table.add_row(precision, batch_sizes, *blanks, Text(f"excluded: {one_line(reason)}"), style="dim")
    return table


def _fate(row: CandidateRow) -> object:
    """Neighbours with one fate share a line; what was measured has its own."""
    if row.reason is None or row.samples_per_second is not None:
        return id(row)
    return row.precision, row.as_found, row.status, row.reason


def _exclusions(recommendation: Recommendation) -> list[tuple[str, str, str]]:
    """Precision, batch sizes and reason of what has no row yet; batch sizes with one reason are told together."""
    listed = {(row.precision, row.batch_size) for row in recommendation.candidates}
    together: dict[tuple[str, str], list[int]] = {}
    for exclusion in recommendation.excluded:
        if (exclusion.precision, exclusion.batch_size) not in listed:
            batch_sizes = together.setdefault((exclusion.precision, exclusion.reason), [])
            batch_sizes += [] if exclusion.batch_size is None else [exclusion.batch_size]
    return [
        (precision, _span(*batch_sizes) if batch_sizes else "any", reason)
        for (precision, reason), batch_sizes in together.items()
    ]


def _span(*values: int) -> str:
    return "-".join(str(end) for end in sorted({min(values), max(values)}))


def _outcome(row: CandidateRow) -> str:
    name, reason = outcome_name(row.status), one_line(row.reason or "")
    return reason if reason.startswith(name) else f"{name}: {reason}" if reason else name


def _grid(lines: list[tuple[str, str]]) -> Table:
    grid = Table.grid(padding=(0, 2, 0, 0))
    grid.add_column(no_wrap=True)
    grid.add_column(overflow="fold")
    for label, text in lines:
        grid.add_row(Text(label, "dim"), Text(text, "yellow" if label == "warning" else ""))
    return grid


def _print_lines(heading: str, lines: list[str], console: Console) -> None:
    if lines:
        console.print(Text(heading, "bold"))
        for line in lines:
            console.print(Text(f"  {line}"), soft_wrap=True)
