"""Ledger: every record of a search, and the questions that are asked of them."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from typing import NamedTuple

from autotune_amp.core.config import LossScale
from autotune_amp.core.evidence import Objective
from autotune_amp.core.outcome import Accumulation, Failure, Fidelity, Measurement, Outcome, Record
from autotune_amp.core.recommendation import Exclusion
from autotune_amp.core.setting import Setting
from autotune_amp.numerics.scaler_replay import Replay
from autotune_amp.precision.modes import MODES
from autotune_amp.search import loss_scales, ranking
from autotune_amp.search.loss_scales import Answer, Pair
from autotune_amp.search.options import DEFAULT_NUM_STEPS
from autotune_amp.search.ranking import Merit, contenders, is_worth_a_change, least_speed, merit, rank_for
from autotune_amp.search.space import HOPELESS, Space, excluded_by_outcomes, with_accumulation_checked

RIVAL = 0.10  # a rival within 10 % may overtake the winner in the confirmation: processes differ by a few percent
# Less of either is as good as nothing, and would say nothing of other settings.
LEAST_APPLIED_SHARE, LEAST_COMPUTING_SHARE = 0.1, 0.05
LOSS_SCALE = LossScale()  # what fp16 is tried with before its own is known


class Shortlist(NamedTuple):
    """What to confirm; the winner may be the baseline."""

    winner: Setting
    runner_up: Setting | None
    baseline: Setting


class Ledger:
    """All records of one search over `space`, append-only; `write` keeps each before anything is decided on it.

    Answers are kept until the next record. A loss scale is judged over `num_steps` optimizer steps. What may be
    recommended are the settings that were measured and that no check speaks against.
    """

    def __init__(
        self,
        space: Space,
        records: Sequence[Record] = (),
        *,
        objective: Objective = "speed",
        num_steps: int = DEFAULT_NUM_STEPS,
        search_id: str = "",
        write: Callable[[Record], None] = lambda _: None,
    ) -> None:
        self.objective = objective
        self.search_id = search_id
        self.records = tuple(records)
        self.scales: dict[Setting, Answer] = loss_scales.calibrated(records, num_steps)
        self._whole_space = space
        self.num_steps = num_steps
        self._write = write
        self.num_awaited = 0
        self._actual: Ledger | None = None

    @property
    def actual(self) -> Ledger:
        """The ledger without what is only expected."""
        return self._actual or self

    def expecting(self, records: Sequence[Record], scales: Mapping[Setting, Answer], *, num_awaited: int = 0) -> Ledger:
        """A copy that has also what jobs that still run are expected to bring; see `pending`. It is not appended to.

        Of `num_awaited` trials nothing is expected.
        """
        expected = copy.copy(self)
        expected.num_awaited = num_awaited
        expected.records, expected.scales = (*self.records, *records), {**self.scales, **scales}
        expected._actual = self
        expected._forget()
        return expected

    def append(self, record: Record) -> None:
        """Write the record down."""
        self._write(record)
        self.records = (*self.records, record)
        self._forget()
        if record.purpose == "calibration":
            self.scales[record.candidate.scaling] = loss_scales.answer(
                record, self.num_steps, is_loss_sum=self.is_loss_sum
            )

    def with_only(self, records: Sequence[Record]) -> Ledger:
        """The ledger with these of its records alone, and with the loss scales that were asked for."""
        before = Ledger(self._whole_space, objective=self.objective, num_steps=self.num_steps)
        before.records = tuple(records)
        calibrated = {r.candidate.scaling for r in records if r.purpose == "calibration"}
        before.scales = {key: scales for key, scales in self.scales.items() if key in calibrated}
        return before

    def _forget(self) -> None:
        for name, value in vars(Ledger).items():
            if isinstance(value, cached_property):
                self.__dict__.pop(name, None)

    @cached_property
    def space(self) -> Space:
        """What can be tried: without what accumulates, where that was not shown to learn what the whole batch learns.

        Raises `InvalidRequestError` where nothing is left without it.
        """
        return with_accumulation_checked(self._whole_space, self.accumulation)

    @cached_property
    def accumulation(self) -> Accumulation | None:
        """What the check of accumulation found, None where there was none."""
        return ranking.found_accumulation(self.records)

    @property
    def is_loss_sum(self) -> bool:
        """Whether the loss was found to be a sum, which is not divided by the accumulation steps."""
        return self.accumulation is not None and self.accumulation.verdict == "sum"

    @property
    def may_add_accumulation(self) -> bool:
        """Whether what does not accumulate today may: it is not withheld, and the check found it exact."""
        found = self.accumulation
        return self.space.accumulation_withheld is None and found is not None and found.is_exact

    @cached_property
    def fidelity(self) -> dict[Setting, Fidelity]:
        """What the checks against fp32 found."""
        return ranking.found_fidelity(self.records)

    def verdict(self, setting: Setting) -> Fidelity | None:
        """The verdict on a setting, *unchecked* where no check was made; None for fp32 itself."""
        return ranking.verdict_on(setting, self.space, self.fidelity)

    @cached_property
    def trials(self) -> list[Record]:
        """The records without the checks."""
        return [r for r in self.records if ranking.is_trial(r)]

    @cached_property
    def told(self) -> list[Record]:
        """The trials that say something of their setting: all but a first crash."""
        return ranking.without_first_crashes(self.trials)

    @property
    def num_failures(self) -> int:
        """Trials that failed; an outlook looks for the end of what fits, and one that was still loading ran nothing."""
        failed = [r.purpose for r in self.trials if isinstance(r.outcome, Failure) and not r.outcome.is_loading]
        return sum(purpose not in ("one_rank", "outlook") for purpose in failed)

    @cached_property
    def failures(self) -> dict[Setting, Failure]:
        """The settings with a failure that speaks against them, and the first such of each."""
        return ranking.failures(self.records)

    @cached_property
    def outcomes(self) -> dict[Setting, Outcome]:
        """The last measurement of each setting before the confirmation, or else the failure that speaks against it."""
        known = [r for r in self.records if r.purpose in ranking.BEFORE_CONFIRMATION]
        measured: dict[Setting, Outcome] = {r.candidate: r.outcome for r in known if isinstance(r.outcome, Measurement)}
        return measured | dict(ranking.failures(known))

    @property
    def ordinary_outcomes(self) -> dict[Setting, Outcome]:
        """The same of the baseline and of ordinary settings: one with pins or workers says nothing of those without."""
        return {c: o for c, o in self.outcomes.items() if c.is_ordinary or c == self.space.baseline}

    @cached_property
    def exclusions(self) -> tuple[Exclusion, ...]:
        """What the outcomes and the checks rule out, with the reason."""
        return (
            *ranking.exclusions(self.fidelity),
            *loss_scales.exclusions(self.scales),
            *excluded_by_outcomes(self.space, self.ordinary_outcomes),
        )

    @cached_property
    def best(self) -> Record | None:
        """The fastest trial so far of what may be recommended."""
        if self._actual is not None:  # a limit that is only expected may cut off what is sound
            return self._actual.best
        allowed = [(outcome.samples_per_second, r) for r, outcome in self._choices if r.candidate in self.merits]
        return max(allowed, key=lambda pair: pair[0])[1] if allowed else None

    @cached_property
    def measurements(self) -> dict[Setting, list[Measurement]]:
        """What was measured before the confirmation, whatever for, without what failed in any process since."""
        found: dict[Setting, list[Measurement]] = {}
        for record, outcome in self._choices:
            if record.candidate not in self.failures:
                found.setdefault(record.candidate, []).append(outcome)
        return found

    def throughputs(self, *, without_waiting: bool = False) -> dict[Setting, list[float]]:
        """What each process of what may lead measured of the objective, more being better: samples per second, or per
        joule, that reach the optimizer.

        `without_waiting`: as if no step had waited for its data.
        """
        leading = {c: ours for c, ours in self.measurements.items() if self.may_lead(c)}
        has_joules = all(m.joules_per_sample for ours in leading.values() for m in ours)

        def throughput(found: Measurement) -> float:
            if self.objective == "energy" and has_joules and found.joules_per_sample:
                return 1 / found.joules_per_sample
            computing_share = max(LEAST_COMPUTING_SHARE, 1 - ranking.data_share(found)) if without_waiting else 1.0
            return found.samples_per_second / computing_share

        shares = {c: max(LEAST_APPLIED_SHARE, self.applied_share(c)) for c in leading}
        return {c: [shares[c] * throughput(m) for m in ours] for c, ours in leading.items()}

    @cached_property
    def measured(self) -> dict[Setting, Merit]:
        """The merits of what was measured, in samples computed."""
        return {c: merit(ours) for c, ours in self.measurements.items()}

    @cached_property
    def ruled_out(self) -> dict[Setting, str]:
        """What was measured and must not be recommended, with the reason that a check or a calibration gave.

        Of what runs today that is a warning: it may be kept all the same.
        """
        return {c: harm for c in self.measurements if (harm := self._harm(c)) is not None}

    @cached_property
    def merits(self) -> dict[Setting, Merit]:
        """What may be recommended, what runs today among it whatever a check says, in samples that reach the optimizer:
        all of them, at most, of uncalibrated fp16."""
        today = self.space.baseline
        allowed = {c: ours for c, ours in self.measurements.items() if c == today or c not in self.ruled_out}
        return {c: merit(ours, self.applied_share(c)) for c, ours in allowed.items()}

    @cached_property
    def speeds(self) -> dict[Setting, float]:
        """Applied samples per second of what may be recommended."""
        return {c: found.samples_per_second for c, found in self.merits.items()}

    @cached_property
    def pending_tiers(self) -> dict[Setting, int]:
        """The tiers of what may be recommended, while what awaits its check counts as faithful."""
        return {c: self._tier(c, self.fidelity.get(ranking.check_key(c))) for c in self.merits}

    @cached_property
    def tiers(self) -> dict[Setting, int]:
        """The tiers of what may be recommended once the checks are over: what has none by now is *unchecked*."""
        return {c: self._tier(c, self.verdict(c)) for c in self.merits}

    def _tier(self, setting: Setting, found: Fidelity | None) -> int:
        return ranking.LAST_TIER if setting in self.ruled_out else ranking.tier(found)

    @cached_property
    def shortlist(self) -> Shortlist | None:
        """What would be confirmed, while checks are still to come; None where nothing may be recommended."""
        return self.shortlist_for(self.objective, self.pending_tiers)

    @cached_property
    def finalists(self) -> Shortlist | None:
        """What to confirm once the checks are over; None where nothing may be recommended."""
        return self.shortlist_for(self.objective, self.tiers)

    def shortlist_for(self, objective: Objective, tiers: dict[Setting, int]) -> Shortlist | None:
        """The winner, what runs today where nothing is worth a change from it; and a runner-up: for speed the fastest
        of the others within 10 % of the fastest, else the next.

        The runner-up is of a tier behind the others only where nothing else is left.
        """
        if not self.merits:
            return None
        baseline, today = self.space.baseline, self.measured.get(self.space.baseline)
        ranked = rank_for(objective, self.merits, least_speed=least_speed(objective, today), tiers=tiers)
        winner = ranked[0]
        if today is not None:
            known = contenders(self.merits, tiers, baseline)
            worth = (c for c in ranked if c in known and is_worth_a_change(objective, known[c], today))
            winner = next(worth, baseline)
        others = [c for c in ranked if c != winner and not c.as_found]
        least = max(ranking.UNDECIDED_TIER, min((tiers[c] for c in others), default=0))
        sound = [c for c in others if tiers[c] <= least]
        fastest = max(speed for c, speed in self.speeds.items() if c == winner or c in sound)
        rivals = [c for c in sound if objective == "speed" and self.speeds[c] >= (1 - RIVAL) * fastest]
        runner_up = max(rivals, key=lambda c: self.speeds[c]) if rivals else next(iter(sound), None)
        return Shortlist(winner, runner_up, baseline)

    def may_win(self, chosen: Shortlist) -> list[Setting]:
        """The winner, and the runner-up where it is near enough to overtake it in the confirmation."""
        speeds = {c: self.measured[c].samples_per_second for c in chosen[:2] if c in self.measured}
        share = 1 - RIVAL if self.objective == "speed" else 1 / HOPELESS
        least = share * speeds.get(chosen.winner, 0.0)
        return [c for c in chosen[:2] if c is not None and (c == chosen.winner or speeds.get(c, math.inf) >= least)]

    def applied_share(self, setting: Setting) -> float:
        """The share of the gradient that reaches the optimizer with the best loss scale; 1 where that is unknown."""
        found = loss_scales.scales_of(self.scales, setting)
        return 1.0 if found is None else found.replay(found.best).applied_share

    def loss_scale(self, setting: Setting) -> LossScale | None:
        """What a setting is to be trained with: the calibrated loss scale where there is one, None without a scaler."""
        if not MODES[setting.precision].takes_scaler:
            return None
        found = loss_scales.scales_of(self.scales, setting)
        return LOSS_SCALE if found is None else loss_scales.rule(found.best)

    def awaits_calibration(self, setting: Setting) -> bool:
        """Whether what takes a scaler was measured within 10 % of the best so far, and not calibrated."""
        if not MODES[setting.precision].takes_scaler or setting.scaling in self.scales:
            return False
        if "calibration" not in self.space.checks:
            return False
        best, found = (None if self.best is None else self.best.outcome), self.actual.outcomes.get(setting)
        if not isinstance(best, Measurement) or not isinstance(found, Measurement):
            return False
        return found.samples_per_second >= (1 - RIVAL) * best.samples_per_second

    def judged(self, setting: Setting, outcome: Outcome, pair: Pair | None) -> tuple[Outcome, Replay | None]:
        """The outcome of a setting with a pair of loss scale and growth interval, and the replay of the pair."""
        if isinstance(outcome, Failure) or pair is None:
            return outcome, None
        if (refusal := loss_scales.refusal(self.scales, setting)) is not None:
            return Failure(kind="nonfinite", message=refusal), None
        return outcome, self.replay(setting, pair)

    def replay(self, setting: Setting, pair: Pair) -> Replay | None:
        """What the pair does over the training, None where the setting was not calibrated.

        A pair that was asked for may be recommended.
        """
        scales = loss_scales.scales_of(self.scales, setting)
        if scales is not None and pair not in scales.scored:
            self._forget()
        return None if scales is None else scales.replay(pair)

    @cached_property
    def _choices(self) -> list[tuple[Record, Measurement]]:
        """The measurements of what was asked for: a fallback may be of a batch size outside it."""
        return [
            (r, r.outcome)
            for r in self.records
            if isinstance(r.outcome, Measurement)
            and r.purpose in ranking.BEFORE_CONFIRMATION
            and (r.purpose == "search" or r.candidate.with_own_workers in self.space.candidates)
        ]

    def _harm(self, setting: Setting) -> str | None:
        return self._ill(setting) or self._unpaid(setting)

    def _ill(self, setting: Setting) -> str | None:
        return ranking.harm(self.fidelity, setting) or loss_scales.refusal(self.scales, setting)

    def may_lead(self, setting: Setting) -> bool:
        """Whether what was measured may be recommended, if not now then once it was measured again: what is compiled
        may have gained nothing in one slow process."""
        return setting in self.merits or (self._ill(setting) is None and self.break_even_steps(setting) == math.inf)

    def may_choose(self, settings: Iterable[Setting]) -> set[Setting]:
        """Those of the settings, measured or not, that a config can express and that no others come before by what the
        checks say."""
        tiers = {c: ranking.tier(self.fidelity.get(ranking.check_key(c))) for c in settings if not c.as_found}
        least = max(ranking.UNDECIDED_TIER, min(tiers.values(), default=0))
        return {c for c, tier in tiers.items() if tier <= least}

    def break_even_steps(self, setting: Setting) -> float | None:
        """Optimizer steps after which compiling a setting has paid: what its first compilation took, over what a step
        gains on the fastest that is not compiled and may be recommended.

        Infinite where it gains nothing, None where nothing is compiled or there is nothing to compare with.
        """
        ours, plain = self._compiling.get(setting), self._uncompiled_seconds
        if ours is None or plain is None:
            return None
        compiling_seconds, seconds_per_sample = ours
        gain_seconds = setting.effective_batch_size * (plain - seconds_per_sample)
        return compiling_seconds / gain_seconds if gain_seconds > 0 else math.inf

    def _unpaid(self, setting: Setting) -> str | None:
        num_steps = self.break_even_steps(setting)
        if self.objective != "speed" or num_steps is None or num_steps <= self.num_steps:
            return None
        if math.isinf(num_steps):
            return "compiling never pays back: its steps are no faster"
        return f"compiling pays back after {num_steps:,.0f} steps, and the training has {self.num_steps:,} (--steps)"

    @cached_property
    def _compiling(self) -> dict[Setting, tuple[float, float]]:
        """Of what was compiled the longest first step, and the seconds of a sample."""
        return {
            c: (max(m.first_step_seconds for m in ours), min(1 / m.samples_per_second for m in ours))
            for c, ours in self.measurements.items()
            if c.is_compiled
        }

    @cached_property
    def _uncompiled_seconds(self) -> float | None:
        """Seconds of a sample in the fastest that is not compiled."""
        allowed = [ours for c, ours in self.measurements.items() if not c.is_compiled and not self._ill(c)]
        return min((1 / merit(ours).samples_per_second for ours in allowed), default=None)
