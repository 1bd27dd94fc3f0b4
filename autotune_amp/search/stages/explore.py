"""Exploring: seeds first, then what lies round the best, what the sampler suggests, and the fastest again."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass

from autotune_amp.core.outcome import Failure, Measurement, Record
from autotune_amp.core.setting import Setting
from autotune_amp.isolation.backend import Backend
from autotune_amp.search import check_results
from autotune_amp.search.answer.evidence import is_waiting
from autotune_amp.search.ledger import Ledger
from autotune_amp.search.progress import Progress
from autotune_amp.search.run import CHECK_SHARE, Budget
from autotune_amp.search.space import without
from autotune_amp.search.stages import seeding
from autotune_amp.search.stages.trials import Conditions
from autotune_amp.search.study import Study
from autotune_amp.trial.jobs import Check, Trial

LOADER_SHARE = 0.1  # of the budget, kept back for other numbers of loader workers, where the loader sets the speed
# Measuring the fastest three once more takes back a quarter of what is lost to luck (studies/search_efficiency).
NUM_REPEATED, NUM_SEARCH_PROCESSES = 3, 2
REPEATED_SHARE = 0.5  # of the fastest one's speed: what is slower was not unlucky
AFFORDABLE_MARGIN = 2.0
MAX_IDLE_SUGGESTIONS = 4  # suggestions in a row that were known already or brought nothing
WORTH_SHARING = 0.2  # of a trial
MIN_SHARED_SECONDS = 0.5  # less is not worth a model that lies in memory and a process that may fail to share it
BYTES_PER_PARAMETER = 4


@dataclass
class _Explore(ABC):
    """Tries settings until nothing promising is left, its share of the budget is used, or `max_trials` are done.

    It leaves a share of the budget for the checks and for loader workers. fp16 that may win has its loss scale
    calibrated at once, and the study is told with it.
    """

    conditions: Conditions
    study: Study

    def next(self, ledger: Ledger, budget: Budget) -> Trial | Check | None:
        """The trial to run next, or the calibration of the last one."""
        last = ledger.records[-1] if ledger.records else None
        if last is not None and last.purpose == "search" and ledger.awaits_calibration(last.candidate):
            return self.conditions.check("calibration", last.candidate, budget.left_for_search())
        self.study.catch_up(ledger)
        left = left_to_explore(self.conditions, ledger, budget)
        if not self.conditions.may_try(ledger, left):
            return None
        setting = self._next(ledger, left)
        return None if setting is None else self.conditions.search_trial(ledger, budget, setting, left)

    @abstractmethod
    def _next(self, ledger: Ledger, left_seconds: float) -> Setting | None:
        """What to try next."""

    def _for_certainty(self, ledger: Ledger, setting: Setting | None, left_seconds: float) -> Setting | None:
        """What is run for certainty alone must not cost the checks their time."""
        is_wanted = setting is not None and _is_affordable(ledger, setting, left_seconds)
        return self.study.ask(setting).setting if is_wanted else None


class Seeds(_Explore):
    """What the models of time and memory point to (`seeding`): once more, where a check ruled the leaders out."""

    def _next(self, ledger: Ledger, left_seconds: float) -> Setting | None:  # noqa: ARG002
        known, limit = ledger.ordinary_outcomes, self.conditions.memory_limit_bytes
        seed = seeding.next_seed(self.conditions.hardware, ledger.space, known, limit, ledger.exclusions)
        if seed is None and ledger.objective == "memory":
            seed = smaller_seed(ledger)
        return None if seed is None else self.study.ask(seed).setting


class Looks(_Explore):
    """What lies round the best, for certainty."""

    def _next(self, ledger: Ledger, left_seconds: float) -> Setting | None:
        if ledger.objective != "speed":
            return None
        known, limit = ledger.ordinary_outcomes, self.conditions.memory_limit_bytes
        look = seeding.next_look(ledger.space, known, limit, ledger.exclusions)
        return self._for_certainty(ledger, look, left_seconds)


class Suggestions(_Explore):
    """What the sampler suggests, then the fastest once more."""

    _num_idle = 0  # of suggestions in a row
    _best_before: Record | None = None  # when the last suggestion was run; None where it was no suggestion

    def _next(self, ledger: Ledger, left_seconds: float) -> Setting | None:
        suggested = self._next_suggestion(ledger, left_seconds)
        if suggested is not None or ledger.objective != "speed":  # another does not recommend the fastest
            return suggested
        return self._for_certainty(ledger, next_repeat(ledger), left_seconds)

    def _next_suggestion(self, ledger: Ledger, left_seconds: float) -> Setting | None:
        """What the sampler suggests and nobody knows yet; it is told at once what is known."""
        if self._best_before is not None:
            self._num_idle = self._num_idle + 1 if ledger.best is self._best_before else 0
            self._best_before = None
        while self._num_idle < MAX_IDLE_SUGGESTIONS:
            untried = [c for c in without(ledger.space.candidates, ledger.exclusions) if c not in ledger.outcomes]
            if not untried:
                break
            # While nothing has worked there is nothing to learn from: the smallest first, until one does.
            asked = self.study.ask(None if ledger.best else min(untried, key=lambda c: c.batch_size))
            known = ledger.outcomes.get(asked.setting)
            if known is None and asked.setting not in untried:
                reason = next(e.reason for e in ledger.exclusions if e.covers(asked.setting))
                known = Failure(kind="timeout", message=reason)
            elif known is None and ledger.best and not _is_affordable(ledger, asked.setting, left_seconds):
                known = Failure(kind="timeout", message="the time left is too short for it")
            if known is None:
                self._best_before = ledger.best
                return asked.setting
            self.study.tell(asked, known)
            self._num_idle += 1
        self._num_idle = MAX_IDLE_SUGGESTIONS
        return None


EXPLORING = (Seeds, Looks, Suggestions)


def _is_affordable(ledger: Ledger, setting: Setting, left_seconds: float) -> bool:
    """Whether the time left is enough for `setting`, going by the nearest batch of its precision: what the budget cut
    off would speak against it.
    """
    ours = [r for r in ledger.trials if r.candidate.precision == setting.precision]
    nearest = min(ours, key=lambda r: abs(math.log(r.candidate.batch_size / setting.batch_size)), default=None)
    return nearest is None or AFFORDABLE_MARGIN * nearest.seconds < left_seconds


def left_to_explore(conditions: Conditions, ledger: Ledger, budget: Budget) -> float:
    """Seconds left before the share of the checks begins, and of other numbers of loader workers."""
    space = ledger.space
    is_checked = any(check_results.needs_check(c, space) for c in (*space.candidates, space.baseline))
    has_workers = conditions.description.num_workers is not None
    share = is_checked * CHECK_SHARE + (has_workers and is_waiting(ledger.records)) * LOADER_SHARE
    left = budget.left_for_search() - share * budget.seconds
    is_known = any(isinstance(outcome, Measurement) for outcome in ledger.outcomes.values())
    # While nothing has run there is nothing to confirm either, and building must not be all that the search does.
    return left if is_known or 2 * conditions.setup_seconds < left else max(left, budget.left())


def smaller_seed(ledger: Ledger) -> Setting | None:
    """For memory: the next smaller batch of what takes the least so far, None where it was tried. Pure.

    Batches shrink so until they are slower than the baseline, which speed alone would not look into.
    """
    chosen = ledger.shortlist
    if chosen is None:
        return None
    legal = [c for c in without(ledger.space.candidates, ledger.exclusions) if c.precision == chosen.winner.precision]
    smaller = [c for c in legal if c.batch_size < chosen.winner.batch_size]
    setting = max(smaller, key=lambda c: c.batch_size, default=None)
    return None if setting in {r.candidate for r in ledger.records} else setting


def next_repeat(ledger: Ledger) -> Setting | None:
    """Which of the fastest to measure again, since one process may be lucky, or slow; None when all were. Pure."""
    # Other numbers of loader workers are tried by rules of their own.
    speeds = {c: speed for c, speed in ledger.speeds.items() if not c.as_found and c.num_workers is None}
    rivals = [c for c in speeds if speeds[c] >= REPEATED_SHARE * max(speeds.values())]
    fastest = sorted(rivals, key=lambda c: -speeds[c])[:NUM_REPEATED]
    num_done = {c: sum(r.candidate == c and r.purpose == "search" for r in ledger.records) for c in fastest}
    setting = min(fastest, key=lambda c: num_done[c], default=None)
    return None if setting is None or num_done[setting] >= NUM_SEARCH_PROCESSES else setting


def share_building(
    backend: Backend, conditions: Conditions, ledger: Ledger, budget: Budget, progress: Progress
) -> None:
    """Share building among the trials to come if it is more than `WORTH_SHARING` of one, and say so.

    Before the first measurement it is, where it would be even in a trial that measures for as long as it may. Where
    time or memory is too short for a model more, every trial goes on building its own.
    """
    if "share_build" not in backend.abilities or backend.is_build_shared:
        return
    known, left_seconds = conditions.description, left_to_explore(conditions, ledger, budget)
    trial = conditions.search_trial(ledger, budget, ledger.space.baseline, left_seconds)
    building, context, rest = known.build_seconds, known.context_seconds, trial.measure_seconds or 0.0
    searched = [r.outcome for r in ledger.records if r.purpose == "search" and isinstance(r.outcome, Measurement)]
    own = next((found for found in reversed(searched) if not found.is_build_shared), None)
    if own is not None:
        rest = own.first_step_seconds + own.num_steps * own.step_seconds
        building, context = own.build_seconds, own.context_seconds
    share = (building + context) / (building + context + rest)
    if share <= WORTH_SHARING or max(building, context) < MIN_SHARED_SECONDS or left_seconds <= 2 * building:
        return
    text = f"Building the workload takes {building + context:.1f} s, {100 * share:.0f} % of a trial: "
    if building < context:  # which forks do not inherit
        progress.note(text + "one process is kept for the trials until one fails.")
        backend.keep()
        return
    free = conditions.hardware.memory.available - conditions.memory_limit_bytes
    if conditions.hardware.device == "cpu" and BYTES_PER_PARAMETER * known.num_parameters > free:
        return  # the model of the process that the trials are forked from lies in the memory that they have
    progress.note(text + "it is built once and shared by the trials.")
    # One thread builds there, where a trial may have used several.
    reason = backend.share_build(trial, min(left_seconds, 4 * building + 5))
    if reason is not None:
        progress.note(f"It cannot be shared by forking, so one process is kept instead: {reason}.")
        backend.keep()
