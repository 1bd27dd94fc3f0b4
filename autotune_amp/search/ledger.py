"""Ledger: all records of a search, and the values derived from them, by which its stages choose the next job."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from statistics import median
from typing import NamedTuple

from msgspec.structs import replace

from autotune_amp.core.config import LossScale
from autotune_amp.core.errors import InvalidRequestError
from autotune_amp.core.evidence import THROUGHPUT_OBJECTIVES, Objective
from autotune_amp.core.outcome import Accumulation, Failure, Fidelity, Measurement, Outcome, Record
from autotune_amp.core.recommendation import Exclusion
from autotune_amp.core.setting import Setting
from autotune_amp.numerics.scaler_replay import Replay
from autotune_amp.precision.modes import MODES
from autotune_amp.search import loss_scales, ranking
from autotune_amp.search.loss_scales import CalibrationResult, Pair
from autotune_amp.search.options import DEFAULT_NUM_STEPS
from autotune_amp.search.ranking import Merit, contenders, is_worth_a_change, merit, rank_for
from autotune_amp.search.space import Space, excluded_by_outcomes, with_accumulation_checked

# A rival within 10 % may overtake the winner when both are measured again in fresh processes (the confirmation):
# processes differ by a few percent.
RIVAL_MARGIN = 0.10
# Lower bound of the share of samples that reach the optimizer, which throughputs are multiplied by. A smaller one would
# distort comparisons with other settings.
MIN_APPLIED_SHARE = 0.1
LOSS_SCALE = LossScale()  # default, for fp16 settings whose own loss scale is not calibrated yet


class Shortlist(NamedTuple):
    """Settings to measure again in fresh processes. The winner may be the baseline, the training as it is now."""

    winner: Setting
    runner_up: Setting | None
    baseline: Setting


class Ledger:
    """All records of one search over `space`, append-only. `write` saves each record before any decision depends on it.

    A record is the outcome of one job (trial, check or profile) with a setting. Derived values are cached until the
    next record. `num_steps` is the length of the training run in optimizer steps: loss scales are compared over it, and
    compiling has to pay back within it. If the run `has_fixed_samples`, these are steps of the baseline, and a larger
    batch takes fewer. `scales` holds the result of each loss-scale calibration by `Setting.scaling`,
    the part of a setting that the loss scale depends on. A setting may be recommended if it was measured and neither
    its fidelity check, its calibration nor its compilation time rules it out (`ruled_out`).
    """

    def __init__(
        self,
        space: Space,
        records: Sequence[Record] = (),
        *,
        objective: Objective = "speed",
        num_steps: int = DEFAULT_NUM_STEPS,
        has_fixed_samples: bool = False,
        search_id: str = "",
        write: Callable[[Record], None] = lambda _: None,
    ) -> None:
        self.requested_objective = objective
        self.search_id = search_id
        self.records = tuple(records)
        self.session = 1 + max((r.session for r in self.records), default=0)
        self.scales: dict[Setting, CalibrationResult] = loss_scales.calibration_results(records, num_steps)
        self._whole_space = space
        self.num_steps = num_steps
        self._has_fixed_samples = has_fixed_samples
        self._write = write
        self.num_awaited = 0
        self._actual: Ledger | None = None

    @property
    def actual(self) -> Ledger:
        """Return the ledger of real records only, without the predicted ones of `with_predicted`."""
        return self._actual or self

    def with_predicted(
        self, records: Sequence[Record], scales: Mapping[Setting, CalibrationResult], *, num_awaited: int = 0
    ) -> Ledger:
        """Return a copy with the predicted `records` and calibration results (`scales`) of jobs that still run.

        The next job on another device is chosen from it (`stages.pending`); it is never appended to. `num_awaited` is
        the number of running trials without a predicted record.
        """
        expected = self._with((*self.records, *records), {**self.scales, **scales})
        expected.num_awaited, expected._actual = num_awaited, self
        return expected

    def append(self, record: Record) -> None:
        """Save a record with `write` and add it to the ledger."""
        self._write(record)
        self.records = (*self.records, record)
        self._clear_derived_values()
        if record.purpose == "calibration":
            self.scales[record.candidate.scaling] = loss_scales.calibration_result(
                record, self.num_steps, is_loss_sum=self.is_loss_sum
            )

    def with_only(self, records: Sequence[Record]) -> Ledger:
        """Return a copy with only these records and the calibration results of those among them. It is never appended
        to.
        """
        calibrated = {r.candidate.scaling for r in records if r.purpose == "calibration"}
        return self._with(records, {key: scales for key, scales in self.scales.items() if key in calibrated})

    def _with(self, records: Sequence[Record], scales: dict[Setting, CalibrationResult]) -> Ledger:
        ledger = copy.copy(self)
        ledger.records, ledger.scales = tuple(records), scales
        ledger._clear_derived_values()
        return ledger

    def _clear_derived_values(self) -> None:
        """Delete the cached values, which follow from the records."""
        for name, value in vars(Ledger).items():
            if isinstance(value, cached_property):
                self.__dict__.pop(name, None)

    @cached_property
    def space(self) -> Space:
        """Return the search space, without settings that accumulate gradients if the accumulation check failed.

        Raises `InvalidRequestError` if no setting is left.
        """
        return with_accumulation_checked(self._whole_space, self.accumulation)

    @cached_property
    def accumulation(self) -> Accumulation | None:
        """Return the result of the accumulation check, or None if it was not run."""
        return ranking.accumulation_result(self.records)

    @cached_property
    def objective(self) -> Objective:
        """Return what settings are compared by: the requested objective, but tokens in place of samples per second once
        a trial had samples of another length, because of its arguments of the command.
        """
        if self.requested_objective != "speed":
            return self.requested_objective
        # At one batch size, all runs take the same samples in their first steps.
        num_tokens = {
            r.candidate: r.outcome.num_first_tokens
            for r in self.records
            if r.purpose == "search" and isinstance(r.outcome, Measurement) and r.outcome.num_first_tokens
        }
        for setting, num in num_tokens.items():
            today = num_tokens.get(replace(setting, arguments=()))
            if today is not None and abs(num / today - 1) > ranking.MIN_GAIN:
                return "tokens"
        return "speed"

    @property
    def is_by_throughput(self) -> bool:
        """Whether the objective compares throughput, in samples or tokens, rather than memory or energy."""
        return self.objective in THROUGHPUT_OBJECTIVES

    @property
    def is_loss_sum(self) -> bool:
        """Whether the accumulation check found the loss to be a sum over samples.

        The loss of a pass is then not divided by the number of accumulation steps.
        """
        return self.accumulation is not None and self.accumulation.verdict == "sum"

    @property
    def is_accumulation_allowed(self) -> bool:
        """Whether settings may use more accumulation steps than the baseline.

        They may if the accumulation check found the result exact, and `space.accumulation_withheld` gives no reason
        against it.
        """
        accumulation = self.accumulation
        return self.space.accumulation_withheld is None and accumulation is not None and accumulation.is_exact

    @cached_property
    def fidelity(self) -> dict[Setting, Fidelity]:
        """Return the results of the fidelity checks by `ranking.check_key`, which is the same for all batch sizes."""
        return ranking.fidelity_verdicts(self.records)

    def verdict(self, setting: Setting) -> Fidelity | None:
        """Return the fidelity verdict on a setting, *unchecked* if no check was run; None for fp32, the reference."""
        return ranking.verdict_on(setting, self.space, self.fidelity)

    @cached_property
    def trials(self) -> list[Record]:
        """Return the records of trials, without those of checks and profiles."""
        return [r for r in self.records if ranking.is_trial(r)]

    @cached_property
    def counted_trials(self) -> list[Record]:
        """Return the trials without the first crash of each setting, which is run again."""
        return ranking.without_first_crashes(self.trials)

    @property
    def num_failures(self) -> int:
        """Return the number of failed trials.

        Left out are processes that failed while loading, trials of several ranks' settings on one rank ("one_rank"),
        and those of larger effective batches ("outlook"), which are doubled until one no longer fits in memory.
        """
        purposes = [r.purpose for r in self.trials if isinstance(r.outcome, Failure) and not r.outcome.is_loading]
        return sum(purpose not in ("one_rank", "outlook") for purpose in purposes)

    @cached_property
    def failures(self) -> dict[Setting, Failure]:
        """Return the first failure of each setting that has one, without those that do not tell against the setting.

        `ranking.failures` lists those, such as a first crash.
        """
        return ranking.failures(self.records)

    @cached_property
    def outcomes(self) -> dict[Setting, Outcome]:
        """Return, for each setting tried before the confirmation, its failure if one counts, else its last measurement.

        Trials of fallback plans are among them.
        """
        records = [r for r in self.records if r.purpose in ranking.BEFORE_CONFIRMATION]
        measured: dict[Setting, Outcome] = {
            r.candidate: r.outcome for r in records if isinstance(r.outcome, Measurement)
        }
        return measured | dict(ranking.failures(records))

    @property
    def ordinary_outcomes(self) -> dict[Setting, Outcome]:
        """Return the `outcomes` of the baseline and of ordinary settings.

        Those have another value than the default only for precision, batch size and accumulation steps.
        """
        return {c: o for c, o in self.outcomes.items() if c.is_ordinary or c == self.space.baseline}

    @cached_property
    def exclusions(self) -> tuple[Exclusion, ...]:
        """Return the precisions and batch sizes that outcomes, checks and calibrations rule out, with the reasons."""
        return (
            *ranking.exclusions(self.fidelity),
            *loss_scales.exclusions(self.scales),
            *excluded_by_outcomes(self.space, self.ordinary_outcomes),
        )

    @cached_property
    def best(self) -> Record | None:
        """Return the record of the fastest trial so far of a setting that may be recommended, or None."""
        if self._actual is not None:  # predicted records may rule out a setting that the real ones do not
            return self._actual.best
        allowed = [
            (ranking.throughput(self.objective, outcome), r)
            for r, outcome in self._records_in_space
            if r.candidate in self.merits
        ]
        return max(allowed, key=lambda pair: pair[0])[1] if allowed else None

    @cached_property
    def measurements(self) -> dict[Setting, list[Measurement]]:
        """Return the measurements before the confirmation by setting, without settings in `failures`.

        They are those of search trials, and of trials of fallback plans in the search space.
        """
        measurements: dict[Setting, list[Measurement]] = {}
        for record, outcome in self._records_in_space:
            if record.candidate not in self.failures:
                measurements.setdefault(record.candidate, []).append(outcome)
        return measurements

    def throughputs(self, *, without_waiting: bool = False) -> dict[Setting, list[float]]:
        """Return the throughput of each measurement, for every setting that `is_recommendable`; more is better.

        The unit is samples, for the objective tokens tokens, that reach the optimizer per second or, for the objective
        energy if all measurements have it, per joule. With `without_waiting` the time that a step waited for data is
        subtracted from its seconds.
        """
        recommendable = {c: measurements for c, measurements in self.measurements.items() if self.is_recommendable(c)}
        has_joules = all(m.joules_per_sample for measurements in recommendable.values() for m in measurements)

        def throughput(measurement: Measurement) -> float:
            if self.objective == "energy" and has_joules and measurement.joules_per_sample:
                return 1 / measurement.joules_per_sample
            speed = ranking.throughput(self.objective, measurement)
            return ranking.speed_without_wait(speed, ranking.data_share(measurement)) if without_waiting else speed

        shares = {c: max(MIN_APPLIED_SHARE, self.applied_share(c)) for c in recommendable}
        return {c: [shares[c] * throughput(m) for m in measurements] for c, measurements in recommendable.items()}

    @cached_property
    def measured_merits(self) -> dict[Setting, Merit]:
        """Return the merit (speed, peak memory, energy) of every setting in `measurements`, ruled out or not.

        Samples of steps that the loss scaler skipped count too.
        """
        return {c: merit(measurements, objective=self.objective) for c, measurements in self.measurements.items()}

    @cached_property
    def ruled_out(self) -> dict[Setting, str]:
        """Return the measured settings that must not be recommended, with the reason.

        The reason comes from a check, a calibration or the compilation time. For the baseline it is a warning: it may
        be kept all the same.
        """
        reasons = {c: self._numerical_reason_against(c) or self._compile_cost_reason(c) for c in self.measurements}
        return {c: reason for c, reason in reasons.items() if reason is not None}

    @cached_property
    def merits(self) -> dict[Setting, Merit]:
        """Return the merit of each setting that may be recommended, counting only samples that reach the optimizer.

        The baseline is among them whenever it was measured. For uncalibrated fp16 all samples are assumed to reach the
        optimizer.
        """
        baseline = self.space.baseline
        allowed = {
            c: measurements for c, measurements in self.measurements.items() if c == baseline or c not in self.ruled_out
        }
        return {c: merit(ms, self.applied_share(c), objective=self.objective) for c, ms in allowed.items()}

    @cached_property
    def speeds(self) -> dict[Setting, float]:
        """Return the samples, or for the objective tokens the tokens, per second that reach the optimizer, for each
        setting that may be recommended.
        """
        return {c: merit.speed for c, merit in self.merits.items()}

    def raise_if_unmeasured(self) -> None:
        """Raise `InvalidRequestError` if no setting that may be recommended has a measurement of what the objective
        compares.
        """
        measurements = [m for c in self.merits for m in self.measurements[c]]
        if self.objective == "energy" and all(m.joules_per_sample is None for m in measurements):
            raise InvalidRequestError(
                "--objective is 'energy', but no trial of this search measured the device's energy.",
                "Search with --objective energy --fresh, which measures it or says why it cannot.",
            )
        if self.objective == "tokens" and all(m.tokens_per_second is None for m in measurements):
            raise InvalidRequestError(
                "--objective is 'tokens', but no batch of this training held token ids in a tensor called input_ids.",
                "Use --objective speed, or let the batches be mappings with input_ids, and attention_mask for padding.",
            )

    @cached_property
    def provisional_tiers(self) -> dict[Setting, int]:
        """Return the tier of each setting in `merits` before all checks have run: an unchecked one counts as faithful.

        A tier is the rank of a fidelity verdict (`ranking.tier`): settings of a lower one are preferred.
        """
        return {c: self._tier(c, self.fidelity.get(ranking.check_key(c))) for c in self.merits}

    @cached_property
    def tiers(self) -> dict[Setting, int]:
        """Return the tier of each setting in `merits` after all checks: one without a check ranks as *unchecked*."""
        return {c: self._tier(c, self.verdict(c)) for c in self.merits}

    def _tier(self, setting: Setting, fidelity: Fidelity | None) -> int:
        return ranking.LAST_TIER if setting in self.ruled_out else ranking.tier(fidelity)

    @cached_property
    def shortlist(self) -> Shortlist | None:
        """Return the settings to confirm, judged before all checks have run; None if nothing may be recommended."""
        return self._shortlist(self.provisional_tiers)

    @cached_property
    def final_shortlist(self) -> Shortlist | None:
        """Return the settings to confirm, judged after all checks; None if nothing may be recommended."""
        return self._shortlist(self.tiers)

    def _shortlist(self, tiers: dict[Setting, int]) -> Shortlist | None:
        """Return the winner and a runner-up, given the settings' `tiers`; None if nothing may be recommended.

        The baseline is the winner if no setting improves enough on it. The runner-up is, for speed, the fastest other
        setting within 10 % of the fastest, else the next in rank. It is a setting that is neither faithful nor
        undecided only if no better tier is left, and never one with the caller's own flags (`as_found`).
        """
        if not self.merits:
            return None
        objective, baseline = self.objective, self.space.baseline
        baseline_merit = self.measured_merits.get(baseline)
        ranked = rank_for(objective, self.merits, baseline=baseline_merit, tiers=tiers)
        winner = ranked[0]
        if baseline_merit is not None:
            candidates = contenders(self.merits, tiers, baseline)
            improvements = (
                c for c in ranked if c in candidates and is_worth_a_change(objective, candidates[c], baseline_merit)
            )
            winner = next(improvements, baseline)
        others = [c for c in ranked if c != winner and not c.as_found]
        last_tier = ranking.best_tier(tiers[c] for c in others)
        sound_settings = [c for c in others if tiers[c] <= last_tier]
        fastest = max(speed for c, speed in self.speeds.items() if c == winner or c in sound_settings)
        rivals = [c for c in sound_settings if self.is_by_throughput and self.speeds[c] >= (1 - RIVAL_MARGIN) * fastest]
        runner_up = max(rivals, key=lambda c: self.speeds[c]) if rivals else next(iter(sound_settings), None)
        return Shortlist(winner, runner_up, baseline)

    def applied_share(self, setting: Setting) -> float:
        """Return the share of the gradient that reaches the optimizer with the best loss scale.

        The rest is lost in steps that the loss scaler skips, or flushed to zero. The share is 1 without a calibration.
        """
        scales = loss_scales.scales_of(self.scales, setting)
        return 1.0 if scales is None else scales.replay(scales.best).applied_share

    def loss_scale(self, setting: Setting) -> LossScale | None:
        """Return the loss scale to train a setting with, the default if not calibrated; None without a scaler."""
        if not MODES[setting.precision].takes_scaler:
            return None
        scales = loss_scales.scales_of(self.scales, setting)
        return LOSS_SCALE if scales is None else loss_scales.loss_scale_of(scales.best)

    def is_uncalibrated(self, setting: Setting) -> bool:
        """Whether a setting uses a loss scaler that can be calibrated here and has not been yet."""
        takes_scaler = MODES[setting.precision].takes_scaler
        return takes_scaler and "calibration" in self.space.checks and setting.scaling not in self.scales

    def awaits_calibration(self, setting: Setting) -> bool:
        """Whether a setting `is_uncalibrated` and within 10 % of the best speed."""
        best, outcome = (None if self.best is None else self.best.outcome), self.actual.outcomes.get(setting)
        if not isinstance(best, Measurement) or not isinstance(outcome, Measurement):
            return False
        rate, best_rate = (ranking.throughput(self.objective, each) for each in (outcome, best))
        return self.is_uncalibrated(setting) and rate >= (1 - RIVAL_MARGIN) * best_rate

    def outcome_with_pair(self, setting: Setting, outcome: Outcome, pair: Pair | None) -> tuple[Outcome, Replay | None]:
        """Return a setting's outcome if trained with a pair (init_scale, growth_interval), and the replay of the pair.

        The outcome is a failure if the calibration found no safe loss scale. The replay is None for a failure, without
        a pair or without a calibration.
        """
        if isinstance(outcome, Failure) or pair is None:
            return outcome, None
        if (refusal := loss_scales.refusal(self.scales, setting)) is not None:
            return Failure(kind="nonfinite", message=refusal), None
        return outcome, self.replay(setting, pair)

    def replay(self, setting: Setting, pair: Pair) -> Replay | None:
        """Return the replay of a pair (init_scale, growth_interval) over `num_steps`, None if not calibrated.

        The pair to recommend is chosen among all replayed ones, so a new one clears the derived values.
        """
        scales = loss_scales.scales_of(self.scales, setting)
        if scales is not None and pair not in scales.scored:
            self._clear_derived_values()
        return None if scales is None else scales.replay(pair)

    @cached_property
    def _records_in_space(self) -> list[tuple[Record, Measurement]]:
        """Return the records of search trials that measured, and of fallback plans in the space, with the measurements.

        A fallback plan may have a batch size outside the space. No setting that accumulates more than the baseline
        counts once the check found accumulation inexact: it trains another model.
        """
        num_steps = self.space.baseline.accumulation_steps
        is_inexact = self.accumulation is not None and not self.accumulation.is_exact
        return [
            (r, r.outcome)
            for r in self.records
            if isinstance(r.outcome, Measurement)
            and r.purpose in ranking.BEFORE_CONFIRMATION
            and (r.purpose == "search" or r.candidate.with_own_workers in self.space.candidates)
            and not (is_inexact and r.candidate.accumulation_steps > num_steps)
        ]

    def _numerical_reason_against(self, setting: Setting) -> str | None:
        """Return the reason if a check or a calibration rules a setting out, else None."""
        return ranking.unfaithful_reason(self.fidelity, setting) or loss_scales.refusal(self.scales, setting)

    def is_recommendable(self, setting: Setting) -> bool:
        """Whether a measured setting may be recommended, now or after another trial.

        A compiled setting that saved no time counts too: the process that measured it may only have been slow.
        """
        return setting in self.merits or (
            self._numerical_reason_against(setting) is None and self.break_even_steps(setting) == math.inf
        )

    def best_tier_settings(self, settings: Iterable[Setting]) -> set[Setting]:
        """Return those `settings` that a config can express (not `as_found`) and that are of the best tier.

        Faithful and undecided settings count as one tier, and unchecked ones as faithful.
        """
        tiers = {c: ranking.tier(self.fidelity.get(ranking.check_key(c))) for c in settings if not c.as_found}
        last_tier = ranking.best_tier(tiers.values())
        return {c for c, tier in tiers.items() if tier <= last_tier}

    def break_even_steps(self, setting: Setting) -> float | None:
        """Return the number of optimizer steps after which compiling `setting` has saved its own time.

        It is the seconds of the longest first step, which compiles, divided by the seconds that a step saves compared
        with the fastest uncompiled setting that no check or calibration rules out. Infinite if it saves nothing; None
        if the setting is not compiled, or not measured, or no uncompiled one was.
        """
        measurements = self.measurements.get(setting, ()) if setting.is_compiled else ()
        if not measurements or self._uncompiled_seconds_per_sample is None:
            return None
        uncompiled_seconds = setting.effective_batch_size * self._uncompiled_seconds_per_sample
        gain_seconds = uncompiled_seconds - min(m.step_seconds for m in measurements)
        return max(m.first_step_seconds for m in measurements) / gain_seconds if gain_seconds > 0 else math.inf

    def _compile_cost_reason(self, setting: Setting) -> str | None:
        """Return the reason if the training run is too short for compiling to save time, else None."""
        num_steps, length = self.break_even_steps(setting), self.num_steps_with(setting)
        if not self.is_by_throughput or num_steps is None or num_steps <= length:
            return None
        if math.isinf(num_steps):
            return "compiling never saves time: its steps are no faster"
        option = "--samples" if self._has_fixed_samples else "--steps"
        return f"compiling pays back after {num_steps:,.0f} steps, and the training has {length:,} ({option})"

    def num_steps_with(self, setting: Setting) -> int:
        """Return the length of the training run with `setting` in optimizer steps."""
        if not self._has_fixed_samples:
            return self.num_steps
        return self.num_steps * self.space.baseline.effective_batch_size // setting.effective_batch_size

    @cached_property
    def _uncompiled_seconds_per_sample(self) -> float | None:
        """Return the seconds per sample on one rank of the fastest uncompiled setting that no check or calibration
        rules out.
        """
        allowed = (
            median(m.step_seconds for m in measurements) / c.effective_batch_size
            for c, measurements in self.measurements.items()
            if not c.is_compiled and not self._numerical_reason_against(c)
        )
        return min(allowed, default=None)
