"""What a finished search and a probe look like on a terminal."""

from __future__ import annotations

from itertools import groupby
from typing import TYPE_CHECKING

from rich import box
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from autotune_amp.core.config_source import export_lines
from autotune_amp.core.text import count, duration, flops, number, one_line, size
from autotune_amp.report.frameworks import export_command
from autotune_amp.report.progress import TerminalProgress
from autotune_amp.report.summary import (
    baseline_row,
    outcome_words,
    python_lines,
    recommended_row,
)

if TYPE_CHECKING:
    from rich.console import Console

    from autotune_amp.core.hardware import Hardware
    from autotune_amp.core.recommendation import CandidateRow, Recommendation

__all__ = ["TerminalProgress", "hardware_table", "print_recommendation"]


def print_recommendation(recommendation: Recommendation, console: Console, path: str | None = None) -> None:
    """All candidates with their outcome, the recommended config with its evidence, and how to use it.

    `path` is that of its file, as in `python_lines`.
    """
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
        Panel(grid(recommendation.facts()), title=Text(title, "bold"), title_align="left", border_style="green")
    )
    # Below the panel and never wrapped by us: these lines are there to be copied.
    _print_lines("In the shell, before Python starts:", export_lines(recommendation.config), console)
    _print_lines("In Python:", python_lines(recommendation, path), console)
    title, command = export_command(recommendation, path)
    _print_lines(f"{title}:", [command], console)


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
    console.print(grid(lines + [("warning", one_line(note)) for note in hardware.notes]))

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
    has_workers = any(row.num_workers is not None for row in recommendation.candidates)
    extra = ["accum"] * has_accumulation + ["workers"] * has_workers
    table.add_column("precision", no_wrap=True)
    has_energy = any(row.joules_per_sample is not None for row in recommendation.candidates)
    for name in ("batch", *extra, "samples/s", "step", "memory", *["J/sample"] * has_energy):
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
            *(["-" if row.num_workers is None else str(row.num_workers)] if has_workers else []),
            "-" if row.samples_per_second is None else number(row.samples_per_second),
            "-" if row.step_seconds is None else duration(row.step_seconds),
            "-" if row.peak_memory_bytes is None else size(row.peak_memory_bytes),
            *(["-" if row.joules_per_sample is None else f"{row.joules_per_sample:.3g}"] if has_energy else []),
            Text(", ".join([*names, row.status if (row.precision, row.reason) in everywhere else _outcome(row)])),
            style="bold green" if row is recommended else "dim" if row.samples_per_second is None else "",
        )
    for precision, batch_sizes, reason in _exclusions(recommendation):
        blanks = ["-"] * (3 + len(extra) + has_energy)
        table.add_row(precision, batch_sizes, *blanks, Text(f"excluded: {one_line(reason)}"), style="dim")
    return table


def _fate(row: CandidateRow) -> object:
    """Neighbours with one fate share a line; what was measured has its own."""
    if row.reason is None or row.samples_per_second is not None:
        return id(row)
    return row.precision, row.as_found, row.num_workers, row.status, row.reason


def _exclusions(recommendation: Recommendation) -> list[tuple[str, str, str]]:
    """Precisions, batch sizes and reason of what has no row yet; what has one reason is told together."""
    listed = {(row.precision, row.batch_size) for row in recommendation.candidates}
    together: dict[tuple[str, str], list[int]] = {}
    for exclusion in recommendation.excluded:
        if (exclusion.precision, exclusion.batch_size) not in listed:
            batch_sizes = together.setdefault((exclusion.precision, exclusion.reason), [])
            batch_sizes += [] if exclusion.batch_size is None else [exclusion.batch_size]
    shared: dict[tuple[str, str], list[str]] = {}
    for (precision, reason), batch_sizes in together.items():
        shared.setdefault((_span(*batch_sizes) if batch_sizes else "any", reason), []).append(precision)
    return [("\n".join(precisions), batch_sizes, reason) for (batch_sizes, reason), precisions in shared.items()]


def _span(*values: int) -> str:
    return "-".join(str(end) for end in sorted({min(values), max(values)}))


def _outcome(row: CandidateRow) -> str:
    name, reason = outcome_words(row), one_line(row.reason or "")
    return reason if reason.startswith(name) else f"{name}: {reason}" if reason else name


def grid(lines: list[tuple[str, str]]) -> Table:
    """Labels and their texts, side by side; warnings and notes stand out."""
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
