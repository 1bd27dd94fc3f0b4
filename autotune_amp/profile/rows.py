"""What was measured, as the rows of a profile and its answer. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import geometric_mean
from typing import Any, NamedTuple

import msgspec

from autotune_amp.core.dimensions import Precision
from autotune_amp.core.hardware import Hardware
from autotune_amp.core.intervals import ratio_interval
from autotune_amp.core.outcome import Failure, Measurement, Outcome
from autotune_amp.core.setting import Setting
from autotune_amp.profile.gap import gap, next_steps
from autotune_amp.profile.job import LOW, Profiled
from autotune_amp.profile.results import AmpProfile, PrecisionRow, Verdict

# A precision whose steps take so many times those of fp32 is left, if they are so long that it is worth it: the first
# ones of a small model in another format are many times slower than those that follow.
CUT_RATIO, LONG_STEP_SECONDS = 5.0, 1.0
DEADLINE_RATIO = 10.0  # one step may take so many times fp32's
SHORTEST_DEADLINE_SECONDS = 5.0
FIRST_STEP_RATIO = 3.0  # as a search allows it
SHORTEST_FIRST_STEP_DEADLINE_SECONDS = 30.0  # it may compile and set up what fp32's did not need

_LEAST_SPEEDUPS: tuple[tuple[float, Verdict], ...] = ((1.2, "significant"), (1.05, "modest"), (0.95, "negligible"))


class Found(NamedTuple):
    """All that was found: `refused` are the precisions that cannot be run with the reason, `outcomes` what each of the
    others did in each round, up to one that failed or was cut, and `profiled` how its step was taken apart.
    """

    hardware: Hardware
    refused: Mapping[Precision, str]
    outcomes: Mapping[Precision, Sequence[Outcome]]
    profiled: Mapping[Precision, Profiled]


def verdict(speedup: float) -> Verdict:
    """``excellent`` above 1.5, ``significant`` from 1.2, ``modest`` from 1.05, ``negligible`` from 0.95, ``slower``."""
    if speedup > 1.5:
        return "excellent"
    return next((name for least, name in _LEAST_SPEEDUPS if speedup >= least), "slower")


def is_cut(outcome: Outcome, fp32: Outcome) -> bool:
    """Whether a process ran so slowly beside that of fp32 that no other is worth it."""
    if not isinstance(outcome, Measurement) or not isinstance(fp32, Measurement):
        return False
    return outcome.was_cut or outcome.step_seconds > limits(fp32)["cut_step_seconds"]


def limits(fp32: Measurement) -> dict[str, float]:
    """What steps of another precision may take, as fields of a `Trial`."""
    step = max(DEADLINE_RATIO * fp32.step_seconds, SHORTEST_DEADLINE_SECONDS)
    first_step = FIRST_STEP_RATIO * fp32.first_step_seconds + step
    return {
        "cut_step_seconds": max(CUT_RATIO * fp32.step_seconds, LONG_STEP_SECONDS),
        "first_step_deadline_seconds": max(first_step, SHORTEST_FIRST_STEP_DEADLINE_SECONDS),
        "step_deadline_seconds": step,
    }


def rows(asked: Sequence[Precision], found: Found) -> tuple[PrecisionRow, ...]:
    """A row for each precision in the order asked, compared with fp32 where that ran."""
    reference = _row("fp32", found)
    return tuple(
        reference if precision == "fp32" else _compared(_row(precision, found), reference, found) for precision in asked
    )


def _row(precision: Precision, found: Found) -> PrecisionRow:
    if precision in found.refused:
        return PrecisionRow(precision=precision, reason=found.refused[precision])
    outcomes = found.outcomes[precision]
    measured = [outcome for outcome in outcomes if isinstance(outcome, Measurement)]
    last = outcomes[-1]
    failed: dict[str, Any] = {"failure": last.kind, "reason": last.message} if isinstance(last, Failure) else {}
    if not measured:
        return PrecisionRow(precision=precision, **failed)
    steps = tuple(outcome.step_seconds for outcome in measured)
    profiled = found.profiled.get(precision)
    return PrecisionRow(
        precision=precision,
        step_seconds=geometric_mean(steps),  # as the speed-up: one slow process moves it little
        step_seconds_interval=ratio_interval(steps, [1.0] * len(steps)),
        process_step_seconds=steps,
        num_steps=sum(outcome.num_steps for outcome in measured),
        peak_memory_bytes=measured[0].peak_memory_bytes,
        gap=None
        if profiled is None
        else gap(measured, profiled, _rate(precision, found), found.hardware.identity.type),
        **failed,
    )


def _rate(precision: Precision, found: Found) -> float | None:
    """The highest seen: what else runs on the machine only lowers it."""
    capability, profiled = found.hardware.precisions.get(precision), found.profiled[precision]
    probed = None if capability is None else capability.matmul_flops_per_second
    return max(probed or 0.0, profiled.flops_per_second or 0.0) or None


def _compared(row: PrecisionRow, reference: PrecisionRow, found: Found) -> PrecisionRow:
    """The row with its speed-up, from processes of one round; without one where either of them failed."""
    pairs = list(zip(reference.process_step_seconds, row.process_step_seconds, strict=False))
    if not pairs or row.failure is not None or reference.failure is not None:
        return row
    speedup = geometric_mean(fp32 / ours for fp32, ours in pairs)
    if is_cut(found.outcomes[row.precision][-1], found.outcomes["fp32"][0]):
        return msgspec.structs.replace(
            row,
            step_seconds_interval=None,
            speedup=speedup,
            verdict="slower",
            was_cut=True,
            reason=f"cut: at least {_times(1 / speedup)} times slower than fp32",
        )
    interval = ratio_interval(*zip(*pairs, strict=True))
    return msgspec.structs.replace(
        row,
        speedup=speedup,
        speedup_interval=interval,
        verdict=verdict(speedup),
        verdicts=(verdict(interval[0]), verdict(interval[1])),
    )


def _times(ratio: float) -> str:
    return f"{ratio:,.0f}" if ratio >= 10 else f"{ratio:.2g}"


def answer(
    rows: tuple[PrecisionRow, ...],
    found: Found,
    *,
    workload: str,
    setting: Setting,
    num_batches: int,
    trace: str | None = None,
    notes: Sequence[str] = (),
) -> AmpProfile:
    """The profile that these rows make, fp32's first; `notes` are told before those that come of the rows.

    `setting` has the batch size and the accumulation steps.
    """
    compared = [r for r in rows if r.precision in LOW and r.speedup is not None and r.failure is None]
    best = max(compared, key=lambda row: row.speedup or 0.0, default=None)
    made = AmpProfile(
        workload=workload,
        device=found.hardware.device,
        device_name=found.hardware.identity.name,
        batch_size=setting.batch_size,
        accumulation_steps=setting.accumulation_steps,
        num_batches=num_batches,
        rows=rows,
        best_precision=None if best is None else best.precision,
        speedup=None if best is None else best.speedup,
        verdict=None if best is None else best.verdict,
        next_steps=(),
        notes=(*notes, *_notes(rows, found)),
        trace=trace,
    )
    precision = made.gap_precision
    if made.gap is None:
        return made
    return msgspec.structs.replace(made, next_steps=next_steps(made.gap, precision, found.profiled[precision]))


def _notes(rows: Sequence[PrecisionRow], found: Found) -> list[str]:
    notes = []
    for row in rows:
        capability = found.hardware.precisions.get(row.precision)
        if row.speedup is not None and capability is not None and capability.level == "emulated":
            notes.append(f"{row.precision} is emulated: {capability.reason}")
    for profiled in found.profiled.values():
        if profiled.split_problem is not None:
            notes.append(f"Steps could not be taken apart: {profiled.split_problem}.")
        if profiled.flops_problem is not None:
            notes.append(f"The step's floating-point operations could not be counted: {profiled.flops_problem}.")
    notes += [f"{row.precision}: {row.gap.note}." for row in rows if row.gap is not None and row.gap.note]
    return list(dict.fromkeys(notes))
