"""Stage that tries more loader workers where loading data limits the speed, and then explores batch sizes again."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from statistics import median

from msgspec.structs import replace

from autotune_amp.core.outcome import Measurement
from autotune_amp.core.setting import Setting
from autotune_amp.dimensions.loader import SHORT_WAIT
from autotune_amp.search.ledger import Ledger
from autotune_amp.search.planner import JobDefaults, Planner
from autotune_amp.search.ranking import (
    MAX_DATA_SHARE,
    MIN_GAIN,
    UNDECIDED_TIER,
    data_share,
    rank,
    speed_without_wait,
    throughput,
)
from autotune_amp.search.stages import Stage
from autotune_amp.search.stages.checks import Checks
from autotune_amp.search.stages.explore import is_ordinary_apart_from_pins, next_promising, untried_promising_settings
from autotune_amp.trial.jobs import Check, Trial

SAME_WAIT = 0.9  # ratio of waits above which more workers did not help; the speed alone can mislead
HANDOVER_SECONDS = 1e-3  # time to pass a batch from a worker process: workers cannot reduce a shorter wait


@dataclass
class LoaderWorkers(Stage):
    """Stage that raises the number of loader workers while that shortens the wait for data, and checks the new leader.

    Once steps hardly wait, batch sizes that were compared only by estimates without the wait are explored again.
    """

    checks: Checks

    def next(self, ledger: Ledger, planner: Planner) -> Trial | Check | None:
        """Return the next check, else another trial, or None."""
        check, left_seconds = self.checks.next(ledger, planner), planner.seconds_before_confirmation(ledger)
        if check is not None or not planner.has_time_for_trial(ledger, left_seconds):
            return check
        setting = self.setting(ledger, planner.job_defaults) or self._promising(ledger, planner, left_seconds)
        return None if setting is None else planner.trial(ledger, setting, left_seconds)

    def setting(self, ledger: Ledger, job_defaults: JobDefaults) -> Setting | None:
        """Return the best setting if no step waited for data, with the next number of workers; None if none may gain.

        The number of workers is doubled up to the number of CPUs, until the wait is short, a trial fails, or it is
        slower than with the number before, or no faster and waits no less. One worker always has a second one tried: it
        only overlaps loading with training, and the second one doubles the loading rate.
        """
        own_num_workers, num_cpus = job_defaults.description.num_workers, job_defaults.num_cpus
        trials = [r for r in ledger.records if r.purpose == "search"]
        measured = {
            r.candidate: r.outcome
            for r in trials
            if isinstance(r.outcome, Measurement)
            and not r.outcome.was_cut
            and r.candidate.num_workers is None
            and not r.candidate.as_found
        }
        waits = {c: data_share(measurement) for c, measurement in measured.items()}
        speeds, tiers = ledger.speeds, ledger.provisional_tiers
        speeds_without_wait = {c: speed_without_wait(speed, waits[c]) for c, speed in speeds.items() if c in waits}
        if own_num_workers is None or not speeds_without_wait:
            return None
        target = rank(speeds_without_wait, tiers=tiers)[0]
        fastest = max(speed for c, speed in speeds.items() if tiers[c] <= max(UNDECIDED_TIER, tiers[target]))
        wait_seconds = measured[target].data_seconds / target.accumulation_steps
        if waits[target] <= MAX_DATA_SHARE or wait_seconds < HANDOVER_SECONDS:
            return None
        if speeds_without_wait[target] <= (1 + MIN_GAIN) * fastest:
            return None
        tried = {r.candidate: r.outcome for r in trials}
        speed_before, share_before, most_seconds_before = speeds[target], waits[target], math.inf
        for num_workers in worker_counts(own_num_workers, num_cpus):
            outcome = tried.get(setting := replace(target, num_workers=num_workers))
            if outcome is None:
                return setting
            if not isinstance(outcome, Measurement) or data_share(outcome) < SHORT_WAIT:
                break
            speed = throughput(ledger.objective, outcome)
            is_no_faster = speed <= (1 + MIN_GAIN) * speed_before
            least_seconds, most_seconds = outcome.step_seconds_interval
            is_slower = least_seconds > most_seconds_before
            if is_slower or (num_workers > 1 and is_no_faster and data_share(outcome) > SAME_WAIT * share_before):
                break
            speed_before, share_before = speed, data_share(outcome)
            most_seconds_before = most_seconds
        # If the wait still limits the speed, a setting with fewer risks reaches the same speed.
        leader = rank({c: speed for c, speed in speeds.items() if c.with_own_workers == target})[0]
        limited_speeds = {c: min(speed, speeds[leader]) for c, speed in speeds_without_wait.items()}
        safer = replace(rank(limited_speeds, tiers=tiers)[0], num_workers=leader.num_workers)
        return None if safer in tried else safer

    def _promising(self, ledger: Ledger, planner: Planner, left_seconds: float) -> Setting | None:
        """Return the setting to try next, with the fewest workers that ended the wait; None if none is worth it."""
        sufficient_numbers = [
            c.num_workers
            for c, measurements in ledger.measurements.items()
            if c.num_workers is not None and not c.has_variants and median(map(data_share, measurements)) < SHORT_WAIT
        ]
        is_settled = ledger.shortlist is None or ledger.shortlist.winner.has_variants or ledger.objective == "memory"
        if not sufficient_numbers or is_settled:
            return None
        num_workers = min(sufficient_numbers)
        failed = [c for c in ledger.failures if c.num_workers == num_workers]
        observed: dict[Setting, list[float]] = {}
        for setting, throughputs in ledger.throughputs(without_waiting=True).items():
            if is_ordinary_apart_from_pins(setting.with_own_workers):
                observed.setdefault(replace(setting, num_workers=num_workers), []).extend(throughputs)
        untried = [
            replace(c, num_workers=num_workers)
            for c in untried_promising_settings(ledger, planner.job_defaults, observed)
            if all(c.precision != other.precision or c.batch_size < other.batch_size for other in failed)
        ]
        return next_promising(ledger, planner, observed, left_seconds, untried)


def worker_counts(own_num_workers: int, num_cpus: int) -> Iterator[int]:
    """Yield the numbers of workers to try: the user's own number doubled repeatedly, up to the number of CPUs."""
    number = own_num_workers
    while number < num_cpus:
        number = min(max(1, 2 * number), num_cpus)
        yield number
