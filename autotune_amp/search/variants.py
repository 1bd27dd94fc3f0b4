"""Values of further dimensions worth a trial on the setting that would win, and the report on each. Pure."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

from msgspec.structs import replace

from autotune_amp.core.outcome import Failure, Measurement, Profiled, Record
from autotune_amp.core.recommendation import VariantRow
from autotune_amp.core.setting import Setting
from autotune_amp.dimensions import DIMENSIONS, TRIED_ON_LEADER
from autotune_amp.dimensions.dimension import Dimension, Leader
from autotune_amp.search.ledger import Ledger
from autotune_amp.search.planner import Planner
from autotune_amp.search.ranking import PLATEAU, check_key, needs_check
from autotune_amp.search.stages.throughput_model import PRECISION_DEVIATION, VALUE_DEVIATION
from autotune_amp.trial.step_profile.breakdown import break_down, max_speedups

MAX_SPEEDUP = 2.5  # highest speed-up by further dimensions: 2.1 times in ten training runs on an H200 (studies/real_card)
# Expected gain from a normally distributed effect, in standard deviations, if a loss is not chosen.
_GAINED = 1 / math.sqrt(2 * math.pi)


def dimensions_by_worth(ledger: Ledger) -> list[Dimension[Any]]:
    """Return the dimensions in the order to try: by the gain that a profile leaves possible, per second of a trial."""
    gains = _max_speedups(ledger)

    def worth(dimension: Dimension[Any]) -> float:
        gain = min(gains.get(name, 1.0) for name in (dimension.name, *dimension.sets_also))
        return math.log(gain) / _least_seconds(ledger, dimension)

    return sorted(TRIED_ON_LEADER, key=worth, reverse=True)


def _least_seconds(ledger: Ledger, dimension: Dimension[Any]) -> float:
    """Return the least seconds that a trial of a dimension takes."""
    # A run that was measured already while describing a command has a record without time.
    ran = [
        r for r in ledger.actual.trials if isinstance(o := r.outcome, Measurement) and r.seconds > o.first_step_seconds
    ]
    trial_seconds = min((r.seconds for r in ran), default=1.0)
    return trial_seconds + dimension.extra_seconds


def setting_to_profile(ledger: Ledger) -> Setting | None:
    """Return the setting that would win if a profile of its step would help to order the variants, else None."""
    if "profile" not in ledger.space.checks or any(record.purpose == "profile" for record in ledger.records):
        return None
    leader = _leader(ledger)
    if leader is None or leader.active_variants or ledger.objective == "memory":
        return None
    worth = [
        dimension
        for dimension in TRIED_ON_LEADER
        if dimension.removable
        for value in ledger.space.variants.get(dimension.name, ())
        if not _trials_of(ledger, dimension, value) and why_not_worth(ledger, dimension, value) is None
    ]
    return leader if worth else None


def _max_speedups(ledger: Ledger) -> dict[str, float]:
    """Return the upper bound of the speed-up by dimension, from the profile; empty without one."""
    record = next((record for record in ledger.records if isinstance(record.outcome, Profiled)), None)
    if record is None or record.candidate not in ledger.measurements:
        return {}
    assert isinstance(record.outcome, Profiled)
    found = break_down(ledger.measurements[record.candidate], record.outcome, None)
    return {} if found is None or found.note is not None else max_speedups(found)


def next_setting(ledger: Ledger, is_worth: Callable[[Setting], bool] = lambda _: True) -> Setting | None:
    """Return the next setting to try: the leader with a value that was not tried yet, then several good values
    together.

    Return None once nothing `is_worth` its seconds. The leader is the setting that would win among those that a config
    can express.
    """
    leader = _leader(ledger)
    if leader is None:
        return None
    tried = {record.candidate for record in ledger.counted_trials}
    for dimension in dimensions_by_worth(ledger):
        for value in ledger.space.variants.get(dimension.name, ()):
            if _trials_of(ledger, dimension, value) or why_not_worth(ledger, dimension, value) is not None:
                continue
            setting = _at_larger_batch_if_memory_freed(ledger, dimension.on(leader, value))
            if setting not in tried and is_worth(setting):
                return setting
    together = _combined_values(ledger, leader)
    return next((setting for setting in together if setting not in tried and is_worth(setting)), None)


def is_worth_trying(ledger: Ledger, planner: Planner, setting: Setting) -> bool:
    """Return whether a value of a further dimension may gain enough for the seconds of its trial, compilation and
    check.

    A value that the user named is always tried.
    """
    leader = _leader(ledger)
    if ledger.space.are_variants_named or leader is None or ledger.objective != "speed":
        return True
    names = [d.name for d in TRIED_ON_LEADER if getattr(setting, d.name) != getattr(leader, d.name)]
    most = min((gain for name, gain in _max_speedups(ledger).items() if name in names), default=math.inf)
    gain = min(_GAINED * (PRECISION_DEVIATION if setting.precision != leader.precision else VALUE_DEVIATION), most - 1)
    seconds = planner.trial_seconds(ledger, min(m.step_seconds for m in ledger.measurements[leader]))
    if setting.is_compiled:
        seconds += planner.compile_seconds(ledger)
    if needs_check(setting, ledger.space) and check_key(setting) not in ledger.fidelity:
        seconds += planner.check_seconds(ledger)
    return gain > planner.least_gain(seconds)


def why_not_worth(ledger: Ledger, dimension: Dimension[Any], value: Any) -> str | None:
    """Return the reason that an available value is not worth a trial on the leader, or None if it is."""
    winner = _leader(ledger)
    if winner is None:
        return "nothing leads that a config can express and that could still overtake what runs today"
    asked = dimension.on(winner, value)
    leader = Leader(
        setting=winner,
        objective=ledger.objective,
        measurements=ledger.measurements,
        trials=ledger.counted_trials,
        values=ledger.space.variants,
        are_values_named=ledger.space.are_variants_named,
        num_steps=ledger.num_steps,
    )
    if leader.effect not in dimension.affects:
        return f"it does not bear on {leader.effect}"
    if asked.misfits:
        return f"it does not go with {winner.precision}, which is the fastest"
    used = (other for other in DIMENSIONS if other.value_in(asked) is not None)
    reasons = (other.reason_against_setting(asked, leader) for other in used)
    reason = next(filter(None, reasons), None) or dimension.reason_against(value, leader)
    if reason is None and dimension.frees_memory and leader.effect == "speed":
        is_memory_short = _next_batch_out_of_memory(ledger, winner) is not None
        return None if is_memory_short else "it frees memory, and there is no larger batch that lacks some"
    return reason


def _leader(ledger: Ledger) -> Setting | None:
    """Return the setting that would win among those that a config can express, or None if it is hopelessly slow."""
    chosen = ledger.shortlist
    if chosen is None:
        return None
    leader = chosen.runner_up if chosen.winner.as_found else chosen.winner
    today, ours = (ledger.measured_merits.get(c) if c is not None else None for c in (chosen.baseline, leader))
    if ledger.objective == "speed" and today is not None and ours is not None:
        is_hopeless = MAX_SPEEDUP * ours.samples_per_second < today.samples_per_second
        return None if is_hopeless else leader
    return leader


def _at_larger_batch_if_memory_freed(ledger: Ledger, setting: Setting) -> Setting:
    """Return `setting`, moved to the next larger batch, which lacked memory, if it frees memory for speed."""
    if not _frees_memory(setting) or ledger.objective == "memory":
        return setting
    larger = _next_batch_out_of_memory(ledger, setting)
    return setting if larger is None else _with_batch_size_of(larger, setting)


def _frees_memory(setting: Setting) -> bool:
    return any(d.frees_memory and d.value_in(setting) is not None for d in DIMENSIONS)


def _next_batch_out_of_memory(ledger: Ledger, setting: Setting) -> Setting | None:
    alike = setting.precision, setting.autocast_precision
    ran_out = [c.batch_size for c, f in ledger.failures.items() if f.kind == "oom" and c.precision in alike]
    larger = [c for c in _candidates_in_precision(ledger, setting) if c.batch_size > setting.batch_size]
    beyond = [c for c in larger if ran_out and c.batch_size >= min(ran_out)]
    return beyond[0] if beyond else None


def _combined_values(ledger: Ledger, leader: Setting) -> Iterator[Setting]:
    """Yield the leader with each value that was faster on another setting: on several devices values are tried at the
    same time, each on its own.
    """
    for dimension in dimensions_by_worth(ledger):
        own = getattr(leader, dimension.name)
        for value in ledger.space.variants.get(dimension.name, ()):
            setting = _at_larger_batch_if_memory_freed(ledger, dimension.on(leader, value))
            if not setting.misfits and _is_faster(ledger, dimension, value, own):
                yield setting


def _is_faster(ledger: Ledger, dimension: Dimension[Any], value: Any, other: Any) -> bool:
    found = ledger.measured_merits
    pairs = [(r.candidate, replace(r.candidate, **{dimension.name: other})) for r in ledger.trials]
    return any(
        found[c].samples_per_second > (1 + PLATEAU) * found[rival].samples_per_second
        for c, rival in pairs
        if getattr(c, dimension.name) == value and c in found and rival in found
    )


def neighbouring_batch_sizes(ledger: Ledger) -> Iterator[Setting]:
    """Yield the leader with its further dimensions at the next larger and smaller batch size, unless tried already."""
    winner = _leader(ledger)
    if winner is None or not winner.active_variants:
        return
    tried = {record.candidate for record in ledger.counted_trials}
    sizes = _candidates_in_precision(ledger, winner)
    if winner.is_compiled:  # compiling takes tens of seconds, and a compiled winner gains most at a larger batch
        sizes = [c for c in sizes if c.batch_size >= winner.batch_size]
    smaller = [c for c in sizes if c.batch_size < winner.batch_size][-1:]
    larger = [c for c in sizes if c.batch_size > winner.batch_size][:1]
    for neighbour in (*larger, *smaller):
        failure = ledger.failures.get(neighbour)
        setting = _with_batch_size_of(neighbour, winner)
        if setting not in tried and (failure is None or _frees_memory(winner)):
            yield setting


def _with_batch_size_of(other: Setting, setting: Setting) -> Setting:
    return replace(setting, batch_size=other.batch_size, accumulation_steps=other.accumulation_steps)


def _candidates_in_precision(ledger: Ledger, setting: Setting) -> list[Setting]:
    """Return the candidates of the setting's precision, ascending by batch size."""
    return [c for c in ledger.space.candidates if c.precision == setting.autocast_precision]


def _trials_of(ledger: Ledger, dimension: Dimension[Any], value: Any) -> list[Record]:
    ours = [r for r in ledger.counted_trials if r.purpose == "search" and r.candidate != ledger.space.baseline]
    return [r for r in ours if dimension.is_tried_in(r.candidate, value)]


# -- report on each ----------------------------------------------------------------------------------------------------


def rows(ledger: Ledger, chosen: Setting, *, is_budget_spent: bool) -> tuple[VariantRow, ...]:
    """Return a row for each value of each further dimension: its gain over the setting without it, or why not tried."""
    found = []
    for dimension in dimensions_by_worth(ledger):
        name, space = dimension.name, ledger.space
        for value in space.variants.get(name, ()):
            is_chosen = dimension.value_in(chosen) == value
            found.append(_row(ledger, dimension, value, is_chosen=is_chosen, is_budget_spent=is_budget_spent))
        for value, reason in space.variants_left_out.get(name, {}).items():
            found.append(VariantRow(name=name, value=str(value), status="untried", reason=reason))
    return tuple(found)


def _row(
    ledger: Ledger, dimension: Dimension[Any], value: Any, *, is_chosen: bool, is_budget_spent: bool
) -> VariantRow:
    gain = _max_speedups(ledger).get(dimension.name)
    row = VariantRow(name=dimension.name, value=str(value), status="untried", max_speedup=gain)
    trials = _trials_of(ledger, dimension, value)
    if not trials:
        reason = why_not_worth(ledger, dimension, value)
        seconds = _least_seconds(ledger, dimension)
        at_least = f"a trial takes {seconds:.0f} s or more"
        spent = f"the search ended before, and {at_least}: a larger --budget tries it"
        left_out = (
            f"{at_least}, which is more than it is likely to be worth: --try {dimension.name} tries it all the same"
        )
        return replace(row, reason=reason or (spent if is_budget_spent else left_out))
    record, outcome = trials[0], trials[0].outcome
    row = replace(row, setting=str(record.candidate))
    if isinstance(outcome, Failure):
        return replace(row, status=outcome.kind, reason=outcome.message)
    assert isinstance(outcome, Measurement)
    without = _setting_without(ledger, record.candidate, dimension)
    row = replace(
        row,
        status="chosen" if is_chosen else "tried",
        first_step_seconds=outcome.first_step_seconds,
        num_graph_breaks=outcome.num_graph_breaks,
    )
    if record.candidate in ledger.ruled_out:
        row = replace(row, status="excluded", reason=ledger.ruled_out[record.candidate])
    if (num_steps := ledger.break_even_steps(record.candidate)) is not None:
        row = replace(row, break_even_steps=None if math.isinf(num_steps) else num_steps)
    if without is None:
        return row
    base = ledger.measurements[without][-1]
    (low, high), (base_low, base_high) = (_per_sample(r, m) for r, m in ((record.candidate, outcome), (without, base)))
    return replace(
        row,
        beside=str(without),
        speedup=outcome.samples_per_second / base.samples_per_second,
        speedup_interval=(base_low / high, base_high / low),
        memory_change_bytes=outcome.peak_memory_bytes - base.peak_memory_bytes,
    )


def _per_sample(setting: Setting, measured: Measurement) -> tuple[float, float]:
    """Return the interval of the seconds per sample within a process."""
    low, high = measured.step_seconds_interval
    least = max(low, min(measured.raw_step_seconds))  # the interval may reach below 0 if steps differ a lot
    return least / setting.effective_batch_size, high / setting.effective_batch_size


def _setting_without(ledger: Ledger, setting: Setting, dimension: Dimension[Any]) -> Setting | None:
    """Return the setting that a variant is compared with: the same without it, else the fastest at another batch."""
    plain = replace(setting, **{dimension.name: dimension.default})
    if plain in ledger.measurements and dimension.is_without(plain, setting):
        return plain
    others = [other for other in ledger.speeds if dimension.is_without(other, setting)]
    return max(others, key=lambda other: ledger.speeds[other], default=None)
