"""What was measured, as the rows of a profile and its answer. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import NamedTuple

import msgspec

from autotune_amp.core.hardware import Hardware
from autotune_amp.core.intervals import ratio_interval
from autotune_amp.core.outcome import Failure, Measurement
from autotune_amp.core.setting import Precision
from autotune_amp.profile.gap import Conditions, Step, gap, next_steps
from autotune_amp.profile.job import CUT_RATIO, LOW, Lane, Profiled, Split
from autotune_amp.profile.results import AmpProfile, Gap, PrecisionRow, Verdict

# Alone a step must also be so long that it is worth cutting: the first ones of a small model in another format are many
# times slower than those that follow, and what else runs on the machine comes and goes.
LONG_STEP_SECONDS = 1.0
DEADLINE_RATIO = 10.0  # one step may take so many times fp32's
SHORTEST_DEADLINE_SECONDS = 5.0
FIRST_STEP_RATIO = 3.0  # as a search allows it
SHORTEST_FIRST_STEP_DEADLINE_SECONDS = 30.0  # it may compile and set up what fp32's did not need


class Found(NamedTuple):
    """All that was found: `refused` are the precisions that cannot be run with the reason, `alone` what each of the
    others did in a process of its own, `profiled` what they did in the rounds after that, a block for each process.
    `rates` are the machine's in matrix products, in FLOP/s, 0 where unknown.
    """

    refused: Mapping[Precision, str]
    alone: Mapping[Precision, Measurement | Failure]
    profiled: Profiled
    rates: Mapping[Precision, float]
    device_type: str


def verdict(speedup: float) -> Verdict:
    """``excellent`` above 1.5, ``significant`` from 1.2, ``modest`` from 1.05, ``negligible`` from 0.95, ``slower``."""
    if speedup > 1.5:
        return "excellent"
    if speedup >= 1.2:
        return "significant"
    if speedup >= 1.05:
        return "modest"
    return "negligible" if speedup >= 0.95 else "slower"


def is_cut(precision: Precision, alone: Mapping[Precision, Measurement | Failure]) -> bool:
    """Whether it ran alone, and so slowly that it is not worth running beside the others."""
    ours, fp32 = alone[precision], alone.get("fp32")
    if not isinstance(ours, Measurement) or not isinstance(fp32, Measurement):
        return False
    return ours.was_cut or ours.step_seconds > cut_step_seconds(fp32)


def cut_step_seconds(fp32: Measurement) -> float:
    """What a step alone may take to be run beside the others."""
    return max(CUT_RATIO * fp32.step_seconds, LONG_STEP_SECONDS)


def step_deadline_seconds(fp32: Measurement) -> float:
    """What one step of another precision may take."""
    return max(DEADLINE_RATIO * fp32.step_seconds, SHORTEST_DEADLINE_SECONDS)


def first_step_deadline_seconds(fp32: Measurement) -> float:
    """What the first step of another precision may take."""
    return max(
        FIRST_STEP_RATIO * fp32.first_step_seconds + step_deadline_seconds(fp32), SHORTEST_FIRST_STEP_DEADLINE_SECONDS
    )


def rows(asked: Sequence[Precision], found: Found) -> tuple[PrecisionRow, ...]:
    """A row for each precision in the order asked, compared with fp32 where that ran."""
    reference = _row("fp32", found)
    return tuple(
        reference if precision == "fp32" else _compared(_row(precision, found), reference) for precision in asked
    )


def _row(precision: Precision, found: Found) -> PrecisionRow:
    if precision in found.refused:
        return PrecisionRow(precision=precision, reason=found.refused[precision])
    alone = found.alone[precision]
    if isinstance(alone, Failure):
        return PrecisionRow(precision=precision, failure=alone.kind, reason=alone.message)
    peak = alone.peak_memory_bytes
    if is_cut(precision, found.alone):
        fp32 = found.alone["fp32"]
        assert isinstance(fp32, Measurement), "it is cut against fp32 alone"
        ratio = alone.step_seconds / fp32.step_seconds
        return PrecisionRow(
            precision=precision,
            step_seconds=alone.step_seconds,
            speedup=1 / ratio,
            verdict="slower",
            peak_memory_bytes=peak,
            was_cut=True,
            reason=f"cut: at least {_times(ratio)} times slower than fp32",
        )
    lane = next(lane for lane in found.profiled.lanes if lane.precision == precision)
    steps = _steps(lane)
    return PrecisionRow(
        precision=precision,
        step_seconds=_mean(steps) if steps else None,
        # Of the geometric mean, as the speed-up's.
        step_seconds_interval=ratio_interval(steps, [1.0] * len(steps)) if steps else None,
        process_step_seconds=steps,
        num_steps=lane.num_steps,
        peak_memory_bytes=peak,
        was_cut=lane.was_cut,
        failure=None if lane.failure is None else lane.failure.kind,
        reason=None if lane.failure is None else lane.failure.message,
        gap=_gap(lane, lane.split, found) if steps and lane.split is not None else None,
    )


def _compared(row: PrecisionRow, reference: PrecisionRow) -> PrecisionRow:
    """The row with its speed-up, from processes of one round; without one where either of them failed."""
    if reference.failure is not None:
        return msgspec.structs.replace(row, speedup=None, verdict=None)
    pairs = list(zip(reference.process_step_seconds, row.process_step_seconds, strict=False))
    if not pairs or row.failure is not None:
        return row
    interval = ratio_interval(*zip(*pairs, strict=True))
    speedup = _mean([fp32 / ours for fp32, ours in pairs])
    return msgspec.structs.replace(
        row,
        speedup=speedup,
        speedup_interval=interval,
        verdict=verdict(speedup),
        verdicts=(verdict(interval[0]), verdict(interval[1])),
        reason=f"cut: {_times(1 / speedup)} times slower than fp32" if row.was_cut else row.reason,
    )


def _steps(lane: Lane) -> tuple[float, ...]:
    """Seconds of a step of each block, with the wait for its data."""
    return tuple(seconds + wait for seconds, wait in zip(lane.block_seconds, lane.data_seconds, strict=True))


def _gap(lane: Lane, split: Split, found: Found) -> Gap:
    """Of the row's step: the mean wait and the mean computing have their shares of it."""
    wait, compute = fmean(lane.data_seconds), fmean(lane.block_seconds)
    scale = _mean(_steps(lane)) / (wait + compute)
    rate = found.rates.get(lane.precision) or None
    waits = tuple(wait / (wait + block) for wait, block in zip(lane.data_seconds, lane.block_seconds, strict=True))
    step = Step(scale * wait, scale * compute, (min(waits), max(waits)))
    return gap(step, split, found.profiled.flops_per_step, rate, found.device_type)


def _times(ratio: float) -> str:
    return f"{ratio:,.0f}" if ratio >= 10 else f"{ratio:.2g}"


def _mean(values: Sequence[float]) -> float:
    """The geometric one: the ratio of two of them is that of their ratios, and one slow step moves it little."""
    return math.exp(fmean(map(math.log, values)))


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
