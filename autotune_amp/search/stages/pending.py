"""Predicted results of running jobs, by which stages decide about the next job on another slot. Pure.

The throughput model's prediction takes the place of a measurement, so that the next trial is the most valuable one in
addition to those that are running ("kriging believer": Ginsbourger, Le Riche, Carraro, 2010, Kriging Is Well-Suited to
Parallelize Optimization).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from msgspec.structs import replace

from autotune_amp.core.outcome import Fidelity, Measurement, Record
from autotune_amp.core.setting import Setting
from autotune_amp.search.ledger import Ledger
from autotune_amp.search.loss_scales import MissingCalibration
from autotune_amp.search.ranking import BEFORE_CONFIRMATION
from autotune_amp.search.stages.throughput_model import ThroughputModel
from autotune_amp.trial.jobs import Check, Trial
from autotune_amp.trial.step_profile.breakdown import ProfileJob

EXPECTED = 0  # number of a predicted record; numbers of real ones begin at 1


def ledger_with_predicted(ledger: Ledger, pending: Sequence[Trial | Check | ProfileJob]) -> Ledger | None:
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
