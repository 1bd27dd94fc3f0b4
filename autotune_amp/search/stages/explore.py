"""Stages that explore the space: the baseline, every precision at the baseline's batch size, then the settings with the
most expected gain by the throughput model.

The next trial depends only on the outcomes so far, so a resumed search continues where it stopped.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from statistics import median

from msgspec.structs import replace

from autotune_amp.core.intervals import fit_memory
from autotune_amp.core.outcome import Measurement
from autotune_amp.core.precisions import Precision
from autotune_amp.core.setting import Setting
from autotune_amp.processes.local import Backend
from autotune_amp.search.ledger import Ledger
from autotune_amp.search.planner import JobDefaults, Planner, num_timed_passes
from autotune_amp.search.progress import Progress
from autotune_amp.search.ranking import is_limited_by_data, throughput
from autotune_amp.search.space import excluded_by_outcomes, is_hopelessly_slow, without_excluded
from autotune_amp.search.stages import Stage
from autotune_amp.search.stages.checks import AccumulationCheck, Checks
from autotune_amp.search.stages.throughput_model import ThroughputModel
from autotune_amp.trial.jobs import Trial

MAX_PROCESSES = 4  # maximum number of trials of one setting
WORTH_SHARING = 0.2  # least share of a trial's time spent building for which the built workload is shared
MIN_SHARED_SECONDS = 0.5  # a shorter build is not worth another model in memory
BYTES_PER_PARAMETER = 4
# the memory model is 2 to 19 % off (studies/README.md), so it may skip settings but never exclude them
MEMORY_MARGIN = 1.1


class SeedSettings(Stage):
    """Stage that measures the baseline, the best setting of an earlier search for the same code, and every precision at
    the baseline's batch size.

    It may use all the remaining time, since a precision that was not compared cannot be recommended.
    """

    def next(self, ledger: Ledger, planner: Planner) -> Trial | None:  # noqa: D102 - see Stage
        left_seconds = planner.budget.left()
        setting = self.next_setting(ledger, planner, left_seconds)
        return None if setting is None else planner.trial(ledger, setting, left_seconds)

    def next_setting(self, ledger: Ledger, planner: Planner, left_seconds: float) -> Setting | None:  # noqa: D102
        has_time = planner.has_time_for_trial(ledger, left_seconds)
        return untried_seed(ledger, planner.job_defaults) if has_time else None


class PromisingSettings(Stage):
    """Stage that tries the setting with the most expected gain per second by the throughput model.

    While every trial has failed, it tries the smallest batch instead, and for the objective memory the next smaller
    batch of the setting with the lowest peak.
    """

    def next_setting(self, ledger: Ledger, planner: Planner, left_seconds: float) -> Setting | None:  # noqa: D102
        if not planner.has_time_for_trial(ledger, left_seconds):
            return None
        job_defaults = planner.job_defaults
        num_workers = job_defaults.description.num_workers
        has_cpus_left = num_workers is not None and num_workers < job_defaults.num_cpus
        # More loader workers may end the wait for data; until that is tried, compare throughputs without the wait.
        all_throughputs = ledger.throughputs(without_waiting=has_cpus_left and is_limited_by_data(ledger.records))
        throughputs = {
            c: values
            for c, values in all_throughputs.items()
            if c == ledger.space.baseline or is_ordinary_apart_from_pins(c)
        }
        if not throughputs:
            untried = untried_settings(ledger, job_defaults.memory_limit_bytes)
            return min(untried, key=lambda c: c.batch_size, default=None)
        if ledger.objective == "memory":  # the settings with the highest throughput take the most memory
            return smaller_batch(ledger)
        return next_promising(
            ledger,
            planner,
            throughputs,
            left_seconds,
            [*untried_promising_settings(ledger, job_defaults, throughputs), *untried_pinned_settings(ledger)],
            max_processes=1,
        )


def exploration_stages() -> tuple[Stage, ...]:
    """Return the exploration stages in order: every precision, then other batch sizes, then a check of the fastest.

    A check costs as much as two trials where processes start slowly. If it rules a precision out, the batch sizes of
    others are tried, of which the fastest is checked. Settings nearly as fast as the best are measured again after the
    further dimensions, which may gain more (`stages.variants`).
    """
    seeds, promising, checks = SeedSettings(), PromisingSettings(), Checks(only_winner=True)
    return seeds, AccumulationCheck(), seeds, promising, checks, seeds, promising, checks, seeds


def untried_seed(ledger: Ledger, job_defaults: JobDefaults) -> Setting | None:
    """Return the next setting that has to be measured before any other; None once all were tried. Pure.

    These are the baseline, the setting nearest to the best of an earlier search, then one of each precision.
    """
    space, outcomes = ledger.space, ledger.ordinary_outcomes
    hardware, similar_best = job_defaults.hardware, job_defaults.similar_best
    if space.baseline not in outcomes:
        return space.baseline
    untried = untried_settings(ledger, job_defaults.memory_limit_bytes)
    if similar_best is not None:
        same_precision = [c for c in space.candidates if c.precision == similar_best.autocast_precision]
        nearest = min(same_precision, key=lambda c: abs(math.log(c.batch_size / similar_best.batch_size)), default=None)
        if nearest in untried:
            return nearest

    def first_setting(precision: Precision) -> Setting | None:
        """Return the untried setting nearest to the baseline's batch; None once one ran or failed other than by OOM."""
        tried = [o for c, o in outcomes.items() if c.precision == precision and not c.as_found]
        if any(isinstance(outcome, Measurement) or outcome.kind != "oom" for outcome in tried):
            return None
        same_precision = [c for c in untried if c.precision == precision]
        return min(same_precision, key=lambda c: abs(math.log(c.batch_size / space.baseline.batch_size)), default=None)

    def sort_key(precision: Precision) -> tuple[bool, float]:
        """Return a sort key: precisions with the fastest matrix products first, hopelessly slow ones last, since one of
        their steps may take longer than the rest of the search.
        """
        return is_hopelessly_slow(hardware, precision), -(hardware.precisions[precision].matmul_flops_per_second or 0.0)

    settings = map(first_setting, sorted(dict.fromkeys(c.precision for c in space.candidates), key=sort_key))
    return next(filter(None, settings), None)


def smaller_batch(ledger: Ledger) -> Setting | None:
    """Return the next smaller batch of the winner for the objective memory; None if it was tried. Pure.

    Batches shrink until one is slower than the baseline. The stages for speed would not try these.
    """
    shortlist = ledger.shortlist
    if shortlist is None:
        return None
    legal = [
        c
        for c in without_excluded(ledger.space.candidates, ledger.exclusions)
        if c.precision == shortlist.winner.precision
    ]
    smaller = [c for c in legal if c.batch_size < shortlist.winner.batch_size]
    setting = max(smaller, key=lambda c: c.batch_size, default=None)
    return None if setting in {r.candidate for r in ledger.records} else setting


def next_promising(
    ledger: Ledger,
    planner: Planner,
    throughputs: Mapping[Setting, Sequence[float]],
    left_seconds: float,
    untried: Sequence[Setting] = (),
    *,
    max_processes: int = MAX_PROCESSES,
) -> Setting | None:
    """Return the setting whose next process has the most expected gain per second, or None if none is worth it. Pure.

    `throughputs` lists the throughputs of each setting's processes. A measured setting is returned again if the spread
    of its processes leaves the choice open.
    """
    choosable = ledger.best_tier_settings((*throughputs, *untried))
    if not throughputs or not choosable:
        return None
    throughput_model = ThroughputModel(throughputs, untried)
    measured = [m for measurements in ledger.measurements.values() for m in measurements]
    fastest = max(m.samples_per_second for m in measured)
    tokens_per_sample = median(throughput(ledger.objective, m) / m.samples_per_second for m in measured)
    num_tried = Counter(r.candidate for r in ledger.records if r.purpose == "search")

    def seconds(setting: Setting) -> float:
        """Return the predicted seconds of a trial."""
        # For energy the model's throughput is not samples per second, and without the wait for data it is too high.
        predicted = math.inf if ledger.objective == "energy" else throughput_model.throughput(setting)
        speed = min(fastest, predicted / tokens_per_sample)
        num_samples = setting.batch_size * num_timed_passes(setting) * planner.job_defaults.description.num_batches
        return planner.trial_seconds(ledger, setting, num_samples / speed)

    def may_run(setting: Setting) -> bool:
        if (setting in ledger.measurements) != (setting in ledger.actual.measurements):
            return False  # its first process is still running, and decides whether a second one is needed
        return num_tried[setting] < max_processes and seconds(setting) < left_seconds

    gains = throughput_model.gains(choosable, least=median(throughputs.get(ledger.space.baseline, [0.0])))
    gains_per_second = {
        c: gain / seconds(c) for c, gain in gains.items() if gain > planner.min_gain(seconds(c)) and may_run(c)
    }
    # Settings of nearly equal worth are taken in their order, so that the choice is independent of a CPU's rounding.
    return max(gains_per_second, key=lambda c: float(f"{gains_per_second[c]:.6g}"), default=None)


def share_building(backend: Backend, planner: Planner, ledger: Ledger, progress: Progress) -> None:
    """Build the workload once for all further trials if building takes more than `WORTH_SHARING` of a trial.

    This is done once the precisions were compared, and reported to `progress`. If time or memory is too short for
    another copy of the model, every trial goes on building its own.
    """
    job_defaults = planner.job_defaults
    searched = [r.outcome for r in ledger.records if r.purpose == "search" and isinstance(r.outcome, Measurement)]
    last_built = next((measurement for measurement in reversed(searched) if not measurement.is_build_shared), None)
    if "share_build" not in backend.abilities or backend.is_build_shared or last_built is None:
        return
    if untried_seed(ledger, job_defaults) is not None:
        return
    left_seconds = planner.exploration_seconds(ledger)
    building, context = last_built.build_seconds, last_built.context_seconds
    if not planner.has_time_for_trial(ledger, left_seconds):
        return
    other_seconds = last_built.first_step_seconds + last_built.num_steps * last_built.step_seconds
    share = (building + context) / (building + context + other_seconds)
    if share <= WORTH_SHARING or max(building, context) < MIN_SHARED_SECONDS or left_seconds <= 2 * building:
        return
    note = f"Building the workload takes {building + context:.1f} s, {100 * share:.0f} % of a trial: "
    if building < context:  # a device context, which forked processes do not inherit
        progress.note(note + "one process is kept for the trials until one fails.")
        backend.keep()
        return
    free = job_defaults.hardware.memory.available - job_defaults.memory_limit_bytes
    if job_defaults.hardware.device == "cpu" and BYTES_PER_PARAMETER * job_defaults.description.num_parameters > free:
        return  # the template process's model would take memory that the trials need
    progress.note(note + "it is built once and shared by the trials.")
    # The template builds with one thread, where a trial may have used several.
    trial = planner.trial(ledger, ledger.space.baseline, left_seconds)
    reason = backend.share_build(trial, min(left_seconds, 4 * building + 5))
    if reason is not None:
        progress.note(f"It cannot be shared by forking, so one process is kept instead: {reason}.")
        backend.keep()


def untried_settings(ledger: Ledger, memory_limit_bytes: int) -> list[Setting]:
    """Return the candidates that were not tried and are not excluded.

    Those that the memory model predicts more than 10 % above the limit are left out.
    """
    outcomes = ledger.ordinary_outcomes
    points: dict[Precision, list[tuple[int, int]]] = {}
    for setting, outcome in outcomes.items():
        if isinstance(outcome, Measurement) and not setting.as_found:
            points.setdefault(setting.precision, []).append((setting.batch_size, outcome.reserved_memory_bytes))
    models = {precision: fit_memory(of_it) for precision, of_it in points.items()}

    def may_fit(setting: Setting) -> bool:
        model = models.get(setting.precision)
        return model is None or model(setting.batch_size) <= MEMORY_MARGIN * memory_limit_bytes

    legal = without_excluded(ledger.space.candidates, ledger.exclusions)
    return [c for c in legal if c not in outcomes and may_fit(c)]


def untried_promising_settings(ledger: Ledger, job_defaults: JobDefaults, leading: Iterable[Setting]) -> list[Setting]:
    """Return the untried settings of the precisions that have not run yet, and of those of the `leading` settings.

    A precision that ran and is not among them is left out: its other batch sizes would be ruled out too.
    """
    excluded_precisions = {c.precision for c in ledger.measurements} - {c.precision for c in leading}
    # An emulated precision that timed out may be arbitrarily slow.
    excluded_precisions |= {
        c.precision for c in ledger.failures if is_hopelessly_slow(job_defaults.hardware, c.precision)
    }
    return [
        c for c in untried_settings(ledger, job_defaults.memory_limit_bytes) if c.precision not in excluded_precisions
    ]


def untried_pinned_settings(ledger: Ledger) -> list[Setting]:
    """Return the untried settings of every precision that pinned modules made faithful, with these modules pinned."""
    tried = {
        r.candidate: r.outcome
        for r in ledger.trials
        if r.candidate.pinned_modules and is_ordinary_apart_from_pins(r.candidate)
    }
    pins = {c.precision: c.pinned_modules for c in tried if c in ledger.merits}
    failed_sizes = {c.precision: c.batch_size for c, outcome in tried.items() if not isinstance(outcome, Measurement)}
    legal = without_excluded(ledger.space.candidates, excluded_by_outcomes(ledger.space, ledger.ordinary_outcomes))
    settings = [replace(c, pinned_modules=pins[c.precision]) for c in legal if c.precision in pins]
    return [c for c in settings if c not in tried and c.batch_size < failed_sizes.get(c.precision, math.inf)]


def is_ordinary_apart_from_pins(setting: Setting) -> bool:
    """Whether `setting` is an ordinary setting, its pinned modules aside."""
    return replace(setting, pinned_modules=()).is_ordinary
