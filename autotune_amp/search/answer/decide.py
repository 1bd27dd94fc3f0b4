"""Records -> recommendation. Pure: a finished outcomes.jsonl is ranked again without a device.

The objective ranks (objective.py); and what the user runs today stays unless something beats it by 3 %. Above every
objective: what does not learn what fp32 learns is out, what nobody checked comes after fp32 and what was shown to be
faithful, what is doubtful comes last, and fp16 counts only the share of the gradient that reaches the optimizer.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from autotune_amp.core.config import AmpConfig
from autotune_amp.core.errors import InvalidRequestError, StudyError
from autotune_amp.core.evidence import Evidence, Job, Outlook
from autotune_amp.core.outcome import Description, Measurement
from autotune_amp.core.recommendation import Decision, Recommendation, SearchSummary
from autotune_amp.core.setting import Setting
from autotune_amp.search import check_results, loss_scales
from autotune_amp.search.answer import explain
from autotune_amp.search.answer.evidence import best_runs, confirm_runs, gather, plain_config
from autotune_amp.search.folder import StudyFolder
from autotune_amp.search.ledger import LOSS_SCALE, Ledger
from autotune_amp.search.objective import PLATEAU, check_measured, keeps_baseline, least_speed, merit, rank_for
from autotune_amp.search.options import RANKING, SearchOptions
from autotune_amp.search.space import build_space
from autotune_amp.search.stages.fallbacks import fallback_plans
from autotune_amp.trial.memory import recommended_environment

# Where a study lies is for whoever asks to say, and a storage's URL may hold a password.
_OPTIONS_NOT_KEPT = ("study", "out", "storage")
_SECONDS_PER_HOUR = 3600


def decide(
    ledger: Ledger,
    *,
    environment: Mapping[str, str],
    is_budget_spent: bool = False,
    description: Description | None = None,
) -> Decision:
    """The choice, with its evidence, from the records of a search and of its confirmation.

    The contenders were confirmed in `environment`, the recommended one, and the baseline in the user's own (a record's
    empty environment). `is_budget_spent` says why settings are left untried. Where the confirmation was of another
    objective's winner, this one's is chosen by the search's own trials, and is unconfirmed.
    Raises `ValueError` where nothing was measured that may be recommended, `InvalidRequestError` where nothing was that
    the objective asks for.
    """
    records, space, objective, scales = ledger.records, ledger.space, ledger.objective, ledger.scales
    merits, tiers, out = ledger.merits, ledger.tiers, ledger.ruled_out
    if not merits:
        raise ValueError("Nothing was measured: there is nothing to choose from.")
    contenders = sound = {c: found for c, found in merits.items() if tiers[c] == min(tiers.values())}
    baseline = best_runs(records, space.baseline, {})
    today = merit(baseline.measurements) if baseline.measurements else None
    if _was_confirmed(ledger, environment):
        confirmed = {
            c: merit(runs.measurements, ledger.applied_share(c))
            for c in sound
            if not c.as_found and (runs := confirm_runs(records, c, environment)).measurements
        }
        contenders = confirmed or sound
    else:
        today = ledger.measured.get(space.baseline, today)  # trials of one kind are compared
    check_measured(objective, contenders.values())
    candidate = rank_for(objective, contenders, least_speed=least_speed(objective, today))[0]
    may_be_kept = space.baseline not in out and (
        space.baseline in sound
        or space.baseline not in merits
        or not check_results.can_check(space.baseline, space)  # no budget would settle it, and it is what the user runs
    )
    is_kept = may_be_kept and keeps_baseline(objective, candidate, contenders[candidate], space.baseline, today)
    promised = {} if is_kept else dict(environment)
    chosen = baseline if is_kept else best_runs(records, candidate, promised)
    known = ledger.fidelity
    chosen_scale = ledger.loss_scale(chosen.candidate) or LOSS_SCALE
    confirming = [
        r.outcome
        for r in records
        if isinstance(r.outcome, Measurement)
        and (r.purpose, r.candidate, r.environment) == ("confirm", chosen.candidate, promised)
        and r.loss_scale in (None, chosen_scale)
    ]
    evidence = msgspec.structs.replace(
        gather(ledger, chosen, baseline, promised, description),
        fidelity=ledger.verdict(chosen.candidate),
        loss_scale=loss_scales.evidence(scales, chosen.candidate, confirming),
    )
    plans = fallback_plans(
        records,
        chosen.candidate,
        {e.precision for e in check_results.exclusions(known)},
        may_add_steps=ledger.may_add_accumulation,
    )
    config = plain_config(chosen.candidate, chosen_scale, promised, plans)
    excluded = explain.excluded(ledger, is_budget_spent=is_budget_spent)
    passed_over = {
        c: found for c in merits if tiers[c] > min(tiers.values()) and (found := ledger.verdict(c)) is not None
    }
    if objective == "speed":
        reason = explain.reason(
            chosen.candidate,
            space.baseline,
            evidence,
            {c: found.samples_per_second for c, found in contenders.items()},
            is_kept=is_kept,
            left_out={c: (ledger.measured[c].samples_per_second, why) for c, why in out.items()},
            passed_over={c: (merits[c].samples_per_second, found) for c, found in passed_over.items()},
        )
    else:
        reason = explain.reason_for(
            objective,
            chosen.candidate,
            space.baseline,
            today if is_kept and today is not None else contenders[candidate],
            today,
            is_kept=is_kept,
            searched=ledger.measured,
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
        warnings=(*warnings, *([explain.WHOLE_DEVICE] if objective == "energy" else [])),
        excluded=excluded,
        candidates=explain.rows(ledger, excluded, environment),
        fidelity=tuple(known.values()),
        outlook=_outlook(ledger, evidence),
    )


def _outlook(ledger: Ledger, evidence: Evidence) -> Outlook | None:
    """What another effective batch size would reach, where that is more than what is recommended."""
    found = [(r.outcome, r.candidate) for r in ledger.records if r.purpose == "outlook"]
    measured = [(o.samples_per_second, c, o) for o, c in found if isinstance(o, Measurement)]
    if not measured or ledger.objective != "speed":
        return None
    speed, setting, outcome = max(measured, key=lambda one: one[0])
    if speed < (1 + PLATEAU) * evidence.samples_per_second:
        return None
    todays = evidence.baseline.samples_per_second
    return Outlook.of(
        setting,
        samples_per_second=speed,
        peak_memory_bytes=outcome.peak_memory_bytes,
        speedup=None if todays is None else speed / todays,
    )


def _was_confirmed(ledger: Ledger, environment: Mapping[str, str]) -> bool:
    """Whether the confirmation was of this objective's winner, and not of another's."""
    before = [r for r in ledger.records if r.purpose not in ("confirm", "plain")]
    chosen = ledger.with_only(before).finalists
    return chosen is not None and any(
        r.purpose == "confirm" and r.candidate == chosen.winner and r.environment == environment for r in ledger.records
    )


def recommend(
    ledger: Ledger,
    *,
    options: SearchOptions,
    environment: Mapping[str, str],
    workload: Description,
    search: SearchSummary,
    **circumstances: Any,
) -> Recommendation:
    """The recommendation for the length of training in `options`, with what a `Recommendation` says of the search's
    `circumstances`; see `decide`.

    `environment` is the one that the contenders were confirmed in. Raises what `decide` raises.
    """
    decision = decide(ledger, environment=environment, is_budget_spent=search.is_budget_spent, description=workload)
    fields = msgspec.to_builtins(options)
    return Recommendation(
        **msgspec.structs.asdict(decision) | circumstances | {"warnings": (*decision.warnings, *search.warnings)},
        search=search,
        workload=workload,
        options={name: fields[name] for name in fields if name not in _OPTIONS_NOT_KEPT},
        objective=options.objective,
        job=cost_of_training(decision.config, decision.evidence, options),
    )


def rerank(known: Recommendation, options: SearchOptions, folder: StudyFolder) -> Recommendation:
    """`known` for the objective, the length of training and the price in `options`, from the records in its folder.

    Reads only. Raises `StudyError` where the folder lacks the records, and `InvalidRequestError` where nothing was
    measured that the objective asks for.
    """
    records = folder.records(known.search.search_id) if known.search.search_id else []
    if not records or known.workload is None:
        raise StudyError(
            f"{folder.path} cannot be ranked again: its outcomes.jsonl lacks the trials behind recommendation.json.",
            "Search again with --fresh, or put the outcomes.jsonl of this search beside it.",
        )
    before = msgspec.convert(known.options, SearchOptions)
    asked = msgspec.structs.replace(before, **{name: getattr(options, name) for name in RANKING})
    space = build_space(known.hardware, known.workload, asked)
    steps = asked.horizon_steps(space.baseline.effective_batch_size)
    ledger = Ledger(space, records, objective=asked.objective, num_steps=steps)
    confirming = [r for r in records if r.purpose == "confirm"]
    # The pairs of loss scale and growth interval that the search chose: what else it asked for is not kept.
    chosen = (Setting.of(known.config), known.config.loss_scale)
    for setting, scale in [chosen, *((r.candidate, r.loss_scale) for r in confirming)]:
        if scale is not None:
            ledger.replay(setting, (scale.init_scale, scale.growth_interval))
    # What the contenders were confirmed in: this may be another machine than the one that searched.
    environments = filter(None, (*(r.environment for r in confirming), known.config.environment))
    return recommend(
        ledger,
        options=asked,
        environment=next(environments, recommended_environment(known.hardware.device)),
        workload=known.workload,
        hardware=known.hardware,
        search=known.search,
        fingerprint=known.fingerprint,
        versions=known.versions,
    )


def ranked_again(
    known: Recommendation,
    path: Path,
    objective: str | None,
    steps: int | None,
    samples: int | None,
    price_per_hour: float | None,
) -> Recommendation:
    """`rerank` of the recommendation at `path` for what a user asks; None is what it has.

    Raises `InvalidRequestError` for a wrong option and for a search that was interrupted, and what `rerank` raises.
    """
    if known.search.was_interrupted:
        raise InvalidRequestError(
            f"{path} is the best of a search that was interrupted, which is not ranked again.",
            "Run its `autotune-amp search` command again with these options: it goes on, and ranks by them.",
        )
    before = msgspec.convert(known.options, SearchOptions)
    is_length_given = steps is not None or samples is not None
    options = SearchOptions.from_user(
        objective=before.objective if objective is None else objective,
        steps=steps if is_length_given else before.num_steps,
        samples=samples if is_length_given else before.num_samples,
        price_per_hour=before.price_per_hour if price_per_hour is None else price_per_hour,
    )
    return rerank(known, options, StudyFolder(str(path.parent.parent), path.parent.name))


def cost_of_training(config: AmpConfig, evidence: Evidence, options: SearchOptions) -> Job | None:
    """Hours and price of the training that the options name, None where they name none.

    Hours are samples / (samples per second of a rank * ranks); the interval is that of the throughput, inverted. Steps
    that fp16's loss scaler skips are among the steps and take as long as the others: they are not made up for. A number
    of steps is taken as steps of the recommended config, and the baseline is timed over the same number of samples.
    """
    effective = config.effective_batch_size * options.num_ranks
    if options.num_samples is not None:
        num_samples, num_steps = options.num_samples, -(-options.num_samples // effective)
    elif options.num_steps is not None:
        num_samples, num_steps = options.num_steps * effective, options.num_steps
    else:
        return None

    def hours(samples_per_second: float) -> float:
        return num_samples / (samples_per_second * options.num_ranks) / _SECONDS_PER_HOUR

    slowest, fastest = evidence.samples_per_second_interval
    interval = hours(fastest), hours(slowest)
    todays, price = evidence.baseline.samples_per_second, options.price_per_hour
    return Job(
        num_steps=num_steps,
        num_samples=num_samples,
        hours=hours(evidence.samples_per_second),
        hours_interval=interval,
        baseline_hours=None if todays is None else hours(todays),
        price_per_hour=price,
        price=None if price is None else price * hours(evidence.samples_per_second),
        price_interval=None if price is None else (price * interval[0], price * interval[1]),
    )
