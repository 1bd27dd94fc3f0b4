"""Ranking of settings from the records of a search: their runs, failures, fidelity verdicts, and order. Pure.

An unfaithful setting is excluded. Unchecked settings rank after fp32 and the faithful ones, doubtful ones last. Among
the others `rank_for` decides by the objective. Speed: among settings within 3 % of the fastest (`PLATEAU`), a decided
verdict ranks before an undecided one, then the precision with the fewest run-time risks, then the smallest batch
(`dimensions.risks`). Tokens: as speed, with tokens that are no padding in place of samples. Memory: the lowest peak
among settings no slower than the baseline; peaks within 2 % count as equal, and speed decides. Energy: the fewest
joules per sample, and within 3 % the setting with the fewest risks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from statistics import median
from typing import NamedTuple

import msgspec
from msgspec.structs import replace

from autotune_amp.core.evidence import Objective
from autotune_amp.core.hardware import MachineLoad
from autotune_amp.core.outcome import (
    PRECISION_FAILURE_KINDS,
    Accumulation,
    Failure,
    Fidelity,
    LaterVerdict,
    Measurement,
    Record,
    Verdict,
)
from autotune_amp.core.recommendation import Exclusion
from autotune_amp.core.setting import Setting
from autotune_amp.core.text import sentence
from autotune_amp.dimensions import NUMERIC, numerics_of, risks
from autotune_amp.search.space import SAME_MEMORY_SHARE, Space
from autotune_amp.trial.failures import suggested_fix

# Three shares of a speed, each as large as the differences between processes (studies/README.md, Timing).
PLATEAU = 0.03  # settings that are slower than the fastest by no more are as good: risks decide
MIN_GAIN = 0.03  # gain from which on a setting, a variant, more workers or a larger batch is worth a change
SPEED_ERROR = 0.03  # by which the lead of one setting over another may be wrong
MAX_DATA_SHARE = 0.10  # above this share of a step spent waiting for data, loading limits the speed (studies/README.md)
MIN_COMPUTING_SHARE = 0.02  # lower bound of the share of a step spent computing, which speeds are divided by

BEFORE_CONFIRMATION = ("search", "fallback")  # purposes of the trials that decide which settings are confirmed


def is_trial(record: Record) -> bool:
    """Whether a record is of a trial rather than a check or profile."""
    return record.purpose not in ("fidelity", "calibration", "accumulation", "profile")


def failures(records: Sequence[Record]) -> dict[Setting, Failure]:
    """Return the first failure that counts for each candidate that has one.

    These do not count: a confirmation cut off by the budget; a run without the recommended environment, on one rank, or
    at a larger effective batch; a search trial that timed out although another trial of its candidate did not (the
    machine stalled); a first crash, since anybody may kill a process; and a first process that was still loading.
    Failures of checks are handled by `fidelity_verdicts`, `accumulation_result` and `loss_scales`.
    """
    measured_settings = {r.candidate for r in records if r.purpose == "search" and isinstance(r.outcome, Measurement)}
    failures_by_setting: dict[Setting, Failure] = {}
    loaded_too_long = set[Setting]()
    for record in without_first_crashes([r for r in records if is_trial(r)]):
        failure, purpose = record.outcome, record.purpose
        if not isinstance(failure, Failure) or purpose in ("plain", "one_rank", "outlook"):
            continue
        if failure.is_loading and record.candidate not in loaded_too_long:
            loaded_too_long.add(record.candidate)
            continue
        is_stalled = purpose == "confirm" or (purpose == "search" and record.candidate in measured_settings)
        if failure.kind != "timeout" or not is_stalled:
            failures_by_setting.setdefault(record.candidate, failure)
    return failures_by_setting


def without_first_crashes(records: Iterable[Record]) -> list[Record]:
    """Return the records without each candidate's first crash: anybody may kill a process, so it is run again."""
    crashed, kept = set[Setting](), []
    for record in records:
        is_crash = isinstance(record.outcome, Failure) and record.outcome.kind == "crash"
        if not is_crash or record.candidate in crashed:
            kept.append(record)
        elif is_crash:
            crashed.add(record.candidate)
    return kept


class SettingRuns(msgspec.Struct, frozen=True, kw_only=True):
    """Processes that measured one candidate in one environment.

    `rounds` are the confirmation rounds, one for each measurement; empty for a trial of the search. `loads` are the
    loads of the machine by other processes, where measured. `failure` is the reason that there is no measurement; None
    if there is one or the candidate never ran. `is_beside_others`: other jobs of the search ran at the same time.
    `objective` says what the speeds are of (see `throughput`).
    """

    candidate: Setting
    measurements: tuple[Measurement, ...] = ()
    rounds: tuple[int, ...] = ()
    loads: tuple[MachineLoad, ...] = ()
    failure: Failure | None = None
    is_beside_others: bool = False
    objective: Objective = "speed"

    @classmethod
    def of(cls, candidate: Setting, records: Sequence[Record], *, are_confirming: bool = False) -> SettingRuns:
        """Return the runs in `records`, all of which are of the candidate."""
        measured = [(r, r.outcome) for r in records if isinstance(r.outcome, Measurement)]
        return cls(
            candidate=candidate,
            measurements=tuple(outcome for _, outcome in measured),
            rounds=tuple(r.round or 0 for r, _ in measured) if are_confirming else (),
            loads=tuple(r.load for r, _ in measured if r.load is not None),
            failure=None if measured else failures(records).get(candidate),
            is_beside_others=any(r.num_beside for r, _ in measured),
        )

    @property
    def speeds(self) -> list[float]:
        """Return the throughput of each process."""
        return [throughput(self.objective, m) for m in self.measurements]

    @property
    def speed(self) -> float:
        """Return the median of the processes' throughput."""
        return median(self.speeds)

    @property
    def num_confirming(self) -> int:
        """Return the number of confirmation processes."""
        return len(self.rounds)


def without_lost_rounds(records: Sequence[Record]) -> list[Record]:
    """Return the records without confirmation runs of rounds that were repeated because their slot was lost.

    Of each round, the slot with the most runs is kept, or the last of several with equally many.
    """
    num_runs = Counter((r.round, r.slot) for r in records)
    slots: dict[int | None, str | None] = {}
    for r in records:
        if r.round not in slots or num_runs[r.round, r.slot] >= num_runs[r.round, slots[r.round]]:
            slots[r.round] = r.slot
    return [r for r in records if r.round is None or r.slot == slots[r.round]]


def confirming_records(records: Sequence[Record]) -> list[Record]:
    """Return the records of confirmation runs, of each round those of the last session that ran it.

    The speeds of one session are comparable. A resumed search may run on another day, when the machine is faster or
    slower.
    """
    confirming = [r for r in records if is_confirming(r)]
    sessions = {r.round: r.session for r in confirming}  # the last record of each round decides
    return without_lost_rounds([r for r in confirming if r.session == sessions[r.round]])


def confirm_runs(records: Sequence[Record], candidate: Setting, environment: Mapping[str, str]) -> SettingRuns:
    """Return the confirmation processes of a candidate in exactly this environment."""
    runs = [r for r in confirming_records(records) if r.candidate == candidate and r.environment == environment]
    return SettingRuns.of(candidate, runs, are_confirming=True)


def is_confirming(record: Record) -> bool:
    """Whether a record is of a confirmation process, or of a trial of a command, which counts as one."""
    outcome = record.outcome
    was_cut = isinstance(outcome, Measurement) and outcome.was_cut
    return record.purpose == "confirm" or (record.purpose == "search" and record.round is not None and not was_cut)


def best_runs(records: Sequence[Record], candidate: Setting, environment: Mapping[str, str]) -> SettingRuns:
    """Return the confirmation processes in this environment, else the candidate's last trial of the search."""
    confirmed = confirm_runs(records, candidate, environment)
    if confirmed.measurements or confirmed.failure:
        return confirmed
    trials = [r for r in records if r.candidate == candidate and r.purpose in BEFORE_CONFIRMATION]
    return SettingRuns.of(candidate, [r for r in trials if isinstance(r.outcome, Measurement)][-1:] or trials)


def were_processes_shared(records: Sequence[Record]) -> bool:
    """Whether the confirmation measured several settings in the same process, one after the other."""
    return any(r.round is not None and r.start_seconds == 0.0 and isinstance(r.outcome, Measurement) for r in records)


def data_share(measured: Measurement) -> float:
    """Return the share of a step spent waiting for data, at most 1.

    Threads that load ahead wait while the steps go on, so that their waits may add up to more than a step.
    """
    return min(1.0, measured.data_seconds / measured.step_seconds)


def speed_without_wait(speed: float, share: float) -> float:
    """Return the speed of steps that do not wait for data, given their speed and the share that they wait."""
    return speed / max(MIN_COMPUTING_SHARE, 1 - share)


def is_limited_by_data(records: Sequence[Record]) -> bool:
    """Whether loading data limits the speed of any candidate measured with the user's own number of workers."""
    outcomes = [r.outcome for r in records if r.purpose == "search" and r.candidate.num_workers is None]
    return any(isinstance(o, Measurement) and not o.was_cut and data_share(o) > MAX_DATA_SHARE for o in outcomes)


def check_key(candidate: Setting) -> Setting:
    """Return the key of a candidate's fidelity check: a setting with its numerics at batch size 1.

    A verdict holds at every batch size. fp32 with the user's own flags counts as TF32, since parts of it may use TF32.
    """
    precision = "tf32" if candidate.as_found and candidate.precision == "fp32" else candidate.precision
    return replace(numerics_of(candidate), precision=precision, batch_size=1, accumulation_steps=1)


def needs_check(candidate: Setting, space: Space) -> bool:
    """Whether a candidate needs a fidelity check: all but strict fp32 do, and that too with low-precision weights."""
    key = check_key(candidate)
    return key.precision != "fp32" or not key.is_ordinary or space.weights in ("bf16", "fp16")


def is_checkable(candidate: Setting, space: Space) -> bool:
    """Whether a fidelity check is needed and possible.

    It is impossible for the user's own flags on a device without TF32, where they may change more than TF32.
    """
    return (
        "fidelity" in space.checks
        and needs_check(candidate, space)
        and (check_key(candidate).precision != "tf32" or space.has_tf32)
    )


def fidelity_verdicts(records: Sequence[Record]) -> dict[Setting, Fidelity]:
    """Return the verdict of each check, including failed ones, by `check_key`.

    It is the latest on initial weights, or that on trained weights if it is *unfaithful*.

    A *doubtful* verdict on trained weights does not replace the first: once a model has nearly learned its few samples,
    there is little noise between batches to compare rounding with, and a faithful setting may look doubtful
    (studies/fidelity). As for trials, only a second crash counts.
    """
    verdicts = [
        (check_key(r.candidate), r.outcome if isinstance(r.outcome, Fidelity) else _fidelity_of_failed_check(r))
        for r in without_first_crashes(r for r in records if r.purpose == "fidelity")
    ]
    verdict_by_key: dict[Setting, Fidelity] = {}
    for key, fidelity in sorted(verdicts, key=lambda verdict: verdict[1].num_steps_before > 0):
        if fidelity.num_steps_before and fidelity.verdict != "unfaithful":
            later = LaterVerdict(num_steps=fidelity.num_steps_before, verdict=fidelity.verdict, reason=fidelity.reason)
            fidelity = replace(verdict_by_key[key], later=later)
        verdict_by_key[key] = fidelity
    return verdict_by_key


def accumulation_result(records: Sequence[Record]) -> Accumulation | None:
    """Return the result of the accumulation check, *unchecked* if it did not finish; None if it was not run."""
    record = next((r for r in reversed(records) if r.purpose == "accumulation"), None)
    if record is None:
        return None
    outcome = record.outcome
    if isinstance(outcome, Accumulation):
        return outcome
    assert isinstance(outcome, Failure)
    return Accumulation(
        verdict="unchecked",
        reason=sentence(f"Accumulation is unchecked: the check failed: {outcome.kind}: {outcome.message}"),
        next_step=_next_step(outcome),
        batch_size=record.candidate.batch_size,
        num_micro_batches=0,
        seconds=record.seconds,
    )


def verdict_on(candidate: Setting, space: Space, fidelity: Mapping[Setting, Fidelity]) -> Fidelity | None:
    """Return the fidelity verdict on a candidate, *unchecked* without a check; None for fp32, the reference."""
    if not needs_check(candidate, space):
        return None
    reason_and_next_step = (
        "the search had no time for its check, or expected another answer",
        "Give a larger --budget, or check it with `autotune-amp fidelity` (`check_fidelity` in Python).",
    )
    if not is_checkable(candidate, space):
        reason_and_next_step = (
            "the flags set by your own code cannot be checked on this device",
            "Name the precision that you train in, as in --baseline fp32:32.",
        )
    return fidelity.get(check_key(candidate)) or _fidelity_without_check(candidate, "unchecked", *reason_and_next_step)


def unfaithful_reason(fidelity: Mapping[Setting, Fidelity], candidate: Setting) -> str | None:
    """Return the reason if the candidate's verdict is *unfaithful*, else None."""
    verdict = fidelity.get(check_key(candidate))
    return verdict.reason.rstrip(".") if verdict is not None and verdict.verdict == "unfaithful" else None


UNDECIDED_TIER = 1
_TIERS: dict[Verdict, int] = {"undecided": UNDECIDED_TIER, "unchecked": 2, "doubtful": 3, "unfaithful": 4}
LAST_TIER = max(_TIERS.values())


def tier(verdict: Fidelity | None) -> int:
    """Return the tier of a setting by its verdict, which is None for fp32. A lower tier ranks first.

    Tier 0 holds fp32 and faithful settings, tier 1 undecided ones, which rank after tier 0 only at equal speed. Then
    come unchecked, doubtful and unfaithful settings.
    """
    return 0 if verdict is None else _TIERS.get(verdict.verdict, 0)


def best_tier(tiers: Iterable[int]) -> int:
    """Return the last tier that is as good as the best of these: faithful and undecided settings count as one."""
    return max(UNDECIDED_TIER, min(tiers, default=0))


def contenders(
    merits: Mapping[Setting, Merit], tiers: Mapping[Setting, int], baseline: Setting
) -> dict[Setting, Merit]:
    """Return the settings that may replace the baseline: those that a config can express, in no later tier than the
    baseline. Undecided ones are included.
    """
    last_tier = max(best_tier(tiers.values()), tiers.get(baseline, 0))
    return {c: merit for c, merit in merits.items() if tiers[c] <= last_tier and not c.as_found}


def exclusions(fidelity: Mapping[Setting, Fidelity]) -> tuple[Exclusion, ...]:
    """Return the precisions with an *unfaithful* verdict, excluded at every batch size without pinned modules."""
    return tuple(
        Exclusion(precision=key.precision, batch_size=None, reason=reason)
        for key in fidelity
        if key.is_ordinary and (reason := unfaithful_reason(fidelity, key)) is not None
    )


def _next_step(failure: Failure) -> str:
    """Return the next step for a user whose check failed."""
    if failure.kind == "timeout":
        return "Give a larger --budget."
    return suggested_fix(failure) or "Fix that error, or use another precision."


def _fidelity_of_failed_check(record: Record) -> Fidelity:
    """Return the verdict of a check that failed: *unfaithful* if the precision is the cause, else *unchecked*."""
    failure = record.outcome
    assert isinstance(failure, Failure)
    description = f"{failure.kind}: {failure.message}"
    if failure.kind in PRECISION_FAILURE_KINDS:
        return _fidelity_without_check(
            record.candidate, "unfaithful", description, suggested_fix(failure) or "Use another precision."
        )
    return _fidelity_without_check(
        record.candidate, "unchecked", f"the check failed: {description}", _next_step(failure)
    )


def _fidelity_without_check(candidate: Setting, verdict: Verdict, reason: str, next_step: str) -> Fidelity:
    """Return a verdict that follows from a `reason` instead of a finished check."""
    key = check_key(candidate)
    return Fidelity(
        precision=key.precision,
        batch_size=candidate.batch_size,
        pinned_modules=candidate.pinned_modules,
        verdict=verdict,
        reason=sentence(f"{key.labelled(NUMERIC)} is {verdict}: {reason}"),
        next_step=next_step,
    )


class Merit(NamedTuple):
    """Values that a candidate is ranked by. `speed` is the throughput that the objective compares (see `throughput`).
    `joules_per_sample` is None if the device's energy was not measured.
    """

    speed: float
    peak_memory_bytes: int
    joules_per_sample: float | None


def throughput(objective: Objective, measurement: Measurement) -> float:
    """Return the tokens per second for the objective tokens, if they were counted, else the samples per second."""
    tokens = measurement.tokens_per_second
    return measurement.samples_per_second if tokens is None or objective != "tokens" else tokens


def merit(measurements: Sequence[Measurement], applied_share: float = 1.0, *, objective: Objective = "speed") -> Merit:
    """Return the merit of one candidate from its processes. Only samples that reach the optimizer count."""
    joules = joules_per_sample(measurements)
    with_tokens = [m for m in measurements if objective == "tokens" and m.tokens_per_second is not None]
    return Merit(
        speed=median(throughput(objective, m) for m in with_tokens or measurements) * applied_share,
        peak_memory_bytes=max(m.peak_memory_bytes for m in measurements),
        joules_per_sample=joules / applied_share if joules is not None and applied_share > 0 else None,
    )


def joules_per_sample(measurements: Iterable[Measurement]) -> float | None:
    """Return the median joules per sample of the processes that read an energy counter, or None if none did."""
    return known_median(m.joules_per_sample for m in measurements)


def known_median(values: Iterable[float | None]) -> float | None:
    """Return the median of the values that are not None, or None without any."""
    known = [value for value in values if value is not None]
    return median(known) if known else None


def rank(measured: Mapping[Setting, float], tiers: Mapping[Setting, int] | None = None) -> list[Setting]:
    """Return the candidates ranked by speed, given their samples per second: repeatedly the winner among those left.

    Lower tiers come first; a candidate missing from `tiers` has tier 0, and the undecided tier counts as 0. Within a
    tier, candidates with the user's own flags come last, since a config cannot express them.
    """
    return rank_for("speed", {c: Merit(speed, 0, None) for c, speed in measured.items()}, tiers=tiers)


def rank_for(
    objective: Objective,
    merits: Mapping[Setting, Merit],
    *,
    baseline: Merit | None = None,
    tiers: Mapping[Setting, int] | None = None,
) -> list[Setting]:
    """Return the candidates ranked by any objective, as `rank` does by speed.

    Within `PLATEAU` of the best, the one with the fewest risks wins. For memory, candidates below the `least_speed` for
    this baseline come after the others of their tier; for energy, those without joules do. Both are then ranked by
    speed.
    """

    def winner(candidates: Sequence[Setting]) -> Setting:
        speeds = {c: merits[c].speed for c in candidates}
        if objective == "memory":
            peaks = {c: merits[c].peak_memory_bytes for c in candidates if speeds[c] >= least}
            speeds = {
                c: speeds[c] for c, peak in peaks.items() if SAME_MEMORY_SHARE * peak <= min(peaks.values())
            } or speeds
        joules = {c: j for c in candidates if (j := merits[c].joules_per_sample) is not None}
        if objective == "energy" and joules:
            equals = [c for c, energy in joules.items() if (1 - PLATEAU) * energy <= min(joules.values())]
        else:
            equals = [c for c, speed in speeds.items() if speed >= (1 - PLATEAU) * max(speeds.values())]
        return min(equals, key=lambda c: (tier_of.get(c, 0), risks(c)))

    tier_of, least = tiers or {}, least_speed(objective, baseline)
    groups: dict[tuple[int, bool], list[Setting]] = {}
    for candidate in merits:
        groups.setdefault((max(UNDECIDED_TIER, tier_of.get(candidate, 0)), candidate.as_found), []).append(candidate)
    ranking: list[Setting] = []
    for _, candidates in sorted(groups.items(), key=lambda item: item[0]):
        while candidates:
            ranking.append(winner(candidates))
            candidates.remove(ranking[-1])
    return ranking


def least_speed(objective: Objective, baseline: Merit | None) -> float:
    """Return the least samples per second for a recommendation: for memory 97 % of the baseline's, otherwise 0."""
    return (1 - MIN_GAIN) * baseline.speed if objective == "memory" and baseline is not None else 0.0


def is_worth_a_change(objective: Objective, candidate: Merit, baseline: Merit | None) -> bool:
    """Whether a setting improves on the baseline by at least 3 % in the objective, or the baseline was not measured.

    For memory, a setting with the baseline's peak counts if it is 3 % faster, and one slower than the baseline never.
    """
    if baseline is None:
        return True
    if objective == "memory":
        if candidate.speed < least_speed(objective, baseline):
            return False
        is_faster = candidate.speed >= (1 + MIN_GAIN) * baseline.speed
        is_no_larger = SAME_MEMORY_SHARE * candidate.peak_memory_bytes <= baseline.peak_memory_bytes
        is_smaller = candidate.peak_memory_bytes <= (1 - MIN_GAIN) * baseline.peak_memory_bytes
        return is_smaller or (is_faster and is_no_larger)
    if objective == "energy":
        if candidate.joules_per_sample is None or baseline.joules_per_sample is None:
            return candidate.joules_per_sample is not None
        return candidate.joules_per_sample <= (1 - MIN_GAIN) * baseline.joules_per_sample
    return candidate.speed >= (1 + MIN_GAIN) * baseline.speed
