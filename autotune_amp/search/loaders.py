"""Where the data loader sets the speed, it is tried which number of workers would do."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec

from autotune_amp.core.outcome import Measurement, Outcome, Record
from autotune_amp.core.setting import Setting
from autotune_amp.isolation.backend import Backend
from autotune_amp.search import verdicts
from autotune_amp.search.choose import search_speeds
from autotune_amp.search.conditions import MAX_DATA_SHARE, data_share
from autotune_amp.search.explore import MIN_TRIAL_SECONDS, search_spec
from autotune_amp.search.gate import pass_gate
from autotune_amp.search.loss_scales import AllScales
from autotune_amp.search.objective import PLATEAU, rank
from autotune_amp.search.session import Session, outcome_of
from autotune_amp.search.space import Space
from autotune_amp.search.study import Study
from autotune_amp.search.told import own_workers
from autotune_amp.trial.jobs import Trial

SHORT_WAIT = 0.05  # of a step: more workers have little left to gain
HANDOVER_SECONDS = 1e-3  # of a batch from a worker process: a shorter wait is not made shorter by one
WORKER_START_SECONDS = 10.0  # a worker that is not forked imports torch first


def try_workers(session: Session, runner: Backend, space: Space, study: Study, max_trials: int | None) -> None:
    """Try more workers until one number will do or none helps, within `max_trials` of the whole search.

    A precision that comes to lead by them is checked.
    """
    own = None if session.description is None else session.description.num_workers
    if own is None:
        return
    num_cpus = session.hardware.identity.num_cpus
    while session.clock.left_for_search() > MIN_TRIAL_SECONDS:
        if max_trials is not None and sum(r.purpose == "search" for r in session.records) >= max_trials:
            return
        candidate = next_to_try(session.records, session.scales, own, num_cpus)
        if candidate is None:
            return
        session.progress.phase(f"trying {candidate}")
        session.run(runner, _spec(session, candidate))
        pass_gate(session, runner, space, study, search_spec)


def next_to_try(records: Sequence[Record], scales: AllScales, own_num_workers: int, num_cpus: int) -> Setting | None:
    """What to try next with another number of workers, None where there is nothing to gain by one. Pure.

    The ladder of workers is climbed with what would be chosen if no step waited for its data. It ends where the wait is
    short, where more workers failed, and where they are no faster than half as many. The first worker is no test of
    that: it makes loading and training overlap, the second one doubles the loading.
    """
    speeds = search_speeds(records, scales)
    known = verdicts.verdicts(records)
    tiers = {c: verdicts.tier(known.get(verdicts.check_of(c))) for c in speeds}  # unchecked counts as faithful so far
    waits = _waits(records)
    unheld = {c: speed / (1 - waits[c]) for c, speed in speeds.items() if c in waits}
    if not unheld:
        return None
    target = rank(unheld, tiers=tiers)[0]
    fastest = max(speed for c, speed in speeds.items() if tiers[c] <= tiers[target])
    if waits[target] <= MAX_DATA_SHARE or unheld[target] <= (1 + PLATEAU) * fastest:
        return None
    tried = {r.candidate: outcome_of(r) for r in records if r.purpose == "search"}
    seconds_per_batch = target.batch_size / unheld[target] / (1 - waits[target])
    if waits[target] * seconds_per_batch < HANDOVER_SECONDS:
        return None
    num_before, before = own_num_workers, tried[target]
    for num_workers in ladder(own_num_workers, num_cpus):
        candidate = msgspec.structs.replace(target, num_workers=num_workers)
        if candidate not in tried:
            return candidate
        found = tried[candidate]
        if not _is_worth_doubling(found, before if num_before else None):
            break
        num_before, before = num_workers, found
    # Where the wait still sets the speed, what has less to go wrong reaches it too.
    leader = rank({c: speed for c, speed in speeds.items() if own_workers(c) == target})[0]
    held = {c: min(speed, speeds[leader]) for c, speed in unheld.items()}
    safer = msgspec.structs.replace(rank(held, tiers=tiers)[0], num_workers=leader.num_workers)
    return None if safer in tried else safer


def ladder(own_num_workers: int, num_cpus: int) -> Iterator[int]:
    """The numbers of workers to try: today's doubled and doubled again, up to the number of CPUs."""
    number = own_num_workers
    while number < num_cpus:
        number = min(max(1, 2 * number), num_cpus)
        yield number


def _waits(records: Sequence[Record]) -> dict[Setting, float]:
    """The share of a step spent waiting with the user's own number of workers, of what a config can express."""
    return {
        r.candidate: data_share(r.outcome)
        for r in records
        if r.purpose == "search"
        and r.candidate.num_workers is None
        and not r.candidate.as_found
        and isinstance(r.outcome, Measurement)
        and not r.outcome.was_cut
    }


def _is_worth_doubling(found: Outcome, before: Outcome | None) -> bool:
    """Whether still more workers may do better, given what these did and what half as many had done."""
    if not isinstance(found, Measurement) or data_share(found) < SHORT_WAIT:
        return False
    return not isinstance(before, Measurement) or found.samples_per_second > (1 + PLATEAU) * before.samples_per_second


def _spec(session: Session, candidate: Setting) -> Trial:
    """A search trial with time for the workers to start."""
    spec = search_spec(session, candidate, session.clock.left_for_search())
    first, step = spec.first_step_deadline_seconds, spec.step_deadline_seconds
    return msgspec.structs.replace(
        spec,
        first_step_deadline_seconds=None if first is None else first + WORKER_START_SECONDS,
        step_deadline_seconds=None if step is None else step + WORKER_START_SECONDS,  # an epoch's end starts them anew
    )
