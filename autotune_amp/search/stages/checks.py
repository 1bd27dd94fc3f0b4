"""Stages that check settings before the confirmation: accumulated gradients against those of the whole batch,
contenders against fp32, and the loss scales of fp16.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, NamedTuple

from msgspec.structs import replace

from autotune_amp.core.outcome import Failure, Fidelity
from autotune_amp.core.setting import Setting
from autotune_amp.search import loss_scales, ranking
from autotune_amp.search.ledger import RIVAL_MARGIN, Ledger
from autotune_amp.search.planner import MIN_TRIAL_SECONDS, Planner
from autotune_amp.search.ranking import MIN_GAIN, SPEED_ERROR, check_key, rank
from autotune_amp.search.space import HOPELESS_SLOWDOWN, Space
from autotune_amp.search.stages import Stage
from autotune_amp.search.storage.study import Study
from autotune_amp.trial.jobs import Check, Trial

NUM_PAIRS = 24  # pairs (init_scale, growth_interval) to replay for one contender, including the initial ones

LATER_MARGIN = 0.7  # share of the time for checks on trained weights to plan with: a busy machine may be slower
# Optimizer steps before a check on trained weights. Fewer than 50 move the weights too little to test anything new.
MIN_STEPS_BEFORE, MAX_STEPS_BEFORE = 50, 300


class CheckAction(NamedTuple):
    """Next job for a contender: check its fidelity against fp32 (with its pinned modules, if any), calibrate its loss
    scale, or measure its throughput.
    """

    purpose: Literal["fidelity", "calibration", "search"]
    setting: Setting


class AccumulationCheck(Stage):
    """Stage that checks once, on the user's workload, whether accumulated gradients equal those of the whole batch."""

    is_exclusive = True

    def next(self, ledger: Ledger, planner: Planner) -> Check | None:
        """Return the check, or None if no setting accumulates or the check has run already."""
        if "accumulation" not in ledger.space.checks or not ledger.space.accumulates or ledger.accumulation is not None:
            return None
        return planner.accumulation_check(ledger)


@dataclass
class Checks(Stage):
    """Stage that checks the fidelity of the contenders against fp32 and calibrates fp16's loss scale.

    With `only_winner` the runner-up is left out; otherwise it is checked if its possible gain justifies the seconds.
    """

    only_winner: bool = False

    def next(self, ledger: Ledger, planner: Planner) -> Trial | Check | None:
        """Return the next check, calibration or trial that is needed to choose the contenders, or None."""

        def is_worth(gain: float, num_checks: int) -> bool:
            return gain > planner.min_gain(num_checks * planner.check_seconds(ledger))

        action = next_action(ledger, only_winner=self.only_winner, is_worth=is_worth)
        left_seconds = planner.seconds_before_confirmation(ledger)
        needed_seconds = planner.waiting_seconds(ledger) + max(MIN_TRIAL_SECONDS, planner.check_seconds(ledger))
        if action is None or planner.budget.left() <= needed_seconds:
            return None
        if action.purpose != "search":
            return planner.check(ledger, action.purpose, action.setting)
        has_time = planner.has_time_for_trial(ledger, left_seconds)
        return planner.trial(ledger, action.setting, left_seconds) if has_time else None


@dataclass
class TrainedWeightsChecks(Stage):
    """Stage that repeats the fidelity check of the winner on weights trained in fp32 for some steps.

    If the winner proves unfaithful, the stage `checks` checks the contenders that replace it.
    """

    checks: Checks

    def next(self, ledger: Ledger, planner: Planner) -> Trial | Check | None:
        """Return the next job of `checks`, else a check on trained weights, or None."""
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
class LossScales(Stage):
    """Stage that lets Optuna's sampler suggest loss scales for the contenders and replays them, without a job."""

    is_exclusive = True
    study: Study

    def next(self, ledger: Ledger, planner: Planner) -> None:
        """Let the study suggest and replay loss scales. Always return None, since a replay needs no job."""
        for contender in filter(None, (ledger.final_shortlist or ())[:2]):
            self.study.suggest_pairs(
                contender.with_own_workers, NUM_PAIRS, lambda: planner.seconds_before_confirmation(ledger)
            )


def next_action(
    ledger: Ledger, *, only_winner: bool = False, is_worth: Callable[[float, int], bool] = lambda *_: True
) -> CheckAction | None:
    """Return the next job needed before the contenders can be confirmed; None once all are checked. Pure.

    With `only_winner` only the winner is checked. Call it again after each result: an unfaithful setting leaves the
    shortlist and another takes its place. The baseline is a contender, since it may be kept; a runner-up that is
    `HOPELESS_SLOWDOWN` times slower is skipped. `is_worth(gain, num_checks)` returns whether a relative gain in
    throughput justifies that many checks; the gain of a runner-up is its lead over the winner plus `SPEED_ERROR`, the
    uncertainty of both, and that of the baseline at least `MIN_GAIN`.
    """
    pinning_action = _next_pinning_action(ledger)
    if pinning_action is not None:
        return pinning_action
    shortlist = ledger.shortlist
    speeds = {c: merit.speed for c, merit in ledger.measured_merits.items()}
    if shortlist is None:
        return None
    fastest = max(speeds[c] for c in shortlist[:2] if c is not None)
    contenders = (shortlist.winner,) if only_winner else shortlist
    for setting in dict.fromkeys(c for c in contenders if c is not None and c in speeds):
        if HOPELESS_SLOWDOWN * speeds[setting] < speeds[shortlist.winner]:
            continue
        is_rival = setting == shortlist.winner or speeds[setting] >= (1 - RIVAL_MARGIN) * fastest
        is_possible_winner = is_rival or not ledger.is_by_throughput  # for other objectives a slower setting may win
        is_uncalibrated = is_possible_winner and ledger.is_uncalibrated(setting)
        is_unchecked = _is_unchecked(ledger, setting)
        if setting != shortlist.winner and ledger.is_by_throughput:
            lead = speeds[setting] / speeds[shortlist.winner] - 1 + SPEED_ERROR
            if setting == shortlist.baseline:  # kept unless the winner proves faster
                lead = max(lead, MIN_GAIN)
            if not is_worth(lead, is_uncalibrated + is_unchecked):
                continue
        if is_uncalibrated:
            return CheckAction("calibration", setting.scaling)
        if is_unchecked:
            return _fidelity_action(setting, ledger.space)
    setting_to_pin = _setting_to_pin(ledger, fastest)
    return None if setting_to_pin is None else _fidelity_action(setting_to_pin, ledger.space)


def next_trained_weights_check(ledger: Ledger, seconds: float) -> tuple[Setting, int] | None:
    """Return the setting to check on trained weights and the optimizer steps to train before, or None. Pure.

    The setting is the winner or a runner-up nearly as fast, if it was checked on its initial weights only. As many
    steps are trained as fit in `seconds`. Return None if too few fit, if the setting's results equal fp32's bit for
    bit, or if weights are kept in low precision and so cannot be trained in fp32.
    """
    shortlist, speeds = ledger.final_shortlist, ledger.speeds
    if shortlist is None or "later" not in ledger.space.checks or ledger.space.weights in ("bf16", "fp16"):
        return None
    check_seconds = {check_key(r.candidate): r.seconds for r in ledger.records if r.purpose == "fidelity"}
    for setting in filter(None, shortlist[:2]):
        if speeds[setting] < (1 - RIVAL_MARGIN) * speeds[shortlist.winner]:
            continue
        key = check_key(setting)
        fidelity = ledger.fidelity.get(key)
        if fidelity is None or fidelity.later is not None or fidelity.num_steps_before:
            continue
        if not fidelity.fp32_step_seconds or fidelity.is_equal:  # bit for bit, which trained weights do not change
            continue
        num_steps = int((LATER_MARGIN * seconds - check_seconds[key]) / fidelity.fp32_step_seconds)
        if num_steps >= MIN_STEPS_BEFORE:
            return setting, min(num_steps, MAX_STEPS_BEFORE)
    return None


def _is_unchecked(ledger: Ledger, setting: Setting) -> bool:
    """Whether a setting needs a fidelity check that is possible and has not run."""
    return ranking.is_checkable(setting, ledger.space) and check_key(setting) not in ledger.fidelity


def _next_pinning_action(ledger: Ledger) -> CheckAction | None:
    """Return the next job for a precision that pinned modules may make faithful: its check with pins, then a trial."""
    tried = {r.candidate for r in ledger.records if r.purpose in ranking.BEFORE_CONFIRMATION}
    for key, fidelity in ledger.fidelity.items():
        settings = [c for c in tried if check_key(c) == key and not c.as_found]
        if fidelity.verdict != "unfaithful" or not fidelity.healing_pins or not settings:
            continue
        # Where no trial of the precision succeeded, take the smallest batch: its failures may have been numerical.
        speeds = {c: ledger.measured_merits[c].speed for c in settings if c in ledger.measured_merits}
        base = rank(speeds)[0] if speeds else min(settings, key=lambda c: c.batch_size)
        pinned = replace(base.with_own_workers, pinned_modules=fidelity.healing_pins)
        verdict = ledger.fidelity.get(check_key(pinned))
        if verdict is None:
            return _fidelity_action(pinned, ledger.space)
        if verdict.verdict != "unfaithful" and pinned not in tried:
            return CheckAction("search", pinned)
    return None


def _setting_to_pin(ledger: Ledger, fastest: float) -> Setting | None:
    """Return a setting that pinned modules (kept in fp32) might make usable, or None.

    It is a fast fp16 setting without a safe loss scale, or one of a precision in which every trial had values that are
    not finite.
    """
    settings = [
        setting
        for setting, merit in ledger.measured_merits.items()
        if merit.speed >= (1 - RIVAL_MARGIN) * fastest and loss_scales.refusal(ledger.scales, setting) is not None
    ]
    tried = [r for r in ledger.records if r.purpose == "search" and not r.candidate.pinned_modules]
    for precision in dict.fromkeys(r.candidate.precision for r in tried):
        outcomes = {r.candidate: r.outcome for r in tried if r.candidate.precision == precision}
        if all(isinstance(outcome, Failure) and outcome.kind == "nonfinite" for outcome in outcomes.values()):
            settings.append(min(outcomes, key=lambda c: c.batch_size))
    return next((c for c in settings if not c.pinned_modules and _is_unchecked(ledger, c)), None)


def _fidelity_action(setting: Setting, space: Space) -> CheckAction:
    """Return the action that checks the fidelity of a setting, at a batch size small enough for a check."""
    # A compiled setting is checked at the batch size it was compiled for: another size would compile once more.
    size = setting.batch_size if setting.is_compiled else min(space.check_batch_size, setting.batch_size)
    return CheckAction("fidelity", replace(check_key(setting), batch_size=size))
