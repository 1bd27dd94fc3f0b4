"""Exploring: seeds first, then what lies round the best, what the sampler suggests, and the fastest again.

Seeds are the baseline, every precision at a middle batch, and where the models of time and memory point. Seeding a
sampler so cuts the mean regret at 15 trials from 14 % to 2 % (studies/README.md). What comes next follows from the
outcomes so far, so a resumed search goes on where it was.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, pairwise
from typing import TYPE_CHECKING, NamedTuple

from autotune_amp.core.dimensions import Precision
from autotune_amp.core.hardware import Hardware
from autotune_amp.core.outcome import Failure, Measurement, Outcome, Record
from autotune_amp.core.recommendation import Exclusion
from autotune_amp.core.setting import Setting
from autotune_amp.isolation.local import Backend
from autotune_amp.search import ranking
from autotune_amp.search.ledger import Ledger
from autotune_amp.search.progress import Progress
from autotune_amp.search.ranking import PLATEAU, is_waiting
from autotune_amp.search.run import CHECK_SHARE, Budget
from autotune_amp.search.space import Space, excluded_by_outcomes, without
from autotune_amp.search.stages.trials import Conditions, is_hopeless
from autotune_amp.trial.jobs import Check, Trial

if TYPE_CHECKING:
    from autotune_amp.search.study import Study  # and with it Optuna, which what fits memory's model has no use for

LOADER_SHARE = 0.1  # of the budget, kept back for other numbers of loader workers, where the loader sets the speed
# Measuring the fastest three once more takes back a quarter of what is lost to luck (studies/search_efficiency).
NUM_REPEATED, NUM_SEARCH_PROCESSES = 3, 2
REPEATED_SHARE = 0.5  # of the fastest one's speed: what is slower was not unlucky
AFFORDABLE_MARGIN = 2.0
MAX_IDLE_SUGGESTIONS = 4  # suggestions in a row that were known already or brought nothing
WORTH_SHARING = 0.2  # of a trial
MIN_SHARED_SECONDS = 0.5  # less is not worth a model that lies in memory and a process that may fail to share it
BYTES_PER_PARAMETER = 4
MIN_GAIN = 0.01  # a doubled batch that gains less ends the climb (studies/README.md)
MEMORY_MARGIN = 1.1  # the memory model is within 2 to 19 % (studies/README.md), so it may skip but never exclude
NUM_PRECISIONS = 2  # precisions whose batch size is worth a search
# Beyond the best batch of a precision that is not far behind, every batch is looked at until two in a row are so much
# slower: processes differ by 8 to 23 %, and one slow one must not end a climb (studies/search_efficiency).
FAR_BEHIND = 1.25
NUM_FAR_BEHIND = 2


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
    """What the models of time and memory point to: once more, where a check ruled the leaders out."""

    def _next(self, ledger: Ledger, left_seconds: float) -> Setting | None:  # noqa: ARG002
        known, limit = ledger.ordinary_outcomes, self.conditions.memory_limit_bytes
        seed = next_seed(self.conditions.hardware, ledger.space, known, limit, ledger.exclusions)
        if seed is None and ledger.objective == "memory":
            seed = smaller_seed(ledger)
        return None if seed is None else self.study.ask(seed).setting


class Looks(_Explore):
    """What lies round the best, for certainty."""

    def _next(self, ledger: Ledger, left_seconds: float) -> Setting | None:
        if ledger.objective != "speed":
            return None
        known, limit = ledger.ordinary_outcomes, self.conditions.memory_limit_bytes
        look = next_look(ledger.space, known, limit, ledger.exclusions)
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
            if known is None:
                excluded = (e.reason for e in ledger.exclusions if e.covers(asked.setting))
                is_too_long = ledger.best and not _is_affordable(ledger, asked.setting, left_seconds)
                reason = next(excluded, "the time left is too short for it" if is_too_long else None)
                if reason is None:
                    self._best_before = ledger.best
                    return asked.setting
                known = Failure(kind="timeout", message=reason)
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
    is_checked = any(ranking.needs_check(c, space) for c in (*space.candidates, space.baseline))
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


def fit_step_time(points: Iterable[tuple[int, float]]) -> Callable[[int], float] | None:
    """Samples per second at any batch size, fitted to (batch size, samples per second) points.

    A forward and backward pass on b samples, its share of the optimizer step included, takes t(b) = a + c·b seconds, by
    least squares on the relative error with a and c >= 0. None with fewer than two batch sizes, which cannot tell them
    apart.
    """
    timed = [(size, size / rate) for size, rate in points]
    if len({size for size, _ in timed}) < 2:
        return None
    # Minimise sum((a/t + c·b/t - 1)^2): the normal equations of a regression on 1/t and b/t.
    s_uu = sum(1 / t**2 for _, t in timed)
    s_uv = sum(b / t**2 for b, t in timed)
    s_vv = sum(b**2 / t**2 for b, t in timed)
    s_u = sum(1 / t for _, t in timed)
    s_v = sum(b / t for b, t in timed)
    determinant = s_uu * s_vv - s_uv**2
    a, c = (s_u * s_vv - s_v * s_uv) / determinant, (s_v * s_uu - s_u * s_uv) / determinant
    if a < 0:
        a, c = 0.0, s_v / s_vv
    elif c < 0:
        a, c = s_u / s_uu, 0.0
    return lambda size: size / (a + c * size)


def fit_memory(points: Iterable[tuple[int, int]]) -> Callable[[float], float] | None:
    """Bytes that count against the limit at any batch size, M(b) = max(m0, m1 + m2·b), of (batch size, bytes) points.

    The smallest batches sit on the optimizer's plateau m0 (studies/README.md), so the line is that through the two
    largest; memory never falls with the batch size. None with fewer than two sizes.
    """
    at = sorted(dict(points).items())
    if len(at) < 2:
        return None
    (b1, m1), (b2, m2) = at[-2:]
    slope = max(0.0, (m2 - m1) / (b2 - b1))
    m0 = min(m for _, m in at)
    return lambda size: max(m0, m2 + slope * (size - b2))


class _Known(NamedTuple):
    """Of one precision: samples per second of the batch sizes that ran, ascending, and those that may be tried."""

    rates: dict[int, float]
    untried: dict[int, Setting]


def next_seed(
    hardware: Hardware,
    space: Space,
    outcomes: Mapping[Setting, Outcome],
    memory_limit_bytes: int | None,
    excluded: Sequence[Exclusion] = (),
) -> Setting | None:
    """What to try next, or None when seeding is over. Never something that has an outcome or is excluded.

    `excluded` is beyond what the outcomes rule out. Candidates that the memory model puts more than a tenth over
    `memory_limit_bytes` are skipped, not excluded.
    """
    if space.baseline not in outcomes:
        return space.baseline
    known = _known(space, outcomes, memory_limit_bytes, excluded)

    def first_of(precision: Precision) -> Setting | None:
        """The first try: at the baseline's batch, where all can be compared; smaller only after OOM."""
        tried = [o for c, o in outcomes.items() if c.precision == precision and not c.as_found]
        if any(isinstance(outcome, Measurement) or outcome.kind != "oom" for outcome in tried):
            return None
        untried = known[precision].untried
        size = min(untried, key=lambda size: abs(math.log(size / space.baseline.batch_size)), default=None)
        return None if size is None else untried[size]

    def promise(precision: Precision) -> tuple[bool, float]:
        """The fastest matrix products first; the hopeless last: a step may cost more than the rest of the search."""
        return is_hopeless(hardware, precision), -(hardware.precisions[precision].matmul_flops_per_second or 0.0)

    firsts = map(first_of, sorted(dict.fromkeys(c.precision for c in space.candidates), key=promise))
    # An emulated precision may lead at small batches alone: what the device does itself climbs first.
    climbing = sorted(_best_precisions(known), key=lambda p: hardware.precisions[p].level == "emulated")
    nexts = (_next_of(known[precision]) for precision in climbing)
    return next(filter(None, chain(firsts, nexts)), None)


def next_look(
    space: Space,
    outcomes: Mapping[Setting, Outcome],
    memory_limit_bytes: int | None,
    excluded: Sequence[Exclusion] = (),
) -> Setting | None:
    """What to try once seeding is over: the batches round the best of each precision that is not far behind.

    None where all of them are known. The arguments are those of `next_seed`.
    """
    known = _known(space, outcomes, memory_limit_bytes, excluded)
    fastest = max((rate for found in known.values() for rate in found.rates.values()), default=0.0)
    near = [p for p in _best_precisions(known) if max(known[p].rates.values()) * FAR_BEHIND >= fastest]
    return next(filter(None, (_round_the_best(known[precision]) for precision in near)), None)


def _known(
    space: Space, outcomes: Mapping[Setting, Outcome], limit: int | None, excluded: Sequence[Exclusion]
) -> dict[Precision, _Known]:
    legal = without(space.candidates, (*excluded, *excluded_by_outcomes(space, outcomes)))
    leading = without(outcomes, excluded)  # what a check rules out leads nobody any more
    found = {}
    for precision in dict.fromkeys(c.precision for c in (*outcomes, *space.candidates)):
        ours = [c for c in outcomes if c.precision == precision and not c.as_found]
        measured = {c: m for c in ours if isinstance(m := outcomes[c], Measurement)}
        model = fit_memory((c.batch_size, m.reserved_memory_bytes) for c, m in measured.items())
        rates = {c.batch_size: m.samples_per_second for c, m in measured.items() if c in leading}
        untried = {
            c.batch_size: c
            for c in legal
            if c.precision == precision
            and c not in outcomes
            and (limit is None or model is None or model(c.batch_size) <= MEMORY_MARGIN * limit)
        }
        found[precision] = _Known(dict(sorted(rates.items())), untried)
    return found


def _best_precisions(known: Mapping[Precision, _Known]) -> list[Precision]:
    best = {precision: max(found.rates.values()) for precision, found in known.items() if found.rates}
    return sorted(best, key=lambda precision: -best[precision])[:NUM_PRECISIONS]


def _next_of(known: _Known) -> Setting | None:
    """The next batch of a precision: up to where the step-time model has its plateau, then the best's neighbours."""
    rates, untried = known
    sizes = sorted({*rates, *untried})
    above, below = dict(pairwise(sizes)), dict(pairwise(reversed(sizes)))
    best = max(rates, key=lambda size: rates[size])
    wanted = [below.get(best), below.get(smallest_near_best(rates))]
    smaller = dict(pairwise(reversed(rates))).get(best)
    is_climbing = smaller is None or rates[best] >= (1 + MIN_GAIN) * rates[smaller]
    if best < max(rates) or is_climbing:
        wanted.insert(0, above.get(best))
    model = fit_step_time(rates.items())
    if model is not None and best == max(rates) and is_climbing:
        # Only upwards: what it says of smaller batches the neighbours measure sooner.
        plateau = smallest_near_best({size: model(size) for size in sizes})
        wanted.insert(0, max(plateau, best))
    return next((untried[size] for size in wanted if size in untried), None)


def _round_the_best(known: _Known) -> Setting | None:
    """The nearest untried batch above or below the best one, on a side where not all is far behind yet."""
    rates, untried = known
    best = max(rates, key=lambda size: rates[size])
    sizes = sorted({*rates, *untried})
    for side in ([s for s in sizes if s > best], [s for s in reversed(sizes) if s < best]):
        num_far_behind = 0
        for size in side:
            if num_far_behind == NUM_FAR_BEHIND:
                break
            if size in untried:
                return untried[size]
            num_far_behind = num_far_behind + 1 if rates[size] * FAR_BEHIND < rates[best] else 0
    return None


def smallest_near_best(rates: Mapping[int, float]) -> int:
    """The smallest batch size within `PLATEAU` of the best samples per second."""
    return min(size for size, rate in rates.items() if rate >= (1 - PLATEAU) * max(rates.values()))
