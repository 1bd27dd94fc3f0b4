"""Stages that try, on the setting that would win, other values of further dimensions and, where loading data limits the
speed, more loader workers.

One dimension is changed at a time and the best value kept.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from statistics import median
from typing import ClassVar

from msgspec.structs import replace

from autotune_amp.core.outcome import Measurement
from autotune_amp.core.setting import Setting
from autotune_amp.search.job_defaults import JobDefaults
from autotune_amp.search.ledger import Ledger
from autotune_amp.search.planner import Planner
from autotune_amp.search.ranking import MAX_DATA_SHARE, PLATEAU, UNDECIDED_TIER, data_share, rank
from autotune_amp.search.stages.checks import Checks
from autotune_amp.search.stages.explore import is_ordinary_apart_from_pins, next_promising, untried_promising_settings
from autotune_amp.search.variants import is_worth_trying, neighbouring_batch_sizes, next_setting, setting_to_profile
from autotune_amp.trial.jobs import Check, Trial
from autotune_amp.trial.step_profile.breakdown import ProfileJob

PROFILE_SHARE = 0.05  # share of the remaining time that a profile of the winner may take
TRACE_SECONDS, NUM_STEPS_FORESEEN = 2.0, 8  # of a profile: its trace's seconds; its steps, warm-up included
PROFILE_PATIENCE = 5.0  # times the predicted seconds: 3.4 to 4 s of a GPT-2 on an H200, 8.5 of a Llama
SHORT_WAIT = 0.05  # share of a step: below it more workers have little left to gain
SAME_WAIT = 0.9  # of the wait before: if as much is left, more workers do not help; speed alone can mislead
HANDOVER_SECONDS = 1e-3  # to pass a batch from a worker process: a shorter wait does not get shorter by workers


@dataclass
class Variants:
    """Stage that tries the space's variants on the leader. The leader is checked last, since each variant changes its
    numerics.

    A profile of the leader's step comes first if it is cheap: it shows which dimensions can gain most.
    """

    is_exclusive: ClassVar[bool] = False
    checks: Checks

    def next(self, ledger: Ledger, planner: Planner) -> Trial | Check | ProfileJob | None:
        """Return the profile, else the next trial, else the check that the leader needs, or None."""
        left, leader = planner.exploration_seconds(ledger), setting_to_profile(ledger)
        foreseen = math.inf if leader is None else self._profile_seconds(ledger, planner, leader)
        if leader is not None and foreseen < PROFILE_SHARE * left:
            trial = planner.job_defaults.trial(ledger, leader)
            seconds = PROFILE_PATIENCE * foreseen
            return ProfileJob(device=trial.device, trial=trial, deadline_seconds=seconds, counts_flops=False)
        setting = self._next(ledger, planner, left) if planner.has_time_for_trial(ledger, left) else None
        if setting is None:
            return self.checks.next(ledger, planner)
        return planner.trial(ledger, setting, left)

    def _profile_seconds(self, ledger: Ledger, planner: Planner, leader: Setting) -> float:
        step_seconds = min(m.step_seconds for m in ledger.measurements[leader])
        return TRACE_SECONDS + planner.setup_seconds(ledger) + NUM_STEPS_FORESEEN * step_seconds

    def _next(self, ledger: Ledger, planner: Planner, left_seconds: float) -> Setting | None:
        """Return the next variant, else a setting to measure again or at a neighbouring batch size, or None."""
        setting = next_setting(ledger, lambda c: is_worth_trying(ledger, planner, c))
        if setting is not None and setting.is_compiled and ledger is not ledger.actual:
            return None  # compiling takes tens of seconds: wait until all running jobs have ended
        if setting is None and ledger.objective != "memory":
            return next_promising(ledger, planner, ledger.throughputs(), left_seconds, tuple(neighbouring_batch_sizes(ledger)))
        return setting


@dataclass
class LoaderWorkers:
    """Stage that raises the number of loader workers until steps no longer wait for data or it does not help, and
    checks the new leader.

    Once the wait is over, batch sizes that were compared only by estimates without the wait are explored again.
    """

    is_exclusive: ClassVar[bool] = False
    checks: Checks

    def next(self, ledger: Ledger, planner: Planner) -> Trial | Check | None:
        """Return the check that the last trial makes necessary, else another trial, or None."""
        check, left = self.checks.next(ledger, planner), planner.seconds_before_confirmation(ledger)
        if check is not None or not planner.has_time_for_trial(ledger, left):
            return check
        setting = self.setting(ledger, planner.job_defaults) or self._promising(ledger, planner, left)
        return None if setting is None else planner.trial(ledger, setting, left)

    def setting(self, ledger: Ledger, job_defaults: JobDefaults) -> Setting | None:
        """Return the setting that would win if no step waited for data, with the next number of workers; None if there
        is nothing to gain.

        The number of workers is doubled up to the number of CPUs. It stops where the wait is short, where more workers
        failed, and where they are no faster than half as many and wait no less. One worker is not tested for that: it
        overlaps loading with training, while the second doubles the loading rate.
        """
        own_num_workers, num_cpus = job_defaults.description.num_workers, job_defaults.num_cpus
        searched = [r for r in ledger.records if r.purpose == "search"]
        waits = {
            r.candidate: data_share(r.outcome)
            for r in searched
            if isinstance(r.outcome, Measurement)
            and not r.outcome.was_cut
            and r.candidate.num_workers is None
            and not r.candidate.as_found
        }
        speeds, tiers = ledger.speeds, ledger.pending_tiers
        unheld = {c: speed / (1 - waits[c]) for c, speed in speeds.items() if c in waits}
        if own_num_workers is None or not unheld:
            return None
        target = rank(unheld, tiers=tiers)[0]
        fastest = max(speed for c, speed in speeds.items() if tiers[c] <= max(UNDECIDED_TIER, tiers[target]))
        wait_seconds = waits[target] * target.batch_size / speeds[target]
        if waits[target] <= MAX_DATA_SHARE or wait_seconds < HANDOVER_SECONDS:
            return None
        if unheld[target] <= (1 + PLATEAU) * fastest:
            return None
        tried = {r.candidate: r.outcome for r in searched}
        before, share_before = speeds[target], waits[target]
        for num_workers in worker_counts(own_num_workers, num_cpus):
            found = tried.get(setting := replace(target, num_workers=num_workers))
            if found is None:
                return setting
            if not isinstance(found, Measurement) or data_share(found) < SHORT_WAIT:
                break
            is_no_faster = found.samples_per_second <= (1 + PLATEAU) * before
            if num_workers > 1 and is_no_faster and data_share(found) > SAME_WAIT * share_before:
                break
            before, share_before = found.samples_per_second, data_share(found)
        # Where the wait still limits the speed, a setting with less to go wrong reaches the same speed.
        leader = rank({c: speed for c, speed in speeds.items() if c.with_own_workers == target})[0]
        held = {c: min(speed, speeds[leader]) for c, speed in unheld.items()}
        safer = replace(rank(held, tiers=tiers)[0], num_workers=leader.num_workers)
        return None if safer in tried else safer

    def _promising(self, ledger: Ledger, planner: Planner, left_seconds: float) -> Setting | None:
        """Return the setting to try next with the fewest workers that ended the wait; None if none is worth it."""
        enough = [
            c.num_workers
            for c, ours in ledger.measurements.items()
            if c.num_workers is not None and not c.active_variants and median(map(data_share, ours)) < SHORT_WAIT
        ]
        is_settled = ledger.shortlist is None or ledger.shortlist.winner.active_variants or ledger.objective == "memory"
        if not enough or is_settled:
            return None
        num_workers = min(enough)
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
    """Yield the numbers of workers to try: the user's own, doubled until it reaches the number of CPUs."""
    number = own_num_workers
    while number < num_cpus:
        number = min(max(1, 2 * number), num_cpus)
        yield number
