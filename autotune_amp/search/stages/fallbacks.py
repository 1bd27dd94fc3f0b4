"""Fallback plans for each precision that a training run may step down to: their measurement and their choice."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from statistics import median

from msgspec.structs import replace

from autotune_amp.core.config import FallbackPlan
from autotune_amp.core.outcome import Failure, Measurement, Record
from autotune_amp.core.precisions import Precision
from autotune_amp.core.setting import Setting
from autotune_amp.dimensions import fallback_setting
from autotune_amp.precision.modes import MODES
from autotune_amp.search import ranking
from autotune_amp.search.ledger import Ledger
from autotune_amp.search.planner import Planner
from autotune_amp.search.stages import Stage
from autotune_amp.search.stages.confirm import is_runner_up_worth
from autotune_amp.trial.jobs import MEASURE_SECONDS, Check, Trial

MAX_FALLBACK_TRIES = 3


class Fallbacks(Stage):
    """Stage that measures a plan for each safer precision, at the effective batch size of each contender.

    Both contenders are covered, since the confirmation may reverse their order. On OOM the batch size is halved and the
    accumulation steps doubled, if accumulation is allowed. Measured settings are not repeated. A precision that a check
    found unfaithful is never a fallback.
    """

    def next(self, ledger: Ledger, planner: Planner) -> Trial | Check | None:
        """Return the trial of an unmeasured plan, or the accumulation check that it depends on, or None."""
        left_seconds = planner.seconds_before_confirmation(ledger)
        if not planner.has_time_for_trial(ledger, left_seconds):
            return None
        shortlist = ledger.final_shortlist
        if shortlist is None:
            return None
        contenders = shortlist[:2] if is_runner_up_worth(ledger, planner, shortlist) else shortlist[:1]
        for contender in filter(None, contenders):
            for setting in missing_plans(ledger, contender):
                is_split = setting.accumulation_steps > contender.accumulation_steps
                is_possible = "accumulation" in ledger.space.checks and ledger.space.accumulation_withheld is None
                if is_split and is_possible and ledger.accumulation is None:
                    return planner.accumulation_check(ledger)
                if not is_split or ledger.is_accumulation_allowed:
                    return planner.job_defaults.trial(
                        ledger,
                        setting,
                        purpose="fallback",
                        measure_seconds=min(MEASURE_SECONDS, left_seconds / 3),
                        deadline_seconds=left_seconds - planner.waiting_seconds(ledger),
                    )
        return None


def missing_plans(ledger: Ledger, contender: Setting) -> list[Setting]:
    """Return the next setting to measure for each precision that `contender` may step down to and that has no plan.
    Pure.
    """
    missing = []
    for precision in fallback_precisions(ledger, contender):
        for factor in (2**power for power in range(MAX_FALLBACK_TRIES) if contender.batch_size % 2**power == 0):
            setting = _stepped_down(contender, precision, factor)
            outcome = ledger.outcomes.get(setting)
            if outcome is None:
                missing.append(setting)
            if not (isinstance(outcome, Failure) and outcome.kind == "oom"):
                break
    return missing


def fallback_precisions(ledger: Ledger, setting: Setting) -> list[Precision]:
    """Return the precisions that `setting` may step down to: those of the space that no check found unfaithful, and
    that its other dimensions are compatible with.
    """
    harmful = {e.precision for e in ranking.exclusions(ledger.fidelity)}
    possible = {c.precision for c in ledger.space.candidates} - harmful
    return [p for p in MODES[setting.precision].rungs_below if p in possible and _is_compatible(setting, p)]


def _stepped_down(setting: Setting, precision: Precision, factor: int) -> Setting:
    """Return `setting` in `precision`, uncompiled and without pinned modules.

    Its batch size is divided by `factor`, its accumulation steps multiplied. Other dimensions, such as loader workers,
    stay.
    """
    batch_size, num_steps = setting.batch_size // factor, setting.accumulation_steps * factor
    split = replace(setting, batch_size=batch_size, accumulation_steps=num_steps)
    bare = fallback_setting(split.without_fp8)
    return replace(bare, precision=precision, as_found=False, pinned_modules=())


def _is_compatible(setting: Setting, precision: Precision) -> bool:
    """Whether the dimensions of `setting` that a fallback keeps are compatible with `precision`."""
    return not _stepped_down(setting, precision, 1).misfits


def fallback_plans(
    records: Sequence[Record], chosen: Setting, harmful: Collection[Precision] = (), *, is_splitting_allowed: bool
) -> tuple[FallbackPlan, ...]:
    """Return a plan for each precision to step down to: the fastest measured setting that never failed.

    It has the effective batch size of `chosen`, and its batch size divides that of `chosen`, since the run's data
    loader keeps yielding the same batches. Unless `is_splitting_allowed`, it has no more accumulation steps than
    `chosen`. `harmful` precisions are left out, and so are settings with pinned modules, which a plan cannot express.
    Plans are measured without compiling, which takes too long for a setting that may never run; their slowdown is
    relative to `chosen` without compiling, if that was measured.
    """
    failed, counted = ranking.failures(records), ranking.without_lost_rounds(records)
    measured = _measurements_by_setting(counted)
    speeds = {c: median(m.samples_per_second for m in measurements) for c, measurements in measured.items()}
    compatible = [
        c
        for c in measured
        if c == _stepped_down(chosen, c.precision, max(1, chosen.batch_size // c.batch_size))
        and c.effective_batch_size == chosen.effective_batch_size
        and (is_splitting_allowed or c.accumulation_steps == chosen.accumulation_steps)
        and c.precision not in harmful
        and _is_compatible(chosen, c.precision)
        and c not in failed
    ]
    reference = next(c for c in (fallback_setting(chosen), chosen) if c in speeds)
    settings_by_precision = [
        [c for c in compatible if c.precision == precision] for precision in MODES[chosen.precision].rungs_below
    ]
    return tuple(
        FallbackPlan.of(
            best,
            peak_memory_bytes=max(m.peak_memory_bytes for m in measured[best]),
            samples_per_second=speeds[best],
            slowdown=speeds[reference] / speeds[best],
        )
        for best in (max(settings, key=lambda c: speeds[c]) for settings in settings_by_precision if settings)
    )


def _measurements_by_setting(records: Iterable[Record]) -> dict[Setting, list[Measurement]]:
    measurements: dict[Setting, list[Measurement]] = {}
    for record in records:
        has_other_conditions = record.purpose in ("plain", "one_rank")
        if isinstance(record.outcome, Measurement) and not has_other_conditions:
            measurements.setdefault(record.candidate, []).append(record.outcome)
    return measurements
