"""What is said about a choice: the reason in a sentence or two, the warnings, the table, what was left out. Pure."""

from __future__ import annotations

from statistics import median
from typing import TYPE_CHECKING

import msgspec

from autotune_amp.core.config import PRECISIONS, AmpConfig
from autotune_amp.core.evidence import MIN_PROCESSES, Evidence
from autotune_amp.core.outcome import Failure, Measurement, Record
from autotune_amp.core.recommendation import CandidateRow, Exclusion
from autotune_amp.core.text import number, rate
from autotune_amp.search import accumulate, busy
from autotune_amp.search.conditions import ending_doubts, loader_doubts, loader_reason, memory_doubts
from autotune_amp.search.evidence import Runs, best_runs, confirm_runs, failures, is_trial
from autotune_amp.search.fallbacks import LADDER
from autotune_amp.search.objective import joules_per_sample
from autotune_amp.search.space import Space, without
from autotune_amp.search.verdicts import sentence

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from autotune_amp.core.fidelity import Fidelity
    from autotune_amp.core.outcome import Description
    from autotune_amp.core.setting import Setting

WIDE_INTERVAL = 0.2  # plus and minus; processes 5 % apart, as the prior has it, give 15 % with three, 13 % with five

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
        *loader_reason(chosen, evidence),
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
    found += busy.doubts(evidence.load) + memory_doubts(description) + ending_doubts(chosen)
    found += accumulate.warnings(space, chosen.candidate, config, evidence.accumulation)
    return tuple(dict.fromkeys(found))


def excluded(
    records: Sequence[Record], space: Space, exclusions: Sequence[Exclusion], *, is_budget_spent: bool
) -> tuple[Exclusion, ...]:
    """Every candidate that failed, could not run or was left untried for want of time, each with its reason, once."""
    failed = [
        Exclusion(
            precision=candidate.precision,
            batch_size=candidate.batch_size,
            reason=f"{failure.kind}: {failure.message}",
        )
        for candidate, failure in failures(records).items()
        if not candidate.pinned_modules and candidate.num_workers is None
    ]
    known = [*space.excluded, *failed, *exclusions]
    if is_budget_spent:
        tried = {r.candidate for r in records if is_trial(r)}
        untried = [c for c in without(space.candidates, known) if c not in tried]
        known += [Exclusion(precision=c.precision, batch_size=c.batch_size, reason=_BUDGET_SPENT) for c in untried]
    unique: dict[tuple[str, int | None], Exclusion] = {}
    for exclusion in known:
        unique.setdefault((exclusion.precision, exclusion.batch_size), exclusion)
    return tuple(unique.values())


def rows(
    records: Sequence[Record],
    space: Space,
    exclusions: Sequence[Exclusion],
    environment: Mapping[str, str],
    out: Mapping[Setting, str] | None = None,
) -> tuple[CandidateRow, ...]:
    """The table of all candidates, the untried ones too; `exclusions` say why those were left out.

    Those that are `out`, with the reason, were measured and are excluded all the same. Numbers are those measured in
    `environment`, the baseline's those in the user's own; a second line has those in `environment`.
    """
    tried = [r for r in records if is_trial(r)]
    candidates = dict.fromkeys([space.baseline, *space.candidates, *(r.candidate for r in tried)])
    ordered = sorted(
        candidates,
        key=lambda c: (PRECISIONS.index(c.precision), c.batch_size, c.accumulation_steps, c.num_workers or 0),
    )
    table = []
    for candidate in ordered:
        ours = [r for r in records if r.candidate == candidate]
        runs = best_runs(ours, candidate, {} if candidate == space.baseline else environment)
        failure = runs.failure if candidate == space.baseline else failures(ours).get(candidate)
        fallbacks = tuple(r.outcome for r in ours if r.purpose == "fallback" and isinstance(r.outcome, Measurement))
        row = _row(runs, runs.measurements or fallbacks, failure, exclusions)
        if out and candidate in out and failure is None:
            row = msgspec.structs.replace(row, status="excluded", reason=out[candidate])
        table.append(row)
        again = confirm_runs(ours, candidate, environment)
        if candidate == space.baseline and environment and again.measurements:
            row = _row(again, again.measurements, None, exclusions)
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
    found = []
    if baseline in left_out:
        found.append(f"The baseline is no choice: {sentence(left_out[baseline][1])}")
    others = {c: speed for c, (speed, _) in left_out.items() if c != baseline}
    fastest = max(others, key=lambda c: others[c], default=None)
    if fastest is not None and others[fastest] > evidence.samples_per_second:
        ratio = others[fastest] / evidence.samples_per_second
        found.append(f"{fastest} was {ratio:.2f} times as fast and is left out: {sentence(left_out[fastest][1])}")
    return found


def _why_passed_over(
    chosen: Setting, evidence: Evidence, passed_over: Mapping[Setting, tuple[float, Fidelity]]
) -> list[str]:
    others = {c: speed for c, (speed, _) in passed_over.items() if c != chosen}
    fastest = max(others, key=lambda c: others[c], default=None)
    if fastest is None or others[fastest] <= evidence.samples_per_second:
        return []
    verdict = passed_over[fastest][1]
    why = verdict.reason.removeprefix(f"{verdict.precision} is ")
    return [f"{fastest} is {others[fastest] / evidence.samples_per_second:.2f} times as fast but {sentence(why)}"]


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
    found += loader_doubts(evidence)
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
    if chosen.precision == "fp16" and scale is None:
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
    planned = {plan.precision for plan in config.plans}
    missing = {c.precision for c in space.candidates}.intersection(LADDER[config.precision]) - planned
    return [
        f"No plan for stepping down to {precision} was measured: should {config.precision} fail during the training, "
        f"nobody knows which batch size fits in memory then. {way_out}"
        for precision in LADDER[config.precision]
        if precision in missing
    ]


def _row(
    runs: Runs, measured: Sequence[Measurement], failure: Failure | None, exclusions: Sequence[Exclusion]
) -> CandidateRow:
    candidate = runs.candidate
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
