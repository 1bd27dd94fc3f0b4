"""Explanation of a choice: the reason in a sentence or two, the warnings, the table, and the exclusions. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import median

from msgspec.structs import replace

from autotune_amp.core.config import AmpConfig
from autotune_amp.core.evidence import MIN_PROCESSES, Evidence, Objective
from autotune_amp.core.outcome import Accumulation, Description, Failure
from autotune_amp.core.recommendation import CandidateRow, Exclusion, NothingWorksError, SearchSummary
from autotune_amp.core.setting import Setting
from autotune_amp.core.text import count, number, rate, sentence, size
from autotune_amp.dimensions import risks
from autotune_amp.hardware import machine_load
from autotune_amp.precision.modes import MODES
from autotune_amp.search import ranking
from autotune_amp.search.ledger import Ledger
from autotune_amp.search.ranking import PLATEAU, Merit, SettingRuns, least_speed
from autotune_amp.search.space import SAME_MEMORY_SHARE, Space, without
from autotune_amp.trial.failures import mended

WIDE_INTERVAL = 0.2  # half width; processes 5 % apart, as the prior assumes, give 15 % with three, 13 % with five

SECONDS_OF_A_TRIAL = 15.0  # including the jobs that may follow it, to propose a larger budget

_WHOLE_DEVICE = "The joules are those of the whole device: what else ran on it while a trial was measured counts too."
_UNTRIED = "not tried: less promising than what was measured"
_ENDED = "not tried: the search ended before"


def reason(
    ledger: Ledger,
    chosen: Setting,
    evidence: Evidence,
    contenders: Mapping[Setting, Merit],
    today: Merit | None,
    unsure: tuple[Setting, float, float] | None,
    search: SearchSummary | None,
    *,
    is_kept: bool,
) -> str:
    """Return the reason for a choice: its gain, and why no better setting was chosen.

    The choice was made among the `contenders`; `today` is the baseline as it was compared with them. If the baseline is
    kept because no gain is sure, `unsure` is the first contender that seemed worth a change, with the interval of its
    speed-up.
    """
    objective, baseline = ledger.objective, ledger.space.baseline
    if is_kept and is_only_baseline_tried(ledger):
        return _reason_if_only_baseline_ran(ledger, search)
    ours = today if is_kept and today is not None else contenders[chosen]
    own = baseline if is_kept else chosen
    why_not_better = _why_not_better(ledger, own, ours, today, contenders, {chosen, baseline, *(unsure or ())[:1]})
    if is_kept:
        amount = "" if objective == "speed" else f", {_amount(objective, ours)}"
        gain = f"Keep what you have: {baseline}{amount}; "
        if unsure is None:
            others = len(ledger.measured_merits.keys() - {baseline})
            among = f"of {count(others + 1, 'setting')} measured none was worth a change"
            gain += f"{among}." if others else "nothing else that was tried ran to its end."
        else:
            setting, low, high = unsure
            variables = " with the recommended variables" if setting == baseline else ""
            gain += (
                f"{setting}{variables} may be faster, but that is not sure: {low:.2f} to {high:.2f} times as fast. "
                "A larger --budget may decide it."
            )
    else:
        amount = "" if objective == "speed" else f"takes {_amount(objective, ours)} and "
        where = "in the recommended environment " if chosen == baseline else ""
        gain = f"{chosen} {where}{amount}reaches {rate(evidence.samples_per_second)}"
        if today is None or evidence.speedup is None:
            gain += f"; the baseline, {baseline}, has no measurement ({evidence.baseline.reason})."
        else:
            beside = "" if objective == "speed" else f", {_amount(objective, today)}"
            gain += f", {evidence.speedup:.2f} times the baseline, {baseline}{beside}."
    return " ".join([gain, *why_not_better, *_loader_reason(chosen, evidence)])


def is_only_baseline_tried(ledger: Ledger) -> bool:
    """Return whether only the baseline was tried, although there were more settings to try."""
    return {r.candidate for r in ledger.trials} == {ledger.space.baseline} != set(ledger.space.candidates)


def _reason_if_only_baseline_ran(ledger: Ledger, search: SearchSummary | None) -> str:
    """Return the reason for a choice if only the baseline was measured: why that is, and the next step."""
    said = f"Only {ledger.space.baseline} was measured"
    if search is None:
        return f"{said}, and nothing was compared with it."
    if not search.is_budget_spent:
        return f"{said}, and nothing was compared with it. Allow more --trials."
    said += f" in {search.seconds:.0f} s"
    if search.was_interrupted:
        return f"{said}, before the search was interrupted. Run the same search again to go on."
    spent = f": a process takes {search.start_seconds:.0f} s to start here" if search.start_seconds >= 1 else ""
    num_precisions = len({c.precision for c in ledger.space.candidates})
    needed = search.seconds + num_precisions * (search.start_seconds + SECONDS_OF_A_TRIAL)
    return f"{said}{spent}. Give --budget {math.ceil(needed / 10) * 10} or leave it out."


def _amount(objective: Objective, found: Merit) -> str:
    """Return the memory or energy of a setting as text, such as ``612 MiB`` or ``0.35 J a sample``."""
    if objective == "memory":
        return size(found.peak_memory_bytes)
    joules = found.joules_per_sample
    return "an unknown energy" if joules is None else f"{joules:.3g} J a sample"


def _relative_cost(objective: Objective, other: Merit, ours: Merit) -> float:
    """Return the cost of `other` as a share of the cost of `ours`, 1 if unknown. For speed, the cost is the time."""
    if objective == "speed":
        return ours.samples_per_second / other.samples_per_second
    if objective == "memory":
        share = other.peak_memory_bytes / ours.peak_memory_bytes
        return share if share < SAME_MEMORY_SHARE else max(share, 1.0)
    if other.joules_per_sample is None or ours.joules_per_sample is None:
        return 1.0
    return other.joules_per_sample / ours.joules_per_sample


def _why_not_better(
    ledger: Ledger,
    own: Setting,
    ours: Merit,
    today: Merit | None,
    contenders: Mapping[Setting, Merit],
    held: set[Setting],
) -> list[str]:
    """Return a sentence on why the best setting that beats the choice was not taken; empty if none beats it.

    `held` are settings to leave out. Settings that were not confirmed are compared with the search's own trials of the
    choice, since the speed of the machine may change until the confirmation. Settings whose trial was cut short are
    left out, since they were far slower.
    """
    objective, last = ledger.objective, max(ledger.tiers[c] for c in contenders) if contenders else 0

    def why_not(other: Setting, found: Merit) -> str:
        verdict = ledger.verdict(other)
        if other in ledger.ruled_out:
            return f"is left out: {ledger.ruled_out[other]}"
        if ledger.tiers[other] > last and verdict is not None:
            return f"is left out: {verdict.reason}"
        if found.samples_per_second < least_speed(objective, today):
            return "is slower than the baseline"
        if other not in contenders:
            return "was not confirmed, which a larger --budget does"
        return "is within 3 %, where less to go wrong and a smaller batch come first"

    better: dict[Setting, tuple[float, str]] = {}
    for other, searched in ledger.measured_merits.items():
        found = contenders.get(other) or ledger.merits.get(other, searched)
        share = _relative_cost(objective, found, ours if other in contenders else ledger.measured_merits.get(own, ours))
        was_cut = any(m.was_cut for m in ledger.measurements[other])
        if (
            other not in held
            and not was_cut
            and not other.as_found
            and share < (1 if other in contenders else 1 - PLATEAU)
        ):
            better[other] = share, why_not(other, found)
    if not better:
        return []
    other = min(better, key=lambda c: better[c])
    share, why = better[other]
    compared = f"is {1 / share:.2f} times as fast" if objective == "speed" else f"takes {share:.2f} of that"
    return [f"{other} {compared} and {sentence(why)}"]


def _loader_reason(chosen: Setting, evidence: Evidence) -> list[str]:
    """Return a sentence on the gain by another number of loader workers; empty if the choice has no such number."""
    loader = evidence.loader
    if chosen.num_workers is None or loader is None:
        return []
    return [
        f"The data loader set the speed: {100 * loader.data_share:.0f} % of a step waited for it, "
        f"{100 * evidence.data_share:.0f} % with {count(chosen.num_workers, 'worker')}."
    ]


def warnings_and_notes(
    ledger: Ledger,
    chosen: SettingRuns,
    evidence: Evidence,
    config: AmpConfig,
    why_uncalibrated: str | None,
    description: Description | None,
    search: SearchSummary | None,
) -> tuple[list[str], list[str]]:
    """Return warnings, which the reader should act on, the most important first; and notes.

    `why_uncalibrated` is the reason if fp16's calibration was tried without a result. `search` tells how the search
    ended, and the load by other processes before it.
    """
    space = ledger.space
    before = None if search is None or search.load is None else machine_load.evidence([search.load])
    harm, numerical = _numerical_warnings_and_notes(ledger, chosen, evidence, why_uncalibrated)
    # Load by other processes is why processes disagree and machines change: the first of these warnings is enough.
    load = machine_load.load_warnings(evidence.load) or machine_load.load_warnings(before, "search on an idle machine")
    was_interrupted = search is not None and search.was_interrupted
    spread, unconfirmed = _measurement_warnings(evidence, was_interrupted=was_interrupted)
    unsure = [*load, *spread]
    asked, accumulated = accumulation_warnings(space, chosen.candidate, config, evidence.accumulation)
    warnings = [
        *harm,
        *space.warnings,
        *asked,
        *unconfirmed,
        *unsure[:1],
        *_loader_warnings(evidence),
        *memory_warnings(description),
        *_evaluation_memory_warnings(chosen),
    ]
    notes = [
        *unsure[1:],
        *numerical,
        *accumulated,
        *_missing_plan_notes(space, config),
        *_own_loop_notes(chosen, description),
        *([_WHOLE_DEVICE] if ledger.objective == "energy" else []),
        *space.notes,
    ]
    return warnings, notes


def _measurement_warnings(evidence: Evidence, *, was_interrupted: bool) -> tuple[list[str], list[str]]:
    """Return warnings about the spread of the measurements, and about too few processes."""
    found, unconfirmed = [], []
    low, high = evidence.samples_per_second_interval
    searched = evidence.search_samples_per_second
    # Load by other processes widens the interval too, and has a warning of its own.
    is_widened = searched is not None or (evidence.load is not None and evidence.load.interval_factors != (1.0, 1.0))
    if searched is not None:
        found.append(
            f"The machine changed: the search's trials of this config ran at {rate(searched)}, "
            f"the confirmation at {rate(evidence.samples_per_second)}. The interval is widened to hold both. "
            "Search again with --fresh on a quiet machine."
        )
    if not evidence.is_confirmed:
        next_step = "Run the same search again to go on." if was_interrupted else "A larger --budget confirms it."
        which = "this config" if evidence.num_processes < MIN_PROCESSES else "the baseline"
        unconfirmed.append(f"Unconfirmed: fewer than {MIN_PROCESSES} fresh processes measured {which}. {way_out}")
    elif high - low > 2 * WIDE_INTERVAL * evidence.samples_per_second and not is_widened:
        found.append(
            f"The processes disagree: a run is expected anywhere from {number(low)} to {rate(high)}. "
            "Stop what else runs on this machine and search again with --fresh."
        )
    return found, unconfirmed


def _numerical_warnings_and_notes(
    ledger: Ledger, chosen: SettingRuns, evidence: Evidence, why_uncalibrated: str | None
) -> tuple[list[str], list[str]]:
    """Return warnings about numerical harm to the training run, and notes about its numerics."""
    fidelity, scale = evidence.fidelity, evidence.loss_scale
    found: list[str] = []
    notes: list[str] = []
    num_skips = sum(m.num_skips for m in chosen.measurements)
    if fidelity is not None and fidelity.verdict != "faithful":
        found.append(f"{sentence(fidelity.reason)} {sentence(fidelity.next_step)}")
    elif chosen.candidate in ledger.ruled_out:  # the baseline may be kept all the same
        found.append(f"{sentence(ledger.ruled_out[chosen.candidate])} Try --precision with another one.")
    if fidelity is not None and fidelity.later is not None and fidelity.later.verdict in ("undecided", "doubtful"):
        found.append(f"{sentence(fidelity.later.reason)} Look at the losses of its first few hundred steps.")
    if fidelity is not None and fidelity.verdict == "faithful" and not fidelity.has_moved:
        notes.append(f"{sentence(fidelity.reason)} Search again with a learning rate above 0 for the rest.")
    if MODES[chosen.candidate.precision].takes_scaler and scale is None:
        why = why_uncalibrated or "the search ended before, or fp16 was not among the fastest when it was measured"
        notes.append(f"The loss scale is GradScaler's default: it was not calibrated, since {sentence(why)}")
    if scale is None and num_skips:
        found.append(
            f"The loss scaler skipped {num_skips} of the measured steps because gradients overflowed: "
            "the initial scale is too high for the start of this training."
        )
    if scale is not None and scale.num_skips_seen > scale.num_skips_foretold:
        found.append(
            f"The loss scaler skipped {scale.num_skips_seen} of {scale.num_confirming_steps} measured steps, where the "
            f"calibration predicted {scale.num_skips_foretold}: the gradients grow beyond what it saw."
        )
    return found, notes


def _missing_plan_notes(space: Space, config: AmpConfig) -> list[str]:
    missing = {c.precision for c in space.candidates} - {plan.precision for plan in config.plans}
    return [
        f"No plan for stepping down to {precision} was measured: should {config.precision} fail during the training, "
        "nobody knows which batch size fits in memory then. A larger --budget may measure one."
        for precision in MODES[config.precision].rungs_below
        if precision in missing
    ]


def _loader_warnings(evidence: Evidence) -> list[str]:
    """Return a warning if the data loader limits the speed, with the numbers of workers that were tried."""
    loader = evidence.loader
    if loader is None or evidence.data_share <= ranking.MAX_DATA_SHARE:
        return []
    if loader.tried:
        tried = [
            f"{one.candidate} with {count(one.num_workers, 'worker')} "
            f"({'failed' if one.samples_per_second is None else rate(one.samples_per_second)})"
            for one in loader.tried
        ]
        next_step = f"Tried were {', '.join(tried)}. What is left is a sample that costs less to load."
    elif loader.num_workers is None:
        next_step = "The data makes its batches itself, without workers: make a sample cost less to load."
    else:
        next_step = (
            f"More than its {count(loader.num_workers, 'worker')} were not tried: more --budget or --trials does, as "
            "far as there are CPUs for them."
        )
    return [
        f"The data loader sets the speed: {100 * evidence.data_share:.0f} % of a step waits for it; "
        f"without waiting it would reach {rate(loader.step_samples_per_second)}. {way_out}"
    ]


def memory_warnings(description: Description | None) -> list[str]:
    """Return a warning if the memory of the worst batch may not have been measured."""
    if description is None or description.has_worst_batch:
        return []
    sizes, seen, problem = description.sample_sizes, description.batch_sizes_seen, description.scan_problem
    if problem is not None:
        doubt = f"The look through the data for its largest batch came to no end ({problem})"
    elif seen is not None:
        doubt = f"Batches differ, from {seen[0]:,} to {seen[1]:,} numbers in those drawn, and only those were measured"
    elif sizes is not None and sizes.num_seen < sizes.num_samples:
        doubt = f"Memory was measured on the largest of {sizes.num_seen:,} among {sizes.num_samples:,} samples"
    else:
        return []
    return [f"{doubt}; another may take more. Workload(worst_batch=...) names the batch that takes the most."]


def _own_loop_notes(chosen: SettingRuns, description: Description | None) -> list[str]:
    """Return a note if the speed was not measured in the framework's own Trainer."""
    if description is None or description.trainer is None or all(m.is_own_loop for m in chosen.measurements):
        return []
    problems = [m.why_not_own_loop for m in chosen.measurements if m.why_not_own_loop is not None]
    next_step = f"It does not train in a trial: {sentence(problems[0])}" if problems else "A larger --budget measures it."
    return [
        f"What the {description.trainer} does beside a step (callbacks, logging, its loader) is not in the speed, "
        f"which is that of trials. {way_out}"
    ]


def _evaluation_memory_warnings(chosen: SettingRuns) -> list[str]:
    """Return warnings if the memory of the workload's own evaluation and checkpoint could not be measured."""
    problems = [m.ending_problem for m in chosen.measurements if m.ending_problem is not None]
    return [
        f"The peak memory does not hold for the workload's own evaluation and checkpoint: {sentence(problem)} "
        "Fix it where it raised, give a larger --budget where it wants time; then search again with --fresh."
        for problem in problems
    ]


def accumulation_warnings(
    space: Space, chosen: Setting, config: AmpConfig, found: Accumulation | None
) -> tuple[list[str], list[str]]:
    """Return what the user has to change for another effective batch size or for accumulation, as warnings; as notes if
    only a fallback accumulates."""
    warnings: list[str] = []
    notes: list[str] = []
    before, after = space.baseline.effective_batch_size, chosen.effective_batch_size
    if before != after:
        warnings.append(
            f"The batch size was free to change: the optimizer sees {after} samples a step instead of {before}, and "
            f"the learning rate may need another look. --effective-batch-size {before * space.num_ranks} keeps them."
        )
    num_steps = [config.accumulation_steps, *(plan.accumulation_steps for plan in config.plans)]
    if max(num_steps) == 1:
        return warnings, notes
    said = warnings if config.accumulation_steps > 1 else notes
    asking = ("sum",) if space.weighs_passes else ("sum", "weighted")
    if found is not None and found.verdict in asking:
        said.append(f"{sentence(found.reason)} {sentence(found.next_step)}")
    is_todays = set(num_steps) <= {1, space.baseline.accumulation_steps}
    if "accumulation" not in space.checks and not (is_todays or space.keeps_effective_batch_size):
        said.append("How the training weighs what it accumulates was not checked.")
    return warnings, notes


def excluded(ledger: Ledger, *, is_budget_spent: bool) -> tuple[Exclusion, ...]:
    """Return the candidates that failed, could not run or were not tried for lack of time, each with one reason."""
    failed = [
        Exclusion(precision=c.precision, batch_size=c.batch_size, reason=f"{failure.kind}: {failure.message}")
        for c, failure in ledger.failures.items()
        if replace(c, as_found=False).is_ordinary
    ]
    known = [*ledger.space.excluded, *failed, *ledger.exclusions]
    if is_budget_spent:
        tried = {r.candidate for r in ledger.trials}
        untried = [c for c in without(ledger.space.candidates, known) if c not in tried]
        known += [Exclusion(precision=c.precision, batch_size=c.batch_size, reason=_ENDED) for c in untried]
    unique: dict[tuple[str, int | None], Exclusion] = {}
    for exclusion in known:
        unique.setdefault((exclusion.precision, exclusion.batch_size), exclusion)
    return tuple(unique.values())


def rows(ledger: Ledger, exclusions: Sequence[Exclusion], environment: Mapping[str, str]) -> tuple[CandidateRow, ...]:
    """Return the table of all candidates, including the untried ones, whose reasons are in `exclusions`.

    A measured candidate that a check or a calibration rules out is excluded too. Numbers were measured in
    `environment`, those of the baseline in the user's own environment; a second row has the baseline in `environment`.
    """
    baseline, out = ledger.space.baseline, ledger.ruled_out
    tried = [r.candidate for r in ledger.trials if r.purpose != "outlook"]
    table = []
    for candidate in sorted(dict.fromkeys([baseline, *ledger.space.candidates, *tried]), key=risks):
        ours = [r for r in ledger.records if r.candidate == candidate]
        runs = ranking.best_runs(ours, candidate, {} if candidate == baseline else environment)
        failure = runs.failure if candidate == baseline else ranking.failures(ours).get(candidate)
        row = _row(runs, failure, exclusions)
        if row.reason == _UNTRIED and is_only_baseline_tried(ledger):
            row = replace(row, reason=_ENDED)
        if candidate in out and failure is None and candidate != baseline:
            row = replace(row, status="excluded", reason=out[candidate])
        table.append(row)
        again = ranking.confirm_runs(ours, candidate, environment)
        if candidate == baseline and environment and again.measurements:
            table.append(replace(_row(again, None, exclusions), has_environment=True))
    return tuple(table)


def _row(runs: SettingRuns, failure: Failure | None, exclusions: Sequence[Exclusion]) -> CandidateRow:
    candidate, measured = runs.candidate, runs.measurements
    status, why = "measured", None
    if failure is not None:
        status, why, measured = failure.kind, failure.message, ()
    elif not measured:
        why = next((e.reason for e in exclusions if not without([candidate], [e])), _UNTRIED)
        status = "untried" if why in (_UNTRIED, _ENDED) else "excluded"
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
        reason=why,
        joules_per_sample=ranking.joules_per_sample(measured),
    )


def nothing_works(ledger: Ledger, excluded: tuple[Exclusion, ...], has_stepped: bool) -> NothingWorksError | None:
    """Return why nothing can be recommended; None if trials were only too slow and one `has_stepped`."""
    if ledger.ruled_out:
        reasons = dict.fromkeys(f"{setting.precision}: {reason}" for setting, reason in ledger.ruled_out.items())
        return NothingWorksError(
            f"Whatever ran is ruled out: {'; '.join(reasons)}.",
            "Allow --precision fp32 as well, or do as the first of these reasons says.",
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
    """Return what to do about these failures, of which the first was told: what is known of its kind of error."""
    kinds = {failure.kind for failure in failed}
    asked = {
        "oom": "Give it a smaller batch.",
        "timeout": "Give a larger --budget, or find out where it hangs: run the training by itself for a few steps.",
    }
    first = mended(failed[0]) or asked.get(failed[0].kind, "Fix that error, then run the same search again.")
    slow = " If the others only need more time, give a larger --budget."
    return first + slow * ("timeout" in kinds and failed[0].kind != "timeout")
