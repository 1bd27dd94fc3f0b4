"""Terminal output of a fidelity check and of a memory profile."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.text import Text

from autotune_amp.core.outcome import DAMAGE_COLUMNS
from autotune_amp.core.text import one_line
from autotune_amp.memory import results
from autotune_amp.report.terminal import new_table, print_panel

if TYPE_CHECKING:
    from rich.console import Console

    from autotune_amp.core.outcome import Fidelity
    from autotune_amp.memory.results import MemoryProfile

_NAME_WIDTH = 40
_STYLES = {"faithful": "bold green", "unfaithful": "bold red"}


def print_fidelity(fidelity: Fidelity, console: Console) -> None:
    """Print the verdict with its reason and the next step, the numbers behind it, and the most damaged modules."""
    heading = Text(f"{fidelity.heading()}: ")
    console.print(heading.append(fidelity.verdict, _STYLES.get(fidelity.verdict, "yellow")))
    if fidelity.modules:
        first, *numbers, last = DAMAGE_COLUMNS
        table = new_table(first, *numbers, last=last, first_width=_NAME_WIDTH)
        for found in fidelity.most_damaged():
            style = "bold red" if found.name in fidelity.culprits else ""
            table.add_row(*map(Text, found.cells()), style=style)
        console.print(table)
    print_panel("Does it learn what fp32 learns?", fidelity.facts(), console)


def print_memory(profile: MemoryProfile, console: Console) -> None:
    """Print the memory of each part and of the modules' activations in each precision, the batch that fits, and the
    advice on what would free most."""
    console.print(Text(results.heading(profile)))
    names = [row.precision for row, _ in results.measured_rows(profile)]
    for first, lines in (("held by", results.parts(profile)), ("activations of", results.modules(profile))):
        table = new_table(first, *names[:-1], last=names[-1], first_width=_NAME_WIDTH)
        for label, *cells in lines:
            table.add_row(Text(one_line(label)), *cells, style="bold" if label == "peak" else "")
        console.print(table)
    print_panel("Does it fit, and what would free most?", results.facts(profile), console)
