"""Terminal output of the diagnostics: checks of a workload and of its fidelity, profiles of a step and its memory."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from autotune_amp.core.outcome import DAMAGE_COLUMNS
from autotune_amp.core.text import count, one_line
from autotune_amp.diagnostics import profile_amp
from autotune_amp.diagnostics.memory import results
from autotune_amp.report.terminal import label_table, new_table, print_panel

if TYPE_CHECKING:
    from rich.console import Console

    from autotune_amp.core.outcome import Fidelity
    from autotune_amp.diagnostics.check.findings import CheckReport, Finding
    from autotune_amp.diagnostics.memory.results import MemoryProfile
    from autotune_amp.diagnostics.profile_amp import AmpProfile

_NAME_WIDTH = 40
_VERDICT_STYLES = {"faithful": "bold green", "unfaithful": "bold red"}


def print_fidelity(fidelity: Fidelity, console: Console) -> None:
    """Print the verdict, the most damaged modules, and the reason with its numbers and the next step."""
    heading = Text(f"{fidelity.heading()}: ")
    console.print(heading.append(fidelity.verdict, _VERDICT_STYLES.get(fidelity.verdict, "yellow")))
    if fidelity.modules:
        first, *numbers, last = DAMAGE_COLUMNS
        table = new_table(first, *numbers, last=last, first_width=_NAME_WIDTH)
        for damage in fidelity.most_damaged():
            style = "bold red" if damage.name in fidelity.culprits else ""
            table.add_row(*map(Text, damage.cells()), style=style)
        console.print(table)
    print_panel("Does it learn what fp32 learns?", fidelity.facts(), console)


def print_memory(profile: MemoryProfile, console: Console) -> None:
    """Print the memory of each part and of the modules' activations in each row, the largest batch size that fits, and
    advice on how to reduce memory."""
    console.print(Text(results.heading(profile)))
    names = [row.label for row, _ in results.measured_rows(profile)]
    tables = ("held by", results.parts(profile)), ("activations of", results.modules(profile))
    for first, lines in tables if names else ():  # none if only smaller batches fit
        table = new_table(first, *names[:-1], last=names[-1], first_width=_NAME_WIDTH)
        for label, *cells in lines:
            table.add_row(Text(one_line(label)), *cells, style="bold" if label == "peak" else "")
        console.print(table)
    print_panel("Does it fit, and what would free most?", results.facts(profile), console)


def print_profile(profile: AmpProfile, console: Console) -> None:
    """Print speed-up and memory of each precision, the parts of a step's time, and advice."""
    console.print(Text(profile_amp.heading(profile)))
    console.print(_precisions(profile))
    print_panel("Does mixed precision pay here?", profile_amp.facts(profile), console)


def _precisions(profile: AmpProfile) -> Table:
    first, *numbers, last = profile_amp.ROW_COLUMNS
    table = new_table(first, *numbers, last=last)
    styles = {"excellent": "bold green", "significant": "green", "slower": "yellow"}
    for row in profile.rows:
        step, speedup, memory, verdict = profile_amp.row_cells(row)
        style = "dim" if row.step_seconds is None else styles.get(row.verdict or "", "")
        table.add_row(row.precision, step or "-", speedup or "-", memory or "-", Text(verdict), style=style)
    return table


def print_check(report: CheckReport, console: Console) -> None:
    """Print a block for each finding, in order of severity; then the scope and the limits of the check."""
    num_breaking = sum(finding.severity == "breaks" for finding in report.findings)
    summary = (
        f"{num_breaking} will break, {len(report.findings) - num_breaking} will hurt"
        if report.findings
        else "nothing found"
    )
    console.print(Text(f"{one_line(report.workload)} under {report.device}'s autocast: {summary}", "bold"))
    for finding in report.findings:
        console.print()
        _print_finding(finding, console)
    console.print()
    console.print(label_table(_scope_lines(report)))


def _print_finding(finding: Finding, console: Console) -> None:
    verb, style = ("will break", "bold red") if finding.severity == "breaks" else ("will hurt", "yellow")
    where = "source unknown" if finding.file is None else f"{one_line(finding.file)}:{finding.line}"
    console.print(Text.assemble((verb, style), f" in {', '.join(finding.precisions)}: {finding.rule}"))
    console.print(Text(f"  {where}"), soft_wrap=True)
    first, *others = finding.modules
    lines = [
        ("in", f"{first} and {count(len(others), 'other')}" if others else first),
        ("code", one_line(finding.code)),
        ("why", finding.why),
        ("fix", finding.mend),
    ]
    console.print(Padding(label_table([line for line in lines if line[1]]), (0, 0, 0, 2)))


def _scope_lines(report: CheckReport) -> list[tuple[str, str]]:
    files = count(len(report.files), "file")
    where = "the CPU" if report.recorded_on == "cpu" else report.recorded_on
    step = f"one fp32 step of {count(report.batch_size, 'sample')} on {where}: {count(report.num_calls, 'call')}"
    lines = [("checked", f"{step} in {count(report.num_modules, 'module')}; {files} of yours read")]
    if report.unread:
        names = ", ".join(map(one_line, report.unread[:3]))
        lines.append(("note", f"The source of {names}{' and others' * (len(report.unread) > 3)} could not be read."))
    if report.problem is not None:
        lines.append(("warning", f"The recording ended early: {one_line(report.problem)}"))
    lines += [("note", one_line(note)) for note in report.notes]
    limits = "Branches that this step did not take, and values that occur only later in training."
    return [*lines, ("not checked", limits)]
