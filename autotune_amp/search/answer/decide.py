"""Decision: the recommended setting and its evidence, from the records of a search.

It is the first setting of `ranking.rank_for` that gains at least 3 % over the baseline and whose interval lies above 1;
without one, the baseline is kept. For fp16, only samples of steps that the loss scaler does not skip count. Numbers are
medians over processes, with intervals. A finished outcomes.jsonl can be ranked again on any machine.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any, Literal

import msgspec

from autotune_amp.core.config import AmpConfig
from autotune_amp.core.errors import InvalidRequestError, StudyError
from autotune_amp.core.evidence import (
    MIN_PROCESSES,
    BaselineEvidence,
    Evidence,
    LargerBatchOption,
    LoaderEvidence,
    MemoryEvidence,
    PlainEnvironment,
    ProcessPeak,
    RanksEvidence,
    TrainingCost,
    UnitPrice,
    Utilization,
    WorkersTrial,
    is_wide,
)
from autotune_amp.core.hardware import Hardware
from autotune_amp.core.intervals import prediction_interval
from autotune_amp.core.outcome import CountedFlops, Description, Failure, Fidelity, Measurement, Profiled, Record
from autotune_amp.core.precisions import PRECISIONS, Precision, product_precision
from autotune_amp.core.recommendation import MAX_WARNINGS, Decision, Recommendation, SearchSummary
from autotune_amp.core.setting import Setting
from autotune_amp.core.text import size
from autotune_amp.hardware import machine_load
from autotune_amp.hardware.data_sheets import data_sheet_flops_per_second
from autotune_amp.precision.modes import MODES
from autotune_amp.search import loss_scales, ranking
from autotune_amp.search.answer import explain
from autotune_amp.search.gains import gain_interval, other_process_speeds, speedup
from autotune_amp.search.ledger import LOSS_SCALE, Ledger
from autotune_amp.search.options import RANKING, SearchOptions
from autotune_amp.search.ranking import MIN_GAIN, SettingRuns, best_runs, confirm_runs, data_share, known_median
from autotune_amp.search.space import build_space
from autotune_amp.search.stages.fallbacks import fallback_plans
from autotune_amp.search.stages.variants import variant_rows
from autotune_amp.search.storage.folder import StudyFolder
from autotune_amp.trial.jobs import NUM_STEPS_BEFORE_CUT
from autotune_amp.trial.memory import recommended_environment

# Ratio of the speeds in the search's trials and in the confirmation beyond which the machine must have changed. Without
# other load it was 0.72 to 1.31 (forty searches of studies/truth, real_training and peers).
DRIFT = 1.5
# Options that are not saved: a study folder may be moved, and the URL of a storage may contain a password.
_OPTIONS_NOT_KEPT = ("study", "out", "storage")
_SECONDS_PER_HOUR = 3600


def decide(
    ledger: Ledger, *, environment: Mapping[str, str], search: SearchSummary, description: Description
) -> Decision:
    """Return the recommended setting with its evidence, from the records of a search and of its confirmation.

    It is never slower than the baseline, unless that failed; fidelity problems of the baseline are warnings. The
    contenders were confirmed in the recommended `environment`, the baseline in the user's own, recorded as an empty
    one. `search` holds how the search ended. If the confirmation was for another objective, the search's own trials
    decide and the recommendation is unconfirmed. Raises `ValueError` if no setting may be recommended,
    `InvalidRequestError` if what the objective compares, such as energy or tokens, was not measured.
    """
    records, space, objective = ledger.records, ledger.space, ledger.objective
    contenders = ranking.contenders(ledger.merits, ledger.tiers, space.baseline)
    baseline = best_runs(records, space.baseline, {})
    baseline_merit = ranking.merit(baseline.measurements, objective=objective) if baseline.measurements else None
    compared_baseline = baseline
    if _was_confirmed(ledger, environment):
        # A command's trials add to the runs of what was confirmed, and confirm nothing else.
        was_run_again = {r.candidate for r in records if r.purpose == "confirm"}
        confirmed = {
            c: ranking.merit(runs.measurements, ledger.applied_share(c), objective=objective)
            for c in contenders
            if c in was_run_again and (runs := confirm_runs(records, c, environment)).measurements
        }
        contenders = confirmed or contenders
    else:
        # Trials are compared with trials only.
        baseline_merit = ledger.measured_merits.get(space.baseline, baseline_merit)
        searched = best_runs(_before_confirmation(records), space.baseline, {})
        compared_baseline = searched if searched.measurements and baseline_merit is not None else baseline
    ledger.raise_if_unmeasured()
    ranked = ranking.rank_for(objective, contenders, baseline=baseline_merit, tiers=ledger.tiers)
    improvements = [c for c in ranked if ranking.is_worth_a_change(objective, contenders[c], baseline_merit)]
    gains = {c: gain_interval(ledger, best_runs(records, c, environment), compared_baseline) for c in improvements}
    needs_gain = baseline_merit is not None and ledger.is_by_throughput
    candidate = next((c for c in improvements if not needs_gain or gains[c][0] > 1), None)
    is_kept = candidate is None
    chosen_environment = {} if is_kept else dict(environment)
    chosen_runs = baseline if candidate is None else best_runs(records, candidate, chosen_environment)
    evidence = gather_evidence(
        ledger, chosen_runs, baseline if is_kept else compared_baseline, chosen_environment, description
    )
    harmful = {e.precision for e in ranking.exclusions(ledger.fidelity)}
    plans = fallback_plans(records, chosen_runs.candidate, harmful, is_splitting_allowed=ledger.is_accumulation_allowed)
    loss_scale = ledger.loss_scale(chosen_runs.candidate)
    chosen = chosen_runs.candidate.with_workers_of(description.num_workers)
    config = AmpConfig.of(chosen, loss_scale=loss_scale, environment=chosen_environment, fallback=plans)
    excluded = explain.excluded_candidates(ledger, is_budget_spent=search.is_budget_spent)
    unsure = next(((c, *gains[c]) for c in improvements), None) if is_kept else None
    warnings, notes = explain.warnings_and_notes(ledger, chosen_runs, evidence, config, description, search)
    warnings = list(dict.fromkeys([*warnings, *search.warnings]))
    return Decision(
        config=config,
        evidence=evidence,
        reason=explain.reason(
            ledger, chosen_runs.candidate, evidence, contenders, baseline_merit, unsure, search, is_kept=is_kept
        ),
        warnings=tuple(warnings[:MAX_WARNINGS]),
        excluded=excluded,
        candidates=explain.candidate_rows(ledger, excluded, environment),
        fidelity=tuple(ledger.fidelity.values()),
        variants=variant_rows(ledger, Setting.of(config), is_budget_spent=search.is_budget_spent),
        outlook=_outlook(ledger, evidence),
        notes=tuple(dict.fromkeys((*warnings[MAX_WARNINGS:], *notes, *search.files, *search.notes))),
    )


def _outlook(ledger: Ledger, evidence: Evidence) -> LargerBatchOption | None:
    """Return the fastest larger effective batch size; None unless it is 3 % faster than the recommendation."""
    outcomes = [(r.outcome, r.candidate) for r in ledger.records if r.purpose == "outlook"]
    measured = [(o.samples_per_second, c, o) for o, c in outcomes if isinstance(o, Measurement)]
    if not measured or ledger.objective != "speed":
        return None
    speed, setting, outcome = max(measured, key=lambda row: row[0])
    if speed < (1 + MIN_GAIN) * evidence.samples_per_second:
        return None
    baseline_speed = evidence.baseline.samples_per_second
    return LargerBatchOption.of(
        setting,
        samples_per_second=speed,
        peak_memory_bytes=outcome.peak_memory_bytes,
        speedup=None
        if baseline_speed is None or is_wide(evidence.samples_per_second_interval)
        else speed / baseline_speed,
    )


def _was_confirmed(ledger: Ledger, environment: Mapping[str, str]) -> bool:
    """Whether the confirmation measured the winner for the ledger's objective rather than for another."""
    shortlist = ledger.with_only(_before_confirmation(ledger.records)).final_shortlist
    if shortlist is None:
        return False
    environments = [environment, {}] if shortlist.winner == shortlist.baseline else [environment]
    return any(
        r.purpose == "confirm" and r.candidate == shortlist.winner and r.environment in environments
        for r in ranking.confirming_records(ledger.records)
    )


def _before_confirmation(records: Iterable[Record]) -> list[Record]:
    return [r for r in records if r.purpose not in ("confirm", "plain")]


def gather_evidence(
    ledger: Ledger,
    chosen_runs: SettingRuns,
    baseline: SettingRuns,
    environment: Mapping[str, str],
    description: Description,
) -> Evidence:
    """Return the evidence for `chosen_runs`, measured in `environment`, against `baseline`, in the user's own."""
    records, candidate = ranking.without_lost_rounds(ledger.records), chosen_runs.candidate
    measurements = chosen_runs.measurements
    confirming = [
        r.outcome
        for r in ranking.confirming_records(ledger.records)
        if isinstance(r.outcome, Measurement)
        and (r.purpose, r.candidate, r.environment) == ("confirm", candidate, environment)
        and r.loss_scale in (None, ledger.loss_scale(candidate))
    ]
    speedup_ratio, ratio_interval = speedup(ledger, chosen_runs, baseline)
    processes = [runs.num_confirming for runs in (chosen_runs, baseline) if runs.measurements]
    low, high = _prediction_interval(chosen_runs, records)
    search_speed = _drifted_search_speed(chosen_runs, records)
    shares_processes = chosen_runs.num_confirming > 0 and ranking.were_processes_shared(records)
    return Evidence(
        samples_per_second=chosen_runs.speed,
        samples_per_second_interval=(low, high)
        if search_speed is None
        else (min(low, search_speed), max(high, search_speed)),
        search_samples_per_second=search_speed,
        step_seconds=median(m.step_seconds for m in measurements),
        peak_memory_bytes=max(m.peak_memory_bytes for m in measurements),
        baseline=_baseline_evidence(baseline, records),
        speedup=speedup_ratio,
        speedup_interval=ratio_interval,
        num_processes=len(measurements),
        is_confirmed=min(processes) >= MIN_PROCESSES,
        data_share=median(map(data_share, measurements)),
        update_share=known_median(m.update_seconds and m.update_seconds / m.step_seconds for m in measurements),
        plain_environment=_plain_environment(records, candidate, baseline) if environment else None,
        fidelity=ledger.verdict(candidate),
        loss_scale=loss_scales.evidence(ledger.scales, candidate, confirming),
        is_build_shared=not shares_processes and any(m.is_build_shared for m in measurements),
        are_processes_shared=shares_processes,
        joules_per_sample=ranking.joules_per_sample(measurements),
        loader=loader_evidence(records, chosen_runs, description),
        memory=memory_evidence(chosen_runs, description),
        evaluation_seconds=known_median(m.evaluation_seconds for m in measurements),
        checkpoint_seconds=known_median(m.checkpoint_seconds for m in measurements),
        accumulation=ledger.accumulation,
        load=machine_load.evidence(chosen_runs.loads),
        devices=_devices(ledger.records),
        ranks=_ranks_evidence(records, description),
        **_token_evidence(chosen_runs, records),
    )


def _token_evidence(runs: SettingRuns, records: Sequence[Record]) -> dict[str, Any]:
    """Return the fields of an `Evidence` for the tokens that the runs trained on; none if they counted no tokens."""
    tokens_per_second = known_median(m.tokens_per_second for m in runs.measurements)
    if tokens_per_second is None:
        return {}
    in_tokens = msgspec.structs.replace(runs, objective="tokens")
    return {
        "tokens_per_second": tokens_per_second,
        "tokens_per_second_interval": _prediction_interval(in_tokens, records),
        "padded_share": known_median(m.padded_share for m in runs.measurements),
    }


def _devices(records: Sequence[Record]) -> tuple[str, ...]:
    """Return the names of the devices that trials ran on at the same time; empty if one job ran at a time."""
    names = sorted({r.slot for r in records if r.slot is not None})
    return tuple(names) if len(names) > 1 else ()


def _ranks_evidence(records: Sequence[Record], description: Description) -> RanksEvidence | None:
    """Return the evidence on how throughput scales with the number of ranks; None if each trial uses one rank."""
    if not description.is_ranked:
        return None
    num_ranks, alone = description.num_ranks, next((r for r in records if r.purpose == "one_rank"), None)
    if alone is None or not isinstance(alone.outcome, Measurement):
        return RanksEvidence(num_ranks=num_ranks)
    runs = best_runs(records, alone.candidate, alone.environment)
    if runs.failure is not None:  # with all ranks it failed in the confirmation
        return RanksEvidence(num_ranks=num_ranks)
    one_rank_speed = alone.outcome.samples_per_second
    return RanksEvidence(
        num_ranks=num_ranks,
        setting=str(alone.candidate),
        one_rank_samples_per_second=one_rank_speed,
        efficiency=runs.speed / (num_ranks * one_rank_speed),
    )


def _prediction_interval(runs: SettingRuns, records: Sequence[Record]) -> tuple[float, float]:
    """Return the prediction interval of samples per second, widened for the load by other processes."""
    low, high = prediction_interval(runs.speeds, other_process_speeds(records, runs))
    low_factor, high_factor = machine_load.interval_factors(runs.loads)
    return low_factor * min(low, runs.speed), high_factor * max(high, runs.speed)


def _drifted_search_speed(runs: SettingRuns, records: Sequence[Record]) -> float | None:
    """Return the samples per second of the search's trials if the confirmation differs by more than `DRIFT`, else None.

    Also None if the confirmation ran a Trainer's own loop, which is expected to be slower than trials.
    """
    if any(m.is_own_loop for m in runs.measurements):
        return None
    outcomes = [r.outcome for r in records if r.candidate == runs.candidate and r.purpose == "search"]
    measured = [o for o in outcomes if isinstance(o, Measurement) and o.num_steps >= NUM_STEPS_BEFORE_CUT]
    if not measured or not runs.num_confirming:
        return None
    search_speed = median(o.samples_per_second for o in measured)
    return None if 1 / DRIFT <= search_speed / runs.speed <= DRIFT else search_speed


def _baseline_evidence(runs: SettingRuns, records: Sequence[Record]) -> BaselineEvidence:
    measured, failure = runs.measurements, runs.failure
    reason = "not measured: the search ended before" if failure is None else f"{failure.kind}: {failure.message}"
    takes_scaler = MODES[runs.candidate.precision].takes_scaler
    return BaselineEvidence(
        config=AmpConfig.of(runs.candidate, loss_scale=LOSS_SCALE if takes_scaler else None),
        samples_per_second=runs.speed if measured else None,
        samples_per_second_interval=_prediction_interval(runs, records) if measured else None,
        step_seconds=known_median(m.step_seconds for m in measured),
        peak_memory_bytes=max((m.peak_memory_bytes for m in measured), default=None),
        reason=None if measured else reason,
        tokens_per_second=known_median(m.tokens_per_second for m in measured),
    )


def _plain_environment(records: Sequence[Record], candidate: Setting, baseline: SettingRuns) -> PlainEnvironment | None:
    """Return the evidence from runs of the candidate without the recommended variables; None if there were none.

    Both of its numbers are None if these runs failed.
    """
    if candidate == baseline.candidate and baseline.num_confirming:  # the baseline always runs without variables
        return PlainEnvironment(samples_per_second=baseline.speed, speedup=1.0)
    outcomes = [r.outcome for r in records if r.candidate == candidate and r.purpose == "plain"]
    if not outcomes:
        return None
    speed = known_median(o.samples_per_second if isinstance(o, Measurement) else None for o in outcomes)
    return PlainEnvironment(
        samples_per_second=speed,
        speedup=speed / baseline.speed if speed is not None and baseline.measurements else None,
    )


def loader_evidence(records: Sequence[Record], runs: SettingRuns, description: Description) -> LoaderEvidence | None:
    """Return the evidence on the data loader if, with the user's own workers, it limits the speed; else None."""
    with_own_workers = runs.candidate.with_own_workers
    searched = [(r.candidate, r.outcome) for r in records if r.purpose == "search"]
    outcomes = (
        runs.measurements
        if with_own_workers == runs.candidate
        else [outcome for c, outcome in searched if c == with_own_workers]
    )
    measured = [m for m in outcomes if isinstance(m, Measurement) and not m.was_cut]
    share = median(map(data_share, measured)) if measured else 0.0
    if share <= ranking.MAX_DATA_SHARE:
        return None
    return LoaderEvidence(
        num_workers=description.num_workers,
        data_share=share,
        step_samples_per_second=ranking.speed_without_wait(median(m.samples_per_second for m in measured), share),
        tried=tuple(
            WorkersTrial(
                candidate=str(c.with_own_workers),
                num_workers=c.num_workers,
                samples_per_second=outcome.samples_per_second if isinstance(outcome, Measurement) else None,
                data_share=data_share(outcome) if isinstance(outcome, Measurement) else None,
            )
            for c, outcome in searched
            if c.num_workers is not None
        ),
    )


def memory_evidence(runs: SettingRuns, description: Description) -> MemoryEvidence:
    """Return how the peak memory was measured: on which batches and processes, and with or without evaluation."""
    sizes, worst_case = description.sample_sizes, None
    if description.has_worst_batch:
        worst_case = "the worst batch named by the workload"
    elif sizes is not None:
        num = min(runs.candidate.batch_size, len(sizes.largest))
        worst_case = (
            f"the {num:,} largest of {sizes.num_seen:,} samples examined, of {sizes.num_samples:,}: "
            f"{sizes.smallest_size:,} to {sizes.largest_size:,} numbers each, median {sizes.median_size:,}"
        )
    return MemoryEvidence(
        worst_case=worst_case,
        has_evaluation=any(m.evaluation_seconds is not None for m in runs.measurements),
        has_checkpoint=any(m.checkpoint_seconds is not None for m in runs.measurements),
        processes=tuple(
            ProcessPeak(num_steps=m.num_steps_taken, peak_memory_bytes=m.peak_memory_bytes) for m in runs.measurements
        ),
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
    """Return the recommendation, with the cost of a training run of the length and price in `options`.

    The contenders were confirmed in `environment`. `circumstances` are further fields of the `Recommendation`. Raises
    the errors of `decide`.
    """
    decision = decide(ledger, environment=environment, search=search, description=workload)
    fields = msgspec.to_builtins(options)
    compared = msgspec.structs.replace(options, objective=ledger.objective)  # tokens, maybe, where speed was asked for
    return Recommendation(
        **msgspec.structs.asdict(decision) | circumstances,
        search=search,
        workload=workload,
        options={name: fields[name] for name in fields if name not in _OPTIONS_NOT_KEPT},
        objective=ledger.objective,
        job=cost_of_training(decision.config, decision.evidence, compared, workload.num_batches),
        unit_price=unit_price(decision.evidence, options),
        utilization=utilization(decision, ledger.records, circumstances["hardware"], workload),
    )


def rerank(
    saved: Recommendation,
    options: SearchOptions,
    folder: StudyFolder,
    *,
    precisions: Sequence[Precision] | None = None,
    memory_limit: int | None = None,
) -> Recommendation:
    """Return a saved recommendation, ranked again for the objective, length of the training run and price in `options`.

    Only settings in `precisions`, and whose processes reserved at most `memory_limit` bytes, may be recommended; None
    sets no limit beyond the search's own. The study's folder is only read. Raises `StudyError` if it lacks the records,
    and `InvalidRequestError` if what the objective compares was not measured, or no setting is within the limits.
    """
    records = folder.records(saved.search.search_id) if saved.search.search_id else []
    if not records or saved.workload is None:
        raise StudyError(
            f"{folder.path} cannot be ranked again: its outcomes.jsonl lacks the trials of recommendation.json.",
            "Search again with --fresh, or copy the outcomes.jsonl of that search into the folder.",
        )
    saved_options = saved.options_as(SearchOptions)
    new_options = msgspec.structs.replace(
        saved_options,
        **{name: getattr(options, name) for name in RANKING},
        precisions=saved_options.precisions if precisions is None else tuple(precisions),
        memory_limit=saved_options.memory_limit if memory_limit is None else memory_limit,
    )
    records = _within_limits(records, precisions or PRECISIONS, memory_limit or math.inf)
    space = build_space(saved.hardware, saved.workload, new_options)
    steps = new_options.horizon_steps(space.baseline.effective_batch_size * space.num_batches)
    ledger = Ledger(
        space,
        records,
        objective=new_options.objective,
        num_steps=steps,
        has_fixed_samples=new_options.num_samples is not None,
    )
    confirming = [r for r in records if r.purpose == "confirm"]
    # The pairs of loss scale and growth interval that the search chose; other pairs that it replayed are not saved.
    chosen_pair = (Setting.of(saved.config), saved.config.loss_scale)
    for setting, scale in [chosen_pair, *((r.candidate, r.loss_scale) for r in confirming)]:
        if scale is not None:
            ledger.replay(setting, (scale.init_scale, scale.growth_interval))
    if ledger.final_shortlist is None:
        raise InvalidRequestError(
            "No setting within these limits was measured and may be recommended.",
            "Allow more precisions or more memory, or search again with these limits.",
        )
    # That of the confirmation: the search may have run on another machine, or had no time for the recommended
    # variables. A baseline that is kept was measured in the user's own, and perhaps in the recommended one too.
    of_contenders = [r.environment for r in confirming if r.candidate != space.baseline][-1:]
    is_kept = Setting.of(saved.config) == space.baseline and not saved.config.environment
    of_config = [] if is_kept else [saved.config.environment]
    environments = iter(of_contenders or of_config or [r.environment for r in confirming if r.environment])
    return recommend(
        ledger,
        options=new_options,
        environment=next(environments, recommended_environment(saved.hardware.device)),
        workload=saved.workload,
        hardware=saved.hardware,
        search=saved.search,
        fingerprint=saved.fingerprint,
        versions=saved.versions,
        target=saved.target,
        command_template=saved.command_template,
    )


def _within_limits(records: Sequence[Record], precisions: Sequence[Precision], memory_limit: float) -> list[Record]:
    """Return the records as they would be under these limits: trials of settings beyond them become failures."""
    measured = [(r.candidate, r.outcome) for r in records if isinstance(r.outcome, Measurement)]
    too_large = {c: size(o.reserved_memory_bytes) for c, o in measured if o.reserved_memory_bytes > memory_limit}
    limited = []
    for record in records:
        setting, failure = record.candidate, None
        if setting in too_large:
            failure = Failure(kind="oom", message=f"it reserved {too_large[setting]}, more than the limit")
        elif setting.precision not in precisions:
            failure = Failure(kind="unsupported", message=f"{setting.precision} is not among the precisions allowed")
        is_beyond = failure is not None and ranking.is_trial(record)
        limited.append(msgspec.structs.replace(record, outcome=failure) if is_beyond else record)
    return limited


def rerank_with_options(saved: Recommendation, path: Path, **arguments: Any) -> Recommendation:
    """Return a recommendation loaded from `path`, ranked again by a user's options; None keeps an option's value.

    These are `objective`, `steps` or `samples`, `price_per_hour`, and the limits `precision` and `memory_limit`, within
    which a setting must be to be recommended. Raises `InvalidRequestError` for a wrong option or a search that was
    interrupted, and the errors of `rerank`.
    """
    if saved.search.was_interrupted:
        raise InvalidRequestError(
            f"{path} is from an interrupted search, which cannot be ranked again.",
            "Run its `autotune-amp search` command again with these options: it continues and ranks by them.",
        )
    given = {name: value for name, value in arguments.items() if value is not None}
    now = saved.options_as(SearchOptions)
    kept: dict[str, Any] = {"objective": now.objective, "price_per_hour": now.price_per_hour}
    if given.keys().isdisjoint(("steps", "samples")):
        kept |= {"steps": now.num_steps, "samples": now.num_samples}
    options = SearchOptions.from_user(**kept | given)
    folder = StudyFolder(str(path.parent.parent), path.parent.name)
    return rerank(saved, options, folder, precisions=options.precisions, memory_limit=options.memory_limit)


def cost_of_training(
    config: AmpConfig, evidence: Evidence, options: SearchOptions, num_batches: int = 1
) -> TrainingCost | None:
    """Return the hours and price of a training run of the length in `options`, or None without a length.

    The evidence is the throughput of a group of ranks that takes `num_batches` batches at once, and `options.num_ranks`
    is the number of such groups: hours are samples / (samples per second of a group * groups), with the inverted
    interval of the throughput. Steps that fp16's loss scaler skips count as steps and take as long as others; no step
    replaces them. A number of steps means steps of the recommended config, and the baseline is timed over the same
    number of samples, or of tokens if these are the objective.
    """
    effective = config.effective_batch_size * num_batches * options.num_ranks
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
    baseline_speed, price = evidence.baseline.samples_per_second, options.price_per_hour
    tokens, baseline_tokens = evidence.tokens_per_second, evidence.baseline.tokens_per_second
    if options.objective == "tokens" and tokens is not None and baseline_tokens is not None:
        baseline_speed = evidence.samples_per_second * baseline_tokens / tokens
    return TrainingCost(
        num_steps=num_steps,
        num_samples=num_samples,
        hours=hours(evidence.samples_per_second),
        hours_interval=interval,
        baseline_hours=None if baseline_speed is None else hours(baseline_speed),
        price_per_hour=price,
        price=None if price is None else price * hours(evidence.samples_per_second),
        price_interval=None if price is None else (price * interval[0], price * interval[1]),
    )


def unit_price(evidence: Evidence, options: SearchOptions) -> UnitPrice | None:
    """Return the price of a million tokens, or samples without token ids, by the price per hour in `options`.

    `options.num_ranks` groups of ranks train at the evidence's throughput each, and the price is that of all of them.
    """
    if options.price_per_hour is None:
        return None
    throughput, interval = evidence.tokens_per_second, evidence.tokens_per_second_interval
    baseline = evidence.baseline.tokens_per_second
    unit: Literal["tokens", "samples"] = "tokens"
    if throughput is None or interval is None:
        unit, throughput, interval = "samples", evidence.samples_per_second, evidence.samples_per_second_interval
        baseline = evidence.baseline.samples_per_second
    price_of_rate = options.price_per_hour * 1e6 / _SECONDS_PER_HOUR / options.num_ranks
    return UnitPrice(
        unit=unit,
        price=price_of_rate / throughput,
        price_interval=(price_of_rate / interval[1], price_of_rate / interval[0]),
        baseline_price=None if baseline is None else price_of_rate / baseline,
        price_per_hour=options.price_per_hour,
    )


def utilization(
    decision: Decision, records: Sequence[Record], hardware: Hardware, workload: Description
) -> Utilization:
    """Return the utilization of the device's arithmetic by the recommended config.

    The operations of one batch, counted in the workload's description, a trial, a check or a profile, are scaled by
    positions of tokens if both sides know these, else by samples.
    """
    evidence, config = decision.evidence, decision.config
    of_description = [] if workload.counted_flops is None or config.arguments else [workload.counted_flops]
    counts = [*of_description, *_counts(records, config.arguments)]
    counted = next((each for each in counts if each.flops), counts[0] if counts else None)
    if counted is None:
        return Utilization(problem="no trial, check or profile of this search counted its operations")
    if not counted.flops:
        return Utilization(problem=counted.problem)
    attained = counted.flops / counted.num_samples * evidence.samples_per_second
    tokens_per_second, padded_share = evidence.tokens_per_second, evidence.padded_share
    if counted.num_positions and tokens_per_second is not None and padded_share is not None:
        attained = counted.flops / counted.num_positions * tokens_per_second / (1 - padded_share)
    precision = product_precision(config.precision, workload.weights, as_found=config.as_found)
    if precision is None:
        return Utilization(
            flops_per_second=attained, problem="some weights are in fp32 and others in half precision, without autocast"
        )
    # The ranks of a CPU share the rate that was measured on all of it.
    num_devices = 1 if hardware.identity.type == "cpu" else workload.num_ranks
    capability = hardware.precisions.get(precision)
    machine = None if capability is None else capability.peak_flops_per_second
    is_emulated = capability is not None and capability.level == "emulated"
    data_sheet = data_sheet_flops_per_second(hardware.identity.name, precision)
    return Utilization(
        precision=precision,
        flops_per_second=attained,
        machine_flops_per_second=num_devices * machine if machine else None,
        data_sheet_flops_per_second=num_devices * data_sheet if data_sheet else None,
        mfu=attained / (num_devices * machine) if machine else None,
        data_sheet_mfu=attained / (num_devices * data_sheet) if data_sheet else None,
        problem=f"{precision} is emulated here, so that no rate of it is a limit" if is_emulated else None,
    )


def _counts(records: Iterable[Record], arguments: tuple[tuple[str, str], ...]) -> Iterator[CountedFlops]:
    """Yield the counts of floating-point operations in the records whose setting has these arguments."""
    for record in records:
        outcome = record.outcome
        if record.candidate.arguments != arguments:
            continue
        if isinstance(outcome, (Fidelity, Measurement)) and outcome.counted_flops is not None:
            yield outcome.counted_flops
        if isinstance(outcome, Profiled):
            yield CountedFlops(
                flops=outcome.flops_per_step,
                num_samples=record.candidate.effective_batch_size,
                problem=outcome.flops_problem,
            )
