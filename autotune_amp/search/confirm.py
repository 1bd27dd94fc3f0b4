"""The confirmation: winner, runner-up and baseline again, interleaved, in fresh processes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from statistics import fmean
from typing import NamedTuple

from autotune_amp.core.config import Precision
from autotune_amp.core.outcome import Failure, Measurement, Purpose, Record
from autotune_amp.core.setting import Setting
from autotune_amp.isolation.backend import Backend
from autotune_amp.search import accumulate, verdicts
from autotune_amp.search.choose import Shortlist
from autotune_amp.search.evidence import failures
from autotune_amp.search.fallbacks import LADDER
from autotune_amp.search.seeding import HOPELESS
from autotune_amp.search.session import CONFIRM_SHARE, Session, outcome_of
from autotune_amp.search.space import Space
from autotune_amp.trial.jobs import Trial

NUM_ROUNDS, MIN_ROUNDS = 5, 3
# Long enough to meet what a long run meets: a collection of garbage, a stall of the machine. Short steps fill the
# time, long ones are fewer: it is the spread between processes that counts.
MEASURE_SECONDS = 2.0
MAX_STEPS = 400
RUN_SECONDS = MEASURE_SECONDS + 0.5  # with the warm-up of a small model
ENDING_SHARE = 0.25  # of the confirmation's time, for evaluations and checkpoints
MAX_FALLBACK_TRIES = 3
MAX_SHARE = 0.5  # of the budget
SAFETY = 1.1  # an estimate of a process's seconds that turns out short must not break the budget


class Run(NamedTuple):
    """One measurement of a round; an empty environment is the user's own."""

    candidate: Setting
    purpose: Purpose
    environment: dict[str, str]


class Processes(NamedTuple):
    """Where the runs run: each in a process of its own, or all of a round, one after the other, in one.

    `runner_for` gives what runs in an environment, `start_seconds` is what a process takes before its first step.
    """

    runner_for: Callable[[dict[str, str]], AbstractContextManager[Backend]]
    start_seconds: float
    are_shared: bool = False


def measure_fallbacks(session: Session, runner: Backend, space: Space, winner: Setting) -> None:
    """Measure a plan for each precision with less to go wrong, at the winner's effective batch size.

    The batch is halved and the accumulation doubled where it runs out of memory, if accumulation is offered; what was
    measured already is left. A precision that does harm is none to step down to.
    """
    harmful = {e.precision for e in verdicts.exclusions(verdicts.verdicts(session.records))}
    for precision in LADDER[winner.precision]:
        if precision in harmful or not any(c.precision == precision for c in space.candidates):
            continue
        for _, candidate in zip(range(MAX_FALLBACK_TRIES), _halvings(winner, precision), strict=False):
            is_split = candidate.accumulation_steps > winner.accumulation_steps
            if is_split and not accumulate.is_offered(session, runner, space):
                break
            outcome = session.outcomes.get(candidate)
            if outcome is None:
                if session.clock.left_for_search() <= 0:
                    return
                deadline = session.clock.left_for_search()
                spec = session.spec(
                    candidate, purpose="fallback", measure_seconds=deadline / 3, deadline_seconds=deadline
                )
                outcome = outcome_of(session.run(runner, spec))
            if not (isinstance(outcome, Failure) and outcome.kind == "oom"):
                break


def _halvings(winner: Setting, precision: Precision) -> list[Setting]:
    halvings, factor = [], 1
    while winner.batch_size % factor == 0:
        halvings.append(
            Setting(
                precision=precision,
                batch_size=winner.batch_size // factor,
                accumulation_steps=winner.accumulation_steps * factor,
                num_workers=winner.num_workers,
            )
        )
        factor *= 2
    return halvings


def plan_round(
    shortlist: Shortlist,
    environment: dict[str, str],
    seconds_of: Callable[[Sequence[Run]], float],
    left_seconds: float,
    number: int,
) -> list[Run]:
    """The runs of round `number` (from 0) that the time left allows, none where not even the winner fits.

    `seconds_of` says what runs of one round cost together.

    The runner-up gives way where three rounds could not be reached with it, and a baseline that does not fit at all.
    The order alternates, so that a drift of the machine falls on all alike. In the first round the winner runs once in
    the user's own environment too, unless it is the baseline, which always does.
    """
    winner, baseline = Run(shortlist.winner, "confirm", environment), Run(shortlist.baseline, "confirm", {})
    essential = [winner] if winner == baseline else [winner, baseline]
    full = essential
    if shortlist.runner_up is not None:
        rival = Run(shortlist.runner_up, "confirm", environment)
        full = [winner, rival, *(run for run in essential if run not in (winner, rival))]
    once = []
    if number == 0 and environment and shortlist.winner != shortlist.baseline:
        once = [Run(shortlist.winner, "plain", {})]
    num_needed = max(1, MIN_ROUNDS - number)
    for runs, repeats in ((full, num_needed), (essential, num_needed), (essential, 1)):
        if repeats * seconds_of(runs) + seconds_of(once) <= left_seconds:
            return (runs if number % 2 == 0 else runs[::-1]) + once
    return next((runs for runs in (essential, [winner]) if seconds_of(runs) <= left_seconds), [])


def reserved_seconds(budget_seconds: float, start_seconds: float) -> float:
    """What is the confirmation's of a budget, where its processes are shared and take `start_seconds` to start.

    That is its usual share, or more, up to half, where winner and baseline can be confirmed in that alone.
    """
    usual_seconds = CONFIRM_SHARE * budget_seconds
    needed_seconds = SAFETY * MIN_ROUNDS * (start_seconds + 2 * RUN_SECONDS)
    return needed_seconds if usual_seconds < needed_seconds <= MAX_SHARE * budget_seconds else usual_seconds


def confirm(session: Session, processes: Processes, shortlist: Shortlist, environment: dict[str, str]) -> None:
    """Run the rounds.

    They have their share of the budget; what the search left over of its own goes to the winner and the baseline, until
    both are confirmed. A resumed search runs only the rounds that are missing; what failed is not run again, and costs
    no other run more than the start of another process. The workload's evaluation and checkpoint are run once for each
    candidate in its environment.
    """
    until = session.clock.left() - min(session.clock.confirm_seconds, session.clock.left())

    def cost(runs: Sequence[Run], num_starts: int) -> float:
        starting_seconds = num_starts * start_seconds(session.records, processes.start_seconds)
        return SAFETY * (starting_seconds + sum(run_seconds(session, run.candidate) for run in runs))

    def seconds_of(runs: Sequence[Run]) -> float:
        return cost(runs, min(1, len(runs)) if processes.are_shared else len(runs))

    has_ending = session.description is not None and session.description.has_ending
    ending_budget_seconds = ENDING_SHARE * session.clock.confirm_seconds if has_ending else 0.0

    def ending_left() -> float:
        return max(0.0, ending_budget_seconds - sum(map(_ending_seconds, session.records)))

    contenders, is_borrowing = _runnable(session, shortlist), False
    for number in range(NUM_ROUNDS):
        if is_borrowing and number >= MIN_ROUNDS:
            return
        ending_seconds = ending_left() if number == 0 else 0.0
        planned = plan_round(contenders, environment, seconds_of, session.clock.left() - until - ending_seconds, number)
        if _is_short(planned, contenders, number):
            contenders, until, is_borrowing = contenders._replace(runner_up=None), 0.0, True
            planned = plan_round(contenders, environment, seconds_of, session.clock.left() - ending_seconds, number)
        runs = [
            run
            for run in planned
            if not _is_done(session.records, run, number) and not _has_failed(session.records, run.candidate)
        ]
        for group in [runs] if processes.are_shared and runs else [[run] for run in runs]:
            with processes.runner_for(group[0].environment) as runner:
                num_starts = 1
                for run in group:
                    left, needed = session.clock.left() - until, cost([run], num_starts)
                    if left < needed:
                        return
                    needs_ending = has_ending and run.purpose == "confirm" and not _has_ended(session.records, run)
                    ending = min(ending_left(), left - needed) if needs_ending else None
                    record = session.run(
                        runner,
                        _spec(session, run, deadline_seconds=left, ending_seconds=ending),
                        round_number=number,
                        environment=run.environment,
                    )
                    num_starts = 0 if isinstance(record.outcome, Measurement) else 1


def _spec(session: Session, run: Run, *, deadline_seconds: float, ending_seconds: float | None) -> Trial:
    return session.spec(
        run.candidate,
        purpose=run.purpose,
        loss_scale=session.chosen_loss_scale(run.candidate),
        hold_heap=False,  # the process starts with the variables, or is meant to run without them
        num_steps=(MAX_STEPS, MAX_STEPS),
        measure_seconds=MEASURE_SECONDS,
        deadline_seconds=deadline_seconds,
        ending_seconds=ending_seconds,
    )


def _is_short(planned: Sequence[Run], contenders: Shortlist, number: int) -> bool:
    """Whether a round that the confirmation needs would have to do without the winner or the baseline."""
    return number < MIN_ROUNDS and not {contenders.winner, contenders.baseline} <= {run.candidate for run in planned}


def _has_ended(records: Sequence[Record], run: Run) -> bool:
    """Whether a process like this one has come as far as the evaluation and the checkpoint, however that went."""
    ours = [r.outcome for r in records if (r.candidate, r.purpose, r.environment) == run]
    return any(isinstance(outcome, Measurement) and outcome.ending_seconds is not None for outcome in ours)


def _ending_seconds(record: Record) -> float:
    return (record.outcome.ending_seconds or 0.0) if isinstance(record.outcome, Measurement) else 0.0


def _runnable(session: Session, shortlist: Shortlist) -> Shortlist:
    """The shortlist without a runner-up that a fresh process need not spend time on: one with no chance to win."""
    if shortlist.runner_up is None:
        return shortlist
    winner, runner_up = session.outcomes[shortlist.winner], session.outcomes[shortlist.runner_up]
    assert isinstance(winner, Measurement)
    assert isinstance(runner_up, Measurement)
    if runner_up.samples_per_second * HOPELESS < winner.samples_per_second:
        return shortlist._replace(runner_up=None)
    return shortlist


def start_seconds(records: Sequence[Record], foreseen_seconds: float) -> float:
    """What a process takes before its first step: as seen in the confirmation, else as foreseen."""
    found = [r for r in records if r.round is not None and r.start_seconds and isinstance(r.outcome, Measurement)]
    seen = [_start_seconds(r) for r in found]
    return fmean(seen) if seen else foreseen_seconds


def run_seconds(session: Session, candidate: Setting) -> float:
    """What a run takes from its first step to its ending: as seen, else as the search's trial foretells."""
    ours = [r for r in session.records if r.candidate == candidate and r.round is not None]
    seen = [r.seconds - _start_seconds(r) - _ending_seconds(r) for r in ours]
    if seen:
        return fmean(seen)
    outcome = session.outcomes.get(candidate)
    if not isinstance(outcome, Measurement):
        return 0.0
    warm_up = outcome.first_step_seconds + session.spec(candidate).num_warmup_steps * outcome.step_seconds
    measuring = min(MAX_STEPS * outcome.step_seconds, MEASURE_SECONDS + outcome.step_seconds)
    return warm_up + measuring


def _start_seconds(record: Record) -> float:
    """What came before the first step: starting the process, building, the accelerator. None of it in a kept one."""
    found = record.outcome
    is_kept = record.start_seconds == 0.0
    own = found.build_seconds + found.context_seconds if isinstance(found, Measurement) and not is_kept else 0.0
    return (record.start_seconds or 0.0) + own


def _is_done(records: Sequence[Record], run: Run, number: int) -> bool:
    return any(
        r.candidate == run.candidate
        and r.purpose == run.purpose
        and r.environment == run.environment
        and r.round == number
        for r in records
    )


def _has_failed(records: Sequence[Record], candidate: Setting) -> bool:
    return candidate in failures(records)
