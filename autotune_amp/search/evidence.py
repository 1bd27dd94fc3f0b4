"""Records -> the evidence behind a choice: medians over processes, intervals, the baseline, the fallbacks. Pure."""

from __future__ import annotations

from statistics import median
from typing import TYPE_CHECKING

import msgspec

from autotune_amp.config import AmpConfig, FallbackPlan, LossScale, Precision
from autotune_amp.recommendation import BaselineEvidence, Evidence, PlainEnvironment
from autotune_amp.statistics import prediction_interval, ratio_interval
from autotune_amp.trial.outcome import Failure, Measurement, Record

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from autotune_amp.trial.spec import Candidate

MIN_PROCESSES = 3  # fewer say nothing of the spread between processes, which dominates (measurement.md, Timing)

# What a run steps down to when its precision fails, first choice first.
LADDER: dict[Precision, tuple[Precision, ...]] = {
    "fp32": (),
    "tf32": ("fp32",),
    "bf16": ("fp32",),
    "fp16": ("bf16", "fp32"),
    "fp8": ("bf16", "fp32"),
}


class Runs(msgspec.Struct, frozen=True, kw_only=True):
    """The processes that measured one candidate under one environment.

    `rounds` are the confirmation rounds, one for each measurement; empty where the search's own trial has to do.
    `failure` is why there is no measurement, None where there are some or the candidate was never run.
    """

    candidate: Candidate
    measurements: tuple[Measurement, ...] = ()
    rounds: tuple[int, ...] = ()
    failure: Failure | None = None

    @property
    def speed(self) -> float:
        """Samples per second, the median over processes."""
        return median(m.samples_per_second for m in self.measurements)

    @property
    def num_confirming(self) -> int:
        """How many confirmation processes there are."""
        return len(self.rounds)

    @property
    def by_round(self) -> dict[int, float]:
        """Samples per second of each confirmation round."""
        return {r: m.samples_per_second for r, m in zip(self.rounds, self.measurements, strict=False)}


def is_trial(record: Record) -> bool:
    """Whether a record is of a trial, and not of a check."""
    return record.purpose not in ("fidelity", "calibration")


def disqualifying(record: Record) -> Failure | None:
    """The failure that speaks against a record's candidate, if it is one.

    A confirmation cut off by the budget does not, nor does the one run without the recommended environment. What a
    check's failure says is for `verdicts` and `loss_scales` to tell.
    """
    if not isinstance(record.outcome, Failure) or record.purpose == "plain" or not is_trial(record):
        return None
    return None if record.purpose == "confirm" and record.outcome.kind == "timeout" else record.outcome


def confirm_runs(records: Sequence[Record], candidate: Candidate, environment: Mapping[str, str]) -> Runs:
    """The confirmation processes of a candidate in exactly this environment."""
    ours = [r for r in records if r.candidate == candidate and r.environment == environment and r.purpose == "confirm"]
    measured = [(r.round or 0, r.outcome) for r in ours if isinstance(r.outcome, Measurement)]
    return Runs(
        candidate=candidate,
        measurements=tuple(m for _, m in measured),
        rounds=tuple(number for number, _ in measured),
        failure=None if measured else _first_failure(ours),
    )


def best_runs(records: Sequence[Record], candidate: Candidate, environment: Mapping[str, str]) -> Runs:
    """The confirmation processes in this environment, or else the search's own trial of the candidate."""
    confirmed = confirm_runs(records, candidate, environment)
    if confirmed.measurements or confirmed.failure:
        return confirmed
    ours = [r for r in records if r.candidate == candidate and r.purpose == "search"]
    measured = tuple(r.outcome for r in ours if isinstance(r.outcome, Measurement))
    return Runs(candidate=candidate, measurements=measured[-1:], failure=None if measured else _first_failure(ours))


def gather(
    records: Sequence[Record], chosen: Runs, baseline: Runs, environment: Mapping[str, str], loss_scale: LossScale
) -> Evidence:
    """The evidence for `chosen`, measured in `environment`, against `baseline`, measured in the user's own."""
    speedup, speedup_interval = _speedup(chosen, baseline)
    processes = [runs.num_confirming for runs in (chosen, baseline) if runs.measurements]
    return Evidence(
        samples_per_second=chosen.speed,
        samples_per_second_interval=_promise(chosen, records),
        step_seconds=median(m.step_seconds for m in chosen.measurements),
        peak_memory_bytes=max(m.peak_memory_bytes for m in chosen.measurements),
        baseline=_baseline_evidence(baseline, records, loss_scale),
        speedup=speedup,
        speedup_interval=speedup_interval,
        num_processes=len(chosen.measurements),
        is_confirmed=min(processes) >= MIN_PROCESSES,
        data_share=median(m.data_seconds / m.step_seconds for m in chosen.measurements),
        plain_environment=_plain_environment(records, chosen.candidate, baseline) if environment else None,
        is_as_found=chosen.candidate.as_found,
    )


def plain_config(
    candidate: Candidate,
    loss_scale: LossScale,
    environment: Mapping[str, str] | None = None,
    fallback: tuple[FallbackPlan, ...] = (),
) -> AmpConfig:
    """A candidate as a config; `loss_scale` goes with fp16 alone."""
    return AmpConfig(
        precision=candidate.precision,
        batch_size=candidate.batch_size,
        accumulation_steps=candidate.accumulation_steps,
        loss_scale=loss_scale if candidate.precision == "fp16" else None,
        fallback=fallback,
        pinned_modules=candidate.pinned_modules,
        environment=dict(environment or {}),
    )


def fallback_plans(
    records: Sequence[Record], chosen: Candidate, harmful: Collection[Precision] = ()
) -> tuple[FallbackPlan, ...]:
    """For each precision to step down to, the fastest candidate of the same effective batch that never failed.

    `harmful` precisions are none to step down to, nor is one with pins, which a plan cannot say.
    """
    failed = {r.candidate for r in records if disqualifying(r)}
    measured: dict[Candidate, list[Measurement]] = {}
    for record in records:
        if isinstance(record.outcome, Measurement) and record.purpose != "plain":  # no plan is run so
            measured.setdefault(record.candidate, []).append(record.outcome)
    speeds = {c: median(m.samples_per_second for m in ours) for c, ours in measured.items()}
    fitting = [
        c
        for c in measured
        if c.effective_batch_size == chosen.effective_batch_size
        and not c.as_found
        and not c.pinned_modules
        and c not in failed
    ]
    plans: list[FallbackPlan] = []
    for precision in LADDER[chosen.precision]:
        if precision in harmful:
            continue
        rivals = [c for c in fitting if c.precision == precision]
        if rivals:
            best = max(rivals, key=lambda c: speeds[c])
            plans.append(
                FallbackPlan(
                    precision=best.precision,
                    batch_size=best.batch_size,
                    accumulation_steps=best.accumulation_steps,
                    peak_memory_bytes=max(m.peak_memory_bytes for m in measured[best]),
                    samples_per_second=speeds[best],
                    slowdown=speeds[chosen] / speeds[best],
                )
            )
    return tuple(plans)


def _first_failure(records: Sequence[Record]) -> Failure | None:
    return next(filter(None, map(disqualifying, records)), None)


def _promise(runs: Runs, records: Sequence[Record]) -> tuple[float, float]:
    """The prediction interval, widened to hold the median that it stands beside.

    Its spread is pooled over all that was confirmed: they ran on the same machine in the same minutes.
    """
    groups: dict[tuple[Candidate, tuple[tuple[str, str], ...]], list[float]] = {}
    for record in records:
        if record.purpose == "confirm" and isinstance(record.outcome, Measurement):
            key = record.candidate, tuple(sorted(record.environment.items()))
            groups.setdefault(key, []).append(record.outcome.samples_per_second)
    ours = [m.samples_per_second for m in runs.measurements]
    others = list(groups.values())
    if ours in others:
        others.remove(ours)
    low, high = prediction_interval(ours, others)
    return min(low, runs.speed), max(high, runs.speed)


def _speedup(chosen: Runs, baseline: Runs) -> tuple[float | None, tuple[float, float] | None]:
    """The ratio of the medians, and the interval of the mean ratio over the rounds that both were run in."""
    if not baseline.measurements:
        return None, None
    if chosen == baseline:
        return 1.0, (1.0, 1.0)
    ours, theirs = chosen.by_round, baseline.by_round
    shared = sorted(ours.keys() & theirs.keys())
    pairs = [(ours[r], theirs[r]) for r in shared] or [(chosen.speed, baseline.speed)]
    low, high = ratio_interval(*zip(*pairs, strict=True))
    ratio = chosen.speed / baseline.speed
    return ratio, (min(low, ratio), max(high, ratio))


def _baseline_evidence(runs: Runs, records: Sequence[Record], loss_scale: LossScale) -> BaselineEvidence:
    config = plain_config(runs.candidate, loss_scale)
    if not runs.measurements:
        reason = f"{runs.failure.kind}: {runs.failure.message}" if runs.failure else "not measured: the budget ended"
        return BaselineEvidence(
            config=config,
            samples_per_second=None,
            samples_per_second_interval=None,
            step_seconds=None,
            peak_memory_bytes=None,
            reason=reason,
        )
    return BaselineEvidence(
        config=config,
        samples_per_second=runs.speed,
        samples_per_second_interval=_promise(runs, records),
        step_seconds=median(m.step_seconds for m in runs.measurements),
        peak_memory_bytes=max(m.peak_memory_bytes for m in runs.measurements),
    )


def _plain_environment(records: Sequence[Record], candidate: Candidate, baseline: Runs) -> PlainEnvironment | None:
    """The plain run of the choice; None where there was none. Of a run that failed both numbers are None.

    The baseline itself is always run plainly.
    """
    if candidate == baseline.candidate and baseline.num_confirming:
        return PlainEnvironment(samples_per_second=baseline.speed, speedup=1.0)
    ours = [r.outcome for r in records if r.candidate == candidate and r.purpose == "plain"]
    if not ours:
        return None
    speeds = [o.samples_per_second for o in ours if isinstance(o, Measurement)]
    speed = median(speeds) if speeds else None
    return PlainEnvironment(
        samples_per_second=speed,
        speedup=speed / baseline.speed if speed is not None and baseline.measurements else None,
    )
