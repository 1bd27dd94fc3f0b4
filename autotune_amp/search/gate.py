"""The gate between exploring and confirming: contenders are held against fp32, fp16's loss scales are calibrated."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, TypeAlias

import msgspec

from autotune_amp.core.evidence import Objective
from autotune_amp.core.fidelity import Fidelity
from autotune_amp.core.outcome import Failure, Measurement, Outcome, Record
from autotune_amp.core.setting import Setting
from autotune_amp.isolation.backend import Backend
from autotune_amp.search import loss_scales, verdicts
from autotune_amp.search.choose import RIVAL, finalists, measured_speeds, shortlist
from autotune_amp.search.loss_scales import AllScales
from autotune_amp.search.objective import rank
from autotune_amp.search.seeding import HOPELESS
from autotune_amp.search.session import Session, outcome_of
from autotune_amp.search.space import Space
from autotune_amp.search.study import Study
from autotune_amp.search.told import own_workers
from autotune_amp.search.verdicts import Check
from autotune_amp.trial.jobs import Trial

NUM_PAIRS = 24  # of (init_scale, growth_interval) for one contender, the seeds among them
MIN_CHECK_SECONDS = 0.5


class Hold(NamedTuple):
    """Hold the precision of `candidate`, with its pins, against fp32."""

    candidate: Setting
    find_pins: bool


class Calibrate(NamedTuple):
    """Calibrate the loss scale of `candidate`."""

    candidate: Setting


class Measure(NamedTuple):
    """Measure `candidate`, which pins heal."""

    candidate: Setting


Todo: TypeAlias = Hold | Calibrate | Measure
SpecFor: TypeAlias = Callable[[Session, Setting, float], Trial]  # with the seconds that are left


def next_todo(
    records: Sequence[Record], space: Space, scales: AllScales, objective: Objective = "speed"
) -> Todo | None:
    """What is still to be found out before the contenders can be confirmed; None where all are judged. Pure.

    Every answer adds a record that changes the next one: what is unfaithful leaves the shortlist to others.
    """
    chosen = shortlist(records, space.baseline, scales, objective)
    known = verdicts.verdicts(records)
    speeds = measured_speeds(records)
    healing = _healing(records, known, speeds)
    if healing is not None:
        return healing
    fastest = max((speeds[c] for c in (chosen or ())[:2] if c is not None), default=0.0)
    for candidate in _contenders(records, space, scales, objective):
        is_rival = (
            objective != "speed"  # then what is slower may win
            or speeds[candidate] >= (1 - RIVAL) * fastest
            or (chosen is not None and candidate == chosen.winner)
        )
        if candidate.precision == "fp16" and is_rival and loss_scales.key_of(candidate) not in scales:
            return Calibrate(own_workers(candidate))
        if verdicts.can_check(candidate, space) and verdicts.check_of(candidate) not in known:
            return _hold(candidate, verdicts.check_of(candidate))
    lame = _lame(records, space, scales, known, fastest)
    return None if lame is None else _hold(lame, verdicts.check_of(lame))


def pass_gate(session: Session, runner: Backend, space: Space, study: Study, spec_for: SpecFor) -> None:
    """Check and calibrate until the contenders are judged, or the search's share of the budget is used."""
    while session.clock.left_for_search() > MIN_CHECK_SECONDS:
        todo = next_todo(session.records, space, session.scales, session.objective)
        if todo is None:
            break
        if isinstance(todo, Calibrate):
            calibrate(session, runner, todo.candidate)
            answer_seeds(session, study, todo.candidate)
        elif isinstance(todo, Hold):
            session.progress.phase(f"checking {_named(todo.candidate)} against fp32")
            session.check(runner, "fidelity", todo.candidate, find_pins=todo.find_pins)
        else:
            session.progress.phase(f"measuring {todo.candidate}")
            record = session.run(runner, spec_for(session, todo.candidate, session.clock.left_for_search()))
            study.tell(study.ask(todo.candidate), outcome_of(record), number=record.number)
    chosen = finalists(session.records, space, session.scales, session.objective)
    for contender in filter(None, (chosen or ())[:2]):
        _suggest_pairs(session, study, own_workers(contender))


def is_worth_calibrating(session: Session, candidate: Setting, outcome: Outcome) -> bool:
    """Whether an fp16 measurement is within 10 % of the best so far: one that is slower does not matter."""
    best = session.best()
    if candidate.precision != "fp16" or best is None or not isinstance(outcome, Measurement):
        return False
    assert isinstance(best.outcome, Measurement)
    is_rival = outcome.samples_per_second >= (1 - RIVAL) * best.outcome.samples_per_second
    return is_rival and loss_scales.key_of(candidate) not in session.scales


def calibrate(session: Session, runner: Backend, candidate: Setting) -> None:
    """Measure the largest safe loss scale over a short training in a child."""
    session.progress.phase("calibrating the loss scale")
    session.check(runner, "calibration", candidate)


def answer_seeds(session: Session, study: Study, candidate: Setting) -> None:
    """Tell the study the pairs to begin with, as far as it lacks them."""
    scales = loss_scales.scales_of(session.scales, candidate)
    if scales is None or scales.refusal is not None:
        return
    outcome, told = session.outcomes[candidate], study.pairs(candidate)
    for pair in scales.seeds:
        if pair not in told:
            study.tell(study.ask(candidate, pair), outcome)


def _suggest_pairs(session: Session, study: Study, candidate: Setting) -> None:
    """Let TPE suggest pairs for a contender; a resumed search counts those of before."""
    scales = loss_scales.scales_of(session.scales, candidate)
    if scales is None or scales.refusal is not None:
        return
    answer_seeds(session, study, candidate)
    told = study.pairs(candidate)
    for pair in told:
        scales.replay(pair)
    for _ in range(NUM_PAIRS - len(told)):
        if session.clock.left_for_search() <= 0:
            return
        study.tell(study.ask(candidate, None), session.outcomes[candidate])


def _contenders(records: Sequence[Record], space: Space, scales: AllScales, objective: Objective) -> list[Setting]:
    """What may be recommended, the winner first: a runner-up that is hopelessly slow is not confirmed either.

    The baseline is one: it may be kept.
    """
    chosen = shortlist(records, space.baseline, scales, objective)
    if chosen is None:
        return []
    speeds = measured_speeds(records)
    runner_up = chosen.runner_up
    if runner_up is not None and speeds[runner_up] * HOPELESS < speeds[chosen.winner]:
        runner_up = None
    found = [c for c in (chosen.winner, runner_up, space.baseline) if c is not None and c in speeds]
    return list(dict.fromkeys(found))


def _healing(
    records: Sequence[Record], known: Mapping[Check, Fidelity], speeds: Mapping[Setting, float]
) -> Todo | None:
    """The next step for a precision that some pinned modules make faithful: check it with the pins, then measure it."""
    tried = {r.candidate for r in records if r.purpose == "search"}
    for check, found in known.items():
        ours = [c for c in tried if verdicts.check_of(c) == check and not c.as_found]
        if found.verdict != "unfaithful" or not found.healing_pins or not ours:
            continue
        # Where nothing of the precision ran, the smallest: it may have been the numbers that failed it.
        ran = {c: speeds[c] for c in ours if c in speeds}
        like = rank(ran)[0] if ran else min(ours, key=lambda c: c.batch_size)
        healed = msgspec.structs.replace(own_workers(like), pinned_modules=found.healing_pins)
        verdict = known.get(verdicts.check_of(healed))
        if verdict is None:
            return _hold(healed, verdicts.check_of(healed))
        if verdict.verdict != "unfaithful" and healed not in tried:
            return Measure(healed)
    return None


def _lame(
    records: Sequence[Record],
    space: Space,
    scales: AllScales,
    known: Mapping[Check, Fidelity],
    fastest: float,
) -> Setting | None:
    """A candidate whose numbers alone keep it from being a contender: pins may heal its precision.

    That is fp16 that was refused though fast enough, or a precision whose every trial was not finite.
    """
    if fastest == 0.0:
        return None  # nothing works: it is not precision's fault
    speeds = measured_speeds(records)
    for candidate, speed in speeds.items():
        is_refused = loss_scales.refusal(scales, candidate) is not None and not candidate.pinned_modules
        if is_refused and speed >= (1 - RIVAL) * fastest and verdicts.check_of(candidate) not in known:
            return candidate
    tried = [r for r in records if r.purpose == "search" and not r.candidate.pinned_modules]
    for precision in dict.fromkeys(r.candidate.precision for r in tried):
        ours = [r for r in tried if r.candidate.precision == precision]
        smallest = min((r.candidate for r in ours), key=lambda c: c.batch_size)
        are_nonfinite = all(isinstance(r.outcome, Failure) and r.outcome.kind == "nonfinite" for r in ours)
        if are_nonfinite and verdicts.can_check(smallest, space) and verdicts.check_of(smallest) not in known:
            return smallest
    return None


def _hold(like: Setting, check: Check) -> Hold:
    candidate = Setting(
        precision=check.precision,
        batch_size=min(verdicts.MAX_BATCH_SIZE, like.batch_size),
        pinned_modules=check.pinned_modules,
    )
    return Hold(candidate, find_pins=not check.pinned_modules)


def _named(candidate: Setting) -> str:
    num_pinned = len(candidate.pinned_modules)
    pinned = f" with {num_pinned} module{'s' if num_pinned > 1 else ''} pinned" if num_pinned else ""
    return f"{candidate.precision}{pinned}"
