"""Explanation of a recommendation: its reason, warnings and notes, the table of candidates, and exclusions. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import median

from msgspec.structs import replace

from autotune_amp.core.config import AmpConfig
from autotune_amp.core.evidence import MIN_PROCESSES, THROUGHPUT_OBJECTIVES, Evidence, Objective
from autotune_amp.core.outcome import Accumulation, Description, Failure
from autotune_amp.core.recommendation import CandidateRow, Exclusion, NothingWorksError, SearchSummary
from autotune_amp.core.setting import Setting
from autotune_amp.core.text import count, number, rate, sentence, size, token_rate
from autotune_amp.dimensions import risks
from autotune_amp.hardware import machine_load
from autotune_amp.precision.modes import MODES
from autotune_amp.search import loss_scales, ranking
from autotune_amp.search.ledger import Ledger
from autotune_amp.search.ranking import PLATEAU, Merit, SettingRuns, least_speed
from autotune_amp.search.space import SAME_MEMORY_SHARE, Space, without_excluded
from autotune_amp.search.stages.fallbacks import fallback_precisions
from autotune_amp.trial.failures import suggested_fix

# Relative half width of an interval above which processes are said to disagree. Processes that differ by 5 %, as the
# prior assumes, give 15 % with three of them and 13 % with five.
WIDE_INTERVAL = 0.2

SECONDS_OF_A_TRIAL = 15.0  # with the checks that may follow it, to suggest a larger budget

_WHOLE_DEVICE = "The energy is that of the whole device, including other processes that ran on it during a trial."
_COMPARED_BY_TOKENS = (
    "Settings are compared by tokens per second, since samples have another length with some arguments."
)
_UNTRIED = "not tried: less promising than what was measured"
_ENDED = "not tried: the search ended before"


def reason(
    ledger: Ledger,
    chosen: Setting,
    evidence: Evidence,
    contenders: Mapping[Setting, Merit],
    baseline_merit: Merit | None,
    unsure: tuple[Setting, float, float] | None,
    search: SearchSummary,
    *,
    is_kept: bool,
) -> str:
    """Return the reason for the `chosen` setting: its gain, and why no setting that measured better was chosen.

    It was chosen among the `contenders`; `baseline_merit` holds the merits of the baseline that they were compared
    with. If the baseline is kept because no gain is significant, `unsure` is the first contender with a gain of 3 % and
    the interval of its speed-up.
    """
    objective, baseline = ledger.objective, ledger.space.baseline
    if is_kept and is_only_baseline_tried(ledger):
        return _reason_if_only_baseline_ran(ledger, search)
    chosen_merit = baseline_merit if is_kept and baseline_merit is not None else contenders[chosen]
    compared_setting = baseline if is_kept else chosen
    why_not_better = _why_not_better(
        ledger, compared_setting, chosen_merit, baseline_merit, contenders, {chosen, baseline, *(unsure or ())[:1]}
    )
    if is_kept:
        amount = "" if ledger.is_by_throughput else f", {_amount(objective, chosen_merit)}"
        gain = f"Keep what you have: {baseline}{amount}; "
        if unsure is None:
            num_others = len(ledger.measured_merits.keys() - {baseline})
            gain += (
                f"of {count(num_others + 1, 'setting')} measured none was worth a change."
                if num_others
                else "nothing else that was tried ran without failing."
            )
        else:
            setting, low, high = unsure
            variables = " with the recommended variables" if setting == baseline else ""
            gain += (
                f"{setting}{variables} may be faster, but that is not certain: {low:.2f} to {high:.2f} times as fast. "
                "A larger --budget may decide it."
            )
    else:
        amount = "" if ledger.is_by_throughput else f"takes {_amount(objective, chosen_merit)} and "
        reached = rate(evidence.samples_per_second)
        if objective == "tokens" and evidence.tokens_per_second is not None:
            reached = token_rate(evidence.tokens_per_second)
        where = "in the recommended environment " if chosen == baseline else ""
        gain = f"{chosen} {where}{amount}reaches {reached}"
        if baseline_merit is None or evidence.speedup is None:
            gain += f"; the baseline, {baseline}, has no measurement ({evidence.baseline.reason})."
        else:
            beside = "" if ledger.is_by_throughput else f", {_amount(objective, baseline_merit)}"
            gain += f", {evidence.speedup:.2f} times the baseline, {baseline}{beside}."
    return " ".join([gain, *why_not_better, *_loader_reason(chosen, evidence)])


def is_only_baseline_tried(ledger: Ledger) -> bool:
    """Whether only the baseline was tried, although there were more settings to try."""
    return {r.candidate for r in ledger.trials} == {ledger.space.baseline} != set(ledger.space.candidates)


def _reason_if_only_baseline_ran(ledger: Ledger, search: SearchSummary) -> str:
    """Return the reason for the recommendation if only the baseline was measured, with the next step."""
    text = f"Only {ledger.space.baseline} was measured"
    if not search.is_budget_spent:
        return f"{text}, and nothing was compared with it. Allow more --trials."
    text += f" in {search.seconds:.0f} s"
    if search.was_interrupted:
        return f"{text}, before the search was interrupted. Run the same search again to continue it."
    start_text = f": a process takes {search.start_seconds:.0f} s to start here" if search.start_seconds >= 1 else ""
    num_precisions = len({c.precision for c in ledger.space.candidates})
    needed = search.seconds + num_precisions * (search.start_seconds + SECONDS_OF_A_TRIAL)
    return f"{text}{start_text}. Give --budget {math.ceil(needed / 10) * 10} or leave it out."


def _amount(objective: Objective, merit: Merit) -> str:
    """Return a setting's peak memory or energy as text, such as ``612 MiB`` or ``0.35 J a sample``."""
    if objective == "memory":
        return size(merit.peak_memory_bytes)
    joules = merit.joules_per_sample
    return "an unknown energy" if joules is None else f"{joules:.3g} J a sample"


def _relative_cost(objective: Objective, other: Merit, reference: Merit) -> float:
    """Return the ratio of the costs (time, memory or joules per sample) of `other` and `reference`; 1 if unknown."""
    if objective in THROUGHPUT_OBJECTIVES:
        return reference.speed / other.speed
    if objective == "memory":
        ratio = other.peak_memory_bytes / reference.peak_memory_bytes
        return ratio if ratio < SAME_MEMORY_SHARE else max(ratio, 1.0)
    if other.joules_per_sample is None or reference.joules_per_sample is None:
        return 1.0
    return other.joules_per_sample / reference.joules_per_sample


def _why_not_better(
    ledger: Ledger,
    chosen: Setting,
    own_merit: Merit,
    baseline_merit: Merit | None,
    contenders: Mapping[Setting, Merit],
    left_out: set[Setting],
) -> list[str]:
    """Return a sentence on why the best setting that measured better than the chosen one was not chosen, or nothing.

    `left_out` settings are not considered. Settings that were not confirmed are compared with the search's own trials
    of the `chosen` setting, since the speed of the machine may change until the confirmation. Settings whose
    trial was cut short are ignored, since they were far slower.
    """
    objective, last_tier = ledger.objective, max(ledger.tiers[c] for c in contenders) if contenders else 0

    def why_not(other: Setting, other_merit: Merit) -> str:
        verdict = ledger.verdict(other)
        if other in ledger.ruled_out:
            return f"is left out: {ledger.ruled_out[other]}"
        if ledger.tiers[other] > last_tier and verdict is not None:
            return f"is left out: {verdict.reason}"
        if other_merit.speed < least_speed(objective, baseline_merit):
            return "is slower than the baseline"
        if other not in contenders:
            return "was not confirmed: use a larger --budget to confirm it"
        return "is within 3 %, where fewer numerical risks and a smaller batch come first"

    better: dict[Setting, tuple[float, str]] = {}
    for other, searched in ledger.measured_merits.items():
        if other in left_out or other.as_found or any(m.was_cut for m in ledger.measurements[other]):
            continue
        other_merit = contenders.get(other) or ledger.merits.get(other, searched)
        reference = own_merit if other in contenders else ledger.measured_merits.get(chosen, own_merit)
        ratio = _relative_cost(objective, other_merit, reference)
        if ratio < (1 if other in contenders else 1 - PLATEAU):
            better[other] = ratio, why_not(other, other_merit)
    if not better:
        return []
    other = min(better, key=lambda c: better[c])
    ratio, why = better[other]
    compared = f"is {1 / ratio:.2f} times as fast" if ledger.is_by_throughput else f"takes {ratio:.2f} times as much"
    return [f"{other} {compared} and {sentence(why)}"]


def _loader_reason(chosen: Setting, evidence: Evidence) -> list[str]:
    """Return a sentence on the gain by another number of loader workers, or nothing if the user's own is kept."""
    loader = evidence.loader
    if chosen.num_workers is None or loader is None:
        return []
    return [
        f"The data loader set the speed: {100 * loader.data_share:.0f} % of a step waited for it, "
        f"{100 * evidence.data_share:.0f} % with {count(chosen.num_workers, 'worker')}."
    ]


def warnings_and_notes(
    ledger: Ledger,
    chosen_runs: SettingRuns,
    evidence: Evidence,
    config: AmpConfig,
    description: Description,
    search: SearchSummary,
) -> tuple[list[str], list[str]]:
    """Return warnings that the user should act on, the most important first, and notes.

    `search` holds how the search ended, and the load by other processes before it.
    """
    space = ledger.space
    load_before = None if search.load is None else machine_load.evidence([search.load])
    numerical_warnings, numerical_notes = _numerical_warnings_and_notes(ledger, chosen_runs, evidence)
    # Load by other processes also explains processes that disagree and a changed machine: one warning is enough.
    load = machine_load.load_warnings(evidence.load) or machine_load.load_warnings(
        load_before, "search on an idle machine"
    )
    spread, unconfirmed = _measurement_warnings(evidence, was_interrupted=search.was_interrupted)
    measurement = [*load, *spread]
    accumulation, accumulation_notes = accumulation_warnings(
        space, chosen_runs.candidate, config, evidence.accumulation
    )
    warnings = [
        *numerical_warnings,
        *space.warnings,
        *accumulation,
        *unconfirmed,
        *measurement[:1],
        *_loader_warnings(evidence, description),
        *memory_warnings(description),
        *_evaluation_memory_warnings(chosen_runs),
    ]
    notes = [
        *measurement[1:],
        *numerical_notes,
        *accumulation_notes,
        *_missing_plan_notes(ledger, chosen_runs.candidate, config),
        *_own_loop_notes(chosen_runs, description),
        *([_WHOLE_DEVICE] if ledger.objective == "energy" else []),
        *([_COMPARED_BY_TOKENS] if ledger.objective != ledger.requested_objective else []),
        *space.notes,
    ]
    return warnings, notes


def _measurement_warnings(evidence: Evidence, *, was_interrupted: bool) -> tuple[list[str], list[str]]:
    """Return warnings about the spread of the measurements, and about too few processes."""
    spread, unconfirmed = [], []
    low, high = evidence.samples_per_second_interval
    searched = evidence.search_samples_per_second
    # Load by other processes widens the interval too, and has a warning of its own.
    is_widened = searched is not None or (evidence.load is not None and evidence.load.interval_factors != (1.0, 1.0))
    if searched is not None:
        spread.append(
            f"The machine changed: the search's trials of this config ran at {rate(searched)}, "
            f"the confirmation at {rate(evidence.samples_per_second)}. The interval is widened to include both. "
            "Search again with --fresh on a quiet machine."
        )
    if not evidence.is_confirmed:
        next_step = "Run the same search again to continue it." if was_interrupted else "Use a larger --budget."
        setting_name = "this config" if evidence.num_processes < MIN_PROCESSES else "the baseline"
        unconfirmed.append(
            f"Unconfirmed: fewer than {MIN_PROCESSES} fresh processes measured {setting_name}. {next_step}"
        )
    elif high - low > 2 * WIDE_INTERVAL * evidence.samples_per_second and not is_widened:
        spread.append(
            f"The processes disagree: a run may reach anything from {number(low)} to {rate(high)}. "
            "Stop other programs on this machine and search again with --fresh."
        )
    return spread, unconfirmed


def _numerical_warnings_and_notes(
    ledger: Ledger, chosen_runs: SettingRuns, evidence: Evidence
) -> tuple[list[str], list[str]]:
    """Return warnings about numerical problems of the training run, and notes about its numerics."""
    fidelity, scale = evidence.fidelity, evidence.loss_scale
    warnings: list[str] = []
    notes: list[str] = []
    num_skips = sum(m.num_skips for m in chosen_runs.measurements)
    if fidelity is not None and fidelity.verdict != "faithful":
        warnings.append(f"{sentence(fidelity.reason)} {sentence(fidelity.next_step)}")
    elif chosen_runs.candidate in ledger.ruled_out:  # the baseline may be kept all the same
        warnings.append(f"{sentence(ledger.ruled_out[chosen_runs.candidate])} Use --precision with another precision.")
    if fidelity is not None and fidelity.later is not None and fidelity.later.verdict in ("undecided", "doubtful"):
        warnings.append(
            f"{sentence(fidelity.later.reason)} Compare the losses of its first few hundred steps with fp32's."
        )
    if fidelity is not None and fidelity.verdict == "faithful" and not fidelity.has_moved:
        notes.append(f"{sentence(fidelity.reason)} Search again with a learning rate above 0 to check the updates too.")
    is_calibrated_here = "calibration" in ledger.space.checks  # of a command the loss scale is the script's own
    if MODES[chosen_runs.candidate.precision].takes_scaler and scale is None and is_calibrated_here:
        why = loss_scales.why_uncalibrated(ledger.scales, chosen_runs.candidate)
        why = why or "the search ended before that, or fp16 was not among the fastest settings"
        notes.append(f"The loss scale is GradScaler's default: it was not calibrated, since {sentence(why)}")
    if scale is None and num_skips and MODES[chosen_runs.candidate.precision].takes_scaler:
        warnings.append(
            f"The loss scaler skipped {num_skips} of the measured steps because gradients overflowed: "
            "the initial scale is too high for the start of this training run."
        )
    elif scale is None and num_skips:
        warnings.append(
            f"{num_skips} of the measured steps were skipped because their gradients were not finite, and "
            f"{chosen_runs.candidate.precision} has no loss scale to lower. Find out which batch or layer causes it."
        )
    if scale is not None and scale.num_skips_seen > scale.num_skips_foretold:
        warnings.append(
            f"The loss scaler skipped {scale.num_skips_seen} of {scale.num_confirming_steps} measured steps, where the "
            f"calibration predicted {scale.num_skips_foretold}: the gradients became larger than in the calibration."
        )
    return warnings, notes


def _missing_plan_notes(ledger: Ledger, chosen: Setting, config: AmpConfig) -> list[str]:
    planned = {plan.precision for plan in config.plans}
    return [
        f"No plan for stepping down to {precision} was measured: if {config.precision} fails during training, the "
        "batch size that fits in memory is unknown. A larger --budget may measure one."
        for precision in fallback_precisions(ledger, chosen)
        if precision not in planned
    ]


def _loader_warnings(evidence: Evidence, description: Description) -> list[str]:
    """Return a warning if the data loader limits the speed, with the numbers of workers that were tried."""
    loader = evidence.loader
    if loader is None or evidence.data_share <= ranking.MAX_DATA_SHARE:
        return []
    placeholder = next((each for each in description.missing_placeholders if "num_workers" in each), None)
    if loader.tried:
        tried = [
            f"{trial.candidate} with {count(trial.num_workers, 'worker')} "
            f"({'failed' if trial.samples_per_second is None else rate(trial.samples_per_second)})"
            for trial in loader.tried
        ]
        next_step = f"Tried: {', '.join(tried)}. To go faster, make a sample take less time to load."
    elif placeholder is not None:
        next_step = f"Write {placeholder} where the command takes its number of workers: more of them are then tried."
    elif loader.num_workers is None:
        next_step = "The data makes its batches itself, without workers: make a sample take less time to load."
    else:
        next_step = (
            f"More than its {count(loader.num_workers, 'worker')} were not tried: use a larger --budget or more "
            "--trials, if there are CPUs for them."
        )
    return [
        f"The data loader sets the speed: {100 * evidence.data_share:.0f} % of a step waits for it; "
        f"without waiting it would reach {rate(loader.step_samples_per_second)}. {next_step}"
    ]


def memory_warnings(description: Description) -> list[str]:
    """Return a warning if a batch that takes more memory than the measured ones may exist."""
    if description.has_worst_batch:
        return []
    sizes, batch_sizes, problem = description.sample_sizes, description.batch_sizes_seen, description.scan_problem
    if problem is not None:
        warning = f"The search for the largest batch in the data did not finish ({problem})"
    elif batch_sizes is not None:
        warning = (
            f"Batches differ in size ({batch_sizes[0]:,} to {batch_sizes[1]:,} numbers) and only some were measured"
        )
    elif sizes is not None and sizes.num_seen < sizes.num_samples:
        warning = f"Memory was measured on the largest of only {sizes.num_seen:,} of {sizes.num_samples:,} samples"
    else:
        return []
    return [f"{warning}; another batch may take more memory. Name the largest one with Workload(worst_batch=...)."]


def _own_loop_notes(chosen_runs: SettingRuns, description: Description) -> list[str]:
    """Return a note if the speed was not measured in the framework's own Trainer."""
    if description.trainer is None or all(m.is_own_loop for m in chosen_runs.measurements):
        return []
    problems = [m.why_not_own_loop for m in chosen_runs.measurements if m.why_not_own_loop is not None]
    next_step = (
        f"Its own loop could not be run: {sentence(problems[0])}"
        if problems
        else "Use a larger --budget to include it."
    )
    return [
        f"The speed is that of trials: it does not include what the {description.trainer} does beside a step "
        f"(callbacks, logging, its loader). {next_step}"
    ]


def _evaluation_memory_warnings(chosen_runs: SettingRuns) -> list[str]:
    """Return warnings if the memory of the workload's evaluation and checkpoint could not be measured."""
    problems = [m.ending_problem for m in chosen_runs.measurements if m.ending_problem is not None]
    return [
        f"The peak memory does not include the workload's own evaluation and checkpoint: {sentence(problem)} "
        "Fix the error, or use a larger --budget if time ran out; then search again with --fresh."
        for problem in problems
    ]


def accumulation_warnings(
    space: Space, chosen: Setting, config: AmpConfig, accumulation: Accumulation | None
) -> tuple[list[str], list[str]]:
    """Return warnings on changes to the training code for another effective batch size or accumulation, and notes.

    They are notes if only a fallback accumulates.
    """
    warnings: list[str] = []
    notes: list[str] = []
    current_size, new_size = (c.effective_batch_size * space.num_batches for c in (space.baseline, chosen))
    if current_size != new_size:
        warnings.append(
            f"The effective batch size changes from {current_size} to {new_size} samples per optimizer step, so that "
            f"the learning rate may need tuning. Use --effective-batch-size {current_size} to keep it."
        )
    num_steps = [config.accumulation_steps, *(plan.accumulation_steps for plan in config.plans)]
    if max(num_steps) == 1:
        return warnings, notes
    messages = warnings if config.accumulation_steps > 1 else notes
    verdicts_to_fix = ("sum",) if space.weighs_passes else ("sum", "weighted")
    if accumulation is not None and accumulation.verdict in verdicts_to_fix:
        messages.append(f"{sentence(accumulation.reason)} {sentence(accumulation.next_step)}")
    is_todays = set(num_steps) <= {1, space.baseline.accumulation_steps}
    if "accumulation" not in space.checks and not (is_todays or space.keeps_effective_batch_size):
        messages.append("How the training code weights accumulated gradients was not checked.")
    return warnings, notes


def excluded_candidates(ledger: Ledger, *, is_budget_spent: bool) -> tuple[Exclusion, ...]:
    """Return the candidates that failed, are ruled out or, if time ran out, were not tried, with one reason each."""
    failed = [
        Exclusion(precision=c.precision, batch_size=c.batch_size, reason=f"{failure.kind}: {failure.message}")
        for c, failure in ledger.failures.items()
        if replace(c, as_found=False).is_ordinary
    ]
    exclusions = [*ledger.space.excluded, *failed, *ledger.exclusions]
    if is_budget_spent:
        tried = {r.candidate for r in ledger.trials}
        untried = [c for c in without_excluded(ledger.space.candidates, exclusions) if c not in tried]
        exclusions += [Exclusion(precision=c.precision, batch_size=c.batch_size, reason=_ENDED) for c in untried]
    unique: dict[tuple[str, int | None], Exclusion] = {}
    for exclusion in exclusions:
        unique.setdefault((exclusion.precision, exclusion.batch_size), exclusion)
    return tuple(unique.values())


def candidate_rows(
    ledger: Ledger, exclusions: Sequence[Exclusion], environment: Mapping[str, str]
) -> tuple[CandidateRow, ...]:
    """Return the table of all candidates. Reasons of untried ones are in `exclusions`.

    A measured candidate that a check or a calibration rules out has the status "excluded". Numbers were measured in
    `environment`, those of the baseline in the user's own; a second row has the baseline in `environment`.
    """
    baseline, ruled_out = ledger.space.baseline, ledger.ruled_out
    tried = [r.candidate for r in ledger.trials if r.purpose != "outlook"]
    table = []
    for candidate in sorted(dict.fromkeys([baseline, *ledger.space.candidates, *tried]), key=risks):
        runs = ranking.best_runs(ledger.records, candidate, {} if candidate == baseline else environment)
        failure = runs.failure if candidate == baseline else ranking.failures(ledger.records).get(candidate)
        row = _row(runs, failure, exclusions)
        if row.reason == _UNTRIED and is_only_baseline_tried(ledger):
            row = replace(row, reason=_ENDED)
        if candidate in ruled_out and failure is None and candidate != baseline:
            row = replace(row, status="excluded", reason=ruled_out[candidate])
        table.append(row)
        baseline_runs = ranking.confirm_runs(ledger.records, candidate, environment)
        if candidate == baseline and environment and baseline_runs.measurements:
            table.append(replace(_row(baseline_runs, None, exclusions), has_environment=True))
    return tuple(table)


def _row(runs: SettingRuns, failure: Failure | None, exclusions: Sequence[Exclusion]) -> CandidateRow:
    candidate, measured = runs.candidate, runs.measurements
    status, reason = "measured", None
    if failure is not None:
        status, reason, measured = failure.kind, failure.message, ()
    elif not measured:
        reason = next((e.reason for e in exclusions if not without_excluded([candidate], [e])), _UNTRIED)
        status = "untried" if reason in (_UNTRIED, _ENDED) else "excluded"
    elif runs.num_confirming >= MIN_PROCESSES:
        status = "confirmed"
    elif any(m.was_cut for m in measured):
        status = "cut"
    return CandidateRow.of(
        candidate,
        status=status,
        samples_per_second=median(m.samples_per_second for m in measured) if measured else None,
        step_seconds=median(m.step_seconds for m in measured) if measured else None,
        peak_memory_bytes=max((m.peak_memory_bytes for m in measured), default=None),
        reason=reason,
        joules_per_sample=ranking.joules_per_sample(measured),
        tokens_per_second=ranking.known_median(m.tokens_per_second for m in measured),
    )


def nothing_works_error(ledger: Ledger, excluded: tuple[Exclusion, ...], has_stepped: bool) -> NothingWorksError | None:
    """Return the error that no setting can be recommended; None if trials only timed out and a step was finished."""
    if ledger.ruled_out:
        reasons = dict.fromkeys(f"{setting.precision}: {reason}" for setting, reason in ledger.ruled_out.items())
        return NothingWorksError(
            f"Every setting that ran is ruled out: {'; '.join(reasons)}.",
            "Add --precision fp32, or fix the first of these reasons.",
            excluded,
        )
    failed = [(r.candidate, r.outcome) for r in ledger.trials if isinstance(r.outcome, Failure)]
    failed = [(setting, failure) for setting, failure in failed if not failure.is_loading]
    if not failed or (has_stepped and all(failure.kind == "timeout" for _, failure in failed)):
        return None
    setting, first = next((pair for pair in failed if pair[1].kind == "workload_error"), failed[0])
    details = f"\n{first.details.rstrip()}" if first.details else ""
    return NothingWorksError(
        f"None of {count(len(ledger.trials), 'trial')} worked; {setting}: {first.message}.{details}",
        next_step_for([first, *(failure for _, failure in failed)]),
        excluded,
    )


def next_step_for(failed: Sequence[Failure]) -> str:
    """Return the next step for a user who was shown the first of these failures."""
    kinds = {failure.kind for failure in failed}
    next_steps = {
        "oom": "Use a smaller batch size.",
        "timeout": "Use a larger --budget, or run a few steps of the training by itself to find out where it hangs.",
    }
    next_step = suggested_fix(failed[0]) or next_steps.get(
        failed[0].kind, "Fix that error, then run the same search again."
    )
    slow_hint = " If the others only need more time, use a larger --budget."
    return next_step + slow_hint * ("timeout" in kinds and failed[0].kind != "timeout")
