"""What is said about a choice: the reason in a sentence or two, the warnings, the table, what was left out. Pure."""

from __future__ import annotations

from statistics import median
from typing import TYPE_CHECKING

import msgspec
from msgspec.structs import replace

from autotune_amp.core.config import AmpConfig
from autotune_amp.core.evidence import MIN_PROCESSES, Evidence
from autotune_amp.core.outcome import Failure
from autotune_amp.core.recommendation import CandidateRow, Exclusion
from autotune_amp.core.text import count, number, rate, sentence
from autotune_amp.hardware import machine_load
from autotune_amp.precision.modes import MODES
from autotune_amp.search.answer.evidence import share_seen
from autotune_amp.search.ranking import (
    MAX_DATA_SHARE,
    Runs,
    best_runs,
    confirm_runs,
    failures,
    joules_per_sample,
    least_speed,
)
from autotune_amp.search.space import SAME_MEMORY, Space, without

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from autotune_amp.core.evidence import LoaderEvidence, Objective
    from autotune_amp.core.outcome import Accumulation, Description, Fidelity
    from autotune_amp.core.setting import Setting
    from autotune_amp.search.ledger import Ledger
    from autotune_amp.search.ranking import Merit

WIDE_INTERVAL = 0.2  # plus and minus; processes 5 % apart, as the prior has it, give 15 % with three, 13 % with five

_CHEAPER_SAMPLES = "What is left is a sample that costs less to load: decode less of it, or keep it decoded."
WHOLE_DEVICE = "The joules are those of the whole device: what else ran on it while a trial was measured counts too."
_UNTRIED = "not tried: less promising than what was measured"
_BUDGET_SPENT = "not tried: the budget ended"


def reason(
    chosen: Setting,
    baseline: Setting,
    evidence: Evidence,
    contenders: Mapping[Setting, float],
    *,
    is_kept: bool,
    left_out: Mapping[Setting, tuple[float, str]] | None = None,
    passed_over: Mapping[Setting, tuple[float, Fidelity]] | None = None,
) -> str:
    """Why this one: what it gains, and why nothing faster was taken. `contenders` are samples per second.

    `left_out` are samples per second too, with the reason: what was fast enough, and must not be recommended.
    `passed_over` are those whose verdict put them behind the choice.
    """
    why_not_faster = [
        *_why_not_the_fastest(chosen, evidence, contenders),
        *_why_left_out(baseline, evidence, left_out or {}),
        *_why_passed_over(chosen, evidence, passed_over or {}),
        *_loader_reason(chosen, evidence),
    ]
    if is_kept:
        return " ".join([f"Keep what you have: {baseline}; nothing measured is worth a change.", *why_not_faster])
    speed = f"{chosen} reaches {rate(evidence.samples_per_second)}"
    if evidence.speedup is None:
        gain = f"{speed}; there is no speed-up to give, since the baseline, {baseline}, has no measurement "
        gain += f"({evidence.baseline.reason})."
    elif chosen == baseline:
        gain = f"{speed} in the recommended environment, {evidence.speedup:.2f} times what it reaches without."
    elif evidence.speedup < 1 and baseline not in {**(left_out or {}), **(passed_over or {})}:
        gain = f"{speed}, within 3 % of the baseline, {baseline}, and has less to go wrong."
    else:
        gain = f"{speed}, {evidence.speedup:.2f} times the baseline, {baseline}."
    return " ".join([gain, *why_not_faster])


def warnings(
    chosen: Runs,
    space: Space,
    evidence: Evidence,
    config: AmpConfig,
    *,
    why_uncalibrated: str | None = None,
    description: Description | None = None,
) -> tuple[str, ...]:
    """What the reader has to know before relying on the numbers or the config, the space's notes first.

    `why_uncalibrated` is what became of fp16's calibration, where one was tried and did not come to an end.
    """
    found = [*space.notes, *_doubts(chosen, evidence, why_uncalibrated), *_missing_plans(space, config, evidence)]
    found += machine_load.doubts(evidence.load) + memory_doubts(description) + ending_doubts(chosen)
    found += accumulation_warnings(space, chosen.candidate, config, evidence.accumulation)
    return tuple(dict.fromkeys(found))


def excluded(ledger: Ledger, *, is_budget_spent: bool) -> tuple[Exclusion, ...]:
    """Every candidate that failed, could not run or was left untried for want of time, each with its reason, once."""
    failed = [
        Exclusion(
            precision=candidate.precision,
            batch_size=candidate.batch_size,
            reason=f"{failure.kind}: {failure.message}",
        )
        for candidate, failure in ledger.failures.items()
        if replace(candidate, as_found=False).is_ordinary
    ]
    known = [*ledger.space.excluded, *failed, *ledger.exclusions]
    if is_budget_spent:
        tried = {r.candidate for r in ledger.trials}
        untried = [c for c in without(ledger.space.candidates, known) if c not in tried]
        known += [Exclusion(precision=c.precision, batch_size=c.batch_size, reason=_BUDGET_SPENT) for c in untried]
    unique: dict[tuple[str, int | None], Exclusion] = {}
    for exclusion in known:
        unique.setdefault((exclusion.precision, exclusion.batch_size), exclusion)
    return tuple(unique.values())


def rows(ledger: Ledger, exclusions: Sequence[Exclusion], environment: Mapping[str, str]) -> tuple[CandidateRow, ...]:
    """The table of all candidates, the untried ones too; `exclusions` say why those were left out.

    What a check or a calibration rules out was measured and is excluded all the same. Numbers are those measured in
    `environment`, the baseline's those in the user's own; a second line has those in `environment`.
    """
    space, out = ledger.space, ledger.ruled_out
    tried = [r.candidate for r in ledger.trials if r.purpose != "outlook"]
    candidates = dict.fromkeys([space.baseline, *space.candidates, *tried])
    ordered = sorted(
        candidates,
        key=lambda c: (MODES[c.precision].risk, c.batch_size, c.accumulation_steps, c.num_workers or 0),
    )
    table = []
    for candidate in ordered:
        ours = [r for r in ledger.records if r.candidate == candidate]
        runs = best_runs(ours, candidate, {} if candidate == space.baseline else environment)
        failure = runs.failure if candidate == space.baseline else failures(ours).get(candidate)
        row = _row(runs, failure, exclusions)
        if candidate in out and failure is None:
            row = msgspec.structs.replace(row, status="excluded", reason=out[candidate])
        table.append(row)
        again = confirm_runs(ours, candidate, environment)
        if candidate == space.baseline and environment and again.measurements:
            row = _row(again, None, exclusions)
            table.append(msgspec.structs.replace(row, has_environment=True))
    return tuple(table)


def _why_not_the_fastest(chosen: Setting, evidence: Evidence, contenders: Mapping[Setting, float]) -> list[str]:
    fastest = max(contenders, key=lambda c: contenders[c])
    gain = 100 * (contenders[fastest] / evidence.samples_per_second - 1)
    if fastest.as_found or fastest == chosen or gain <= 0:
        return []
    if fastest.precision != chosen.precision:
        return [f"{fastest} is only {gain:.1f} % faster and has more to go wrong."]
    if fastest.batch_size > chosen.batch_size:
        return [f"{fastest} is only {gain:.1f} % faster and takes a larger batch."]
    if fastest.batch_size == chosen.batch_size:
        return [f"{fastest} is only {gain:.1f} % faster and takes more loader workers."]
    return [f"{fastest} is only {gain:.1f} % faster."]


def _why_left_out(baseline: Setting, evidence: Evidence, left_out: Mapping[Setting, tuple[float, str]]) -> list[str]:
    harm = [f"The baseline is no choice: {sentence(left_out[baseline][1])}"] if baseline in left_out else []
    others = {c: found for c, found in left_out.items() if c != baseline}
    return harm + _faster("was {ratio:.2f} times as fast and is left out:", others, evidence)


def _why_passed_over(
    chosen: Setting, evidence: Evidence, passed_over: Mapping[Setting, tuple[float, Fidelity]]
) -> list[str]:
    others = {
        c: (speed, found.reason.removeprefix(f"{found.precision} is "))
        for c, (speed, found) in passed_over.items()
        if c != chosen
    }
    return _faster("is {ratio:.2f} times as fast but", others, evidence)


def _faster(how: str, others: Mapping[Setting, tuple[float, str]], evidence: Evidence) -> list[str]:
    """What is said of the fastest of the others and its reason, where it is faster than the choice."""
    fastest = max(others, key=lambda c: others[c][0], default=None)
    if fastest is None or others[fastest][0] <= evidence.samples_per_second:
        return []
    speed, why = others[fastest]
    return [f"{fastest} {how.format(ratio=speed / evidence.samples_per_second)} {sentence(why)}"]


def _doubts(chosen: Runs, evidence: Evidence, why_uncalibrated: str | None) -> list[str]:
    found = []
    low, high = evidence.samples_per_second_interval
    searched = evidence.search_samples_per_second
    if searched is not None:
        found.append(
            f"The machine changed: the search's trials of this config ran at {rate(searched)}, "
            f"the confirmation at {rate(evidence.samples_per_second)}. The interval is widened to hold both. "
            "Search again with --fresh on a quiet machine."
        )
    if not evidence.is_confirmed:
        which = "this config" if evidence.num_processes < MIN_PROCESSES else "the baseline"
        found.append(
            f"Unconfirmed: fewer than {MIN_PROCESSES} fresh processes measured {which}. A larger --budget confirms it."
        )
    elif high - low > 2 * WIDE_INTERVAL * evidence.samples_per_second and not _is_widened(evidence):
        found.append(
            f"The processes disagree: a run is expected anywhere from {number(low)} to {rate(high)}. "
            "Stop what else runs on this machine and search again with --fresh."
        )
    found += _loader_doubts(evidence)
    found += _numerical_doubts(chosen.candidate, evidence, why_uncalibrated)
    num_skips = sum(m.num_skips for m in chosen.measurements)
    if num_skips and evidence.loss_scale is None:
        found.append(
            f"The loss scaler skipped {num_skips} of the measured steps because gradients overflowed: "
            "the initial scale is too high for the start of this training."
        )
    return found


def _is_widened(evidence: Evidence) -> bool:
    """Whether what others did on the machine, or its change of speed, is in the interval, and told of."""
    is_busy = evidence.load is not None and evidence.load.interval_factors != (1.0, 1.0)
    return is_busy or evidence.search_samples_per_second is not None


def _numerical_doubts(chosen: Setting, evidence: Evidence, why_uncalibrated: str | None) -> list[str]:
    found, fidelity, scale = [], evidence.fidelity, evidence.loss_scale
    if fidelity is not None and fidelity.verdict == "unchecked":
        found.append(
            f"{sentence(fidelity.reason)} A finite loss was checked; whether it learns what fp32 learns was not. "
            f"{sentence(fidelity.next_step)}"
        )
    if fidelity is not None and fidelity.verdict == "faithful" and not fidelity.has_moved:
        found.append(f"{sentence(fidelity.reason)} Search again with a learning rate above 0 for the rest.")
    if fidelity is not None and fidelity.verdict == "doubtful":
        found.append(f"{sentence(fidelity.reason)} {sentence(fidelity.next_step)}")
    if MODES[chosen.precision].takes_scaler and scale is None:
        why = why_uncalibrated or "the budget ended or fp16 was not among the fastest when it was measured"
        found.append(f"The loss scale is GradScaler's default: it was not calibrated, since {sentence(why)}")
    if scale is not None and scale.num_skips_seen > scale.num_skips_foretold:
        found.append(
            f"The loss scaler skipped {scale.num_skips_seen} of {scale.num_confirming_steps} measured steps, where the "
            f"calibration foretold {scale.num_skips_foretold}: the gradients grow beyond what it saw."
        )
    return found


def _missing_plans(space: Space, config: AmpConfig, evidence: Evidence) -> list[str]:
    found = evidence.accumulation
    is_withheld = space.accumulation_withheld is not None or (found is not None and not found.is_exact)
    way_out = "A larger --budget measures one."
    if is_withheld:
        way_out = "A larger --budget measures one if the whole batch fits: accumulation, which splits it, is withheld."
    missing = {c.precision for c in space.candidates} - {plan.precision for plan in config.plans}
    return [
        f"No plan for stepping down to {precision} was measured: should {config.precision} fail during the training, "
        f"nobody knows which batch size fits in memory then. {way_out}"
        for precision in MODES[config.precision].rungs_below
        if precision in missing
    ]


def _loader_reason(chosen: Setting, evidence: Evidence) -> list[str]:
    """What a choice with another number of workers owes to them."""
    loader = evidence.loader
    if chosen.num_workers is None or loader is None:
        return []
    own = "" if loader.num_workers is None else f" with {count(loader.num_workers, 'worker')}"
    return [
        f"The data loader set the speed: {100 * loader.data_share:.0f} % of a step waited for it{own}, "
        f"{100 * evidence.data_share:.0f} % with {count(chosen.num_workers, 'worker')}."
    ]


def _loader_doubts(evidence: Evidence) -> list[str]:
    """That the loader sets the speed, and what was tried against it."""
    loader = evidence.loader
    if loader is None or evidence.data_share <= MAX_DATA_SHARE:
        return []
    known = (
        f"The data loader sets the speed: {100 * evidence.data_share:.0f} % of a step waits for it; "
        f"without waiting it would reach {rate(loader.step_samples_per_second)}."
    )
    if loader.tried:
        return [" ".join([known, *_attempts(loader), _CHEAPER_SAMPLES])]
    if loader.num_workers is None:
        return [f"{known} No workers could be tried: the data makes its batches itself. {_CHEAPER_SAMPLES}"]
    return [
        f"{known} More than its {count(loader.num_workers, 'worker')} were not tried: more --budget or --trials does, "
        "as far as there are CPUs for them."
    ]


def _attempts(loader: LoaderEvidence) -> list[str]:
    """One sentence for each candidate that was tried with other numbers of workers."""
    by_candidate: dict[str, list[str]] = {}
    for tried in loader.tried:
        speed = tried.samples_per_second
        reached = "failed" if speed is None else rate(speed)
        by_candidate.setdefault(tried.candidate, []).append(f"{count(tried.num_workers, 'worker')} ({reached})")
    return [f"{candidate} was tried with {', '.join(tried)}." for candidate, tried in by_candidate.items()]


def memory_doubts(description: Description | None) -> list[str]:
    """What keeps the measured memory from being that of the worst batch."""
    if description is None or description.has_worst_batch:
        return []
    sizes, seen, way_out = description.sample_sizes, description.batch_sizes_seen, "Workload(worst_batch=...)"
    if description.scan_problem is not None:
        after = "" if sizes is None else f" after {sizes.num_seen:,} of {sizes.num_samples:,} samples"
        doubt = f"The look through the data for its largest batch ended{after} ({description.scan_problem}): a batch "
        doubt += "may take more memory than was measured"
        way_out = f"Mend the sample, or name the batch that takes the most: {way_out}"
        return [f"{doubt}. {way_out}."]
    if seen is not None:
        doubt = (
            f"Batches differ, from {seen[0]:,} to {seen[1]:,} numbers in those drawn, and the data cannot be looked "
        )
        doubt += "through: memory and speed are what the trials' batches took"
    elif sizes is not None and sizes.num_seen < sizes.num_samples:
        doubt = f"Memory was measured on the largest of {sizes.num_seen:,} samples, {share_seen(sizes)} of the dataset"
    else:
        return []
    return [f"{doubt}; another may take more. {way_out} names the batch that takes the most."]


def ending_doubts(chosen: Runs) -> list[str]:
    """What keeps the measured memory from being that of the workload's evaluation and checkpoint too."""
    problems = [m.ending_problem for m in chosen.measurements if m.ending_problem is not None]
    return [
        f"The peak memory does not hold for the workload's own evaluation and checkpoint: {sentence(problem)} "
        "Mend it where it raised, give a larger --budget where it wants time; then search again with --fresh."
        for problem in problems
    ]


def accumulation_warnings(space: Space, chosen: Setting, config: AmpConfig, found: Accumulation | None) -> list[str]:
    """What a changed effective batch and a loss to be weighted ask of the user."""
    said = []
    before, after = space.baseline.effective_batch_size, chosen.effective_batch_size
    if before != after:
        said.append(
            f"The batch size was free to change: the optimizer sees {after} samples a step instead of {before}, and "
            f"the learning rate may need another look. --effective-batch-size {before * space.num_ranks} keeps them."
        )
    num_steps = [config.accumulation_steps, *(plan.accumulation_steps for plan in config.plans)]
    asking = ("sum",) if space.weighs_passes else ("sum", "weighted")
    if max(num_steps) > 1 and found is not None and found.verdict in asking:
        said.append(f"{sentence(found.reason)} {sentence(found.next_step)}")
    return said


def reason_for(
    objective: Objective,
    chosen: Setting,
    baseline: Setting,
    found: Merit,
    today: Merit | None,
    *,
    is_kept: bool,
    searched: Mapping[Setting, Merit],
    behind: Mapping[Setting, str],
) -> str:
    """For memory or energy: what the choice takes beside the baseline, and why nothing that takes less was chosen.

    `found` and `today` are the merits that the choice and the baseline were compared by, `searched` those of the
    search's own trials, by which the others are compared; `behind` says why some of them are no choice.
    """
    said = _kept(objective, baseline, found) if is_kept else _taken(objective, chosen, baseline, found, today)
    ours, least = searched.get(chosen), least_speed(objective, searched.get(baseline))
    others = {} if ours is None else {c: _share(objective, m, ours) for c, m in searched.items() if c != chosen}
    slower = {c for c, m in searched.items() if m.samples_per_second < least}
    # Less memory at the baseline's speed is chosen, whatever may go wrong, unless a confirmation found it slower.
    less = [c for c, share in others.items() if share < 1 and (objective == "energy" or c in behind or c in slower)]
    if not less:
        return said
    other = max(less, key=lambda c: searched[c].samples_per_second)
    if other in behind:
        why = f"is left out: {behind[other].rstrip('.')}"
    elif other in slower:
        why = "is slower than the baseline"
    else:
        why = "has more to go wrong" if other.precision != chosen.precision else "takes a larger batch"
    what = "draws" if objective == "energy" else "takes"
    return f"{said} {other} {what} {others[other]:.2f} of that and {why}."


def _kept(objective: Objective, baseline: Setting, found: Merit) -> str:
    what = "draws less" if objective == "energy" else "that is as fast takes less"
    return f"Keep what you have: {baseline}, {_amount(objective, found)}; nothing measured {what} by 3 % or more."


def _taken(objective: Objective, chosen: Setting, baseline: Setting, found: Merit, today: Merit | None) -> str:
    name = f"{chosen} in the recommended environment" if chosen == baseline else str(chosen)
    what = "draws the least" if objective == "energy" else "has the least memory"
    if today is None:
        return (
            f"{name} {what}: {_amount(objective, found)}, at {rate(found.samples_per_second)}; "
            f"the baseline, {baseline}, has no measurement to compare with."
        )
    ratio = found.samples_per_second / today.samples_per_second
    beside = f"{_amount(objective, found)}, {_beside(objective, found, today)}at {ratio:.2f} of the speed"
    beside += f" of the baseline, {baseline}."
    if found.samples_per_second < least_speed(objective, today):
        return f"Nothing that may be recommended is as fast as the baseline; {name} comes nearest: {beside}"
    return f"{name} {what}{' of what is no slower than the baseline' * (objective == 'memory')}: {beside}"


def _beside(objective: Objective, found: Merit, today: Merit) -> str:
    if objective == "energy" and (found.joules_per_sample is None or today.joules_per_sample is None):
        return ""
    return f"{_share(objective, found, today):.2f} of the {_amount(objective, today)} that it is today, "


def _amount(objective: Objective, found: Merit) -> str:
    """``612 MiB``, ``1.20 GiB`` or ``0.35 J a sample``."""
    if objective == "energy":
        joules = found.joules_per_sample
        return "an unknown energy" if joules is None else f"{joules:.3g} J a sample"
    num_bytes = found.peak_memory_bytes
    return f"{num_bytes / 2**30:.2f} GiB" if num_bytes >= 2**30 else f"{num_bytes / 2**20:.0f} MiB"


def _share(objective: Objective, other: Merit, ours: Merit) -> float:
    """What one takes as a share of what the other takes; 1 where they are alike or that is not known."""
    if objective == "memory":
        share = other.peak_memory_bytes / ours.peak_memory_bytes
        return share if share < SAME_MEMORY else max(share, 1.0)
    if other.joules_per_sample is None or ours.joules_per_sample is None:
        return 1.0
    return other.joules_per_sample / ours.joules_per_sample


def _row(runs: Runs, failure: Failure | None, exclusions: Sequence[Exclusion]) -> CandidateRow:
    candidate, measured = runs.candidate, runs.measurements
    why: str | None = None
    status: str
    if failure is not None:
        status, why, measured = failure.kind, failure.message, ()
    elif runs.num_confirming >= MIN_PROCESSES:
        status = "confirmed"
    elif measured:
        status = "cut" if any(m.was_cut for m in measured) else "measured"
    else:
        why = next((e.reason for e in exclusions if not without([candidate], [e])), _UNTRIED)
        status = "untried" if why in (_UNTRIED, _BUDGET_SPENT) else "excluded"
    return CandidateRow.of(
        candidate,
        status=status,
        samples_per_second=median(m.samples_per_second for m in measured) if measured else None,
        step_seconds=median(m.step_seconds for m in measured) if measured else None,
        peak_memory_bytes=max(m.peak_memory_bytes for m in measured) if measured else None,
        reason=why,
        joules_per_sample=joules_per_sample(measured),
    )
