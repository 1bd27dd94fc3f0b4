"""Speed-up of one setting over another, with a confidence interval from the spread of their processes. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from autotune_amp.core.evidence import MIN_PROCESSES
from autotune_amp.core.intervals import apart_interval, ratio_interval, t_quantile
from autotune_amp.core.outcome import Measurement, Purpose, Record
from autotune_amp.core.setting import Setting
from autotune_amp.search import ranking
from autotune_amp.search.ledger import Ledger, Shortlist
from autotune_amp.search.ranking import PLATEAU, SettingRuns, confirm_runs
from autotune_amp.trial.jobs import NUM_STEPS_BEFORE_CUT

MAX_PREDICTED_ROUNDS = 100


def gain_interval(ledger: Ledger, ours: SettingRuns, today: SettingRuns) -> tuple[float, float]:
    """Return the 95 % interval of a setting's speed-up over the baseline `today`; (0, infinity) if it is unknown."""
    interval = speedup(ours, today, ledger.records)[1] if ours.measurements else None
    if interval is not None:
        return interval
    # On several slots, trials that ran beside others are compared with each other.
    ones, others = (ledger.measurements.get(runs.candidate, []) for runs in (ours, today))
    if not ones or not others:
        return 0.0, math.inf
    return apart_interval([m.samples_per_second for m in ones], [m.samples_per_second for m in others])


def gain_and_rounds_to_settle(ledger: Ledger, chosen: Shortlist, environment: Mapping[str, str]) -> tuple[float, int] | None:
    """Return the gain over the baseline that more confirmation rounds may establish, and the predicted number of those
    rounds; None once the comparison is settled.

    It is settled once enough processes measured the contenders and the baseline, and the fastest contender is either
    surely faster or not worth a change. The interval of a mean narrows with the root of the number of rounds.
    """
    today = confirm_runs(ledger.records, chosen.baseline, {})
    ours = {c: confirm_runs(ledger.records, c, environment) for c in chosen[:2] if c is not None}
    running = [today, *(runs for c, runs in ours.items() if c == chosen.winner or runs.num_confirming)]
    if any(runs.num_confirming < MIN_PROCESSES and runs.candidate not in ledger.failures for runs in running):
        return math.inf, 1
    measured = [runs for runs in ours.values() if runs.measurements and runs != today]
    if not today.measurements or not measured:
        return None
    fastest = max(measured, key=lambda runs: runs.speed)
    ratio, (low, _) = fastest.speed / today.speed, gain_interval(ledger, fastest, today)
    if ratio < 1 + PLATEAU or low > 1:
        return None
    num_rounds = min(fastest.num_confirming, today.num_confirming)
    half = math.inf if low == 0 else math.log(ratio / low) * math.sqrt(num_rounds) / t_quantile(max(1, num_rounds - 1))
    num_more = 1
    while num_more < MAX_PREDICTED_ROUNDS:
        num = num_rounds + num_more
        if half * t_quantile(num - 1) / math.sqrt(num) < math.log(ratio):
            break
        num_more += 1
    return ratio - 1, num_more


def speedup(
    chosen: SettingRuns, baseline: SettingRuns, records: Sequence[Record]
) -> tuple[float | None, tuple[float, float] | None]:
    """Return the ratio of the median speeds and the interval of the mean ratio.

    They are taken over the rounds in which both ran, or without such a round over the processes of both. Both are None
    if the two cannot be compared.
    """
    if not baseline.measurements:
        return None, None
    if chosen == baseline:
        return 1.0, (1.0, 1.0)
    are_confirmed = chosen.num_confirming and baseline.num_confirming
    if chosen.is_beside_others != baseline.is_beside_others and not are_confirmed:
        return None, None  # a GPU may be slower while others run
    ratio = chosen.speed / baseline.speed
    low, high = _ratio_in_rounds(chosen, baseline, records) or apart_interval(
        chosen.speeds, baseline.speeds, other_process_speeds(records, chosen, baseline)
    )
    return ratio, (min(low, ratio), max(high, ratio))


def _ratio_in_rounds(
    chosen: SettingRuns, baseline: SettingRuns, records: Sequence[Record]
) -> tuple[float, float] | None:
    """Return the interval of the ratio in rounds that both were run in, or None without such a round.

    Other settings that ran in these rounds contribute to the estimate of the ratio's spread.
    """
    ours, theirs = (dict(zip(runs.rounds, runs.speeds, strict=False)) for runs in (chosen, baseline))
    shared = sorted(ours.keys() & theirs.keys())
    if not shared:
        return None
    others: dict[Setting, list[float]] = {}
    for record in ranking.without_lost_rounds(records):
        setting, found = record.candidate, record.outcome
        is_other = record.purpose == "confirm" and setting not in (chosen.candidate, baseline.candidate)
        if is_other and isinstance(found, Measurement) and record.round in theirs:
            others.setdefault(setting, []).append(found.samples_per_second / theirs[record.round])
    return ratio_interval([ours[r] for r in shared], [theirs[r] for r in shared], list(others.values()))


def other_process_speeds(records: Sequence[Record], *known: SettingRuns) -> list[list[float]]:
    """Return the samples per second of each other setting's processes, which show how much processes differ.

    `known` are left out. Confirmed settings count, and trials that the search repeated: they ran on the same machine,
    and further apart in time, so that they include changes of its speed between minutes. Settings confirmed in shared
    processes are left out, since their spread is not that between processes.
    """
    are_shared = ranking.were_processes_shared(records)
    groups: dict[tuple[Setting, Purpose, tuple[tuple[str, str], ...]], list[float]] = {}
    for record in records:
        found = record.outcome
        if not isinstance(found, Measurement):
            continue
        is_timed_well = record.purpose == "search" and found.num_steps >= NUM_STEPS_BEFORE_CUT  # beyond its warm-up
        if is_timed_well or (record.purpose == "confirm" and not are_shared):
            key = record.candidate, record.purpose, tuple(sorted(record.environment.items()))
            groups.setdefault(key, []).append(found.samples_per_second)
    others = list(groups.values())
    for runs in known:
        if runs.speeds in others:
            others.remove(runs.speeds)
    return others
