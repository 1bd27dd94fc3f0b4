"""Predicted results of running jobs, by which stages decide about the next job on another slot or about the trials
whose processes load at the same time. Pure.

The throughput model's prediction takes the place of a measurement, so that the next trial is the most valuable one in
addition to those that are running ("kriging believer": Ginsbourger, Le Riche, Carraro, 2010, Kriging Is Well-Suited to
Parallelize Optimization).
"""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence

from msgspec.structs import replace

from autotune_amp.core.outcome import Fidelity, Measurement, Record
from autotune_amp.core.setting import Setting
from autotune_amp.search.ledger import Ledger
from autotune_amp.search.loss_scales import MissingCalibration
from autotune_amp.search.planner import Planner
from autotune_amp.search.ranking import BEFORE_CONFIRMATION
from autotune_amp.search.stages import SearchJob, Stage
from autotune_amp.search.stages.confirm import ConfirmationRounds
from autotune_amp.search.stages.throughput_model import ThroughputModel
from autotune_amp.trial.jobs import Check, Trial
from autotune_amp.trial.step_profile.breakdown import ProfileJob

EXPECTED = 0  # number of a predicted record; numbers of real ones begin at 1
LOADING_STARTS = 2.0  # time for so many starts alone is needed to load several processes together


def ledger_with_predicted(ledger: Ledger, pending: Sequence[SearchJob]) -> Ledger | None:
    """Return the ledger with the expected results of the `pending` jobs, or None if the next decision needs real ones.

    A precision is expected to be faithful, and a setting to be as fast as the throughput model predicts. Before any
    measurement nothing can be predicted. Then every slot runs the same trial, the baseline, so that trials that run
    beside others later are compared with a baseline that did too.
    """
    trials = [job for job in pending if isinstance(job, Trial) and job.purpose in BEFORE_CONFIRMATION]
    checks = [job for job in pending if isinstance(job, Check)]
    if any(isinstance(job, ProfileJob) for job in pending) or any(check.what == "accumulation" for check in checks):
        return None
    if not ledger.measurements:
        return ledger.with_predicted([], {}, num_awaited=len(trials))
    if ledger.measurements.keys() == {trial.candidate for trial in trials}:
        return None  # the same setting still runs on other slots; once it has ended there, building may be shared
    records = [_expected_record(job, _expected_fidelity(job)) for job in checks if job.what == "fidelity"]
    if trials:
        throughputs = {
            c: [m.samples_per_second for m in measurements] for c, measurements in ledger.measurements.items()
        }
        throughput_model = ThroughputModel(throughputs, [trial.candidate for trial in trials])
        records += [
            _expected_record(job, _expected_measurement(ledger, job.candidate, throughput_model)) for job in trials
        ]
    scales = {
        c.candidate.scaling: MissingCalibration("it is being calibrated") for c in checks if c.what == "calibration"
    }
    return ledger.with_predicted(records, scales) if records or scales else ledger


def foreseen_trials(stages: Sequence[Stage], ledger: Ledger, planner: Planner, job: SearchJob) -> list[Trial]:
    """Return the trials that follow `job`, the next one of these stages, if it and they end as expected: as many as can
    load together with it.

    Some may never run, since the outcomes decide.
    """
    num_together = planner.job_defaults.num_together
    if num_together == 1 or not isinstance(job, Trial):
        return []
    if job.deadline_seconds is not None and job.deadline_seconds < LOADING_STARTS * planner.start_seconds(ledger):
        return []
    if stages and isinstance(stages[0], ConfirmationRounds):
        return stages[0].foreseen_trials(ledger, planner)
    planner = copy.copy(planner)  # what it fixes at its first call is not fixed by what is only expected
    trials = [job]
    for stage in stages:
        while len(trials) < num_together:
            expected = ledger_with_predicted(ledger, trials) if ledger.measurements else None
            left_seconds = planner.exploration_seconds(ledger)
            setting = None if expected is None else stage.next_setting(expected, planner, left_seconds)
            if setting is None or any(setting == trial.candidate for trial in trials):
                break
            trials.append(planner.trial(ledger, setting, left_seconds))
    return trials[1:]


def _expected_record(job: Trial | Check, outcome: Measurement | Fidelity) -> Record:
    """Return the record of a running job with its predicted outcome."""
    purpose = job.purpose if isinstance(job, Trial) else job.what
    return Record(search_id="", number=EXPECTED, candidate=job.candidate, purpose=purpose, outcome=outcome, seconds=0.0)


def _expected_fidelity(check: Check) -> Fidelity:
    """Return a *faithful* verdict for a running check."""
    setting = check.candidate
    return Fidelity(
        precision=setting.precision,
        batch_size=setting.batch_size,
        pinned_modules=setting.pinned_modules,
        verdict="faithful",
        reason="It is being checked.",
        next_step="Wait for the check.",
        num_steps_before=check.num_steps_before,
    )


def _expected_measurement(ledger: Ledger, setting: Setting, throughput_model: ThroughputModel) -> Measurement:
    """Return the most similar setting's measurement, with its times scaled to the predicted throughput."""

    def distance(other: Setting) -> tuple[bool, int, float]:
        differing = sum(getattr(other, name) != getattr(setting, name) for name in Setting.__struct_fields__)
        octaves = abs(math.log2(other.batch_size / setting.batch_size))
        return other.precision != setting.precision, differing, octaves

    similar_setting = min(ledger.measurements, key=distance)
    similar = ledger.measurements[similar_setting][-1]
    speed = throughput_model.throughput(setting)
    speedup = speed / similar.samples_per_second
    factor = setting.effective_batch_size / similar_setting.effective_batch_size / speedup
    low, high = similar.step_seconds_interval
    return replace(
        similar,
        step_seconds=factor * similar.step_seconds,
        step_seconds_interval=(factor * low, factor * high),
        samples_per_second=speed,
        tokens_per_second=None if similar.tokens_per_second is None else speedup * similar.tokens_per_second,
        data_seconds=factor * similar.data_seconds,
        raw_step_seconds=tuple(factor * seconds for seconds in similar.raw_step_seconds),
        was_cut=False,
    )
