"""Records -> the evidence behind a choice: medians over processes, intervals, the baseline. Pure."""

from __future__ import annotations

from statistics import median
from typing import TYPE_CHECKING

import msgspec

from autotune_amp.core.config import AmpConfig, FallbackPlan, LossScale
from autotune_amp.core.evidence import (
    MIN_PROCESSES,
    BaselineEvidence,
    Evidence,
    LoaderEvidence,
    MemoryEvidence,
    PlainEnvironment,
    ProcessPeak,
    WorkersTried,
)
from autotune_amp.core.intervals import prediction_interval, ratio_interval
from autotune_amp.core.outcome import Failure, Measurement, Record
from autotune_amp.hardware import machine_load
from autotune_amp.precision.modes import MODES
from autotune_amp.search.check_results import BEFORE_CONFIRMATION, failures
from autotune_amp.search.ledger import LOSS_SCALE
from autotune_amp.search.objective import joules_per_sample
from autotune_amp.trial.jobs import NUM_STEPS_BEFORE_CUT

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from autotune_amp.core.hardware import MachineLoad
    from autotune_amp.core.outcome import Description, Purpose, SampleSizes
    from autotune_amp.core.setting import Setting
    from autotune_amp.search.ledger import Ledger

# A confirmation that differs from the search's trials by more was not measured on the same machine, so to speak: left
# alone, the two differed by factors of 0.72 to 1.31 (forty searches of studies/truth, real_training and peers).
DRIFT = 1.5
MAX_DATA_SHARE = 0.10  # a wait of 5 to 10 % of a step: the loader sets the speed (studies/README.md)


class Runs(msgspec.Struct, frozen=True, kw_only=True):
    """The processes that measured one candidate under one environment.

    `rounds` are the confirmation rounds, one for each measurement; empty where the search's own trial has to do.
    `loads` are what others did on the machine during them, as far as that was looked at.
    `failure` is why there is no measurement, None where there are some or the candidate was never run.
    """

    candidate: Setting
    measurements: tuple[Measurement, ...] = ()
    rounds: tuple[int, ...] = ()
    loads: tuple[MachineLoad, ...] = ()
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


def confirm_runs(records: Sequence[Record], candidate: Setting, environment: Mapping[str, str]) -> Runs:
    """The confirmation processes of a candidate in exactly this environment."""
    ours = [r for r in records if r.candidate == candidate and r.environment == environment and r.purpose == "confirm"]
    measured = [(r.round or 0, r.outcome) for r in ours if isinstance(r.outcome, Measurement)]
    return Runs(
        candidate=candidate,
        measurements=tuple(m for _, m in measured),
        rounds=tuple(number for number, _ in measured),
        loads=_loads(ours),
        failure=None if measured else failures(ours).get(candidate),
    )


def best_runs(records: Sequence[Record], candidate: Setting, environment: Mapping[str, str]) -> Runs:
    """The confirmation processes in this environment, or else the search's own trial of the candidate."""
    confirmed = confirm_runs(records, candidate, environment)
    if confirmed.measurements or confirmed.failure:
        return confirmed
    ours = [r for r in records if r.candidate == candidate and r.purpose in BEFORE_CONFIRMATION]
    measured = [r for r in ours if isinstance(r.outcome, Measurement)][-1:]
    return Runs(
        candidate=candidate,
        measurements=tuple(r.outcome for r in measured if isinstance(r.outcome, Measurement)),
        loads=_loads(measured),
        failure=None if measured else failures(ours).get(candidate),
    )


def were_processes_shared(records: Sequence[Record]) -> bool:
    """Whether the confirmation measured what it holds against each other one after the other in the same processes."""
    return any(r.round is not None and r.start_seconds == 0.0 and isinstance(r.outcome, Measurement) for r in records)


def gather(
    ledger: Ledger,
    chosen: Runs,
    baseline: Runs,
    environment: Mapping[str, str],
    description: Description | None = None,
) -> Evidence:
    """The evidence for `chosen`, measured in `environment`, against `baseline`, measured in the user's own."""
    records = ledger.records
    speedup, speedup_interval = _speedup(chosen, baseline, records)
    processes = [runs.num_confirming for runs in (chosen, baseline) if runs.measurements]
    low, high = _promise(chosen, records)
    drifted = _drifted(chosen, records)
    are_shared = chosen.num_confirming > 0 and were_processes_shared(records)
    return Evidence(
        samples_per_second=chosen.speed,
        samples_per_second_interval=(low, high) if drifted is None else (min(low, drifted), max(high, drifted)),
        search_samples_per_second=drifted,
        step_seconds=median(m.step_seconds for m in chosen.measurements),
        peak_memory_bytes=max(m.peak_memory_bytes for m in chosen.measurements),
        baseline=_baseline_evidence(baseline, records),
        speedup=speedup,
        speedup_interval=speedup_interval,
        num_processes=len(chosen.measurements),
        is_confirmed=min(processes) >= MIN_PROCESSES,
        data_share=median(map(data_share, chosen.measurements)),
        update_share=_median(m.update_seconds and m.update_seconds / m.step_seconds for m in chosen.measurements),
        plain_environment=_plain_environment(records, chosen.candidate, baseline) if environment else None,
        is_build_shared=not are_shared and any(m.is_build_shared for m in chosen.measurements),
        are_processes_shared=are_shared,
        joules_per_sample=joules_per_sample(chosen.measurements),
        loader=loader_evidence(records, chosen, description),
        memory=memory_evidence(chosen, description),
        evaluation_seconds=_median(m.evaluation_seconds for m in chosen.measurements),
        checkpoint_seconds=_median(m.checkpoint_seconds for m in chosen.measurements),
        accumulation=ledger.accumulation,
        load=machine_load.evidence(chosen.loads),
    )


def plain_config(
    candidate: Setting,
    loss_scale: LossScale,
    environment: Mapping[str, str] | None = None,
    fallback: tuple[FallbackPlan, ...] = (),
) -> AmpConfig:
    """A candidate as a config; `loss_scale` goes with fp16 alone."""
    return AmpConfig.of(
        candidate,
        loss_scale=loss_scale if MODES[candidate.precision].takes_scaler else None,
        fallback=fallback,
        environment=dict(environment or {}),
    )


def _median(values: Iterable[float | None]) -> float | None:
    known = [v for v in values if v is not None]
    return median(known) if known else None


def _loads(records: Sequence[Record]) -> tuple[MachineLoad, ...]:
    return tuple(r.load for r in records if isinstance(r.outcome, Measurement) and r.load is not None)


def _promise(runs: Runs, records: Sequence[Record]) -> tuple[float, float]:
    """The prediction interval, widened to hold the median that it stands beside, and what others' load may change.

    Its spread is pooled over all that was confirmed, and over the search's trials of what it measured again: they ran
    on the same machine, and the latter further apart in time, so that they see it change its speed between minutes.
    Others that were confirmed in the same processes are left out: of how far processes differ they say nothing new.
    """
    are_shared = were_processes_shared(records)
    groups: dict[tuple[Setting, Purpose, tuple[tuple[str, str], ...]], list[float]] = {}
    for record in records:
        found = record.outcome
        if not isinstance(found, Measurement):
            continue
        is_timed_well = record.purpose == "search" and found.num_steps >= NUM_STEPS_BEFORE_CUT  # beyond its warm-up
        if is_timed_well or (record.purpose == "confirm" and not are_shared):
            key = record.candidate, record.purpose, tuple(sorted(record.environment.items()))
            groups.setdefault(key, []).append(found.samples_per_second)
    ours = [m.samples_per_second for m in runs.measurements]
    others = list(groups.values())
    if ours in others:
        others.remove(ours)
    low, high = prediction_interval(ours, others)
    low_factor, high_factor = machine_load.interval_factors(runs.loads)
    return low_factor * min(low, runs.speed), high_factor * max(high, runs.speed)


def _drifted(runs: Runs, records: Sequence[Record]) -> float | None:
    """Samples per second of the search's trials, the median, where the confirmation is far from it."""
    found = [r.outcome for r in records if r.candidate == runs.candidate and r.purpose == "search"]
    measured = [o for o in found if isinstance(o, Measurement) and o.num_steps >= NUM_STEPS_BEFORE_CUT]
    if not measured or not runs.num_confirming:
        return None
    searched = median(o.samples_per_second for o in measured)
    return None if 1 / DRIFT <= searched / runs.speed <= DRIFT else searched


def _speedup(
    chosen: Runs, baseline: Runs, records: Sequence[Record]
) -> tuple[float | None, tuple[float, float] | None]:
    """The ratio of the medians, and the interval of the mean ratio over the rounds that both were run in.

    Without such a round nothing says that the machine was the same for both: then the ends are those of their promises.
    """
    if not baseline.measurements:
        return None, None
    if chosen == baseline:
        return 1.0, (1.0, 1.0)
    ours, theirs = chosen.by_round, baseline.by_round
    shared = sorted(ours.keys() & theirs.keys())
    ratio = chosen.speed / baseline.speed
    if not shared:
        (low, high), (their_low, their_high) = _promise(chosen, records), _promise(baseline, records)
        return ratio, (low / their_high, high / their_low)
    low, high = ratio_interval(*zip(*((ours[r], theirs[r]) for r in shared), strict=True))
    return ratio, (min(low, ratio), max(high, ratio))


def _baseline_evidence(runs: Runs, records: Sequence[Record]) -> BaselineEvidence:
    is_measured, why_not = bool(runs.measurements), "not measured: the budget ended"
    if runs.failure is not None:
        why_not = f"{runs.failure.kind}: {runs.failure.message}"
    return BaselineEvidence(
        config=plain_config(runs.candidate, LOSS_SCALE),
        samples_per_second=runs.speed if is_measured else None,
        samples_per_second_interval=_promise(runs, records) if is_measured else None,
        step_seconds=_median(m.step_seconds for m in runs.measurements),
        peak_memory_bytes=max((m.peak_memory_bytes for m in runs.measurements), default=None),
        reason=None if is_measured else why_not,
    )


def _plain_environment(records: Sequence[Record], candidate: Setting, baseline: Runs) -> PlainEnvironment | None:
    """The plain run of the choice; None where there was none. Of a run that failed both numbers are None.

    The baseline itself is always run plainly.
    """
    if candidate == baseline.candidate and baseline.num_confirming:
        return PlainEnvironment(samples_per_second=baseline.speed, speedup=1.0)
    ours = [r.outcome for r in records if r.candidate == candidate and r.purpose == "plain"]
    if not ours:
        return None
    speed = _median(o.samples_per_second if isinstance(o, Measurement) else None for o in ours)
    return PlainEnvironment(
        samples_per_second=speed,
        speedup=speed / baseline.speed if speed is not None and baseline.measurements else None,
    )


def data_share(measured: Measurement) -> float:
    """The share of a step that waits for data."""
    return measured.data_seconds / measured.step_seconds


def is_waiting(records: Sequence[Record]) -> bool:
    """Whether the loader sets the speed of any candidate that was measured with the user's own number of workers."""
    return any(
        isinstance(r.outcome, Measurement) and not r.outcome.was_cut and data_share(r.outcome) > MAX_DATA_SHARE
        for r in records
        if r.purpose == "search" and r.candidate.num_workers is None
    )


def loader_evidence(
    records: Sequence[Record], chosen: Runs, description: Description | None = None
) -> LoaderEvidence | None:
    """What is known of the loader where it sets the speed of the choice with the user's own number of workers."""
    own = chosen.candidate.with_own_workers
    searched = [r for r in records if r.purpose == "search"]
    measured = chosen.measurements
    if own != chosen.candidate:
        measured = tuple(r.outcome for r in searched if r.candidate == own and isinstance(r.outcome, Measurement))
    measured = tuple(m for m in measured if not m.was_cut)
    share = median(map(data_share, measured)) if measured else 0.0
    if share <= MAX_DATA_SHARE:
        return None
    return LoaderEvidence(
        num_workers=None if description is None else description.num_workers,
        data_share=share,
        step_samples_per_second=median(m.samples_per_second for m in measured) / (1 - share),
        tried=tuple(
            WorkersTried(
                candidate=str(r.candidate.with_own_workers),
                num_workers=r.candidate.num_workers,
                samples_per_second=r.outcome.samples_per_second if isinstance(r.outcome, Measurement) else None,
                data_share=data_share(r.outcome) if isinstance(r.outcome, Measurement) else None,
            )
            for r in searched
            if r.candidate.num_workers is not None
        ),
    )


def memory_evidence(chosen: Runs, description: Description | None = None) -> MemoryEvidence:
    """What the peak memory of the choice was measured on."""
    sizes = None if description is None else description.sample_sizes
    worst_case = None
    if description is not None and description.has_worst_batch:
        worst_case = "the worst batch that the workload names"
    elif sizes is not None:
        worst_case = _largest(sizes, chosen.candidate.batch_size)
    return MemoryEvidence(
        worst_case=worst_case,
        num_seen=None if sizes is None else sizes.num_seen,
        num_samples=None if sizes is None else sizes.num_samples,
        has_evaluation=any(m.evaluation_seconds is not None for m in chosen.measurements),
        has_checkpoint=any(m.checkpoint_seconds is not None for m in chosen.measurements),
        processes=tuple(
            ProcessPeak(num_steps=m.num_steps_taken, peak_memory_bytes=m.peak_memory_bytes) for m in chosen.measurements
        ),
    )


def _largest(sizes: SampleSizes, batch_size: int) -> str:
    num = min(batch_size, len(sizes.largest))
    seen = ""
    if sizes.num_seen < sizes.num_samples:
        seen = f", {sizes.num_seen:,} of which were looked at ({share_seen(sizes)})"
    return (
        f"the {f'{num:,} largest' if num > 1 else 'largest'} of {sizes.num_samples:,} samples{seen}, "
        f"{sizes.smallest_size:,} to {sizes.largest_size:,} numbers each, median {sizes.median_size:,}"
    )


def share_seen(sizes: SampleSizes) -> str:
    """``12 %``: how many of the samples were looked at."""
    return f"{100 * sizes.num_seen / sizes.num_samples:.2g} %"
