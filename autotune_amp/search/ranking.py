"""What the records of a search say of each setting: how it ran, what speaks against it, and how settings rank. Pure.

What does not learn what fp32 learns is out, what nobody checked comes after fp32 and what a check found no harm in, and
what is doubtful comes last. Among the others `rank_for` decides. Speed: on the plateau, within 3 % of the fastest, wins
what is decided over what is undecided, then the precision with the least to go wrong at run time, then the smallest
batch (`Setting.risks`). Memory: the least peak of what is no slower than the baseline; peaks within 2 % are alike, and
speed decides. Energy: the least joules per sample, and within 3 % what has the least to go wrong.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from statistics import fmean, median, variance
from typing import Any, NamedTuple

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
from autotune_amp.core.setting import NUMERIC, Setting
from autotune_amp.core.text import sentence
from autotune_amp.search.space import SAME_MEMORY, Space
from autotune_amp.trial.failures import mended

PLATEAU = 0.03  # closer than this, other things decide: processes differ by as much (studies/README.md, Timing)
MAX_CHANCE = 0.10  # processes that differ by more would hide what others do to a run
MAX_DATA_SHARE = 0.10  # a wait of 5 to 10 % of a step: the loader sets the speed (studies/README.md)

BEFORE_CONFIRMATION = ("search", "fallback")  # purposes of the trials whose measurements say what to confirm


def is_trial(record: Record) -> bool:
    """Whether a record is of a trial, and not of a check."""
    return record.purpose not in ("fidelity", "calibration", "accumulation", "profile")


def failures(records: Sequence[Record]) -> dict[Setting, Failure]:
    """The candidates with a failure that speaks against them, and the first such of each.

    A confirmation cut off by the budget does not, nor does the one run without the recommended environment, nor what
    is no more than an outlook, nor a search trial that overran its time where another of its candidate did not: the
    machine stalled. Nor does a crash before there is a second one, since anybody may kill a process, nor a process that
    was still loading. What a check's failure says is for `found_fidelity`, `found_accumulation` and `loss_scales`.
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
    """Return the records without the first crash of each candidate: anybody may kill a process, and it is run again."""
    crashed, left = set[Setting](), []
    for record in records:
        is_crash = isinstance(record.outcome, Failure) and record.outcome.kind == "crash"
        if not is_crash or record.candidate in crashed:
            left.append(record)
        elif is_crash:
            crashed.add(record.candidate)
    return left


class Runs(msgspec.Struct, frozen=True, kw_only=True):
    """The processes that measured one candidate under one environment.

    `rounds` are the confirmation rounds, one for each measurement; empty where the search's own trial has to do.
    `loads` are what others did on the machine during them, as far as that was looked at.
    `failure` is why there is no measurement, None where there are some or the candidate was never run. `has_share`:
    they had a share of the CPU each; `is_on_slot`: that, or others of the search ran beside any of them.
    """

    candidate: Setting
    measurements: tuple[Measurement, ...] = ()
    rounds: tuple[int, ...] = ()
    loads: tuple[MachineLoad, ...] = ()
    failure: Failure | None = None
    has_share: bool = False
    is_on_slot: bool = False

    @classmethod
    def of(cls, candidate: Setting, records: Sequence[Record], *, are_confirming: bool = False) -> Runs:
        """The runs in these records of the candidate."""
        ran = [(r, r.outcome) for r in records if isinstance(r.outcome, Measurement)]
        return cls(
            candidate=candidate,
            measurements=tuple(outcome for _, outcome in ran),
            rounds=tuple(r.round or 0 for r, _ in ran) if are_confirming else (),
            loads=tuple(r.load for r, _ in ran if r.load is not None),
            failure=None if ran else failures(records).get(candidate),
            has_share=any(r.has_share for r, _ in ran),
            is_on_slot=any(r.has_share or r.num_beside for r, _ in ran),
        )

    @property
    def speeds(self) -> list[float]:
        """Samples per second of each process."""
        return [m.samples_per_second for m in self.measurements]

    @property
    def speed(self) -> float:
        """Samples per second, the median over processes."""
        return median(self.speeds)

    @property
    def num_confirming(self) -> int:
        """How many confirmation processes there are."""
        return len(self.rounds)


class Beside(NamedTuple):
    """By what share a confirmation's runs were slower beside others on all slots than alone, and what of it may be
    chance."""

    slowdown: float
    chance: float

    @property
    def is_different(self) -> bool:
        """Whether what runs beside others says nothing of what runs alone."""
        return math.isinf(self.chance) or self.slowdown > min(max(PLATEAU, self.chance), MAX_CHANCE)


def beside(records: Sequence[Record]) -> Beside | None:
    """What running beside others did, by the settings that were run both ways; None where none was.

    `chance` is three standard errors of the mean over these settings, by the spread of their few runs beside others.
    """
    logs: dict[bool, dict[Any, list[float]]] = {False: {}, True: {}}
    for r in records:
        if r.round is not None and isinstance(r.outcome, Measurement):
            key = r.candidate, r.purpose, tuple(sorted(r.environment.items()))
            logs[r.num_beside > 0].setdefault(key, []).append(math.log(r.outcome.step_seconds))
    both = [(logs[False][key], logs[True][key]) for key in logs[False].keys() & logs[True].keys()]
    if not both:
        return None
    change = fmean(fmean(others) - fmean(alone) for alone, others in both)
    variances = [variance(others) * (1 / len(alone) + 1 / len(others)) for alone, others in both if len(others) > 1]
    chance = 3 * math.sqrt(fmean(variances) / len(both)) if variances else math.inf
    return Beside(math.expm1(change), chance)


def counted(records: Sequence[Record]) -> list[Record]:
    """The records without the runs of the confirmation that do not count: those beside others where that made a
    difference, and of a round that was begun anew on another slot those on the slot where it came less far."""
    found = beside(records)
    are_alike = found is not None and not found.is_different
    found_alike = [r for r in records if r.round is None or not r.num_beside or are_alike]
    num_runs = Counter((r.round, r.slot) for r in found_alike)
    slots: dict[int | None, str | None] = {}
    for r in found_alike:  # of as many the last
        if r.round not in slots or num_runs[r.round, r.slot] >= num_runs[r.round, slots[r.round]]:
            slots[r.round] = r.slot
    return [r for r in found_alike if r.round is None or r.slot == slots[r.round]]


def confirm_runs(records: Sequence[Record], candidate: Setting, environment: Mapping[str, str]) -> Runs:
    """The confirmation processes of a candidate in exactly this environment."""
    ours = [r for r in counted(records) if r.candidate == candidate and is_confirming(r)]
    ours = [r for r in ours if r.environment == environment]
    return Runs.of(candidate, ours, are_confirming=True)


def is_confirming(record: Record) -> bool:
    """Say whether a record is of a process of the confirmation, or of one that counts as such: a trial of a command."""
    found = record.outcome
    was_cut = isinstance(found, Measurement) and found.was_cut
    return record.purpose == "confirm" or (record.purpose == "search" and record.round is not None and not was_cut)


def best_runs(records: Sequence[Record], candidate: Setting, environment: Mapping[str, str]) -> Runs:
    """The confirmation processes in this environment, or else the search's own last trial of the candidate."""
    confirmed = confirm_runs(records, candidate, environment)
    if confirmed.measurements or confirmed.failure:
        return confirmed
    ours = [r for r in records if r.candidate == candidate and r.purpose in BEFORE_CONFIRMATION]
    return Runs.of(candidate, [r for r in ours if isinstance(r.outcome, Measurement)][-1:] or ours)


def were_processes_shared(records: Sequence[Record]) -> bool:
    """Whether the confirmation measured what it holds against each other one after the other in the same processes."""
    return any(r.round is not None and r.start_seconds == 0.0 and isinstance(r.outcome, Measurement) for r in records)


def data_share(measured: Measurement) -> float:
    """The share of a step that waits for data."""
    return measured.data_seconds / measured.step_seconds


def is_waiting(records: Sequence[Record]) -> bool:
    """Whether the loader sets the speed of any candidate that was measured with the user's own number of workers."""
    own = [r.outcome for r in records if r.purpose == "search" and r.candidate.num_workers is None]
    return any(isinstance(o, Measurement) and not o.was_cut and data_share(o) > MAX_DATA_SHARE for o in own)


def check_key(candidate: Setting) -> Setting:
    """The check whose verdict holds for a candidate at every batch size: its numerics at batch 1.

    fp32 as found is fp32 with TF32 in parts of it.
    """
    precision = "tf32" if candidate.as_found and candidate.precision == "fp32" else candidate.precision
    return replace(candidate.numerics, precision=precision, batch_size=1, accumulation_steps=1)


def needs_check(candidate: Setting, space: Space) -> bool:
    """Whether fp32 is to be held against it: not strict fp32 itself as the training is, unless its weights are in low
    precision.
    """
    key = check_key(candidate)
    return key.precision != "fp32" or not key.is_ordinary or space.weights in ("bf16", "fp16")


def can_check(candidate: Setting, space: Space) -> bool:
    """Whether a check tells something of the candidate: fp32 as found can mean more than TF32 off CUDA."""
    return (
        "fidelity" in space.checks
        and needs_check(candidate, space)
        and (check_key(candidate).precision != "tf32" or space.has_tf32)
    )


def found_fidelity(records: Sequence[Record]) -> dict[Setting, Fidelity]:
    """The verdict of each check that was made, one that failed too: the latest of the first weights, or that of trained
    ones where they are worse off.

    Only an unfaithful one is worse: a training that has nearly learned its few samples leaves little noise between
    batches to hold rounding against, and what is healthy may look doubtful then (studies/fidelity). A crash counts from
    the second on, as of a trial.
    """
    verdicts = [
        (check_key(r.candidate), r.outcome if isinstance(r.outcome, Fidelity) else _of_failure(r))
        for r in without_first_crashes(r for r in records if r.purpose == "fidelity")
    ]
    found: dict[Setting, Fidelity] = {}
    for key, ours in sorted(verdicts, key=lambda verdict: verdict[1].num_steps_before > 0):
        if ours.num_steps_before and ours.verdict != "unfaithful":
            later = Later(num_steps=ours.num_steps_before, verdict=ours.verdict, reason=ours.reason)
            ours = replace(found[key], later=later)
        found[key] = ours
    return found


def found_accumulation(records: Sequence[Record]) -> Accumulation | None:
    """What the check of accumulation found, *unchecked* where it did not come to an end; None where there was none."""
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
    """The verdict on a candidate, *unchecked* where no check was made; None for fp32, which the others are held to."""
    if not needs_check(candidate, space):
        return None
    unmade = "the search ended before it was checked", "Give a larger --budget."
    if not can_check(candidate, space):
        unmade = "its flags are the caller's own, and here they cannot be checked", "Try --baseline with a precision."
    return known.get(check_key(candidate)) or _judged(candidate, "unchecked", *unmade)


def harm(known: Mapping[Setting, Fidelity], candidate: Setting) -> str | None:
    """Why a verdict rules the candidate out, if one does."""
    found = known.get(check_key(candidate))
    return found.reason.rstrip(".") if found is not None and found.verdict == "unfaithful" else None


UNDECIDED_TIER = 1
_TIERS: dict[Verdict, int] = {"undecided": UNDECIDED_TIER, "unchecked": 2, "doubtful": 3, "unfaithful": 4}
LAST_TIER = max(_TIERS.values())


def tier(found: Fidelity | None) -> int:
    """Return the tier of a setting by its verdict, None for fp32; a lower one ranks before.

    fp32 and the faithful are in tier 0, then come the undecided, which give way to them at equal speed alone, the
    unchecked, the doubtful, the unfaithful.
    """
    return 0 if found is None else _TIERS.get(found.verdict, 0)


def contenders(
    merits: Mapping[Setting, Merit], tiers: Mapping[Setting, int], baseline: Setting
) -> dict[Setting, Merit]:
    """Return the settings that may take the place of the baseline: those that a config can express and that no check
    puts in a tier behind it, the undecided among them."""
    last = max(min(tiers.values()), tiers.get(baseline, 0), UNDECIDED_TIER)
    return {c: found for c, found in merits.items() if tiers[c] <= last and not c.as_found}


def exclusions(known: Mapping[Setting, Fidelity]) -> tuple[Exclusion, ...]:
    """The precisions that the verdicts rule out, at every batch size; with pins, say, they are candidates apart."""
    return tuple(
        Exclusion(precision=check.precision, batch_size=None, reason=reason)
        for check in known
        if check.is_ordinary and (reason := harm(known, check)) is not None
    )


def _next_step(failure: Failure) -> str:
    if failure.kind == "timeout":
        return "Give a larger --budget."
    return mended(failure) or "Fix that error, or use another precision."


def _of_failure(record: Record) -> Fidelity:
    failure = record.outcome
    assert isinstance(failure, Failure)
    what = f"{failure.kind}: {failure.message}"
    if failure.kind in OF_THE_PRECISION:
        return _judged(record.candidate, "unfaithful", what, mended(failure) or "Use another precision.")
    return _judged(record.candidate, "unchecked", f"the check did not come to an end: {what}", _next_step(failure))


def _judged(candidate: Setting, verdict: Verdict, reason: str, next_step: str) -> Fidelity:
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
    """What a candidate is ranked by; `joules_per_sample` is None where nothing says what the device draws."""

    samples_per_second: float
    peak_memory_bytes: int
    joules_per_sample: float | None


def merit(measurements: Sequence[Measurement], applied_share: float = 1.0) -> Merit:
    """The merit of one candidate's processes; only what reaches the optimizer counts as a sample."""
    joules = joules_per_sample(measurements)
    return Merit(
        samples_per_second=median(m.samples_per_second for m in measurements) * applied_share,
        peak_memory_bytes=max(m.peak_memory_bytes for m in measurements),
        joules_per_sample=joules / applied_share if joules is not None and applied_share > 0 else None,
    )


def joules_per_sample(measurements: Iterable[Measurement]) -> float | None:
    """The median over the processes that read a counter, None where none did."""
    known = [m.joules_per_sample for m in measurements if m.joules_per_sample is not None]
    return median(known) if known else None


def rank(measured: Mapping[Setting, float], tiers: Mapping[Setting, int] | None = None) -> list[Setting]:
    """Candidates by speed, from their samples per second: the winner, then the winner without it, and so on.

    Lower tiers come first, 0 where `tiers` does not say, and the undecided with it; in each, candidates as found come
    last, since a config cannot express them.
    """
    return rank_for("speed", {c: Merit(speed, 0, None) for c, speed in measured.items()}, tiers=tiers)


def rank_for(
    objective: Objective,
    merits: Mapping[Setting, Merit],
    *,
    least_speed: float = 0.0,
    tiers: Mapping[Setting, int] | None = None,
) -> list[Setting]:
    """Candidates by any objective, as `rank` has them by speed: within `PLATEAU` the one with the least to go wrong.

    For memory what reaches less than `least_speed` samples per second comes after the others of its tier, and for
    energy what has no joules; both by speed.
    """

    def winner(left: Sequence[Setting]) -> Setting:
        speeds = {c: merits[c].samples_per_second for c in left}
        if objective == "memory":
            peaks = {c: merits[c].peak_memory_bytes for c in left if speeds[c] >= least_speed}
            speeds = {c: speeds[c] for c, peak in peaks.items() if SAME_MEMORY * peak <= min(peaks.values())} or speeds
        joules = {c: j for c in left if (j := merits[c].joules_per_sample) is not None}
        if objective == "energy" and joules:
            close = [c for c, drawn in joules.items() if (1 - PLATEAU) * drawn <= min(joules.values())]
        else:
            close = [c for c, speed in speeds.items() if speed >= (1 - PLATEAU) * max(speeds.values())]
        return min(close, key=lambda c: (known.get(c, 0), c.risks))

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
    """Samples per second that a choice must reach: for memory those of the baseline within 3 %, else none."""
    return (1 - PLATEAU) * baseline.samples_per_second if objective == "memory" and baseline is not None else 0.0


def is_worth_a_change(objective: Objective, found: Merit, today: Merit) -> bool:
    """Say whether a choice gains 3 % on what the user runs today.

    For memory a choice with today's peak is worth it where it is 3 % faster, and one that is slower than today never.
    """
    if objective == "memory":
        if found.samples_per_second < least_speed(objective, today):
            return False
        is_faster = found.samples_per_second >= (1 + PLATEAU) * today.samples_per_second
        is_no_larger = SAME_MEMORY * found.peak_memory_bytes <= today.peak_memory_bytes
        return found.peak_memory_bytes <= (1 - PLATEAU) * today.peak_memory_bytes or (is_faster and is_no_larger)
    if objective == "energy":
        if found.joules_per_sample is None or today.joules_per_sample is None:
            return found.joules_per_sample is not None
        return found.joules_per_sample <= (1 - PLATEAU) * today.joules_per_sample
    return found.samples_per_second >= (1 + PLATEAU) * today.samples_per_second
