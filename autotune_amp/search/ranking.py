"""Judgement of each setting from the records of a search: how it ran, its failures and verdicts, and its rank. Pure.

An unfaithful setting is out. One that nobody checked ranks after fp32 and the faithful ones, and a doubtful one last.
Among the others `rank_for` decides. Speed: on the plateau, within 3 % of the fastest, a decided verdict wins over an
undecided one, then the precision with the least to go wrong at run time, then the smallest batch (`dimensions.risks`).
Memory: the least peak among settings no slower than the baseline; peaks within 2 % are alike, and speed decides.
Energy: the least joules per sample, and within 3 % the setting with the least to go wrong.
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
    OF_THE_PRECISION,
    Accumulation,
    Failure,
    Fidelity,
    Later,
    Measurement,
    Record,
    Verdict,
)
from autotune_amp.core.recommendation import Exclusion
from autotune_amp.core.setting import Setting
from autotune_amp.core.text import sentence
from autotune_amp.dimensions import NUMERIC, numerics, risks
from autotune_amp.search.space import SAME_MEMORY_SHARE, Space
from autotune_amp.trial.failures import mended

PLATEAU = 0.03  # within it other criteria decide: processes differ by as much (studies/README.md, Timing)
MAX_DATA_SHARE = 0.10  # a wait of 5 to 10 % of a step: loading data limits the speed (studies/README.md)

BEFORE_CONFIRMATION = ("search", "fallback")  # purposes of the trials on which the choice of contenders rests


def is_trial(record: Record) -> bool:
    """Whether a record is of a trial rather than a check or profile."""
    return record.purpose not in ("fidelity", "calibration", "accumulation", "profile")


def failures(records: Sequence[Record]) -> dict[Setting, Failure]:
    """Return the first failure that speaks against each candidate, for those that have one.

    These do not count: a confirmation cut off by the budget; a run without the recommended environment, on one rank, or
    for an outlook; a search trial that ran out of time although another trial of its candidate did not (the machine
    stalled); a first crash, since anybody may kill a process; and a process that was still loading. Failures of checks
    are handled by `fidelity_verdicts`, `accumulation_result` and `loss_scales`.
    """
    ran = {r.candidate for r in records if r.purpose == "search" and isinstance(r.outcome, Measurement)}
    found: dict[Setting, Failure] = {}
    for record in without_first_crashes([r for r in records if is_trial(r)]):
        failure, purpose = record.outcome, record.purpose
        if not isinstance(failure, Failure) or purpose in ("plain", "one_rank", "outlook"):
            continue
        if failure.is_loading:
            continue
        is_stalled = purpose == "confirm" or (purpose == "search" and record.candidate in ran)
        if failure.kind != "timeout" or not is_stalled:
            found.setdefault(record.candidate, failure)
    return found


def without_first_crashes(records: Iterable[Record]) -> list[Record]:
    """Return the records without each candidate's first crash: anybody may kill a process, so it is run again."""
    crashed, left = set[Setting](), []
    for record in records:
        is_crash = isinstance(record.outcome, Failure) and record.outcome.kind == "crash"
        if not is_crash or record.candidate in crashed:
            left.append(record)
        elif is_crash:
            crashed.add(record.candidate)
    return left


class SettingRuns(msgspec.Struct, frozen=True, kw_only=True):
    """Processes that measured one candidate in one environment.

    `rounds` are the confirmation rounds, one for each measurement; empty for a trial of the search. `loads` are the
    known loads of the machine by others meanwhile. `failure` is why there is no measurement, None if there is one or
    the candidate was never run. `is_beside_others`: other jobs of the search ran at the same time as any of them.
    """

    candidate: Setting
    measurements: tuple[Measurement, ...] = ()
    rounds: tuple[int, ...] = ()
    loads: tuple[MachineLoad, ...] = ()
    failure: Failure | None = None
    is_beside_others: bool = False

    @classmethod
    def of(cls, candidate: Setting, records: Sequence[Record], *, are_confirming: bool = False) -> SettingRuns:
        """Return the runs of the candidate, from records that are all its own."""
        ran = [(r, r.outcome) for r in records if isinstance(r.outcome, Measurement)]
        return cls(
            candidate=candidate,
            measurements=tuple(outcome for _, outcome in ran),
            rounds=tuple(r.round or 0 for r, _ in ran) if are_confirming else (),
            loads=tuple(r.load for r, _ in ran if r.load is not None),
            failure=None if ran else failures(records).get(candidate),
            is_beside_others=any(r.num_beside for r, _ in ran),
        )

    @property
    def speeds(self) -> list[float]:
        """Return the samples per second of each process."""
        return [m.samples_per_second for m in self.measurements]

    @property
    def speed(self) -> float:
        """Return the median of the processes' samples per second."""
        return median(self.speeds)

    @property
    def num_confirming(self) -> int:
        """Return the number of confirmation processes."""
        return len(self.rounds)


def without_lost_rounds(records: Sequence[Record]) -> list[Record]:
    """Return the records, but of each confirmation round only those on one slot.

    A round whose slot is lost runs again on another one. The slot with the most runs counts, the last of equals.
    """
    num_runs = Counter((r.round, r.slot) for r in records)
    slots: dict[int | None, str | None] = {}
    for r in records:
        if r.round not in slots or num_runs[r.round, r.slot] >= num_runs[r.round, slots[r.round]]:
            slots[r.round] = r.slot
    return [r for r in records if r.round is None or r.slot == slots[r.round]]


def confirm_runs(records: Sequence[Record], candidate: Setting, environment: Mapping[str, str]) -> SettingRuns:
    """Return the confirmation processes of a candidate in exactly this environment."""
    ours = [r for r in without_lost_rounds(records) if r.candidate == candidate and is_confirming(r)]
    ours = [r for r in ours if r.environment == environment]
    return SettingRuns.of(candidate, ours, are_confirming=True)


def is_confirming(record: Record) -> bool:
    """Return whether a record is of a confirmation process, or counts as one, as does a trial of a command."""
    found = record.outcome
    was_cut = isinstance(found, Measurement) and found.was_cut
    return record.purpose == "confirm" or (record.purpose == "search" and record.round is not None and not was_cut)


def best_runs(records: Sequence[Record], candidate: Setting, environment: Mapping[str, str]) -> SettingRuns:
    """Return the confirmation processes in this environment, else the candidate's last trial of the search."""
    confirmed = confirm_runs(records, candidate, environment)
    if confirmed.measurements or confirmed.failure:
        return confirmed
    ours = [r for r in records if r.candidate == candidate and r.purpose in BEFORE_CONFIRMATION]
    return SettingRuns.of(candidate, [r for r in ours if isinstance(r.outcome, Measurement)][-1:] or ours)


def were_processes_shared(records: Sequence[Record]) -> bool:
    """Whether the confirmation measured several settings one after the other in the same process."""
    return any(r.round is not None and r.start_seconds == 0.0 and isinstance(r.outcome, Measurement) for r in records)


def data_share(measured: Measurement) -> float:
    """Return the share of a step spent waiting for data."""
    return measured.data_seconds / measured.step_seconds


def is_limited_by_data(records: Sequence[Record]) -> bool:
    """Whether loading data limits the speed of any candidate measured with the user's own number of workers."""
    own = [r.outcome for r in records if r.purpose == "search" and r.candidate.num_workers is None]
    return any(isinstance(o, Measurement) and not o.was_cut and data_share(o) > MAX_DATA_SHARE for o in own)


def check_key(candidate: Setting) -> Setting:
    """Return the setting by which fidelity checks are kept: the candidate's numerics at batch size 1.

    A check holds at every batch size. fp32 with the user's own flags counts as TF32, since parts of it may use TF32.
    """
    precision = "tf32" if candidate.as_found and candidate.precision == "fp32" else candidate.precision
    return replace(numerics(candidate), precision=precision, batch_size=1, accumulation_steps=1)


def needs_check(candidate: Setting, space: Space) -> bool:
    """Whether a candidate needs a fidelity check: all but strict fp32, unless weights are in low precision."""
    key = check_key(candidate)
    return key.precision != "fp32" or not key.is_ordinary or space.weights in ("bf16", "fp16")


def is_checkable(candidate: Setting, space: Space) -> bool:
    """Whether a fidelity check is possible: off CUDA, the user's own flags can mean more than TF32."""
    return (
        "fidelity" in space.checks
        and needs_check(candidate, space)
        and (check_key(candidate).precision != "tf32" or space.has_tf32)
    )


def fidelity_verdicts(records: Sequence[Record]) -> dict[Setting, Fidelity]:
    """Return the verdict of each check by `check_key`, a failed check included: the latest on initial weights, or that
    on trained weights if it is *unfaithful*.

    A *doubtful* verdict on trained weights does not replace the first: training that has nearly learned its few samples
    leaves little noise between batches to compare rounding with, and a healthy setting may look doubtful
    (studies/fidelity). As for trials, a crash counts from the second on.
    """
    verdicts = [
        (check_key(r.candidate), r.outcome if isinstance(r.outcome, Fidelity) else _fidelity_of_failed_check(r))
        for r in without_first_crashes(r for r in records if r.purpose == "fidelity")
    ]
    found: dict[Setting, Fidelity] = {}
    for key, ours in sorted(verdicts, key=lambda verdict: verdict[1].num_steps_before > 0):
        if ours.num_steps_before and ours.verdict != "unfaithful":
            later = Later(num_steps=ours.num_steps_before, verdict=ours.verdict, reason=ours.reason)
            ours = replace(found[key], later=later)
        found[key] = ours
    return found


def accumulation_result(records: Sequence[Record]) -> Accumulation | None:
    """Return the result of the accumulation check, *unchecked* if it did not finish, or None if there was none."""
    record = next((r for r in reversed(records) if r.purpose == "accumulation"), None)
    if record is None:
        return None
    failure = record.outcome
    if isinstance(failure, Accumulation):
        return failure
    assert isinstance(failure, Failure)
    return Accumulation(
        verdict="unchecked",
        reason=sentence(f"Accumulation is unchecked: the check did not end: {failure.kind}: {failure.message}"),
        next_step=_next_step(failure),
        batch_size=record.candidate.batch_size,
        num_micro_batches=0,
        seconds=record.seconds,
    )


def verdict_on(candidate: Setting, space: Space, known: Mapping[Setting, Fidelity]) -> Fidelity | None:
    """Return the verdict on a candidate, *unchecked* if no check was made; None for fp32, the reference."""
    if not needs_check(candidate, space):
        return None
    unmade = "the search ended before it was checked", "Give a larger --budget."
    if not is_checkable(candidate, space):
        unmade = "its flags are the caller's own, and here they cannot be checked", "Try --baseline with a precision."
    return known.get(check_key(candidate)) or _fidelity_without_check(candidate, "unchecked", *unmade)


def unfaithful_reason(known: Mapping[Setting, Fidelity], candidate: Setting) -> str | None:
    """Return the reason if a verdict rules the candidate out, else None."""
    found = known.get(check_key(candidate))
    return found.reason.rstrip(".") if found is not None and found.verdict == "unfaithful" else None


UNDECIDED_TIER = 1
_TIERS: dict[Verdict, int] = {"undecided": UNDECIDED_TIER, "unchecked": 2, "doubtful": 3, "unfaithful": 4}
LAST_TIER = max(_TIERS.values())


def tier(found: Fidelity | None) -> int:
    """Return the tier of a setting by its verdict, None for fp32. A lower tier ranks first.

    Tier 0 are fp32 and the faithful, tier 1 the undecided, which rank behind tier 0 only at equal speed, then the
    unchecked, the doubtful and the unfaithful.
    """
    return 0 if found is None else _TIERS.get(found.verdict, 0)


def contenders(
    merits: Mapping[Setting, Merit], tiers: Mapping[Setting, int], baseline: Setting
) -> dict[Setting, Merit]:
    """Return the settings that may replace the baseline: a config can express them and no check puts them in a tier
    behind the baseline. The undecided are among them.
    """
    last = max(min(tiers.values()), tiers.get(baseline, 0), UNDECIDED_TIER)
    return {c: found for c, found in merits.items() if tiers[c] <= last and not c.as_found}


def exclusions(known: Mapping[Setting, Fidelity]) -> tuple[Exclusion, ...]:
    """Return the precisions that the verdicts rule out at every batch size, as long as no modules are pinned."""
    return tuple(
        Exclusion(precision=check.precision, batch_size=None, reason=reason)
        for check in known
        if check.is_ordinary and (reason := unfaithful_reason(known, check)) is not None
    )


def _next_step(failure: Failure) -> str:
    if failure.kind == "timeout":
        return "Give a larger --budget."
    return mended(failure) or "Fix that error, or use another precision."


def _fidelity_of_failed_check(record: Record) -> Fidelity:
    failure = record.outcome
    assert isinstance(failure, Failure)
    what = f"{failure.kind}: {failure.message}"
    if failure.kind in OF_THE_PRECISION:
        return _fidelity_without_check(record.candidate, "unfaithful", what, mended(failure) or "Use another precision.")
    return _fidelity_without_check(record.candidate, "unchecked", f"the check did not come to an end: {what}", _next_step(failure))


def _fidelity_without_check(candidate: Setting, verdict: Verdict, reason: str, next_step: str) -> Fidelity:
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
    """Values that a candidate is ranked by. `joules_per_sample` is None if the device's energy was not measured."""

    samples_per_second: float
    peak_memory_bytes: int
    joules_per_sample: float | None


def merit(measurements: Sequence[Measurement], applied_share: float = 1.0) -> Merit:
    """Return the merit of one candidate from its processes. Only samples that reach the optimizer count."""
    joules = joules_per_sample(measurements)
    return Merit(
        samples_per_second=median(m.samples_per_second for m in measurements) * applied_share,
        peak_memory_bytes=max(m.peak_memory_bytes for m in measurements),
        joules_per_sample=joules / applied_share if joules is not None and applied_share > 0 else None,
    )


def joules_per_sample(measurements: Iterable[Measurement]) -> float | None:
    """Return the median over the processes that read an energy counter, or None if none did."""
    known = [m.joules_per_sample for m in measurements if m.joules_per_sample is not None]
    return median(known) if known else None


def rank(measured: Mapping[Setting, float], tiers: Mapping[Setting, int] | None = None) -> list[Setting]:
    """Return the candidates by speed, given their samples per second: the winner, then the winner among the rest, and
    so on.

    Lower tiers come first; a candidate missing from `tiers` has tier 0, and the undecided tier counts as 0. Within a
    tier, candidates with the user's own flags come last, since a config cannot express them.
    """
    return rank_for("speed", {c: Merit(speed, 0, None) for c, speed in measured.items()}, tiers=tiers)


def rank_for(
    objective: Objective,
    merits: Mapping[Setting, Merit],
    *,
    least_speed: float = 0.0,
    tiers: Mapping[Setting, int] | None = None,
) -> list[Setting]:
    """Return the candidates ranked by any objective, as `rank` does by speed: within `PLATEAU` the least to go wrong
    wins.

    For memory, candidates below `least_speed` samples per second come after the others of their tier; for energy, those
    without joules do. Both are then ranked by speed.
    """

    def winner(left: Sequence[Setting]) -> Setting:
        speeds = {c: merits[c].samples_per_second for c in left}
        if objective == "memory":
            peaks = {c: merits[c].peak_memory_bytes for c in left if speeds[c] >= least_speed}
            speeds = {c: speeds[c] for c, peak in peaks.items() if SAME_MEMORY_SHARE * peak <= min(peaks.values())} or speeds
        joules = {c: j for c in left if (j := merits[c].joules_per_sample) is not None}
        if objective == "energy" and joules:
            close = [c for c, drawn in joules.items() if (1 - PLATEAU) * drawn <= min(joules.values())]
        else:
            close = [c for c, speed in speeds.items() if speed >= (1 - PLATEAU) * max(speeds.values())]
        return min(close, key=lambda c: (known.get(c, 0), risks(c)))

    known = tiers or {}
    groups: dict[tuple[int, bool], list[Setting]] = {}
    for candidate in merits:
        groups.setdefault((max(UNDECIDED_TIER, known.get(candidate, 0)), candidate.as_found), []).append(candidate)
    ranking: list[Setting] = []
    for _, left in sorted(groups.items(), key=lambda item: item[0]):
        while left:
            ranking.append(winner(left))
            left.remove(ranking[-1])
    return ranking


def least_speed(objective: Objective, baseline: Merit | None) -> float:
    """Return the least samples per second of a choice: for memory the baseline's less 3 %, otherwise 0."""
    return (1 - PLATEAU) * baseline.samples_per_second if objective == "memory" and baseline is not None else 0.0


def is_worth_a_change(objective: Objective, found: Merit, today: Merit) -> bool:
    """Return whether a choice gains 3 % over the baseline `today`.

    For memory, a choice with the baseline's peak counts if it is 3 % faster, and a slower choice never does.
    """
    if objective == "memory":
        if found.samples_per_second < least_speed(objective, today):
            return False
        is_faster = found.samples_per_second >= (1 + PLATEAU) * today.samples_per_second
        is_no_larger = SAME_MEMORY_SHARE * found.peak_memory_bytes <= today.peak_memory_bytes
        return found.peak_memory_bytes <= (1 - PLATEAU) * today.peak_memory_bytes or (is_faster and is_no_larger)
    if objective == "energy":
        if found.joules_per_sample is None or today.joules_per_sample is None:
            return found.joules_per_sample is not None
        return found.joules_per_sample <= (1 - PLATEAU) * today.joules_per_sample
    return found.samples_per_second >= (1 + PLATEAU) * today.samples_per_second
