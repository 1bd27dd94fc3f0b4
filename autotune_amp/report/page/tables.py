"""The tables of a search's page: candidates, what was left out, failures, checks, the machine."""

from __future__ import annotations

from typing import TYPE_CHECKING

from autotune_amp.core.explain import accumulation_line, check_line
from autotune_amp.core.fidelity import Accumulation
from autotune_amp.core.outcome import Failure
from autotune_amp.core.text import count, duration, flops, number, one_line, outcome_name, size
from autotune_amp.report.page import shell
from autotune_amp.report.summary import baseline_row, outcome_words, recommended_row

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from autotune_amp.core.fidelity import Fidelity
    from autotune_amp.core.hardware import Hardware
    from autotune_amp.core.outcome import Record
    from autotune_amp.core.recommendation import CandidateRow, Exclusion, Recommendation


def candidates(recommendation: Recommendation) -> str:
    """Every candidate and what became of it."""
    recommended, baseline = recommended_row(recommendation), baseline_row(recommendation)
    rows = []
    for row in recommendation.candidates:
        names = ["recommended"] * (row is recommended) + ["baseline"] * (row is baseline) + [outcome_words(row)]
        rows.append(
            (
                row.precision + " as found" * row.as_found + " pinned" * bool(row.pinned_modules),
                str(row.batch_size),
                str(row.accumulation_steps),
                "-" if row.num_workers is None else str(row.num_workers),
                "-" if row.samples_per_second is None else number(row.samples_per_second),
                "-" if row.step_seconds is None else duration(row.step_seconds),
                "-" if row.peak_memory_bytes is None else size(row.peak_memory_bytes),
                "-" if row.joules_per_sample is None else f"{row.joules_per_sample:.3g}",
                ", ".join(names),
                _why(row),
            )
        )
    columns = (
        "precision",
        "batch",
        "accum.",
        "workers",
        "samples/s",
        "step",
        "memory",
        "J/sample",
        "outcome",
        "reason",
    )
    # A column that says the same of every candidate says nothing.
    optional = {"accum.": "1", "workers": "-", "J/sample": "-"}
    kept = [i for i, name in enumerate(columns) if any(row[i] != optional.get(name) for row in rows)]
    shown = ([row[i] for i in kept] for row in rows)
    return shell.table([columns[i] for i in kept], shown, num_numeric=len(kept) - 3)


def _why(row: CandidateRow) -> str:
    if row.status == "cut" and not row.reason:
        return "far slower than the best"
    return one_line(row.reason or "").removeprefix(f"{outcome_name(row.status)}: ")


def left_out(excluded: Iterable[Exclusion]) -> str:
    """What was left out, by reason."""
    sizes: dict[tuple[str, str], list[str]] = {}
    for exclusion in excluded:
        batch = "any" if exclusion.batch_size is None else str(exclusion.batch_size)
        sizes.setdefault((exclusion.precision, one_line(exclusion.reason)), []).append(batch)
    together: dict[tuple[str, str], list[str]] = {}
    for (precision, reason), batches in sizes.items():
        together.setdefault((", ".join(batches), reason), []).append(precision)
    if not together:
        return shell.paragraph("Nothing was left out.", "absent")
    rows = [(", ".join(precisions), batches, reason) for (batches, reason), precisions in together.items()]
    return shell.table(("precision", "batch", "reason"), rows)


def failures(records: Sequence[Record]) -> str:
    """Every failure with its reason; what it printed last unfolds."""
    failed = [(r, r.outcome) for r in records if isinstance(r.outcome, Failure)]
    if not failed:
        return shell.paragraph("No trial and no check failed.", "absent")
    rows = [
        (str(r.number), str(r.candidate), r.purpose, outcome_name(found.kind), one_line(found.message))
        for r, found in failed
    ]
    unfolding = (
        shell.folded(f"Details of trial {r.number}, {r.candidate}", shell.code(outcome_name(found.kind), found.details))
        for r, found in failed
        if found.details
    )
    return shell.table(("trial", "candidate", "purpose", "failure", "reason"), rows) + "".join(unfolding)


def checks(made: Iterable[Fidelity], records: Sequence[Record]) -> str:
    """What the checks of precisions and of accumulation found, a line each."""
    lines: list[tuple[str, str]] = [(found.precision, check_line(found)) for found in made]
    found = [r.outcome for r in records if isinstance(r.outcome, Accumulation)]
    lines += [("accumulation", f"{accumulation_line(check)}. {check.reason}") for check in found]
    return shell.facts(lines) if lines else ""


def machine(hardware: Hardware, versions: dict[str, str]) -> str:
    """The device, its memory, each precision's level and rate, and the versions of what was measured with."""
    identity, memory = hardware.identity, hardware.memory
    limit = "none" if memory.container_limit is None else size(memory.container_limit)
    facts = [
        ("device", f"{hardware.device}: {one_line(identity.name)}"),
        *([("compute", hardware.compute_capability)] if hardware.compute_capability else []),
        *([("driver", identity.driver)] if identity.driver else []),
        ("memory", f"{size(memory.available)} available, {size(memory.free)} free of {size(memory.total)}"),
        ("container limit", limit),
        ("host", count(identity.num_cpus, "CPU")),
        *(("note", one_line(note)) for note in hardware.notes),
    ]
    rows = [
        (
            precision,
            "-" if found.matmul_flops_per_second is None else flops(found.matmul_flops_per_second),
            found.level,
            one_line(found.reason),
        )
        for precision, found in hardware.precisions.items()
    ]
    table = shell.table(("precision", "matrix products", "level", "reason"), rows, num_numeric=1)
    return shell.facts(facts) + table + shell.facts(versions.items())
