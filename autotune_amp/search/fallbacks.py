"""What a run may step down to when its precision fails, and the measured plan for each. Pure."""

from __future__ import annotations

from statistics import median
from typing import TYPE_CHECKING

from autotune_amp.core.config import FallbackPlan, Precision
from autotune_amp.core.outcome import Measurement
from autotune_amp.search.evidence import failures

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from autotune_amp.core.outcome import Record
    from autotune_amp.core.setting import Setting

# What a run steps down to when its precision fails, first choice first.
LADDER: dict[Precision, tuple[Precision, ...]] = {
    "fp32": (),
    "tf32": ("fp32",),
    "bf16": ("fp32",),
    "fp16": ("bf16", "fp32"),
    "fp8": ("bf16", "fp32"),
}


def fallback_plans(
    records: Sequence[Record], chosen: Setting, harmful: Collection[Precision] = (), *, may_add_steps: bool
) -> tuple[FallbackPlan, ...]:
    """For each precision to step down to, the fastest candidate of the same effective batch that never failed.

    Its batches are whole parts of those that the run's loader goes on giving. Unless `may_add_steps`, it has no more
    accumulation steps than `chosen`. `harmful` precisions are none to step down to, nor is one with pins, which a plan
    cannot say.
    """
    failed = failures(records)
    measured: dict[Setting, list[Measurement]] = {}
    for record in records:
        if isinstance(record.outcome, Measurement) and record.purpose != "plain":  # no plan is run so
            measured.setdefault(record.candidate, []).append(record.outcome)
    speeds = {c: median(m.samples_per_second for m in ours) for c, ours in measured.items()}
    fitting = [
        c
        for c in measured
        if c.effective_batch_size == chosen.effective_batch_size
        and chosen.batch_size % c.batch_size == 0
        and (may_add_steps or c.accumulation_steps == chosen.accumulation_steps)
        and not c.as_found
        and not c.pinned_modules
        and c.num_workers == chosen.num_workers  # the loader stays as it is when the precision goes down
        and c not in failed
    ]
    plans: list[FallbackPlan] = []
    for precision in LADDER[chosen.precision]:
        if precision in harmful:
            continue
        rivals = [c for c in fitting if c.precision == precision]
        if rivals:
            best = max(rivals, key=lambda c: speeds[c])
            plans.append(
                FallbackPlan.of(
                    best,
                    peak_memory_bytes=max(m.peak_memory_bytes for m in measured[best]),
                    samples_per_second=speeds[best],
                    slowdown=speeds[chosen] / speeds[best],
                )
            )
    return tuple(plans)
