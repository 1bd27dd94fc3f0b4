"""What a fidelity check and a memory profile look like on a terminal."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.text import Text

from autotune_amp.core.text import exact, number, one_line
from autotune_amp.memory import results
from autotune_amp.report.terminal import new_table, print_panel

if TYPE_CHECKING:
    from rich.console import Console

    from autotune_amp.core.outcome import Fidelity, GradientDamage
    from autotune_amp.memory.results import MemoryProfile

_NUM_DAMAGED, _NAME_WIDTH = 8, 40
_STYLES = {"faithful": "bold green", "doubtful": "yellow", "unfaithful": "bold red", "unchecked": "yellow"}


def print_fidelity(fidelity: Fidelity, console: Console) -> None:
    """The verdict with its reason and the next step, the numbers behind it, and the most damaged modules."""
    heading = Text(f"{fidelity.precision} against fp32, batch size {fidelity.batch_size}: ")
    console.print(heading.append(fidelity.verdict, _STYLES[fidelity.verdict]))
    if fidelity.modules:
        damaged = sorted(fidelity.modules, key=lambda found: -found.noise_ratio)[:_NUM_DAMAGED]
        table = new_table("module", "noise ratio", "cosine", "norm ratio", last="flushed to 0", first_width=_NAME_WIDTH)
        for found in damaged:
            style = "bold red" if found.name in fidelity.culprits else ""
            table.add_row(Text(one_line(found.name) or "outside of modules"), *_damage(found), style=style)
        console.print(table)
    print_panel("Does it learn what fp32 learns?", fidelity_facts(fidelity), console)


def _damage(found: GradientDamage) -> list[str]:
    ratios = [number(value) for value in (found.noise_ratio, found.cosine, found.norm_ratio)]
    return [*ratios, f"{100 * found.flushed_share:.3g} %"]


def fidelity_facts(fidelity: Fidelity) -> list[tuple[str, str]]:
    """Label and text of the verdict and of each number that could be had, with what it means."""
    lines = [("verdict", one_line(fidelity.reason)), ("next step", one_line(fidelity.next_step))]
    ratios = (
        ("noise", fidelity.noise_ratio, "is what rounding does to the gradient over what another batch does to it"),
        ("direction", fidelity.gradient_cosine, "is the cosine between the gradient and that of fp32"),
        ("length", fidelity.gradient_norm_ratio, "is the length of the gradient over that of fp32"),
        ("training", fidelity.training_gap, _paired(fidelity)),
    )
    shares = (
        ("loss", fidelity.loss_error, "is the loss off that of fp32"),
        ("flushed", fidelity.flushed_share, "of the gradient's entries that count are 0 in this precision alone"),
    )
    lines += [(label, f"{number(value)} {meaning}") for label, value, meaning in ratios if value is not None]
    lines += [(label, f"{100 * value:.3g} % {meaning}") for label, value, meaning in shares if value is not None]
    if fidelity.forward_max is not None and fidelity.format_max is not None:
        ends = f", where the format ends at {number(fidelity.format_max)}" if fidelity.format_max < 1e9 else ""
        lines.append(("largest", f"{number(fidelity.forward_max)} is the largest output of a module{ends}"))
    if fidelity.loss_scale is not None:
        lines.append(("loss scale", exact(fidelity.loss_scale)))
    for label, names in (
        ("pinned", fidelity.pinned_modules),
        ("culprits", fidelity.culprits),
        ("healed by", fidelity.healing_pins),
    ):
        if names:
            lines.append((label, one_line(", ".join(names)) + (" in fp32" if label != "culprits" else "")))
    return lines


def _paired(fidelity: Fidelity) -> str:
    return (
        f"is how far {fidelity.num_paired_steps} paired steps ({fidelity.num_skips} skipped) part from fp32, over how "
        "far one rounding of the first weights alone takes fp32 from itself"
    )


def print_memory(profile: MemoryProfile, console: Console) -> None:
    """The parts and the modules' activations in each precision, what fits, and what would free most."""
    console.print(Text(results.heading(profile)))
    names = [row.precision for row, _ in results.measured_rows(profile)]
    for first, lines in (("held by", results.parts(profile)), ("activations of", results.modules(profile))):
        table = new_table(first, *names[:-1], last=names[-1], first_width=_NAME_WIDTH)
        for label, *cells in lines:
            table.add_row(Text(one_line(label)), *cells, style="bold" if label == "peak" else "")
        console.print(table)
    print_panel("Does it fit, and what would free most?", results.facts(profile), console)
