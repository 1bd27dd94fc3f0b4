"""Stages that answer, before the confirmation, whether accumulated gradients equal those of the whole batch, whether
contenders learn the same as fp32, and which loss scales are safe for fp16.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, Literal, NamedTuple

from msgspec.structs import replace

from autotune_amp.core.outcome import Failure, Fidelity
from autotune_amp.core.setting import Setting
from autotune_amp.precision.modes import MODES
from autotune_amp.search import loss_scales, ranking
from autotune_amp.search.ledger import RIVAL_MARGIN, Ledger
from autotune_amp.search.planner import Planner
from autotune_amp.search.ranking import PLATEAU, check_key, rank
from autotune_amp.search.space import HOPELESS_SLOWDOWN, Space
from autotune_amp.search.storage.study import Study
from autotune_amp.trial.jobs import Check, Trial

NUM_PAIRS = 24  # pairs (init_scale, growth_interval) for one contender, including the seeds
MIN_CHECK_SECONDS = 0.5

LATER_MARGIN = 0.7  # share of the seconds for checks of trained weights: a busy machine may be slower than before
MIN_STEPS_BEFORE, MAX_STEPS_BEFORE = 50, 300  # fewer optimizer steps move the weights too little to test anything new


class CheckAction(NamedTuple):
    """Next action for a contender: check its fidelity against fp32 (with its pinned modules, if any), calibrate its
    loss scale, or measure its throughput.
    """

    purpose: Literal["fidelity", "calibration", "search"]
    setting: Setting


class AccumulationCheck:
    """Stage that checks once, on the user's workload, whether accumulated gradients equal those of the whole batch."""

    is_exclusive: ClassVar[bool] = True

    def next(self, ledger: Ledger, planner: Planner) -> Check | None:
        """Return the check, or None if no setting accumulates or the check was made already."""
        if "accumulation" not in ledger.space.checks or not ledger.space.accumulates or ledger.accumulation is not None:
            return None
        return planner.accumulation_check(ledger)


@dataclass
class Checks:
    """Stage that checks the fidelity of the contenders against fp32 and calibrates fp16's loss scale, within its share
    of the budget.

    With `only_winner` the runner-up is left out; otherwise it is checked if it may win by enough to be worth its
    checks.
    """

    is_exclusive: ClassVar[bool] = False
    only_winner: bool = False

    def next(self, ledger: Ledger, planner: Planner) -> Trial | Check | None:
        """Return the next check, calibration or trial that choosing the contenders depends on, or None."""

        def is_worth(gain: float, num_checks: int) -> bool:
            return gain > planner.least_gain(num_checks * planner.check_seconds(ledger))

        action = next_action(ledger, only_winner=self.only_winner, is_worth=is_worth)
        left = planner.seconds_before_confirmation(ledger)
        needed = planner.waiting_seconds(ledger) + max(MIN_CHECK_SECONDS, planner.check_seconds(ledger))
        if action is None or planner.budget.left() <= needed:
            return None
        if action.purpose != "search":
            return planner.check(ledger, action.purpose, action.setting)
        return planner.trial(ledger, action.setting, left) if planner.has_time_for_trial(ledger, left) else None


@dataclass
class TrainedWeightsChecks:
    """Stage that repeats the fidelity check of the setting about to be recommended on weights trained in fp32 for a
    while.

    If a setting is ruled out here, the stage `checks` judges the contenders that replace it.
    """

    is_exclusive: ClassVar[bool] = False
    checks: Checks

    def next(self, ledger: Ledger, planner: Planner) -> Trial | Check | None:
        """Return the check that the last verdict makes necessary, else a check on trained weights, or None."""
        if (job := self.checks.next(ledger, planner)) is not None:
            return job
        used_seconds = sum(
            r.seconds for r in ledger.records if isinstance(r.outcome, Fidelity) and r.outcome.num_steps_before
        )
        seconds = planner.extra_seconds(planner.seconds_before_confirmation(ledger), used_seconds)
        seconds -= planner.waiting_seconds(ledger)
        action = next_trained_weights_check(ledger, seconds)
        if action is None:
            return None
        setting, num_steps = action
        check = planner.job_defaults.check("fidelity", _fidelity_action(setting, ledger.space).setting, seconds)
        return replace(check, num_steps_before=num_steps, aim_seconds=(1 - LATER_MARGIN) * seconds)


@dataclass
class LossScales:
    """Stage that lets Optuna's sampler suggest loss scales for the contenders, which replay scores without a job."""

    is_exclusive: ClassVar[bool] = True
    study: Study

    def next(self, ledger: Ledger, planner: Planner) -> None:
        """Let the study suggest and score loss scales. Always return None, since replay needs no job."""
        self.study.catch_up(ledger)
        for contender in filter(None, (ledger.final_shortlist or ())[:2]):
            self.study.suggest_pairs(contender.with_own_workers, NUM_PAIRS, lambda: planner.seconds_before_confirmation(ledger))


def next_action(
    ledger: Ledger, *, only_winner: bool = False, is_worth: Callable[[float, int], bool] = lambda *_: True
) -> CheckAction | None:
    """Return the next action before the contenders, or with `only_winner` the winner alone, can be confirmed; None once
    all are judged. Pure.

    Call it again after each result: an unfaithful setting leaves the shortlist and another takes its place. The
    baseline is a contender, since it may be kept; a runner-up that is `HOPELESS_SLOWDOWN` times slower is skipped.
    `is_worth(gain, num_checks)` returns whether a relative gain in throughput justifies so many checks; the gain of a
    runner-up is its lead over the winner plus `PLATEAU`, the uncertainty of both.
    """
    healing = _next_pinning_action(ledger)
    if healing is not None:
        return healing
    chosen, speeds = ledger.shortlist, {c: found.samples_per_second for c, found in ledger.measured_merits.items()}
    if chosen is None:
        return None
    fastest = max(speeds[c] for c in chosen[:2] if c is not None)
    contenders = (chosen.winner,) if only_winner else chosen
    for setting in dict.fromkeys(c for c in contenders if c is not None and c in speeds):
        if HOPELESS_SLOWDOWN * speeds[setting] < speeds[chosen.winner]:
            continue
        is_rival = setting == chosen.winner or speeds[setting] >= (1 - RIVAL_MARGIN) * fastest
        may_win = is_rival or ledger.objective != "speed"  # otherwise a slower setting may win
        is_uncalibrated = (
            "calibration" in ledger.space.checks
            and MODES[setting.precision].takes_scaler
            and may_win
            and setting.scaling not in ledger.scales
        )
        is_unchecked = _is_unchecked(ledger, setting)
        if setting != chosen.winner and ledger.objective == "speed":
            lead = speeds[setting] / speeds[chosen.winner] - 1 + PLATEAU
            if not is_worth(lead, is_uncalibrated + is_unchecked):
                continue
        if is_uncalibrated:
            return CheckAction("calibration", setting.scaling)
        if is_unchecked:
            return _fidelity_action(setting, ledger.space)
    healable = _setting_to_pin(ledger, fastest)
    return None if healable is None else _fidelity_action(healable, ledger.space)


def next_trained_weights_check(ledger: Ledger, seconds: float) -> tuple[Setting, int] | None:
    """Return the winner or its rival, if it was checked with its initial weights alone, and the number of optimizer
    steps to train before the next check. Pure.

    The number of steps is as many as fit in `seconds`. Return None if too few fit, if the setting computes exactly as
    fp32 does, or if weights are kept in low precision and so cannot be trained in fp32.
    """
    chosen, speeds = ledger.final_shortlist, ledger.speeds
    if chosen is None or "later" not in ledger.space.checks or ledger.space.weights in ("bf16", "fp16"):
        return None
    checked = {check_key(r.candidate): r.seconds for r in ledger.records if r.purpose == "fidelity"}
    for setting in filter(None, chosen[:2]):
        if speeds[setting] < (1 - RIVAL_MARGIN) * speeds[chosen.winner]:
            continue
        key = check_key(setting)
        first = ledger.fidelity.get(key)
        if first is None or first.later is not None or first.num_steps_before or not first.fp32_step_seconds:
            continue
        if first.is_equal:  # equal to fp32 bit for bit, whatever the weights
            continue
        num_steps = int((LATER_MARGIN * seconds - checked[key]) / first.fp32_step_seconds)
        if num_steps >= MIN_STEPS_BEFORE:
            return setting, min(num_steps, MAX_STEPS_BEFORE)
    return None


def _is_unchecked(ledger: Ledger, setting: Setting) -> bool:
    return ranking.is_checkable(setting, ledger.space) and check_key(setting) not in ledger.fidelity


def _next_pinning_action(ledger: Ledger) -> CheckAction | None:
    """Return the next action for a precision that pins make faithful: check it with the pins, then measure it."""
    tried = {r.candidate for r in ledger.records if r.purpose in ranking.BEFORE_CONFIRMATION}
    for key, found in ledger.fidelity.items():
        ours = [c for c in tried if check_key(c) == key and not c.as_found]
        if found.verdict != "unfaithful" or not found.healing_pins or not ours:
            continue
        # Where no trial of the precision succeeded, take the smallest batch: its failures may have been numerical.
        ran = {c: ledger.measured_merits[c].samples_per_second for c in ours if c in ledger.measured_merits}
        like = rank(ran)[0] if ran else min(ours, key=lambda c: c.batch_size)
        healed = replace(like.with_own_workers, pinned_modules=found.healing_pins)
        verdict = ledger.fidelity.get(check_key(healed))
        if verdict is None:
            return _fidelity_action(healed, ledger.space)
        if verdict.verdict != "unfaithful" and healed not in tried:
            return CheckAction("search", healed)
    return None


def _setting_to_pin(ledger: Ledger, fastest: float) -> Setting | None:
    """Return a setting that pinned modules might make usable: fp16 that is fast enough but has no safe loss scale, or a
    precision whose every trial had values that are not finite.
    """
    found = [
        setting
        for setting, merit in ledger.measured_merits.items()
        if merit.samples_per_second >= (1 - RIVAL_MARGIN) * fastest and loss_scales.refusal(ledger.scales, setting) is not None
    ]
    tried = [r for r in ledger.records if r.purpose == "search" and not r.candidate.pinned_modules]
    for precision in dict.fromkeys(r.candidate.precision for r in tried):
        ours = {r.candidate: r.outcome for r in tried if r.candidate.precision == precision}
        if all(isinstance(outcome, Failure) and outcome.kind == "nonfinite" for outcome in ours.values()):
            found.append(min(ours, key=lambda c: c.batch_size))
    return next((c for c in found if not c.pinned_modules and _is_unchecked(ledger, c)), None)


def _fidelity_action(setting: Setting, space: Space) -> CheckAction:
    # A compiled setting is checked at the batch size it was compiled for: another size would compile once more.
    size = setting.batch_size if setting.is_compiled else min(space.check_batch_size, setting.batch_size)
    return CheckAction("fidelity", replace(check_key(setting), batch_size=size))
