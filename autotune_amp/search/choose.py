"""Outcomes -> recommendation. Pure: a finished outcomes.jsonl can be ranked again without a device.

The objective ranks (objective.py); and what the user runs today stays unless something beats it by 3 %. Above every
objective: what does not learn what fp32 learns is out, what nobody checked comes after fp32 and what was shown to be
faithful, what is doubtful comes last, and fp16 counts only the share of the gradient that reaches the optimizer.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import msgspec

from autotune_amp.core.config import AmpConfig, LossScale
from autotune_amp.core.fidelity import Fidelity
from autotune_amp.core.outcome import Measurement, Record
from autotune_amp.search import accumulate, explain, loss_scales, objective_words, verdicts
from autotune_amp.search.evidence import best_runs, confirm_runs, failures, gather, plain_config
from autotune_amp.search.fallbacks import fallback_plans
from autotune_amp.search.loss_scales import AllScales
from autotune_amp.search.objective import Merit, check_measured, keeps_baseline, least_speed, merit, rank_for

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from autotune_amp.core.evidence import Evidence, Objective
    from autotune_amp.core.outcome import Description
    from autotune_amp.core.recommendation import CandidateRow, Exclusion
    from autotune_amp.core.setting import Setting
    from autotune_amp.search.space import Space

RIVAL = 0.10  # a rival within 10 % may overtake the winner in the confirmation: processes differ by a few percent


class Shortlist(NamedTuple):
    """What to confirm; the winner may be the baseline."""

    winner: Setting
    runner_up: Setting | None
    baseline: Setting


class Decision(msgspec.Struct, frozen=True, kw_only=True):
    """What `Recommendation` has beyond the search's own circumstances."""

    config: AmpConfig
    evidence: Evidence
    reason: str
    warnings: tuple[str, ...]
    excluded: tuple[Exclusion, ...]
    candidates: tuple[CandidateRow, ...]
    fidelity: tuple[Fidelity, ...]


def measured_merits(records: Sequence[Record], scales: AllScales | None = None) -> dict[Setting, Merit]:
    """What the search measured, without what failed in any process since; with `scales` in applied samples.

    fp16 that was not calibrated counts in full, which is an upper bound.
    """
    failed = failures(records)
    found: dict[Setting, list[Measurement]] = {}
    for record in records:
        is_ours = record.purpose == "search" and record.candidate not in failed
        if is_ours and isinstance(record.outcome, Measurement):
            found.setdefault(record.candidate, []).append(record.outcome)
    return {c: merit(ours, loss_scales.applied_share(scales or {}, c)) for c, ours in found.items()}


def measured_speeds(records: Sequence[Record]) -> dict[Setting, float]:
    """Samples per second of what the search measured, without what failed in any process since."""
    return _speeds(measured_merits(records))


def search_merits(records: Sequence[Record], scales: AllScales | None = None) -> dict[Setting, Merit]:
    """What may be recommended: what was measured and no check speaks against."""
    out = why_out(records, scales)
    return {c: found for c, found in measured_merits(records, scales).items() if c not in out}


def search_speeds(records: Sequence[Record], scales: AllScales | None = None) -> dict[Setting, float]:
    """Applied samples per second of what may be recommended."""
    return _speeds(search_merits(records, scales))


def _speeds(merits: Mapping[Setting, Merit]) -> dict[Setting, float]:
    return {c: found.samples_per_second for c, found in merits.items()}


def why_out(records: Sequence[Record], scales: AllScales | None) -> dict[Setting, str]:
    """What was measured and must not be recommended, with the reason that a check or a calibration gave."""
    known = verdicts.verdicts(records)
    out: dict[Setting, str] = {}
    for candidate in measured_speeds(records):
        found = verdicts.unfaithful(known, candidate)
        reason = verdicts.harm(found) if found else loss_scales.refusal(scales or {}, candidate)
        if reason is not None:
            out[candidate] = reason
    return out


def shortlist(
    records: Sequence[Record], baseline: Setting, scales: AllScales | None = None, objective: Objective = "speed"
) -> Shortlist | None:
    """What to check, and then to confirm, while checks are still to come: what awaits its own counts as faithful.

    None where nothing was measured that may be recommended.
    """
    known = verdicts.verdicts(records)
    merits = search_merits(records, scales)
    tiers = {c: verdicts.tier(known.get(verdicts.check_of(c))) for c in merits}
    return _shortlist(merits, tiers, baseline, objective, measured_merits(records).get(baseline))


def finalists(
    records: Sequence[Record], space: Space, scales: AllScales | None = None, objective: Objective = "speed"
) -> Shortlist | None:
    """What to confirm once the checks are over: what has none by now is *unchecked*.

    None where nothing was measured that may be recommended.
    """
    merits = search_merits(records, scales)
    tiers = _final_tiers(records, space, merits)
    return _shortlist(merits, tiers, space.baseline, objective, measured_merits(records).get(space.baseline))


def _final_tiers(records: Sequence[Record], space: Space, candidates: Collection[Setting]) -> dict[Setting, int]:
    known = verdicts.verdicts(records)
    return {c: verdicts.tier(verdicts.verdict_on(c, space, known)) for c in candidates}


def _shortlist(
    merits: Mapping[Setting, Merit],
    tiers: Mapping[Setting, int],
    baseline: Setting,
    objective: Objective,
    today: Merit | None,
) -> Shortlist | None:
    """For speed the runner-up is the fastest of the others within 10 % of the fastest, else the next in the ranking.

    It is of a tier behind the others only where nothing else is left.
    """
    if not merits:
        return None
    winner, *others = rank_for(objective, merits, least_speed=least_speed(objective, today), tiers=tiers)
    others = [c for c in others if not c.as_found]
    sound = [c for c in others if tiers[c] == min(map(tiers.__getitem__, others))]
    speeds = _speeds(merits)
    fastest = max(speed for c, speed in speeds.items() if c == winner or c in sound)
    rivals = [c for c in sound if objective == "speed" and speeds[c] >= (1 - RIVAL) * fastest]
    runner_up = max(rivals, key=lambda c: speeds[c]) if rivals else next(iter(sound), None)
    return Shortlist(winner, runner_up, baseline)


def _was_confirmed_for(
    objective: Objective,
    records: Sequence[Record],
    space: Space,
    scales: AllScales,
    environment: Mapping[str, str],
) -> bool:
    """Whether the confirmation was of this objective's winner, and not of another's."""
    before = [r for r in records if r.purpose not in ("confirm", "plain")]
    chosen = finalists(before, space, scales, objective)
    return chosen is not None and any(
        r.purpose == "confirm" and r.candidate == chosen.winner and r.environment == environment for r in records
    )


def decide(
    records: Sequence[Record],
    space: Space,
    *,
    environment: Mapping[str, str],
    loss_scale: LossScale,
    exclusions: Sequence[Exclusion] = (),
    is_budget_spent: bool = False,
    scales: AllScales | None = None,
    objective: Objective = "speed",
    description: Description | None = None,
) -> Decision:
    """The choice, with its evidence, from the records of a search and of its confirmation.

    The contenders were confirmed in `environment`, the recommended one, and the baseline in the user's own (a record's
    empty environment). `loss_scale` is what fp16 was tried with; `exclusions` are those the search came to, beyond
    `space.excluded`. `is_budget_spent` says why candidates are left untried. `scales` answer for fp16's loss scales
    (`loss_scales.calibrated` of the same records, with the pairs that were asked for since). Where the confirmation was
    of another objective's winner, this one's is chosen by the search's own trials, and is unconfirmed.
    Raises `ValueError` where nothing was measured that may be recommended, `InvalidRequestError` where nothing was that
    the objective asks for.
    """
    scales = scales or {}
    merits = search_merits(records, scales)
    if not merits:
        raise ValueError("Nothing was measured: there is nothing to choose from.")
    measured = measured_merits(records)
    out, tiers = why_out(records, scales), _final_tiers(records, space, merits)
    contenders = sound = {c: found for c, found in merits.items() if tiers[c] == min(tiers.values())}
    baseline = best_runs(records, space.baseline, {})
    today = merit(baseline.measurements) if baseline.measurements else None
    if _was_confirmed_for(objective, records, space, scales, environment):
        confirmed = {
            c: merit(runs.measurements, loss_scales.applied_share(scales, c))
            for c in sound
            if not c.as_found and (runs := confirm_runs(records, c, environment)).measurements
        }
        contenders = confirmed or sound
    else:
        today = measured.get(space.baseline, today)  # trials of one kind are compared
    check_measured(objective, contenders.values())
    candidate = rank_for(objective, contenders, least_speed=least_speed(objective, today))[0]
    may_be_kept = space.baseline not in out and (
        space.baseline in sound
        or space.baseline not in merits
        or not verdicts.can_check(space.baseline, space)  # no budget would settle it, and it is what the user runs
    )
    is_kept = may_be_kept and keeps_baseline(objective, candidate, contenders[candidate], space.baseline, today)
    promised = {} if is_kept else dict(environment)
    chosen = baseline if is_kept else best_runs(records, candidate, promised)
    known = verdicts.verdicts(records)
    chosen_scale = loss_scales.loss_scale(scales, chosen.candidate, loss_scale) or loss_scale
    confirming = [
        r.outcome
        for r in records
        if isinstance(r.outcome, Measurement)
        and (r.purpose, r.candidate, r.environment) == ("confirm", chosen.candidate, promised)
        and r.loss_scale in (None, chosen_scale)
    ]
    evidence = msgspec.structs.replace(
        gather(records, chosen, baseline, promised, loss_scale, description),
        fidelity=verdicts.verdict_on(chosen.candidate, space, known),
        loss_scale=loss_scales.evidence(scales, chosen.candidate, confirming),
    )
    plans = fallback_plans(
        records,
        chosen.candidate,
        {e.precision for e in verdicts.exclusions(known)},
        may_add_steps=accumulate.may_add(space, records),
    )
    config = plain_config(chosen.candidate, chosen_scale, promised, plans)
    excluded = explain.excluded(records, space, exclusions, is_budget_spent=is_budget_spent)
    passed_over = {
        c: found
        for c in merits
        if tiers[c] > min(tiers.values()) and (found := verdicts.verdict_on(c, space, known)) is not None
    }
    if objective == "speed":
        reason = explain.reason(
            chosen.candidate,
            space.baseline,
            evidence,
            _speeds(contenders),
            is_kept=is_kept,
            left_out={c: (speed, out[c]) for c, speed in measured_speeds(records).items() if c in out},
            passed_over={c: (merits[c].samples_per_second, found) for c, found in passed_over.items()},
        )
    else:
        reason = objective_words.reason(
            objective,
            chosen.candidate,
            space.baseline,
            today if is_kept and today is not None else contenders[candidate],
            today,
            is_kept=is_kept,
            searched=measured,
            behind={c: f.reason for c, f in passed_over.items()} | out,
        )
    warnings = explain.warnings(
        chosen,
        space,
        evidence,
        config,
        why_uncalibrated=loss_scales.why_uncalibrated(scales, chosen.candidate),
        description=description,
    )
    return Decision(
        config=config,
        evidence=evidence,
        reason=reason,
        warnings=(*warnings, *objective_words.warnings(objective)),
        excluded=excluded,
        candidates=explain.rows(records, space, excluded, environment, out),
        fidelity=tuple(known.values()),
    )
