"""What a run may step down to when its precision fails, and the measured plan for each."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from statistics import median
from typing import ClassVar

from msgspec.structs import replace

from autotune_amp.core.config import FallbackPlan
from autotune_amp.core.dimensions import Precision
from autotune_amp.core.outcome import Failure, Measurement, Record
from autotune_amp.core.setting import Setting
from autotune_amp.core.variants import COMPILE, FP8_RECIPE, VARIANTS
from autotune_amp.precision.modes import MODES
from autotune_amp.search import ranking
from autotune_amp.search.ledger import Ledger
from autotune_amp.search.planner import Planner
from autotune_amp.search.stages.confirm import is_runner_up_worth
from autotune_amp.trial.jobs import MEASURE_SECONDS, Check, Trial

MAX_FALLBACK_TRIES = 3


class Fallbacks:
    """Measures a plan for each precision with less to go wrong, at the effective batch size of each contender.

    The confirmation may turn the contenders round. The batch is halved and the accumulation doubled where it runs out
    of memory, if accumulation is offered; what was measured already is left. A precision that does harm is none to
    step down to.
    """

    is_exclusive: ClassVar[bool] = False

    def next(self, ledger: Ledger, planner: Planner) -> Trial | Check | None:
        """The trial of a plan that nobody measured, or the check that it waits for."""
        left = planner.before_confirmation(ledger)
        if not planner.may_try(ledger, left):
            return None
        chosen = ledger.finalists
        if chosen is None:
            return None
        contenders = chosen[:2] if is_runner_up_worth(ledger, planner, chosen) else chosen[:1]
        for contender in filter(None, contenders):
            for setting in missing_plans(ledger, contender):
                is_split = setting.accumulation_steps > contender.accumulation_steps
                if is_split and ledger.space.accumulation_withheld is None and ledger.accumulation is None:
                    return planner.accumulation_check(ledger)
                if not is_split or ledger.may_add_accumulation:
                    return planner.conditions.trial(
                        ledger,
                        setting,
                        purpose="fallback",
                        measure_seconds=min(MEASURE_SECONDS, left / 3),
                        deadline_seconds=left - planner.waiting_seconds(ledger),
                    )
        return None


def missing_plans(ledger: Ledger, contender: Setting) -> list[Setting]:
    """For each precision to step down to, what would be measured next for it. Pure."""
    harmful = {e.precision for e in ranking.exclusions(ledger.fidelity)}
    missing = []
    for precision in MODES[contender.precision].rungs_below:
        if precision in harmful or not any(c.precision == precision for c in ledger.space.candidates):
            continue
        if not _fits(contender, precision):
            continue
        for factor in (2**power for power in range(MAX_FALLBACK_TRIES) if contender.batch_size % 2**power == 0):
            setting = _stepped_down(contender, precision, factor)
            outcome = ledger.outcomes.get(setting)
            if outcome is None:
                missing.append(setting)
            if not (isinstance(outcome, Failure) and outcome.kind == "oom"):
                break
    return missing


def _stepped_down(setting: Setting, precision: Precision, factor: int) -> Setting:
    """With batches split by `factor`. What else the setting decides, such as the loader's workers, stays."""
    batch_size, num_steps = setting.batch_size // factor, setting.accumulation_steps * factor
    split = replace(setting, batch_size=batch_size, accumulation_steps=num_steps)
    bare = FP8_RECIPE.off(split)
    return replace(bare, precision=precision, as_found=False, pinned_modules=(), compile=COMPILE.default)


def _fits(setting: Setting, precision: Precision) -> bool:
    """Whether what is set up, which stays through a training, goes with the precision."""
    stepped_down = _stepped_down(setting, precision, 1)
    return all(v.fits(getattr(stepped_down, v.name), stepped_down) for v in VARIANTS)


def fallback_plans(
    records: Sequence[Record], chosen: Setting, harmful: Collection[Precision] = (), *, may_add_steps: bool
) -> tuple[FallbackPlan, ...]:
    """For each precision to step down to, the fastest candidate of the same effective batch that never failed.

    Its batches are whole parts of those that the run's loader goes on giving. Unless `may_add_steps`, it has no more
    accumulation steps than `chosen`. `harmful` precisions are none to step down to, nor is one with pins, which a plan
    cannot say. Plans are measured without compiling, which takes too long for what may never run; so is what their
    slowdown is held against, where it was.
    """
    failed, counted = ranking.failures(records), ranking.counted(records)
    measured = _measured(r for r in counted if not r.has_share)
    shares = _measured(r for r in counted if r.has_share)
    faster = 1.0  # all of the CPU than a share of it
    if chosen in shares:  # a ratio is one of alike
        faster = _speed(measured[chosen]) / _speed(shares[chosen]) if chosen in measured else 1.0
        measured = shares
    speeds = {c: _speed(ours) for c, ours in measured.items()}
    fitting = [
        c
        for c in measured
        if c == _stepped_down(chosen, c.precision, max(1, chosen.batch_size // c.batch_size))
        and c.effective_batch_size == chosen.effective_batch_size
        and (may_add_steps or c.accumulation_steps == chosen.accumulation_steps)
        and c.precision not in harmful
        and _fits(chosen, c.precision)
        and c not in failed
    ]
    alike = next(c for c in (replace(chosen, compile=COMPILE.default), chosen) if c in speeds)
    rivals = [[c for c in fitting if c.precision == precision] for precision in MODES[chosen.precision].rungs_below]
    return tuple(
        FallbackPlan.of(
            best,
            peak_memory_bytes=max(m.peak_memory_bytes for m in measured[best]),
            samples_per_second=faster * speeds[best],
            slowdown=speeds[alike] / speeds[best],
        )
        for best in (max(some, key=lambda c: speeds[c]) for some in rivals if some)
    )


def _measured(records: Iterable[Record]) -> dict[Setting, list[Measurement]]:
    found: dict[Setting, list[Measurement]] = {}
    for record in records:
        if isinstance(record.outcome, Measurement) and record.purpose not in ("plain", "one_rank"):  # no plan is run so
            found.setdefault(record.candidate, []).append(record.outcome)
    return found


def _speed(measurements: Sequence[Measurement]) -> float:
    return median(m.samples_per_second for m in measurements)
