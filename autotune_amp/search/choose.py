"""Outcomes -> recommendation. Pure: a finished outcomes.jsonl can be ranked again without a device.

The rule: within 3 % of the fastest the precision with the least to go wrong at run time wins, then the smallest
batch; and what the user runs today stays unless something beats it by 3 %.
"""

from __future__ import annotations

from statistics import median
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from autotune_amp.config import PRECISIONS, AmpConfig, LossScale
from autotune_amp.search import explain
from autotune_amp.search.evidence import (
    Runs,
    best_runs,
    confirm_runs,
    disqualifying,
    fallback_plans,
    gather,
    plain_config,
)
from autotune_amp.trial.outcome import Measurement, Record

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from autotune_amp.recommendation import CandidateRow, Evidence, Exclusion
    from autotune_amp.search.space import Space
    from autotune_amp.trial.spec import Candidate

PLATEAU = 0.03  # closer than this, other things decide (DESIGN.md, Objective)
RIVAL = 0.10  # a rival within 10 % may overtake the winner in the confirmation: processes differ by a few percent


class Shortlist(NamedTuple):
    """What to confirm; the winner may be the baseline."""

    winner: Candidate
    runner_up: Candidate | None
    baseline: Candidate


class Decision(msgspec.Struct, frozen=True, kw_only=True):
    """What `Recommendation` has beyond the search's own circumstances."""

    config: AmpConfig
    evidence: Evidence
    reason: str
    warnings: tuple[str, ...]
    excluded: tuple[Exclusion, ...]
    candidates: tuple[CandidateRow, ...]


def rank(measured: Mapping[Candidate, float], plateau: float = PLATEAU) -> list[Candidate]:
    """Candidates by the rule, from their samples per second: the winner, then the winner without it, and so on.

    Candidates as found come last, since a config cannot express them.
    """
    ranking: list[Candidate] = []
    for as_found in (False, True):
        left = {c: speed for c, speed in measured.items() if c.as_found == as_found}
        while left:
            fastest = max(left.values())
            close = [c for c, speed in left.items() if speed >= (1 - plateau) * fastest]
            ranking.append(min(close, key=lambda c: (PRECISIONS.index(c.precision), c.batch_size)))
            del left[ranking[-1]]
    return ranking


def search_speeds(records: Sequence[Record]) -> dict[Candidate, float]:
    """Samples per second of what the search measured, without what failed in any process since."""
    failed = {r.candidate for r in records if disqualifying(r)}
    speeds: dict[Candidate, list[float]] = {}
    for record in records:
        is_ours = record.purpose == "search" and record.candidate not in failed
        if is_ours and isinstance(record.outcome, Measurement):
            speeds.setdefault(record.candidate, []).append(record.outcome.samples_per_second)
    return {candidate: median(values) for candidate, values in speeds.items()}


def shortlist(records: Sequence[Record], baseline: Candidate) -> Shortlist | None:
    """What to confirm, or None where nothing was measured.

    The runner-up is the fastest of the others within 10 % of the fastest, else the next in the ranking.
    """
    speeds = search_speeds(records)
    if not speeds:
        return None
    winner, *others = rank(speeds)
    others = [c for c in others if not c.as_found]
    fastest = max(speeds.values())
    rivals = [c for c in others if speeds[c] >= (1 - RIVAL) * fastest]
    runner_up = max(rivals, key=lambda c: speeds[c]) if rivals else next(iter(others), None)
    return Shortlist(winner, runner_up, baseline)


def decide(
    records: Sequence[Record],
    space: Space,
    *,
    environment: Mapping[str, str],
    loss_scale: LossScale,
    exclusions: Sequence[Exclusion] = (),
    is_budget_spent: bool = False,
) -> Decision:
    """The choice, with its evidence, from the records of a search and of its confirmation.

    The contenders were confirmed in `environment`, the recommended one, and the baseline in the user's own (a record's
    empty environment). `loss_scale` is what fp16 was tried with; `exclusions` are those the search came to, beyond
    `space.excluded`. `is_budget_spent` says why candidates are left untried.
    Raises `ValueError` where nothing was measured.
    """
    speeds = search_speeds(records)
    if not speeds:
        raise ValueError("Nothing was measured: there is nothing to choose from.")
    confirmed = {c: runs.speed for c in speeds if (runs := confirm_runs(records, c, environment)).measurements}
    contenders = {c: speed for c, speed in confirmed.items() if not c.as_found} or speeds
    candidate = rank(contenders)[0]
    baseline = best_runs(records, space.baseline, {})
    is_kept = _keeps_baseline(candidate, contenders[candidate], baseline)
    promised = {} if is_kept else dict(environment)
    chosen = baseline if is_kept else best_runs(records, candidate, promised)
    evidence = gather(records, chosen, baseline, promised, loss_scale)
    config = plain_config(chosen.candidate, loss_scale, promised, fallback_plans(records, chosen.candidate))
    excluded = explain.excluded(records, space, exclusions, is_budget_spent=is_budget_spent)
    return Decision(
        config=config,
        evidence=evidence,
        reason=explain.reason(chosen.candidate, space.baseline, evidence, contenders, is_kept=is_kept),
        warnings=explain.warnings(chosen, space, evidence, config, is_kept=is_kept),
        excluded=excluded,
        candidates=explain.rows(records, space, excluded, environment),
    )


def _keeps_baseline(candidate: Candidate, speed: float, baseline: Runs) -> bool:
    """Whether the choice is not worth a change from what the user runs today: a gain below 3 %.

    A choice with less to go wrong is worth it even where it is slower by less than that.
    """
    if not baseline.measurements:
        return False
    is_safer = PRECISIONS.index(candidate.precision) < PRECISIONS.index(baseline.candidate.precision)
    return candidate.as_found or speed < baseline.speed * (1 - PLATEAU if is_safer else 1 + PLATEAU)
