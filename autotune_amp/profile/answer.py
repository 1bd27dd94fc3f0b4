"""The rows of a profile as its answer: the best of them, what to try next, what stands behind the numbers. Pure."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from autotune_amp.core.hardware import Hardware, MachineLoad
from autotune_amp.profile.gap import Conditions, next_steps
from autotune_amp.profile.results import AmpProfile, PrecisionRow
from autotune_amp.profile.spec import LOW, Profiled
from autotune_amp.search import machine_load


def answer(
    rows: tuple[PrecisionRow, ...],
    profiled: Profiled,
    *,
    workload: str,
    hardware: Hardware,
    batch_size: int,
    accumulation_steps: int,
    num_batches: int,
    trace: str | None,
    notes: Sequence[str],
) -> AmpProfile:
    """The profile that these rows make, fp32's first; `notes` are told before those that come of the rows."""
    compared = [r for r in rows if r.precision in LOW and r.speedup is not None and r.failure is None]
    best = max(compared, key=_speedup, default=None)
    conditions = Conditions(
        unfused_optimizer=profiled.unfused_optimizer,
        is_compiled=profiled.is_compiled,
        num_loader_workers=profiled.num_loader_workers,
    )
    found = AmpProfile(
        workload=workload,
        device=hardware.device,
        device_name=hardware.identity.name,
        batch_size=batch_size,
        accumulation_steps=accumulation_steps,
        num_batches=num_batches,
        rows=rows,
        best_precision=None if best is None else best.precision,
        speedup=None if best is None else best.speedup,
        verdict=None if best is None else best.verdict,
        next_steps=(),
        notes=(*notes, *_notes(rows, hardware, profiled)),
        trace=trace,
    )
    if found.gap is None:
        return found
    return msgspec.structs.replace(found, next_steps=next_steps(found.gap, found.gap_precision, conditions))


def _speedup(row: PrecisionRow) -> float:
    return row.speedup or 0.0


def _notes(rows: Sequence[PrecisionRow], hardware: Hardware, profiled: Profiled) -> list[str]:
    notes = []
    for row in rows:
        capability = hardware.precisions.get(row.precision)
        if row.speedup is not None and capability is not None and capability.level == "emulated":
            notes.append(f"{row.precision} is emulated: {capability.reason}")
    if profiled.split_problem is not None:
        notes.append(f"Steps could not be taken apart: {profiled.split_problem}.")
    if profiled.flops_problem is not None:
        notes.append(f"The step's floating-point operations could not be counted: {profiled.flops_problem}.")
    return notes + [f"{row.precision}: {row.gap.note}." for row in rows if row.gap is not None and row.gap.note]


def load_notes(load: MachineLoad) -> list[str]:
    """What others did on the machine while the precisions were timed, where that is worth a word."""
    notes = []
    if machine_load.is_busy([load]) and load.others_num_cores is not None:
        notes.append(
            f"The machine was busy: other processes used {machine_load.cores(load.others_num_cores, load.num_cpus)}"
            f"{machine_load.named(load.busiest)}. That slows precisions unequally: stop them and profile again."
        )
    if machine_load.is_stolen([load]):
        notes.append(
            f"The hypervisor gave {100 * (load.stolen_share or 0.0):.0f} % of the CPU time to others meanwhile: at "
            "another hour steps may be faster, and not all by the same factor."
        )
    if load.card_processes:
        notes.append(
            f"The card was not ours alone{machine_load.on_card(load.card_processes)}: without other work steps may be "
            "faster, and not all by the same factor."
        )
    if load.card_slowdowns:
        notes.append(f"The card lowered its clocks meanwhile: {'; '.join(load.card_slowdowns)}.")
    return notes
