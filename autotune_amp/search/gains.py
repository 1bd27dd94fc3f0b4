"""Speed-up of one setting over another, with a confidence interval from the spread of their processes. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import median

from msgspec.structs import replace

from autotune_amp.core.evidence import MIN_PROCESSES
from autotune_amp.core.intervals import ratio_interval, t_quantile, unpaired_ratio_interval
from autotune_amp.core.outcome import Measurement, Purpose, Record
from autotune_amp.core.setting import Setting
from autotune_amp.search import ranking
from autotune_amp.search.ledger import Ledger, Shortlist
from autotune_amp.search.ranking import MIN_GAIN, SettingRuns, confirm_runs, merit
from autotune_amp.trial.jobs import NUM_STEPS_BEFORE_CUT


def gain_interval(ledger: Ledger, candidate: SettingRuns, baseline: SettingRuns) -> tuple[float, float]:
    """Return the interval of a setting's `speedup` over the baseline; (0, infinity) if it is unknown."""
    interval = speedup(ledger, candidate, baseline)[1] if candidate.measurements else None
    if interval is not None:
        return interval
    # On several slots, trials that ran beside others are compared with each other.
    speeds, baseline_speeds = (
        [ranking.throughput(ledger.objective, m) for m in ledger.measurements.get(runs.candidate, ())]
        for runs in (candidate, baseline)
    )
    return unpaired_ratio_interval(speeds, baseline_speeds) if speeds and baseline_speeds else (0.0, math.inf)


def gain_and_rounds_to_settle(
    ledger: Ledger, shortlist: Shortlist, environment: Mapping[str, str], num_rounds_left: int
) -> tuple[float, int] | None:
    """Return the relative gain that further confirmation rounds may prove, and their predicted number; None if decided
    or if more rounds than are left would be needed.

    The comparison is decided once enough processes measured the contenders and the baseline, and the fastest contender
    is either significantly faster or within 3 % of the baseline. The interval of a mean narrows with the square root of
    the number of rounds.
    """
    baseline = confirm_runs(ledger.records, shortlist.baseline, {})
    contenders = {c: confirm_runs(ledger.records, c, environment) for c in shortlist[:2] if c is not None}
    needed_runs = [baseline, *(runs for c, runs in contenders.items() if c == shortlist.winner or runs.num_confirming)]
    if any(runs.num_confirming < MIN_PROCESSES and runs.candidate not in ledger.failures for runs in needed_runs):
        return math.inf, 1
    candidates = [runs for runs in contenders.values() if runs.measurements and runs != baseline]
    if not baseline.measurements or not candidates:
        return None

    def throughput(runs: SettingRuns) -> float:
        return merit(runs.measurements, objective=ledger.objective).speed

    fastest = max(candidates, key=throughput)
    ratio, (low, _) = throughput(fastest) / throughput(baseline), gain_interval(ledger, fastest, baseline)
    if ratio < 1 + MIN_GAIN or low > 1:
        return None
    num_rounds = min(fastest.num_confirming, baseline.num_confirming)
    quantile = t_quantile(max(1, num_rounds - 1), is_strict=num_rounds > MIN_PROCESSES)
    half_width = math.inf if low == 0 else math.log(ratio / low) * math.sqrt(num_rounds) / quantile
    for num_more_rounds in range(1, num_rounds_left + 1):
        num = num_rounds + num_more_rounds
        if half_width * t_quantile(num - 1, is_strict=True) / math.sqrt(num) < math.log(ratio):
            return ratio - 1, num_more_rounds
    return None


def speedup(
    ledger: Ledger, chosen: SettingRuns, baseline: SettingRuns
) -> tuple[float | None, tuple[float, float] | None]:
    """Return the ratio of the median speeds by the ledger's objective, and the interval of the mean ratio: 95 %, from
    the fourth round on 99 %.

    Both are over the rounds in which both ran or, without such a round, over the processes of both, and None if the two
    cannot be compared. Rounds beyond the third run until the interval excludes 1: with 95 % at each of them, one of
    many looks at two equal settings would. A gain that was sure after three rounds keeps the interval of these where
    that of all would include 1.
    """
    if not baseline.measurements:
        return None, None
    chosen, baseline = (replace(runs, objective=ledger.objective) for runs in (chosen, baseline))
    if chosen == baseline:
        return 1.0, (1.0, 1.0)
    are_confirmed = chosen.num_confirming and baseline.num_confirming
    if chosen.is_beside_others != baseline.is_beside_others and not are_confirmed:
        return None, None  # a GPU may be slower while others run
    paired = _speeds_in_rounds(chosen, baseline)
    if paired is None:
        ratio = chosen.speed / baseline.speed
        others = other_process_speeds(ledger.records, chosen, baseline)
        low, high = unpaired_ratio_interval(chosen.speeds, baseline.speeds, others)
    else:
        ratio = median(paired[0]) / median(paired[1])
        low, high = ratio_interval(*paired, is_strict=len(paired[0]) > MIN_PROCESSES)
        first = ratio_interval(*(speeds[:MIN_PROCESSES] for speeds in paired))
        if low <= 1 < first[0]:
            low, high = first
    return ratio, (min(low, ratio), max(high, ratio))


def _speeds_in_rounds(chosen: SettingRuns, baseline: SettingRuns) -> tuple[list[float], list[float]] | None:
    """Return the speeds of both in the rounds in which both ran, in the rounds' order, or None without such a round."""
    chosen_speeds, baseline_speeds = (dict(zip(runs.rounds, runs.speeds, strict=False)) for runs in (chosen, baseline))
    shared = sorted(chosen_speeds.keys() & baseline_speeds.keys())
    return ([chosen_speeds[r] for r in shared], [baseline_speeds[r] for r in shared]) if shared else None


def other_process_speeds(records: Sequence[Record], *excluded: SettingRuns) -> list[list[float]]:
    """Return the throughput of the processes of each setting without the `excluded`, to estimate their spread.

    Confirmed settings count, and trials that the search repeated: they ran on the same machine at different times, and
    so include changes of its speed. Settings confirmed in shared processes are left out, since their spread is not that
    between processes.
    """
    shares_processes = ranking.were_processes_shared(records)
    # A single process shows no spread of its own, but with others of its setting.
    left_out = [(runs.candidate, each) for runs in excluded if len(runs.speeds) > 1 for each in runs.measurements]
    groups: dict[tuple[Setting, Purpose, tuple[tuple[str, str], ...]], list[float]] = {}
    for record in records:
        outcome = record.outcome
        if not isinstance(outcome, Measurement) or (record.candidate, outcome) in left_out:
            continue
        is_timed_well = record.purpose == "search" and outcome.num_steps >= NUM_STEPS_BEFORE_CUT  # beyond its warm-up
        if is_timed_well or (record.purpose == "confirm" and not shares_processes):
            key = record.candidate, record.purpose, tuple(sorted(record.environment.items()))
            groups.setdefault(key, []).append(ranking.throughput(excluded[0].objective, outcome))
    return list(groups.values())
