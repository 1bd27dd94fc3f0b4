"""Exploring stages: the baseline, every precision at the baseline's batch size, then the settings that the throughput
model values most.

The next trial depends only on the outcomes so far, so a resumed search continues where it was.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import ClassVar

from msgspec.structs import replace

from autotune_amp.core.hardware import Hardware
from autotune_amp.core.intervals import fit_memory
from autotune_amp.core.outcome import Measurement, Outcome
from autotune_amp.core.precisions import Precision
from autotune_amp.core.recommendation import Exclusion
from autotune_amp.core.setting import Setting
from autotune_amp.processes.local import Backend
from autotune_amp.search.job_defaults import JobDefaults, is_hopeless
from autotune_amp.search.ledger import Ledger
from autotune_amp.search.planner import Planner, num_timed_passes
from autotune_amp.search.progress import Progress
from autotune_amp.search.ranking import is_limited_by_data
from autotune_amp.search.run import Stage
from autotune_amp.search.space import Space, excluded_by_outcomes, without
from autotune_amp.search.stages.checks import AccumulationCheck, Checks
from autotune_amp.search.stages.throughput_model import ThroughputModel
from autotune_amp.search.storage.study import Study
from autotune_amp.trial.jobs import Trial

MAX_PROCESSES = 4  # maximum number of trials of one setting
WORTH_SHARING = 0.2  # share of a trial that building must take
MIN_SHARED_SECONDS = 0.5  # less is not worth another model in memory and a process that may fail to share it
BYTES_PER_PARAMETER = 4
MEMORY_MARGIN = 1.1  # the memory model is within 2 to 19 % (studies/README.md), so it may skip but never exclude


@dataclass
class _Explore(ABC):
    """Base class of stages that try settings until none is promising, or time or number of trials is used up."""

    is_exclusive: ClassVar[bool] = False
    study: Study

    def next(self, ledger: Ledger, planner: Planner) -> Trial | None:
        """Return the trial to run next, or None."""
        self.study.catch_up(ledger.actual)
        left = self._left(ledger, planner)
        setting = self._next(ledger, planner, left) if planner.has_time_for_trial(ledger, left) else None
        return None if setting is None else planner.trial(ledger, self.study.ask(setting).setting, left)

    def _left(self, ledger: Ledger, planner: Planner) -> float:
        return planner.exploration_seconds(ledger)

    @abstractmethod
    def _next(self, ledger: Ledger, planner: Planner, left_seconds: float) -> Setting | None:
        """Return the setting to try next, or None if this stage has nothing to try in `left_seconds`."""


class Seeds(_Explore):
    """Stage that measures the baseline, the best setting known for the same code, and every precision at the baseline's
    batch size.

    It may use all the remaining time, since a precision that was not compared cannot be recommended. For the objective
    memory it also tries smaller batches of the setting with the lowest peak.
    """

    def _left(self, ledger: Ledger, planner: Planner) -> float:  # noqa: ARG002 - while they are not all compared
        return planner.budget.left()

    def _next(self, ledger: Ledger, planner: Planner, left_seconds: float) -> Setting | None:  # noqa: ARG002
        seed = untried_seed(ledger, planner.job_defaults)
        return smaller_seed(ledger) if seed is None and ledger.objective == "memory" else seed


class Promising(_Explore):
    """Stage that tries the setting with the most expected gain per second by the throughput model, or the smallest
    batch while nothing has run.
    """

    def _next(self, ledger: Ledger, planner: Planner, left_seconds: float) -> Setting | None:
        job_defaults = planner.job_defaults
        # More loader workers may end the wait for data; until that is tried, compare throughputs without the wait.
        is_held_up = job_defaults.may_add_workers and is_limited_by_data(ledger.records)
        known = ledger.throughputs(without_waiting=is_held_up)
        throughputs = {c: found for c, found in known.items() if c == ledger.space.baseline or is_ordinary_apart_from_pins(c)}
        if not throughputs:
            untried = untried_settings(ledger, job_defaults.memory_limit_bytes)
            return min(untried, key=lambda c: c.batch_size, default=None)
        if ledger.objective == "memory":  # the settings with the highest throughput take the most memory
            return None
        return next_promising(
            ledger,
            planner,
            throughputs,
            left_seconds,
            [*untried_promising_settings(ledger, job_defaults, throughputs), *untried_pinned_settings(ledger)],
            max_processes=1,
        )


def exploration_stages(study: Study) -> tuple[Stage, ...]:
    """Return the exploring stages in order: every precision first, then a check of the leader before its batch sizes
    are explored.

    A check at the end may come too late, and the place of a setting that it rules out goes to others. Settings nearly
    as fast as the best are measured again after the further dimensions, which may gain more (`stages.variants`).
    """
    seeds, checks = Seeds(study), Checks(only_winner=True)
    return seeds, checks, AccumulationCheck(), seeds, Promising(study), checks, seeds


def untried_seed(ledger: Ledger, job_defaults: JobDefaults) -> Setting | None:
    """Return the next setting that has to be measured before any other: the baseline, then every precision at its batch
    size; None once all were tried.
    """
    known, limit = ledger.ordinary_outcomes, job_defaults.memory_limit_bytes
    return next_seed(job_defaults.hardware, ledger.space, known, limit, ledger.exclusions, job_defaults.like)


def smaller_seed(ledger: Ledger) -> Setting | None:
    """Return, for the objective memory, the next smaller batch of the setting with the lowest peak; None if it was
    tried. Pure.

    Batches shrink until they are slower than the baseline; the objective speed would not try these.
    """
    chosen = ledger.shortlist
    if chosen is None:
        return None
    legal = [c for c in without(ledger.space.candidates, ledger.exclusions) if c.precision == chosen.winner.precision]
    smaller = [c for c in legal if c.batch_size < chosen.winner.batch_size]
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
    """Return the setting for which one more process is expected to gain the most per second, or None if none is worth
    it. Pure.

    `throughputs` lists the throughputs of each setting's processes. A measured setting is returned, to be measured
    again, where the spread of its processes leaves the choice open.
    """
    choosable = ledger.choosable_settings((*throughputs, *untried))
    if not throughputs or not choosable:
        return None
    throughput_model = ThroughputModel(throughputs, untried)
    fastest = max(m.samples_per_second for ours in ledger.measurements.values() for m in ours)
    num_tried = Counter(r.candidate for r in ledger.records if r.purpose == "search")

    def seconds(setting: Setting) -> float:
        compiling = 0.0
        if setting.is_compiled:
            known = [m.first_step_seconds for m in ledger.measurements.get(setting, ())]
            compiling = max(known, default=planner.compile_seconds(ledger))
        # For energy, or without the wait for data, `throughput` is not samples per second.
        speed = fastest if ledger.objective == "energy" else min(fastest, throughput_model.throughput(setting))
        num_samples = setting.batch_size * num_timed_passes(setting) * planner.job_defaults.description.num_ranks
        return compiling + planner.trial_seconds(ledger, num_samples / speed)

    def may_run(setting: Setting) -> bool:
        if (setting in ledger.measurements) != (setting in ledger.actual.measurements):
            return False  # its first process is still running, and the value of a second one depends on it
        return num_tried[setting] < max_processes and seconds(setting) < left_seconds

    gains = throughput_model.gains(choosable, least=median(throughputs.get(ledger.space.baseline, [0.0])))
    worth = {c: gain / seconds(c) for c, gain in gains.items() if gain > planner.least_gain(seconds(c)) and may_run(c)}
    # Settings of nearly equal worth are taken in their order, so that the choice is independent of a CPU's rounding.
    return max(worth, key=lambda c: float(f"{worth[c]:.6g}"), default=None)


def share_building(backend: Backend, planner: Planner, ledger: Ledger, progress: Progress) -> None:
    """Build the workload once for all further trials if building takes more than `WORTH_SHARING` of a trial, and note
    it in `progress`.

    This is done once the precisions were compared. If time or memory is too short for another copy of the model, every
    trial goes on building its own.
    """
    job_defaults = planner.job_defaults
    searched = [r.outcome for r in ledger.records if r.purpose == "search" and isinstance(r.outcome, Measurement)]
    own = next((found for found in reversed(searched) if not found.is_build_shared), None)
    if "share_build" not in backend.abilities or backend.is_build_shared or own is None:
        return
    left_seconds, building, context = planner.exploration_seconds(ledger), own.build_seconds, own.context_seconds
    if untried_seed(ledger, job_defaults) is not None or not planner.has_time_for_trial(ledger, left_seconds):
        return
    rest = own.first_step_seconds + own.num_steps * own.step_seconds
    share = (building + context) / (building + context + rest)
    if share <= WORTH_SHARING or max(building, context) < MIN_SHARED_SECONDS or left_seconds <= 2 * building:
        return
    text = f"Building the workload takes {building + context:.1f} s, {100 * share:.0f} % of a trial: "
    if building < context:  # a device context, which forked processes do not inherit
        progress.note(text + "one process is kept for the trials until one fails.")
        backend.keep()
        return
    free = job_defaults.hardware.memory.available - job_defaults.memory_limit_bytes
    if job_defaults.hardware.device == "cpu" and BYTES_PER_PARAMETER * job_defaults.description.num_parameters > free:
        return  # the template process's model would take memory that the trials need
    progress.note(text + "it is built once and shared by the trials.")
    # The template builds with one thread, where a trial may have used several.
    trial = planner.trial(ledger, ledger.space.baseline, left_seconds)
    reason = backend.share_build(trial, min(left_seconds, 4 * building + 5))
    if reason is not None:
        progress.note(f"It cannot be shared by forking, so one process is kept instead: {reason}.")
        backend.keep()


def next_seed(
    hardware: Hardware,
    space: Space,
    outcomes: Mapping[Setting, Outcome],
    memory_limit_bytes: int | None,
    excluded: Sequence[Exclusion] = (),
    like: Setting | None = None,
) -> Setting | None:
    """Return the next setting without an outcome: the baseline, the one nearest to `like`, then one of each precision;
    None once all were tried.

    `excluded` lists exclusions beyond those that follow from `outcomes`.
    """
    if space.baseline not in outcomes:
        return space.baseline
    untried = _untried(space, outcomes, memory_limit_bytes, excluded)
    if like is not None:
        ours = [c for c in space.candidates if c.precision == like.autocast_precision]
        nearest = min(ours, key=lambda c: abs(math.log(c.batch_size / like.batch_size)), default=None)
        if nearest in untried:
            return nearest

    def first_of(precision: Precision) -> Setting | None:
        """Return the setting nearest to the baseline's batch, or smaller after OOM; None once one has run."""
        tried = [o for c, o in outcomes.items() if c.precision == precision and not c.as_found]
        if any(isinstance(outcome, Measurement) or outcome.kind != "oom" for outcome in tried):
            return None
        ours = [c for c in untried if c.precision == precision]
        return min(ours, key=lambda c: abs(math.log(c.batch_size / space.baseline.batch_size)), default=None)

    def promise(precision: Precision) -> tuple[bool, float]:
        """Return a sort key: precisions with the fastest matrix products first, hopeless ones last, since one of their
        steps may cost more than the rest of the search.
        """
        return is_hopeless(hardware, precision), -(hardware.precisions[precision].matmul_flops_per_second or 0.0)

    firsts = map(first_of, sorted(dict.fromkeys(c.precision for c in space.candidates), key=promise))
    return next(filter(None, firsts), None)


def untried_settings(ledger: Ledger, memory_limit_bytes: int | None) -> list[Setting]:
    """Return the candidates that were not tried and are not excluded, without those that the memory model predicts more
    than 10 % above the limit.
    """
    return _untried(ledger.space, ledger.ordinary_outcomes, memory_limit_bytes, ledger.exclusions)


def untried_promising_settings(ledger: Ledger, job_defaults: JobDefaults, leading: Iterable[Setting]) -> list[Setting]:
    """Return the untried settings of every precision that has not run yet or that a setting in `leading` has.

    A precision that ran and is not in `leading` is left out: its other batch sizes would be refused too.
    """
    out = {c.precision for c in ledger.measurements} - {c.precision for c in leading}
    # An emulated precision that timed out may be arbitrarily slow.
    out |= {c.precision for c in ledger.failures if is_hopeless(job_defaults.hardware, c.precision)}
    return [c for c in untried_settings(ledger, job_defaults.memory_limit_bytes) if c.precision not in out]


def untried_pinned_settings(ledger: Ledger) -> list[Setting]:
    """Return the untried settings of every precision that some pinned modules made faithful, with these pins."""
    tried = {
        r.candidate: r.outcome for r in ledger.trials if r.candidate.pinned_modules and is_ordinary_apart_from_pins(r.candidate)
    }
    pins = {c.precision: c.pinned_modules for c in tried if c in ledger.merits}
    failed_sizes = {c.precision: c.batch_size for c, outcome in tried.items() if not isinstance(outcome, Measurement)}
    legal = without(ledger.space.candidates, excluded_by_outcomes(ledger.space, ledger.ordinary_outcomes))
    found = [replace(c, pinned_modules=pins[c.precision]) for c in legal if c.precision in pins]
    return [c for c in found if c not in tried and c.batch_size < failed_sizes.get(c.precision, math.inf)]


def is_ordinary_apart_from_pins(setting: Setting) -> bool:
    """Whether `setting` is an ordinary setting, its pinned modules aside."""
    return replace(setting, pinned_modules=()).is_ordinary


def _untried(
    space: Space, outcomes: Mapping[Setting, Outcome], limit: int | None, excluded: Sequence[Exclusion]
) -> list[Setting]:
    points: dict[Precision, list[tuple[int, int]]] = {}
    for setting, outcome in outcomes.items():
        if isinstance(outcome, Measurement) and not setting.as_found:
            points.setdefault(setting.precision, []).append((setting.batch_size, outcome.reserved_memory_bytes))
    models = {precision: fit_memory(of_it) for precision, of_it in points.items()}

    def may_fit(setting: Setting) -> bool:
        model = models.get(setting.precision)
        return limit is None or model is None or model(setting.batch_size) <= MEMORY_MARGIN * limit

    legal = without(space.candidates, (*excluded, *excluded_by_outcomes(space, outcomes)))
    return [c for c in legal if c not in outcomes and may_fit(c)]
