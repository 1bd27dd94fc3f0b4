"""Outcomes -> recommendation. Pure: a finished outcomes.jsonl can be ranked again without a device.

The rule: within 3 % of the fastest the precision with the least to go wrong at run time wins, then the smallest
batch; and what the user runs today stays unless something beats it by 3 %. What does not learn what fp32 learns is out,
what nobody checked comes after fp32 and what was shown to be faithful, what is doubtful comes last, and fp16 counts
only the share of the gradient that reaches the optimizer.
"""

from __future__ import annotations

from statistics import median
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from autotune_amp.config import PRECISIONS, AmpConfig, LossScale
from autotune_amp.numerics.results import Fidelity
from autotune_amp.search import explain, loss_scales, verdicts
from autotune_amp.search.evidence import (
    Runs,
    best_runs,
    confirm_runs,
    disqualifying,
    fallback_plans,
    gather,
    plain_config,
)
from autotune_amp.search.loss_scales import AllScales
from autotune_amp.trial.outcome import Measurement, Record

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

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
    fidelity: tuple[Fidelity, ...]


def rank(
    measured: Mapping[Candidate, float], plateau: float = PLATEAU, tiers: Mapping[Candidate, int] | None = None
) -> list[Candidate]:
    """Candidates by the rule, from their samples per second: the winner, then the winner without it, and so on.

    Lower tiers come first, 0 where `tiers` does not say; in each, candidates as found come last, since a config cannot
    express them.
    """
    groups = {c: ((tiers or {}).get(c, 0), c.as_found) for c in measured}
    ranking: list[Candidate] = []
    for group in sorted(set(groups.values())):
        left = {c: speed for c, speed in measured.items() if groups[c] == group}
        while left:
            fastest = max(left.values())
            close = [c for c, speed in left.items() if speed >= (1 - plateau) * fastest]
            ranking.append(min(close, key=lambda c: (PRECISIONS.index(c.precision), c.batch_size)))
            del left[ranking[-1]]
    return ranking


def measured_speeds(records: Sequence[Record]) -> dict[Candidate, float]:
    """Samples per second of what the search measured, without what failed in any process since."""
    failed = {r.candidate for r in records if disqualifying(r)}
    speeds: dict[Candidate, list[float]] = {}
    for record in records:
        is_ours = record.purpose == "search" and record.candidate not in failed
        if is_ours and isinstance(record.outcome, Measurement):
            speeds.setdefault(record.candidate, []).append(record.outcome.samples_per_second)
    return {candidate: median(values) for candidate, values in speeds.items()}


def search_speeds(records: Sequence[Record], scales: AllScales | None = None) -> dict[Candidate, float]:
    """Applied samples per second of what may be recommended: what was measured and no check speaks against.

    fp16 that was not calibrated counts in full, which is an upper bound.
    """
    out = why_out(records, scales)
    return {
        c: speed * loss_scales.applied_share(scales or {}, c)
        for c, speed in measured_speeds(records).items()
        if c not in out
    }


def why_out(records: Sequence[Record], scales: AllScales | None) -> dict[Candidate, str]:
    """What was measured and must not be recommended, with the reason that a check or a calibration gave."""
    known = verdicts.verdicts(records)
    out: dict[Candidate, str] = {}
    for candidate in measured_speeds(records):
        found = verdicts.unfaithful(known, candidate)
        reason = verdicts.harm(found) if found else loss_scales.refusal(scales or {}, candidate)
        if reason is not None:
            out[candidate] = reason
    return out


def shortlist(records: Sequence[Record], baseline: Candidate, scales: AllScales | None = None) -> Shortlist | None:
    """What to check, and then to confirm, while checks are still to come: what awaits its own counts as faithful.

    None where nothing was measured that may be recommended.
    """
    known = verdicts.verdicts(records)
    speeds = search_speeds(records, scales)
    return _shortlist(speeds, {c: verdicts.tier(known.get(verdicts.check_of(c))) for c in speeds}, baseline)


def finalists(records: Sequence[Record], space: Space, scales: AllScales | None = None) -> Shortlist | None:
    """What to confirm once the checks are over: what has none by now is *unchecked*.

    None where nothing was measured that may be recommended.
    """
    speeds = search_speeds(records, scales)
    return _shortlist(speeds, _final_tiers(records, space, speeds), space.baseline)


def _final_tiers(records: Sequence[Record], space: Space, candidates: Collection[Candidate]) -> dict[Candidate, int]:
    known = verdicts.verdicts(records)
    return {c: verdicts.tier(verdicts.verdict_on(c, space, known)) for c in candidates}


def _shortlist(
    speeds: Mapping[Candidate, float], tiers: Mapping[Candidate, int], baseline: Candidate
) -> Shortlist | None:
    """The runner-up is the fastest of the others within 10 % of the fastest, else the next in the ranking.

    It is of a tier behind the others only where nothing else is left.
    """
    if not speeds:
        return None
    winner, *others = rank(speeds, tiers=tiers)
    others = [c for c in others if not c.as_found]
    sound = [c for c in others if tiers[c] == min(map(tiers.__getitem__, others))]
    fastest = max(speed for c, speed in speeds.items() if c == winner or c in sound)
    rivals = [c for c in sound if speeds[c] >= (1 - RIVAL) * fastest]
    runner_up = max(rivals, key=lambda c: speeds[c]) if rivals else next(iter(sound), None)
    return Shortlist(winner, runner_up, baseline)


def decide(
    records: Sequence[Record],
    space: Space,
    *,
    environment: Mapping[str, str],
    loss_scale: LossScale,
    exclusions: Sequence[Exclusion] = (),
    is_budget_spent: bool = False,
    scales: AllScales | None = None,
    num_steps_per_report: int = 1,
) -> Decision:
    """The choice, with its evidence, from the records of a search and of its confirmation.

    The contenders were confirmed in `environment`, the recommended one, and the baseline in the user's own (a record's
    empty environment). `loss_scale` is what fp16 was tried with; `exclusions` are those the search came to, beyond
    `space.excluded`. `is_budget_spent` says why candidates are left untried. `scales` answer for fp16's loss scales
    (`loss_scales.calibrated` of the same records, with the pairs that were asked for since); `num_steps_per_report`
    optimizer steps stand behind one of `Measurement.raw_step_seconds`.
    Raises `ValueError` where nothing was measured that may be recommended.
    """
    scales = scales or {}
    speeds = search_speeds(records, scales)
    if not speeds:
        raise ValueError("Nothing was measured: there is nothing to choose from.")
    out, tiers = why_out(records, scales), _final_tiers(records, space, speeds)
    sound = {c: speed for c, speed in speeds.items() if tiers[c] == min(tiers.values())}
    confirmed = {
        c: runs.speed * loss_scales.applied_share(scales, c)
        for c in sound
        if (runs := confirm_runs(records, c, environment)).measurements
    }
    contenders = {c: speed for c, speed in confirmed.items() if not c.as_found} or sound
    candidate = rank(contenders)[0]
    baseline = best_runs(records, space.baseline, {})
    may_be_kept = space.baseline not in out and (
        space.baseline in sound
        or space.baseline not in speeds
        or not verdicts.can_check(space.baseline, space)  # no budget would settle it, and it is what the user runs
    )
    is_kept = may_be_kept and _keeps_baseline(candidate, contenders[candidate], baseline)
    promised = {} if is_kept else dict(environment)
    chosen = baseline if is_kept else best_runs(records, candidate, promised)
    known = verdicts.verdicts(records)
    chosen_scale = loss_scales.loss_scale(scales, chosen.candidate, loss_scale) or loss_scale
    confirming = chosen.measurements if chosen.num_confirming else ()
    evidence = msgspec.structs.replace(
        gather(records, chosen, baseline, promised, loss_scale),
        fidelity=verdicts.verdict_on(chosen.candidate, space, known),
        loss_scale=loss_scales.evidence(scales, chosen.candidate, confirming, num_steps_per_report),
    )
    plans = fallback_plans(records, chosen.candidate, {e.precision for e in verdicts.exclusions(known)})
    config = plain_config(chosen.candidate, chosen_scale, promised, plans)
    excluded = explain.excluded(records, space, exclusions, is_budget_spent=is_budget_spent)
    left_out = {c: (speed, out[c]) for c, speed in measured_speeds(records).items() if c in out}
    passed_over = {
        c: (speed, found)
        for c, speed in speeds.items()
        if tiers[c] > min(tiers.values()) and (found := verdicts.verdict_on(c, space, known)) is not None
    }
    return Decision(
        config=config,
        evidence=evidence,
        reason=explain.reason(
            chosen.candidate,
            space.baseline,
            evidence,
            contenders,
            is_kept=is_kept,
            left_out=left_out,
            passed_over=passed_over,
        ),
        warnings=explain.warnings(
            chosen,
            space,
            evidence,
            config,
            is_kept=is_kept,
            why_uncalibrated=loss_scales.why_uncalibrated(scales, chosen.candidate),
        ),
        excluded=excluded,
        candidates=explain.rows(records, space, excluded, environment, out),
        fidelity=tuple(known.values()),
    )


def _keeps_baseline(candidate: Candidate, speed: float, baseline: Runs) -> bool:
    """Whether the choice is not worth a change from what the user runs today: a gain below 3 %.

    A choice with less to go wrong is worth it even where it is slower by less than that.
    """
    if not baseline.measurements:
        return False
    is_safer = PRECISIONS.index(candidate.precision) < PRECISIONS.index(baseline.candidate.precision)
    return candidate.as_found or speed < baseline.speed * (1 - PLATEAU if is_safer else 1 + PLATEAU)
