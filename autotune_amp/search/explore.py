"""The search phase: seeds, what Optuna suggests, then the fastest again, each time in a trial of its own."""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec

from autotune_amp.core.evidence import Objective
from autotune_amp.core.outcome import Failure, Measurement, Outcome, Record
from autotune_amp.core.recommendation import Exclusion
from autotune_amp.core.setting import Setting
from autotune_amp.isolation.backend import Backend
from autotune_amp.search import building, gate, seeding, verdicts
from autotune_amp.search.choose import search_speeds, shortlist
from autotune_amp.search.conditions import is_waiting
from autotune_amp.search.loss_scales import AllScales
from autotune_amp.search.session import Session, outcome_of, spent_on
from autotune_amp.search.space import Space, without
from autotune_amp.search.study import Asked, Study
from autotune_amp.trial.jobs import Trial

CUT_RATIO = 1.25  # median of five steps against the best: cuts equals 4 % of the time (measurement.md, Timing)
SLOW_PRECISION_SHARE = 0.1  # of the budget, for a precision that has not shown itself worth more
CHECK_SHARE = 0.1  # of the budget, kept back for the checks that follow, where there is something to check
LOADER_SHARE = 0.1  # of the budget, kept back for other numbers of loader workers, where the loader sets the speed
MIN_TRIAL_SECONDS = 0.5
# Measuring the fastest three once more takes back a quarter of what is lost to luck (studies/search_efficiency).
NUM_REPEATED, NUM_SEARCH_PROCESSES = 3, 2
REPEATED_SHARE = 0.5  # of the fastest one's speed: what is slower was not unlucky
AFFORDABLE_MARGIN = 2.0
MAX_IDLE_SUGGESTIONS = 4  # suggestions in a row that were known already or brought nothing
DEADLINE_RATIO = 20.0  # a step so many times longer than the best throughput foretells is not waited for
MIN_STEP_DEADLINE_SECONDS = 2.0  # a busy machine stalls a step for hundreds of milliseconds
METERED_SECONDS, MAX_METERED_STEPS = 1.0, 1000  # an energy counter is updated every 100 ms at worst
NUM_TRIALS_FORESEEN = 16  # one trial's steps take at most this part of the search phase


def explore(session: Session, runner: Backend, space: Space, study: Study, max_trials: int | None) -> None:
    """Try candidates until nothing promising is left, its share of the budget is used, or `max_trials`.

    It leaves a share of the budget for the checks and for loader workers. An fp16 candidate that may win has its loss
    scale calibrated at once, and is told with it.
    """
    while _may_go_on(session, space, max_trials):
        share_building(session, runner, space)
        candidate = seeding.next_seed(
            session.hardware,
            space,
            session.space_outcomes,
            session.memory_limit_bytes,
            session.exclusions(space),
        )
        if candidate is None and session.objective == "memory":
            candidate = smaller_seed(session.records, space, session.scales, session.exclusions(space))
        if candidate is None and session.objective == "speed":
            candidate = _affordable(session, space, _next_look(session, space))
        if candidate is None:
            break
        _measure(session, runner, space, study, study.ask(candidate))
    _follow_suggestions(session, runner, space, study, max_trials)
    if session.objective == "speed":  # another does not recommend the fastest
        _repeat_the_fastest(session, runner, space, study, max_trials)


def smaller_seed(
    records: Sequence[Record], space: Space, scales: AllScales, exclusions: Sequence[Exclusion]
) -> Setting | None:
    """For memory: the next smaller batch of what takes the least so far, None where it was tried. Pure.

    Batches shrink so until they are slower than the baseline, which speed alone would not look into.
    """
    chosen = shortlist(records, space.baseline, scales, "memory")
    if chosen is None:
        return None
    legal = [c for c in without(space.candidates, exclusions) if c.precision == chosen.winner.precision]
    smaller = [c for c in legal if c.batch_size < chosen.winner.batch_size]
    candidate = max(smaller, key=lambda c: c.batch_size, default=None)
    return None if candidate in {r.candidate for r in records} else candidate


def share_building(session: Session, runner: Backend, space: Space) -> None:
    """Have the trials to come share what is built once, where that pays."""
    left = left_to_explore(session, space)
    building.share_where_it_pays(session, runner, search_spec(session, space.baseline, left), left)


def left_to_explore(session: Session, space: Space) -> float:
    """Seconds left before the share of the checks begins, and of other numbers of loader workers."""
    is_checked = any(verdicts.needs_check(c, space) for c in (*space.candidates, space.baseline))
    has_workers = session.description is not None and session.description.num_workers is not None
    share = is_checked * CHECK_SHARE + (has_workers and is_waiting(session.records)) * LOADER_SHARE
    left = session.clock.left_for_search() - share * session.clock.budget_seconds
    is_known = any(isinstance(outcome, Measurement) for outcome in session.outcomes.values())
    # While nothing has run there is nothing to confirm either, and building must not be all that the search does.
    return left if is_known or 2 * building.setup_seconds(session) < left else max(left, session.clock.left())


def _measure(session: Session, runner: Backend, space: Space, study: Study, asked: Asked) -> Outcome:
    seconds = left_to_explore(session, space)
    record = session.run(runner, search_spec(session, asked.candidate, seconds))
    outcome = outcome_of(record)
    is_calibrated = gate.is_worth_calibrating(session, asked.candidate, outcome)
    if is_calibrated:
        gate.calibrate(session, runner, asked.candidate)
        session.progress.phase("searching")
    study.tell(asked, outcome, number=record.number)
    if is_calibrated:
        gate.answer_seeds(session, study, asked.candidate)
    return outcome


def _follow_suggestions(session: Session, runner: Backend, space: Space, study: Study, max_trials: int | None) -> None:
    num_idle = 0
    while num_idle < MAX_IDLE_SUGGESTIONS and _may_go_on(session, space, max_trials):
        excluded = session.exclusions(space)
        untried = [c for c in without(space.candidates, excluded) if c not in session.outcomes]
        if not untried:
            return
        # While nothing has worked there is nothing to learn from: the smallest first, until one does.
        asked = study.ask(None if session.best() else min(untried, key=lambda c: c.batch_size))
        known = session.outcomes.get(asked.candidate)
        if known is None and asked.candidate not in untried:
            reason = next(e.reason for e in excluded if _names(e.precision, e.batch_size, asked.candidate))
            known = Failure(kind="timeout", message=reason)
        elif known is None and session.best() and _affordable(session, space, asked.candidate) is None:
            known = Failure(kind="timeout", message="the time left is too short for it")
        if known is not None:
            study.tell(asked, known)
            num_idle += 1
            continue
        best = session.best()
        _measure(session, runner, space, study, asked)
        num_idle = 0 if best is None or session.best() is not best else num_idle + 1


def _next_look(session: Session, space: Space) -> Setting | None:
    return seeding.next_look(space, session.space_outcomes, session.memory_limit_bytes, session.exclusions(space))


def _repeat_the_fastest(session: Session, runner: Backend, space: Space, study: Study, max_trials: int | None) -> None:
    while _may_go_on(session, space, max_trials):
        candidate = _affordable(session, space, next_repeat(session.records, session.scales))
        if candidate is None:
            return
        _measure(session, runner, space, study, study.ask(candidate))


def next_repeat(records: Sequence[Record], scales: AllScales) -> Setting | None:
    """Which of the fastest to measure again, since one process may be lucky, or slow; None when all were. Pure."""
    speeds = {
        c: speed
        for c, speed in search_speeds(records, scales).items()
        if not c.as_found and c.num_workers is None  # other numbers of workers are tried by rules of their own
    }
    rivals = [c for c in speeds if speeds[c] >= REPEATED_SHARE * max(speeds.values())]
    fastest = sorted(rivals, key=lambda c: -speeds[c])[:NUM_REPEATED]
    num_done = {c: sum(r.candidate == c and r.purpose == "search" for r in records) for c in fastest}
    candidate = min(fastest, key=lambda c: num_done[c], default=None)
    return None if candidate is None or num_done[candidate] >= NUM_SEARCH_PROCESSES else candidate


def _affordable(session: Session, space: Space, candidate: Setting | None) -> Setting | None:
    """`candidate` where the time left is enough, going by the nearest batch of its precision.

    What is looked at for certainty alone must not cost the checks their time, and a repeated trial that the budget
    cut off would speak against its candidate.
    """
    ours = [r for r in session.trials if candidate and r.candidate.precision == candidate.precision]
    if candidate is None or not ours:
        return candidate
    nearest = min(ours, key=lambda r: abs(math.log(r.candidate.batch_size / candidate.batch_size)))
    return candidate if AFFORDABLE_MARGIN * nearest.seconds < left_to_explore(session, space) else None


def _names(precision: str, batch_size: int | None, candidate: Setting) -> bool:
    return precision == candidate.precision and batch_size in (None, candidate.batch_size)


def _may_go_on(session: Session, space: Space, max_trials: int | None) -> bool:
    num_done = sum(r.purpose == "search" for r in session.records)
    if max_trials is not None and num_done >= max_trials:
        return False
    return left_to_explore(session, space) > MIN_TRIAL_SECONDS


def search_spec(session: Session, candidate: Setting, search_seconds: float) -> Trial:
    """A search trial with its limits: what the best so far says a step may take, and the `search_seconds` left."""
    best = session.best()
    if best is None:
        # Nothing is known of the step: two thirds of what is left, so that one that hangs leaves time for another.
        setup_seconds = min(building.setup_seconds(session), search_seconds)
        spec = session.spec(
            candidate,
            measure_seconds=session.clock.budget_seconds / NUM_TRIALS_FORESEEN,
            deadline_seconds=max(MIN_TRIAL_SECONDS, (2 * search_seconds + setup_seconds) / 3),
        )
        return _metered(spec, session.objective)
    assert isinstance(best.outcome, Measurement)
    rate = best.outcome.samples_per_second
    spec = session.spec(
        candidate,
        measure_seconds=session.clock.budget_seconds / NUM_TRIALS_FORESEEN,
        cut_step_seconds=CUT_RATIO * candidate.effective_batch_size / rate,
        deadline_seconds=max(MIN_TRIAL_SECONDS, min(search_seconds, _allowance(session, candidate))),
    )
    reported = candidate.batch_size * spec.num_timed_micro_batches * spec.num_steps_per_report
    step_deadline = max(MIN_STEP_DEADLINE_SECONDS, DEADLINE_RATIO * reported / rate)
    own_num_workers = 0 if session.description is None else session.description.num_workers
    if candidate.num_workers or own_num_workers:  # unless they persist, every epoch starts them anew
        step_deadline += best.outcome.first_step_seconds
    growth = max(1.0, candidate.batch_size / best.candidate.batch_size)
    return msgspec.structs.replace(
        _metered(spec, session.objective),
        step_deadline_seconds=step_deadline,
        first_step_deadline_seconds=step_deadline + 3 * growth * best.outcome.first_step_seconds,
    )


def _metered(spec: Trial, objective: Objective) -> Trial:
    """For energy a trial is as long as a counter needs, however steady or slow its steps are."""
    if objective != "energy":
        return spec
    seconds = min(METERED_SECONDS, spec.measure_seconds or METERED_SECONDS)
    num_steps = MAX_METERED_STEPS, MAX_METERED_STEPS
    return msgspec.structs.replace(spec, num_steps=num_steps, measure_seconds=seconds, cut_step_seconds=None)


def _allowance(session: Session, candidate: Setting) -> float:
    """Seconds that a precision may still cost: a tenth of the budget where its matrix products are hopelessly slow."""
    if not seeding.is_hopeless(session.hardware, candidate.precision):
        return math.inf
    return SLOW_PRECISION_SHARE * session.clock.budget_seconds - spent_on(session.records, candidate.precision)
