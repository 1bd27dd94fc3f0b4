"""What the policy makes of the answers it asks for, of promotions, of hands, and of what was saved."""

from __future__ import annotations

import json
import math
from typing import Any
from unittest.mock import ANY

import pytest
from policy_steps import BAD_LOSS, CLEAN, OVERFLOW, START, after, blamed, confirmed, judged, policy_of

from autotune_amp.core.config import LossScale
from autotune_amp.core.errors import FormatError, InvalidRequestError
from autotune_amp.core.setting import Precision
from autotune_amp.runtime.actions import Blame, Demote, Pin, Probe, Promote, Revert, Stop, Warn
from autotune_amp.runtime.policy import DWELL_STEPS, MAX_PROMOTIONS, NUM_BLAMED_STEPS, PROMOTION_STEPS, Policy

# -- Diagnose ----------------------------------------------------------------------------------------------------------


def test_the_demotion_goes_to_the_first_rung_that_was_finite_in_the_rerun() -> None:
    def goes_to(*finite_in: str) -> int:
        demote = judged(policy_of(can_rerun=True), 2 * [BAD_LOSS], finite_in=finite_in)
        assert isinstance(demote, Demote)
        assert not demote.is_tentative
        return demote.rung

    assert goes_to("bf16", "fp32") == 1
    assert goes_to("fp32") == 2


def test_no_rung_that_is_finite_stops_the_run_as_precisions_fault() -> None:
    stop = judged(policy_of("fp16", "bf16", can_rerun=True), 2 * [BAD_LOSS])
    assert stop == Stop(ANY, is_precision=True)


def test_a_rerun_that_could_not_find_out_is_as_none() -> None:
    demote = judged(policy_of(can_rerun=True), 2 * [BAD_LOSS], is_precision=None, finite_in=(), pins=["ff.wo"])
    assert demote == Demote(1, ANY, is_tentative=True)


def test_modules_are_pinned_once_and_then_it_steps_down() -> None:
    policy = policy_of(can_rerun=True)
    pin = judged(policy, [OVERFLOW, BAD_LOSS, BAD_LOSS], pins=["ff.wo"])
    assert pin == Pin(("ff.wo",), ANY)
    assert policy.scale.scale == START / 2
    assert confirmed(policy, pin) is None
    assert (policy.rung, policy.phase, policy.scale.scale) == (0, "STEADY", START)
    assert isinstance(judged(policy, 2 * [BAD_LOSS], pins=["ff.wi"]), Demote)


def test_what_the_rerun_does_not_show_is_warned_of_and_then_stepped_down_from_on_trial() -> None:
    policy = policy_of(can_rerun=True)
    assert isinstance(judged(policy, 2 * [BAD_LOSS], reproduced=False), Warn)
    assert (policy.rung, policy.phase) == (0, "STEADY")
    assert after(policy, (NUM_BLAMED_STEPS - 1) * [BAD_LOSS]) is None
    step_down = judged(policy, [BAD_LOSS], reproduced=False)
    assert isinstance(step_down, Demote)
    assert step_down.is_tentative


def test_a_clean_step_between_two_trips_that_a_rerun_does_not_show_leaves_it_at_warnings() -> None:
    policy = policy_of(can_rerun=True)
    for _ in range(3):
        assert isinstance(judged(policy, 2 * [BAD_LOSS], reproduced=False), Warn)
        assert after(policy, NUM_BLAMED_STEPS * [CLEAN]) is None


def test_a_declined_trip_is_not_repeated_before_the_dwell_is_over() -> None:
    policy = policy_of()
    assert isinstance(after(policy, 2 * [BAD_LOSS]), Demote)
    policy.decline()
    assert after(policy, (DWELL_STEPS - 1) * [BAD_LOSS]) is None
    assert isinstance(policy.observe(BAD_LOSS), Demote)


# -- rungs that cannot be had ------------------------------------------------------------------------------------------


def test_a_withdrawn_rung_is_passed_over() -> None:
    policy = policy_of()
    policy.withdraw("bf16", "emulated")
    policy.withdraw("fp16", "the run is in it")
    assert list(policy.withdrawn) == ["bf16"]
    demote = after(policy, 2 * [BAD_LOSS])
    assert isinstance(demote, Demote)
    assert demote.rung == 2


def test_a_refused_rung_is_passed_over_and_its_reason_told_in_the_end() -> None:
    policy = policy_of()
    demote = after(policy, 2 * [BAD_LOSS])
    assert isinstance(demote, Demote)
    demote = policy.refuse(demote, "out of memory")
    assert demote == Demote(2, ANY, is_tentative=True)
    stop = policy.refuse(demote, "too slow")
    assert isinstance(stop, Stop)
    assert stop.is_precision
    assert stop.reason.endswith("bf16: out of memory; fp32: too slow")


def test_a_rung_refused_after_a_rerun_leaves_the_reruns_evidence_standing() -> None:
    policy = policy_of(can_rerun=True)
    finite_in = ("bf16",)
    demote = judged(policy, 2 * [BAD_LOSS], finite_in=finite_in)
    assert isinstance(demote, Demote)
    stop = policy.refuse(demote, "out of memory", finite_in)
    assert isinstance(stop, Stop)
    assert stop.is_precision
    assert stop.reason.endswith("bf16: out of memory")


def test_bad_losses_in_the_last_rung_are_not_precisions_fault() -> None:
    blame = after(policy_of("fp32"), 2 * [BAD_LOSS])
    assert blame == Blame(START, ANY)


def test_a_scale_that_cannot_hold_is_warned_of_where_no_rung_is_left() -> None:
    policy = policy_of("fp16")
    assert isinstance(after(policy, 8 * [OVERFLOW]), Warn)
    assert (policy.rung, policy.phase) == (0, "STEADY")
    assert after(policy, 7 * [OVERFLOW]) is None


# -- Promote -----------------------------------------------------------------------------------------------------------


def stepped_down(*rungs: Precision, **more: Any) -> Policy:
    """In bf16, on evidence, after a burst that took the scale from 65536 to 256."""
    policy = policy_of(*rungs, **{"can_rerun": True, "promotes": True, **more})
    assert confirmed(policy, judged(policy, 8 * [OVERFLOW], finite_in=("bf16",))) is None
    assert policy.precision == "bf16"
    assert policy.scale.scale == 256
    return policy


def probe_after(policy: Policy, num_clean: int) -> Probe:
    probe = after(policy, num_clean * [CLEAN])
    assert isinstance(probe, Probe)
    return probe


def test_after_2000_clean_steps_a_probe_that_fits_promotes() -> None:
    policy = stepped_down()
    probe = probe_after(policy, PROMOTION_STEPS)
    assert probe == Probe(0, START * 16)
    promote = policy.probed(probe, fits=True, reason="twice as fast")
    assert promote == Promote(0, "twice as fast")
    assert confirmed(policy, promote) is None
    assert (policy.precision, policy.phase, policy.scale.scale) == ("fp16", "STEADY", START)


def test_a_bad_step_makes_a_promotion_wait_anew() -> None:
    policy = stepped_down()
    assert after(policy, [*(PROMOTION_STEPS - 1) * [CLEAN], OVERFLOW]) is None
    probe_after(policy, PROMOTION_STEPS)


def test_bad_steps_below_do_not_change_what_scale_the_promotion_needs() -> None:
    policy = stepped_down()
    assert policy.observe(OVERFLOW) is None
    assert probe_after(policy, PROMOTION_STEPS).scale == START * 16


@pytest.mark.parametrize("options", [{"promotes": False}, {"can_rerun": False}])
def test_nobody_is_promoted_unasked_or_untried(options: dict[str, bool]) -> None:
    policy = stepped_down()
    for name, value in options.items():
        setattr(policy, name, value)
    assert after(policy, 3 * PROMOTION_STEPS * [CLEAN]) is None


def test_each_failure_doubles_the_wait() -> None:
    policy = stepped_down()
    for num_failures in range(3):
        probe = probe_after(policy, PROMOTION_STEPS * 2**num_failures)
        assert policy.probed(probe, fits=False, reason="not faster") is None
    assert confirmed(policy, policy.probed(probe_after(policy, 8 * PROMOTION_STEPS), fits=True, reason="")) is None
    assert confirmed(policy, judged(policy, 2 * [BAD_LOSS], finite_in=("bf16",))) is None
    probe_after(policy, 16 * PROMOTION_STEPS)


def test_three_promotions_are_the_most() -> None:
    policy = stepped_down()
    for num_promotions in range(MAX_PROMOTIONS):
        probe = probe_after(policy, PROMOTION_STEPS * 2**num_promotions)
        assert confirmed(policy, policy.probed(probe, fits=True, reason="")) is None
        assert policy.precision == "fp16"
        assert confirmed(policy, judged(policy, 2 * [BAD_LOSS], finite_in=("bf16",))) is None
    assert after(policy, 20 * PROMOTION_STEPS * [CLEAN]) is None


def test_no_probe_where_no_faster_rung_can_be_had() -> None:
    assert after(policy_of("fp32", can_rerun=True, promotes=True), 2 * PROMOTION_STEPS * [CLEAN]) is None
    policy = stepped_down()
    policy.withdraw("fp16", "not any more")
    assert after(policy, 2 * PROMOTION_STEPS * [CLEAN]) is None


def test_a_probe_stays_below_the_cap_and_needs_no_scale_but_in_fp16() -> None:
    policy = stepped_down(loss_scale=LossScale(max_scale=2 * START))
    assert probe_after(policy, PROMOTION_STEPS).scale == 2 * START
    policy.move_by_hand("fp32")
    assert probe_after(policy, PROMOTION_STEPS) == Probe(1, 16.0)


# -- by hand -----------------------------------------------------------------------------------------------------------


def test_a_hand_moves_to_any_rung_and_ends_what_was_going_on() -> None:
    policy = blamed(policy_of(can_rerun=True))
    policy.move_by_hand("fp32")
    assert (policy.rung, policy.phase, policy.precision) == (2, "STEADY", "fp32")
    policy.move_by_hand("fp16")
    assert (policy.rung, policy.is_scaling, policy.scale.scale) == (0, True, START)


def test_a_hand_cannot_move_to_what_is_not_there() -> None:
    policy = policy_of()
    with pytest.raises(InvalidRequestError, match="'tf32' is not among") as refused:
        policy.move_by_hand("tf32")
    assert 'fallback=["tf32"]' in refused.value.next_step
    assert policy.rung == 0


# -- what is saved -----------------------------------------------------------------------------------------------------


def changed(state: dict[str, Any], part: str, **changes: Any) -> dict[str, Any]:
    return {**state, part: {**state[part], **changes}}


def test_a_refused_rung_stays_refused_after_a_save_and_load() -> None:
    policy, resumed = policy_of(), policy_of()
    demote = after(policy, 2 * [BAD_LOSS])
    assert isinstance(demote, Demote)
    assert confirmed(policy, policy.refuse(demote, "out of memory")) is None
    assert policy.precision == "fp32"
    resumed.load_state_dict(json.loads(json.dumps(policy.state_dict())))
    resumed.promotes = resumed.can_rerun = True
    assert probe_after(resumed, PROMOTION_STEPS).rung == 0, "promoted to a rung that does not fit"


@pytest.mark.parametrize("part", ["policy", "loss_scale"])
def test_a_state_that_lacks_something_is_refused_and_nothing_is_changed(part: str) -> None:
    saved = stepped_down().state_dict()
    for name in saved[part]:
        policy = policy_of(is_settled=False)
        before = policy.state_dict()
        lacking = {**saved, part: {key: value for key, value in saved[part].items() if key != name}}
        with pytest.raises(FormatError, match=name) as refused:
            policy.load_state_dict(lacking)
        assert refused.value.next_step
        assert policy.state_dict() == before


@pytest.mark.parametrize("rungs", [("fp16", "fp32"), ("fp16",)])
def test_a_state_of_other_rungs_is_refused(rungs: tuple[Precision, ...]) -> None:
    policy = policy_of(*rungs)
    before = policy.state_dict()
    with pytest.raises(FormatError, match="saved in bf16") as refused:
        policy.load_state_dict(stepped_down().state_dict())
    assert refused.value.next_step
    assert policy.state_dict() == before


def test_a_run_goes_on_without_the_rungs_above_the_one_that_was_saved() -> None:
    saved = policy_of("fp16", "bf16", "tf32", "fp32")
    saved.move_by_hand("bf16")
    assert confirmed(saved, after(saved, 2 * [BAD_LOSS])) is None
    assert (saved.precision, saved.phase) == ("tf32", "PROBATION")
    with_a_way_back, without = policy_of("bf16", "tf32", "fp32"), policy_of("tf32", "fp32")
    with_a_way_back.load_state_dict(saved.state_dict())
    assert after(with_a_way_back, 3 * [BAD_LOSS]) == Revert(0, ANY)
    without.load_state_dict(saved.state_dict())
    assert (without.precision, without.phase) == ("tf32", "STEADY")
    assert isinstance(after(without, 2 * [BAD_LOSS]), Demote)


@pytest.mark.parametrize("scale", [0.0, math.inf, math.nan, -1.0])
def test_a_state_whose_scale_cannot_work_is_refused(scale: float) -> None:
    policy = policy_of()
    before = policy.state_dict()
    with pytest.raises(InvalidRequestError, match="finite number above 0"):
        policy.load_state_dict(changed(stepped_down().state_dict(), "loss_scale", scale=scale))
    assert policy.state_dict() == before


def test_what_was_saved_is_a_copy_both_ways() -> None:
    policy, other = policy_of(), policy_of()
    assert after(policy, [OVERFLOW, BAD_LOSS]) is None
    saved = policy.state_dict()
    text = json.dumps(saved)
    other.load_state_dict(saved)
    for either in (policy, other):
        assert after(either, [OVERFLOW, CLEAN]) is None
        either.decline()
    assert json.dumps(saved) == text
