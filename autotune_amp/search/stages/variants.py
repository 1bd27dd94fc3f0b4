"""Further dimensions: the stage that tries their values on the leader, the choice of values, and the report's rows.

The leader is the setting that would be recommended now, among those that a config can express. One dimension is changed
at a time, and the best value kept.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from msgspec.structs import replace

from autotune_amp.core.outcome import Failure, Measurement, Profiled, Record
from autotune_amp.core.recommendation import VariantRow
from autotune_amp.core.setting import Setting
from autotune_amp.dimensions import DIMENSIONS
from autotune_amp.dimensions.argument import Argument, arguments_of
from autotune_amp.dimensions.dimension import Dimension, Leader
from autotune_amp.search.ledger import Ledger
from autotune_amp.search.planner import Planner
from autotune_amp.search.ranking import MIN_GAIN, check_key, needs_check, throughput
from autotune_amp.search.stages import SearchJob, Stage
from autotune_amp.search.stages.checks import Checks
from autotune_amp.search.stages.explore import next_promising
from autotune_amp.search.stages.throughput_model import PRECISION_DEVIATION, VALUE_DEVIATION
from autotune_amp.trial.step_profile.breakdown import ProfileJob, break_down, max_speedups

PROFILE_SHARE = 0.05  # share of the remaining time that a profile of the winner may take
TRACE_SECONDS, NUM_STEPS_FORESEEN = 2.0, 8  # of a profile: seconds to write its trace; steps including the warm-up
# Deadline of a profile, as a multiple of its predicted seconds: 3.4 to 4 s for a GPT-2 on an H200, 8.5 for a Llama.
PROFILE_PATIENCE = 5.0
# Limit of the speed-up by further dimensions: 2.1 was the most in ten training runs on an H200 (studies/real_card).
MAX_SPEEDUP = 2.5
NO_DIFFERENCE = "no difference seen: the value may not reach the training"
# Expected gain from a normally distributed effect of mean 0, in standard deviations, if a negative one is not used.
_GAINED = 1 / math.sqrt(2 * math.pi)


@dataclass
class Variants(Stage):
    """Stage that tries values of further dimensions on the leader, and then checks the leader's fidelity.

    The check comes last, since each value may change the numerics. A profile of the leader's step comes first if it is
    short: it shows which dimensions can gain most.
    """

    checks: Checks

    def next(self, ledger: Ledger, planner: Planner) -> SearchJob | None:
        """Return the profile, else the next trial, else the next check, or None."""
        left_seconds, leader = planner.exploration_seconds(ledger), setting_to_profile(ledger)
        if leader is not None:
            step_seconds = min(m.step_seconds for m in ledger.measurements[leader])
            seconds = TRACE_SECONDS + planner.setup_seconds(ledger) + NUM_STEPS_FORESEEN * step_seconds
            if seconds < PROFILE_SHARE * left_seconds:
                trial = planner.job_defaults.trial(ledger, leader)
                return ProfileJob(device=trial.device, trial=trial, deadline_seconds=PROFILE_PATIENCE * seconds)
        return super().next(ledger, planner) or self.checks.next(ledger, planner)

    def next_setting(self, ledger: Ledger, planner: Planner, left_seconds: float) -> Setting | None:
        """Return the leader with another value, else a setting to measure again or at a neighbouring batch, or None if
        there is none or no time for a trial.
        """
        if not planner.has_time_for_trial(ledger, left_seconds):
            return None
        setting = next_setting(ledger, lambda c: is_worth_trying(ledger, planner, c))
        if setting is not None and setting.is_compiled and ledger is not ledger.actual:
            return None  # compiling takes tens of seconds: wait until all running jobs have ended
        if setting is None and ledger.objective != "memory":
            return next_promising(
                ledger, planner, ledger.throughputs(), left_seconds, tuple(neighbouring_batch_sizes(ledger))
            )
        return setting


def dimensions_by_worth(ledger: Ledger) -> list[Dimension[Any]]:
    """Return the dimensions in the order to try: by their largest possible gain per second of a trial."""
    gains = _max_speedups(ledger)

    def gain_per_second(dimension: Dimension[Any]) -> float:
        gain = min(gains.get(name, 1.0) for name in (dimension.name, *dimension.sets_also))
        return math.log(gain) / _least_seconds(ledger, dimension)

    return sorted(ledger.space.tried_on_leader, key=gain_per_second, reverse=True)


def _least_seconds(ledger: Ledger, dimension: Dimension[Any]) -> float:
    """Return the least seconds that a trial of a dimension's value takes."""
    # A command's run that was measured while it was described has a record without seconds.
    trials = [
        r for r in ledger.actual.trials if isinstance(o := r.outcome, Measurement) and r.seconds > o.first_step_seconds
    ]
    trial_seconds = min((r.seconds for r in trials), default=1.0)
    return trial_seconds + dimension.extra_seconds


def setting_to_profile(ledger: Ledger) -> Setting | None:
    """Return the leader if a profile of its step would help to order the dimensions to try, else None."""
    if "profile" not in ledger.space.checks or any(record.purpose == "profile" for record in ledger.records):
        return None
    leader = _leader(ledger)
    if leader is None or leader.has_variants or ledger.objective == "memory":
        return None
    dimensions = [
        dimension
        for dimension in ledger.space.tried_on_leader
        if dimension.removable
        for value in ledger.space.variants.get(dimension.name, ())
        if not _trials_of(ledger, dimension, value) and reason_not_to_try(ledger, dimension, value) is None
    ]
    return leader if dimensions else None


def _max_speedups(ledger: Ledger) -> dict[str, float]:
    """Return an upper bound of the speed-up by each dimension, from the profile; empty without one."""
    record = next((record for record in ledger.records if isinstance(record.outcome, Profiled)), None)
    if record is None or record.candidate not in ledger.measurements:
        return {}
    assert isinstance(record.outcome, Profiled)
    breakdown = break_down(ledger.measurements[record.candidate], record.outcome, None)
    return {} if breakdown is None or breakdown.note is not None else max_speedups(breakdown)


def next_setting(ledger: Ledger, is_worth: Callable[[Setting], bool] = lambda _: True) -> Setting | None:
    """Return the next setting to try, or None once none `is_worth` its seconds.

    It is the leader with a value that was not tried yet, or else with values that were faster on other settings.
    """
    leader = _leader(ledger)
    if leader is None:
        return None
    tried = {record.candidate for record in ledger.counted_trials}
    for dimension in dimensions_by_worth(ledger):
        for value in ledger.space.variants.get(dimension.name, ()):
            if _trials_of(ledger, dimension, value) or reason_not_to_try(ledger, dimension, value) is not None:
                continue
            setting = _at_larger_batch_if_memory_freed(ledger, dimension.on(leader, value))
            if setting not in tried and is_worth(setting):
                return setting
    together = itertools.chain(_combined_values(ledger, leader), _larger_batches_with_memory_freed(ledger, leader))
    return next((setting for setting in together if setting not in tried and is_worth(setting)), None)


def is_worth_trying(ledger: Ledger, planner: Planner, setting: Setting) -> bool:
    """Whether the leader with another value may gain enough for the seconds of its trial, compilation and check.

    Always true if the user named the dimensions to try, as by a placeholder in a command.
    """
    leader = _leader(ledger)
    if ledger.space.are_variants_named or leader is None or not ledger.is_by_throughput:
        return True
    if setting.arguments != leader.arguments:
        return True
    names = [d.name for d in ledger.space.tried_on_leader if d.read(setting) != d.read(leader)]
    max_speedup = min((gain for name, gain in _max_speedups(ledger).items() if name in names), default=math.inf)
    gain = min(
        _GAINED * (PRECISION_DEVIATION if setting.precision != leader.precision else VALUE_DEVIATION), max_speedup - 1
    )
    seconds = planner.trial_seconds(ledger, setting, min(m.step_seconds for m in ledger.measurements[leader]))
    if needs_check(setting, ledger.space) and check_key(setting) not in ledger.fidelity:
        seconds += planner.check_seconds(ledger)
    return gain > planner.min_gain(seconds)


def reason_not_to_try(ledger: Ledger, dimension: Dimension[Any], value: Any) -> str | None:
    """Return the reason not to try an available value on the leader, or None."""
    leader_setting = _leader(ledger)
    if leader_setting is None:
        return "no setting that a config can express is fast enough to overtake the baseline"
    setting = dimension.on(leader_setting, value)
    leader = Leader(
        setting=leader_setting,
        objective=ledger.objective,
        measurements=ledger.measurements,
        trials=ledger.counted_trials,
        values=ledger.space.variants,
        are_values_named=ledger.space.are_variants_named,
        num_steps=ledger.num_steps_with(leader_setting),
        num_workers=ledger.space.num_workers if leader_setting.num_workers is None else leader_setting.num_workers,
    )
    if leader.effect not in dimension.affects:
        return f"it has no effect on {leader.effect}"
    if setting.misfits:
        return f"it cannot be combined with {leader_setting.precision}, which is the fastest"
    active_dimensions = (other for other in DIMENSIONS if other.value_in(setting) is not None)
    reasons = (other.reason_against_setting(setting, leader) for other in active_dimensions)
    reason = next(filter(None, reasons), None) or dimension.reason_against(value, leader)
    if reason is None and dimension.frees_memory and leader.effect == "speed":
        is_memory_short = _next_batch_out_of_memory(ledger, leader_setting) is not None
        return None if is_memory_short else "it frees memory, and no larger batch ran out of it"
    return reason


def _leader(ledger: Ledger) -> Setting | None:
    """Return the leader, or None if it is too slow to overtake the baseline by any further dimension."""
    shortlist = ledger.shortlist
    if shortlist is None:
        return None
    leader = shortlist.runner_up if shortlist.winner.as_found else shortlist.winner
    baseline_merit, leader_merit = (
        ledger.measured_merits.get(c) if c is not None else None for c in (shortlist.baseline, leader)
    )
    if ledger.is_by_throughput and baseline_merit is not None and leader_merit is not None:
        is_hopeless = MAX_SPEEDUP * leader_merit.speed < baseline_merit.speed
        return None if is_hopeless else leader
    return leader


def _at_larger_batch_if_memory_freed(ledger: Ledger, setting: Setting) -> Setting:
    """Return `setting`, at the next larger batch if that ran out of memory and the setting frees memory."""
    if not _frees_memory(setting) or ledger.objective == "memory":
        return setting
    larger = _next_batch_out_of_memory(ledger, setting)
    return setting if larger is None else _with_batch_size_of(larger, setting)


def _frees_memory(setting: Setting) -> bool:
    return any(d.frees_memory and d.value_in(setting) is not None for d in DIMENSIONS)


def _next_batch_out_of_memory(ledger: Ledger, setting: Setting) -> Setting | None:
    """Return the candidate with the smallest batch larger than `setting`'s that cannot fit in memory, or None."""
    precisions = setting.precision, setting.autocast_precision
    oom_sizes = [c.batch_size for c, f in ledger.failures.items() if f.kind == "oom" and c.precision in precisions]
    larger = [c for c in _candidates_in_precision(ledger, setting) if c.batch_size > setting.batch_size]
    too_large = [c for c in larger if oom_sizes and c.batch_size >= min(oom_sizes)]
    return too_large[0] if too_large else None


def _combined_values(ledger: Ledger, leader: Setting) -> Iterator[Setting]:
    """Yield the leader with each value that was faster on another setting.

    On several devices values are tried at the same time, each by itself.
    """
    for dimension in dimensions_by_worth(ledger):
        leader_value = dimension.read(leader)
        for value in ledger.space.variants.get(dimension.name, ()):
            setting = _at_larger_batch_if_memory_freed(ledger, dimension.on(leader, value))
            if not setting.misfits and _is_faster(ledger, dimension, value, leader_value):
                yield setting


def _is_faster(ledger: Ledger, dimension: Dimension[Any], value: Any, other: Any) -> bool:
    """Whether trials with `value` were 3 % faster than the same setting with `other` at least once."""
    merits = ledger.measured_merits
    pairs = [(r.candidate, dimension.write(r.candidate, other)) for r in ledger.trials]
    return any(
        merits[c].speed > (1 + MIN_GAIN) * merits[rival].speed
        for c, rival in pairs
        if dimension.read(c) == value and c in merits and rival in merits
    )


def _larger_batches_with_memory_freed(ledger: Ledger, leader: Setting) -> Iterator[Setting]:
    """Yield the leader at the next larger batch, which ran out of memory, with each value of a command's argument that
    frees memory.
    """
    larger = _next_batch_out_of_memory(ledger, leader)
    if larger is None or ledger.objective == "memory":
        return
    for argument in arguments_of(ledger.space.argument_values):
        for value in ledger.space.variants[argument.name]:
            if _has_freed_memory(ledger, argument, value):
                yield _with_batch_size_of(larger, argument.on(leader, value))


def _has_freed_memory(ledger: Ledger, argument: Argument, value: str) -> bool:
    """Whether a trial with `value`, which is not ruled out, took 3 % less memory than the same setting with today's
    value at least once.
    """
    peaks = {setting: merit.peak_memory_bytes for setting, merit in ledger.merits.items()}
    pairs = [(setting, argument.write(setting, argument.default)) for setting in peaks]
    return any(
        peaks[setting] < (1 - MIN_GAIN) * peaks[plain]
        for setting, plain in pairs
        if argument.value_in(setting) == value and plain in peaks
    )


def neighbouring_batch_sizes(ledger: Ledger) -> Iterator[Setting]:
    """Yield the leader at the next larger and smaller batch size that were not tried with its further dimensions."""
    winner = _leader(ledger)
    if winner is None or not winner.has_variants:
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
        frees_memory = _frees_memory(winner) or winner.ordinary in ledger.failures
        if setting not in tried and (failure is None or frees_memory):
            yield setting


def _with_batch_size_of(other: Setting, setting: Setting) -> Setting:
    return replace(setting, batch_size=other.batch_size, accumulation_steps=other.accumulation_steps)


def _candidates_in_precision(ledger: Ledger, setting: Setting) -> list[Setting]:
    """Return the candidates of the setting's precision, ascending by batch size."""
    return [c for c in ledger.space.candidates if c.precision == setting.autocast_precision]


def _trials_of(ledger: Ledger, dimension: Dimension[Any], value: Any) -> list[Record]:
    trials = [r for r in ledger.counted_trials if r.purpose == "search" and r.candidate != ledger.space.baseline]
    return [r for r in trials if dimension.is_tried_in(r.candidate, value)]


# -- rows of the report ------------------------------------------------------------------------------------------------


def variant_rows(ledger: Ledger, chosen: Setting, *, is_budget_spent: bool) -> tuple[VariantRow, ...]:
    """Return a row for each value of each further dimension: its gain, or the reason that it was not tried."""
    table = []
    for dimension in dimensions_by_worth(ledger):
        name, space = dimension.name, ledger.space
        for value in space.variants.get(name, ()):
            is_chosen = dimension.value_in(chosen) == value
            table.append(_row(ledger, dimension, value, is_chosen=is_chosen, is_budget_spent=is_budget_spent))
        for value, reason in space.variants_left_out.get(name, {}).items():
            table.append(VariantRow(name=name, value=str(value), status="untried", reason=reason))
    return tuple(table)


def _row(
    ledger: Ledger, dimension: Dimension[Any], value: Any, *, is_chosen: bool, is_budget_spent: bool
) -> VariantRow:
    gain = _max_speedups(ledger).get(dimension.name)
    row = VariantRow(name=dimension.name, value=str(value), status="untried", max_speedup=gain)
    trials = _trials_of(ledger, dimension, value)
    if not trials:
        reason = reason_not_to_try(ledger, dimension, value)
        seconds = _least_seconds(ledger, dimension)
        at_least = f"a trial takes {seconds:.0f} s or more"
        untried_reason = f"the search ended before, and {at_least}: a larger --budget tries it"
        left_out = (
            f"{at_least}, which is more than it is likely to be worth: --try {dimension.name} tries it all the same"
        )
        return replace(
            row, reason=reason or (untried_reason if is_budget_spent or isinstance(dimension, Argument) else left_out)
        )
    record, outcome = trials[0], trials[0].outcome
    row = replace(row, setting=str(record.candidate))
    if isinstance(outcome, Failure):
        return replace(row, status=outcome.kind, reason=outcome.message)
    assert isinstance(outcome, Measurement)
    reference = _setting_without(ledger, record.candidate, dimension)
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
    if reference is None:
        return row
    reference_measurement = ledger.measurements[reference][-1]
    (low, high), (base_low, base_high) = (
        _per_sample(r, m) for r, m in ((record.candidate, outcome), (reference, reference_measurement))
    )
    has_tokens = None not in (outcome.tokens_per_second, reference_measurement.tokens_per_second)
    objective = ledger.objective if has_tokens else "speed"
    speedup = throughput(objective, outcome) / throughput(objective, reference_measurement)
    # Of the tokens in a sample, if tokens are compared, else 1.
    ratio = speedup * reference_measurement.samples_per_second / outcome.samples_per_second
    verdict = ledger.fidelity.get(check_key(record.candidate))
    is_equal = "numerics" not in dimension.affects or (verdict is not None and verdict.is_equal)
    if isinstance(dimension, Argument) and _is_without_effect(outcome, reference_measurement, is_equal=is_equal):
        row = replace(row, reason=NO_DIFFERENCE)
    return replace(
        row,
        beside=str(reference),
        speedup=speedup,
        speedup_interval=(ratio * base_low / high, ratio * base_high / low),
        memory_change_bytes=outcome.peak_memory_bytes - reference_measurement.peak_memory_bytes,
    )


def _is_without_effect(measured: Measurement, reference: Measurement, *, is_equal: bool) -> bool:
    """Whether a run with another value has the speed and the memory of `reference` within 3 %, and the same losses bit
    for bit. Where no losses were observed, `is_equal` says whether both compute the same numbers.
    """
    rates, peaks = (
        sorted(getattr(each, name) for each in (measured, reference))
        for name in ("samples_per_second", "peak_memory_bytes")
    )
    has_losses = bool(measured.first_losses or reference.first_losses)
    are_losses_equal = measured.first_losses == reference.first_losses if has_losses else is_equal
    return are_losses_equal and all(high < (1 + MIN_GAIN) * low for low, high in (rates, peaks))


def _per_sample(setting: Setting, measured: Measurement) -> tuple[float, float]:
    """Return the interval of the seconds per sample of one process."""
    low, high = measured.step_seconds_interval
    least = max(low, min(measured.raw_step_seconds))  # the interval may include 0 if steps differ a lot
    return least / setting.effective_batch_size, high / setting.effective_batch_size


def _setting_without(ledger: Ledger, setting: Setting, dimension: Dimension[Any]) -> Setting | None:
    """Return the setting to compare with: the same without the value, else the fastest without it at another batch."""
    plain = dimension.write(setting, dimension.default)
    if plain in ledger.measurements and dimension.is_without(plain, setting):
        return plain
    others = [other for other in ledger.speeds if dimension.is_without(other, setting)]
    return max(others, key=lambda other: ledger.speeds[other], default=None)
