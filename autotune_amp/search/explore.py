"""The search phase: seeds first, then what Optuna suggests, each candidate in a trial of its own."""

from __future__ import annotations

import math

import msgspec

from autotune_amp.search import gate, seeding, verdicts
from autotune_amp.search.session import Session, outcome_of, spent_on
from autotune_amp.search.space import Space, without
from autotune_amp.search.study import Asked, Study
from autotune_amp.trial.outcome import Failure, Measurement, Outcome
from autotune_amp.trial.runner import Runner
from autotune_amp.trial.spec import Candidate, TrialSpec

CUT_RATIO = 1.25  # median of five steps against the best: cuts equals 4 % of the time (measurement.md, Timing)
SLOW_PRECISION_SHARE = 0.1  # of the budget, for a precision that has not shown itself worth more
CHECK_SHARE = 0.1  # of the budget, kept back for the checks that follow, where there is something to check
MIN_TRIAL_SECONDS = 0.5
MAX_IDLE_SUGGESTIONS = 4  # suggestions in a row that were known already or brought nothing
DEADLINE_RATIO = 20.0  # a step so many times longer than the best throughput foretells is not waited for
MIN_STEP_DEADLINE_SECONDS = 2.0  # a busy machine stalls a step for hundreds of milliseconds
NUM_TRIALS_FORESEEN = 16  # one trial's steps take at most this part of the search phase


def explore(session: Session, runner: Runner, space: Space, study: Study, max_trials: int | None) -> None:
    """Try candidates until nothing promising is left, its share of the budget is used, or `max_trials`.

    It leaves `CHECK_SHARE` of the budget for the checks. An fp16 candidate that may win has its loss scale calibrated
    at once, and is told with it.
    """
    while _may_go_on(session, space, max_trials):
        candidate = seeding.next_seed(
            session.hardware,
            space,
            session.unpinned_outcomes,
            session.memory_limit_bytes,
            session.exclusions(space),
        )
        if candidate is None:
            break
        outcome = _measure(session, runner, space, study, study.ask(candidate))
        _keep_if_worth_it(session, runner, outcome)
    _follow_suggestions(session, runner, space, study, max_trials)


def left_to_explore(session: Session, space: Space) -> float:
    """Seconds left before the checks' share begins."""
    is_checked = any(verdicts.needs_check(c, space) for c in (*space.candidates, space.baseline))
    return session.clock.left_for_search() - is_checked * CHECK_SHARE * session.clock.budget_seconds


def _measure(session: Session, runner: Runner, space: Space, study: Study, asked: Asked) -> Outcome:
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


def _follow_suggestions(session: Session, runner: Runner, space: Space, study: Study, max_trials: int | None) -> None:
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
        if known is not None:
            study.tell(asked, known)
            num_idle += 1
            continue
        best = session.best()
        _measure(session, runner, space, study, asked)
        num_idle = 0 if best is None or session.best() is not best else num_idle + 1


def _names(precision: str, batch_size: int | None, candidate: Candidate) -> bool:
    return precision == candidate.precision and batch_size in (None, candidate.batch_size)


def _may_go_on(session: Session, space: Space, max_trials: int | None) -> bool:
    num_done = sum(r.purpose == "search" for r in session.records)
    if max_trials is not None and num_done >= max_trials:
        return False
    return left_to_explore(session, space) > MIN_TRIAL_SECONDS


def search_spec(session: Session, candidate: Candidate, search_seconds: float) -> TrialSpec:
    """A search trial with its limits: what the best so far says a step may take, and the `search_seconds` left."""
    best = session.best()
    if best is None:
        # Nothing is known of the step: two thirds of what is left, so that one that hangs leaves time for another.
        return session.spec(
            candidate,
            measure_seconds=session.clock.budget_seconds / NUM_TRIALS_FORESEEN,
            deadline_seconds=max(MIN_TRIAL_SECONDS, 2 * search_seconds / 3),
        )
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
    growth = max(1.0, candidate.batch_size / best.candidate.batch_size)
    return msgspec.structs.replace(
        spec,
        step_deadline_seconds=step_deadline,
        first_step_deadline_seconds=step_deadline + 3 * growth * best.outcome.first_step_seconds,
    )


def _allowance(session: Session, candidate: Candidate) -> float:
    """Seconds that a precision may still cost: a tenth of the budget where its matrix products are hopelessly slow."""
    if not seeding.is_hopeless(session.hardware, candidate.precision):
        return math.inf
    return SLOW_PRECISION_SHARE * session.clock.budget_seconds - spent_on(session.records, candidate.precision)


def _keep_if_worth_it(session: Session, runner: Runner, outcome: Outcome) -> None:
    """Where building costs more than measuring, one worker keeps what it built."""
    if isinstance(outcome, Measurement) and runner.isolation == "fork":
        measuring = outcome.first_step_seconds + sum(outcome.raw_step_seconds)
        if outcome.build_seconds + outcome.context_seconds > measuring:
            session.progress.note("Building the workload takes longer than measuring it: one process is kept for it.")
            runner.keep()
