"""When the policy trips, and the phases it goes through: one example each."""

from __future__ import annotations

import math
from unittest.mock import ANY

import pytest
from policy_steps import BAD_LOSS, CLEAN, LOST, OVERFLOW, START, after, blamed, confirmed, judged, policy_of

from autotune_amp.core.config import LossScale
from autotune_amp.core.setting import Precision
from autotune_amp.runtime.actions import Blame, Demote, Diagnose, Measure, Rescale, Revert, Signal, Stop, Warn
from autotune_amp.runtime.policy import Policy

# -- T1: the loss ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_settled", [False, True])
def test_two_bad_losses_running_trip(is_settled: bool) -> None:
    policy = policy_of(is_settled=is_settled)
    assert after(policy, [BAD_LOSS, CLEAN, BAD_LOSS, BAD_LOSS]) == Demote(1, ANY, is_tentative=True)


def test_three_bad_losses_in_50_steps_trip() -> None:
    spread = [BAD_LOSS, *23 * [CLEAN], BAD_LOSS, *24 * [CLEAN], BAD_LOSS]
    assert len(spread) == 50
    tripped = after(policy_of(can_rerun=True), spread)
    assert tripped == Diagnose(ANY)
    assert after(policy_of(), [*spread[:-1], CLEAN, BAD_LOSS]) is None, "three in 51"


def test_a_bad_loss_leaves_the_scale_as_it_was() -> None:
    policy = policy_of()
    assert after(policy, [BAD_LOSS]) is None
    assert policy.scale.scale == policy.scale_before_burst == START
    assert (policy.num_updates, policy.num_skips) == (5, 1)


@pytest.mark.parametrize("rung", ["bf16", "fp32"])
def test_bad_gradients_count_as_bad_losses_where_there_is_no_scale(rung: Precision) -> None:
    tripped = after(policy_of(rung, can_rerun=True), 2 * [OVERFLOW])
    assert tripped == Diagnose(ANY)


def test_something_bad_is_watched_until_it_is_long_past() -> None:
    policy = policy_of()
    assert not policy.is_watching
    watched = []
    for signal in [BAD_LOSS, *50 * [CLEAN]]:
        policy.observe(signal)
        watched.append(policy.is_watching)
    assert watched == 50 * [True] + [False]


# -- T2, T3, and the allowance at the start ----------------------------------------------------------------------------


def test_an_overflow_that_would_cross_the_floor_trips() -> None:
    policy = policy_of(loss_scale=LossScale(init_scale=4.0, min_scale=1.0))
    assert after(policy, 3 * [OVERFLOW]) == Demote(1, ANY, is_tentative=True)
    assert policy.scale.scale == 1.0


def test_the_floor_is_12_octaves_below_the_scale_that_the_run_settled_at() -> None:
    policy = policy_of(is_settled=False)
    assert after(policy, [*20 * [OVERFLOW], *4 * [CLEAN]]) is None
    assert policy.scale.scale == 2.0**-4
    assert policy.scale.floor == 2.0**-16


def test_the_floor_is_settled_however_the_start_ends() -> None:
    policy = blamed(policy_of(is_settled=False, can_rerun=True))
    assert after(policy, 300 * [CLEAN]) is None
    assert (policy.phase, policy.scale.scale, policy.scale.floor) == ("STEADY", START, 1.0)


def test_the_floor_is_settled_when_a_hand_ends_the_start() -> None:
    policy = policy_of(is_settled=False)
    policy.move_by_hand("fp16")
    assert (policy.phase, policy.scale.floor) == ("STEADY", 1.0)


def test_eight_skips_in_200_steps_that_cost_three_octaves_trip() -> None:
    policy = policy_of(can_rerun=True)
    assert after(policy, 8 * [OVERFLOW]) == Diagnose(ANY)
    assert policy.scale_before_burst == START
    assert policy.scale.scale == START / 2**8


def test_eight_skips_in_more_than_200_steps_do_not_trip() -> None:
    in_time = [*7 * [OVERFLOW, *27 * [CLEAN]], *3 * [CLEAN], OVERFLOW]
    assert len(in_time) == 200
    assert isinstance(after(policy_of(), in_time), Demote)
    assert after(policy_of(), [*in_time[:-1], CLEAN, OVERFLOW]) is None


def test_skips_that_the_scale_grows_back_after_do_not_trip() -> None:
    policy = policy_of(loss_scale=LossScale(growth_interval=1))
    assert after(policy, 100 * [OVERFLOW, CLEAN]) is None
    assert policy.num_skips == 100


def test_skips_that_hysteresis_forgives_cost_no_octaves() -> None:
    policy = policy_of(loss_scale=LossScale(hysteresis=8))
    assert after(policy, 9 * [OVERFLOW]) is None
    assert isinstance(after(policy, [OVERFLOW]), Demote), "the third octave"


def test_the_first_descent_is_no_fault_however_long() -> None:
    policy = policy_of(is_settled=False)
    assert after(policy, [*10 * [OVERFLOW], *3 * [CLEAN], *10 * [OVERFLOW], CLEAN]) is None
    assert policy.phase == "STEADY"
    assert after(policy, 7 * [OVERFLOW]) is None, "what was lost before is forgotten"
    assert isinstance(after(policy, [OVERFLOW]), Demote)


def test_a_first_descent_to_nothing_trips() -> None:
    policy = policy_of(is_settled=False)
    assert after(policy, 40 * [OVERFLOW]) is None
    assert policy.scale.scale == 2.0**-24
    assert isinstance(after(policy, [OVERFLOW]), Demote)


def test_a_first_descent_below_its_usual_end_is_diagnosed_once_and_cleared() -> None:
    policy = policy_of(is_settled=False, can_rerun=True)
    assert judged(policy, 17 * [OVERFLOW], pins=("layer",)) is None
    assert policy.startup_was_cleared
    assert after(policy, 23 * [OVERFLOW]) is None
    assert judged(policy, [OVERFLOW]) == Demote(2, ANY, False)


def test_a_bad_loss_does_not_make_a_descent_a_fault() -> None:
    policy = policy_of(is_settled=False, can_rerun=True)
    assert judged(policy, [BAD_LOSS, *17 * [OVERFLOW]]) is None


def test_a_descent_that_a_rerun_could_not_judge_goes_on_as_without_a_rerun() -> None:
    policy = policy_of(is_settled=False, can_rerun=True)
    assert judged(policy, 17 * [OVERFLOW], is_precision=None) is None


# -- T4: silent underflow ----------------------------------------------------------------------------------------------


def test_underflow_raises_the_scale_first() -> None:
    policy = policy_of()
    rescale = after(policy, [LOST])
    assert rescale == Rescale(START * 64, ANY)
    assert confirmed(policy, rescale) is None
    assert (policy.scale.scale, policy.rung, policy.phase) == (START * 64, 0, "STEADY")


def test_the_scale_is_raised_to_its_cap_at_most_and_underflow_there_trips() -> None:
    policy = policy_of(loss_scale=LossScale(max_scale=START * 2))
    assert confirmed(policy, after(policy, [LOST])) is None
    assert policy.scale.scale == START * 2
    assert after(policy, [LOST]) == Demote(1, ANY, is_tentative=True)


def test_underflow_where_overflows_hold_the_scale_down_trips() -> None:
    policy = policy_of()
    assert after(policy, [OVERFLOW, *198 * [CLEAN]]) is None
    assert isinstance(after(policy, [LOST]), Demote)
    assert isinstance(after(policy, [LOST]), Rescale), "the overflow is long past"


def test_overflows_that_undo_a_raise_are_no_octaves_lost() -> None:
    policy = policy_of()
    assert confirmed(policy, after(policy, [LOST])) is None
    assert after(policy, 8 * [OVERFLOW]) is None
    assert isinstance(after(policy, [OVERFLOW]), Demote), "three below where it was"


def test_a_raise_that_an_overflow_undid_is_not_tried_again_however_long_ago_that_was() -> None:
    policy = policy_of()
    assert confirmed(policy, after(policy, [LOST])) is None
    assert after(policy, [OVERFLOW, *250 * [CLEAN]]) is None
    assert isinstance(after(policy, [LOST]), Demote)


def test_after_a_move_the_scale_may_be_raised_again() -> None:
    policy = policy_of()
    assert confirmed(policy, after(policy, [LOST])) is None
    assert after(policy, [OVERFLOW, *250 * [CLEAN]]) is None
    policy.move_by_hand("fp16")
    assert isinstance(after(policy, [LOST]), Rescale)


@pytest.mark.parametrize("signal", [CLEAN, Signal(lost_share=0.01)])
def test_little_lost_is_nothing_lost(signal: Signal) -> None:
    assert after(policy_of(), [signal]) is None


def test_underflow_does_not_count_at_the_start_nor_where_there_is_no_scale() -> None:
    assert after(policy_of(is_settled=False), [LOST]) is None
    assert after(policy_of("bf16", "fp32"), [LOST]) is None


def test_underflow_is_measured_where_it_can_be() -> None:
    policy = policy_of(can_rerun=True)
    measure = after(policy, [OVERFLOW, LOST])
    assert isinstance(measure, Measure)
    step_down = policy.judge_underflow(measure.reason, 0.5)
    assert step_down == Demote(1, ANY, is_tentative=True)


def test_underflow_that_measuring_denies_is_left_alone_for_the_dwell() -> None:
    policy = policy_of(can_rerun=True)
    measure = after(policy, [OVERFLOW, LOST])
    assert isinstance(measure, Measure)
    assert isinstance(policy.judge_underflow(measure.reason, 0.01), Warn)
    assert after(policy, 198 * [LOST]) is None
    assert policy.rung == 0


@pytest.mark.parametrize("first", [OVERFLOW, BAD_LOSS])
def test_underflow_without_a_rung_below_warns_and_is_nobody_elses_fault(first: Signal) -> None:
    policy = policy_of("fp16", loss_scale=LossScale(init_scale=2.0, min_scale=1.0, max_scale=2.0))
    assert isinstance(after(policy, [first, LOST]), Warn)
    assert policy.phase == "STEADY"


# -- PROBATION: stepped down with nothing to rerun ---------------------------------------------------------------------


def on_probation() -> Policy:
    policy = policy_of()
    assert confirmed(policy, after(policy, 2 * [BAD_LOSS])) is None
    assert (policy.rung, policy.phase) == (1, "PROBATION")
    return policy


@pytest.mark.parametrize("first", [[], [OVERFLOW], [BAD_LOSS, OVERFLOW]])
def test_a_clean_step_accepts_a_tentative_demotion(first: list[Signal]) -> None:
    policy = on_probation()
    assert after(policy, [*first, CLEAN]) is None
    assert (policy.rung, policy.phase) == (1, "STEADY")


def test_three_bad_steps_revert_a_tentative_demotion_and_stop() -> None:
    policy = on_probation()
    revert = after(policy, 3 * [BAD_LOSS])
    assert revert == Revert(0, ANY)
    assert confirmed(policy, revert) == Stop(revert.reason, is_precision=False)
    assert (policy.rung, policy.phase, policy.scale.scale) == (0, "BLAMED", START)


def test_a_demotion_on_evidence_needs_no_probation() -> None:
    policy = policy_of(can_rerun=True)
    demote = judged(policy, 2 * [BAD_LOSS])
    assert demote == Demote(2, ANY, is_tentative=False)
    assert confirmed(policy, demote) is None
    assert (policy.rung, policy.phase) == (2, "STEADY")


# -- BLAMED: not precision ---------------------------------------------------------------------------------------------


def test_the_scale_from_before_the_burst_is_given_back_and_held() -> None:
    policy = policy_of(can_rerun=True, loss_scale=LossScale(growth_interval=3))
    assert isinstance(after(policy, [CLEAN, OVERFLOW, OVERFLOW, BAD_LOSS, BAD_LOSS]), Diagnose)
    before = policy.scale_before_burst
    assert policy.scale.scale == before / 4
    blame = policy.judge("NaN", reproduced=True, is_precision=False, finite_in=())
    assert blame == Blame(before, ANY)
    assert confirmed(policy, blame) is None
    assert after(policy, [OVERFLOW, *10 * [CLEAN], BAD_LOSS]) is None
    assert policy.scale.scale == before


def test_ten_bad_steps_in_a_row_stop_a_blamed_run() -> None:
    policy = blamed(policy_of(can_rerun=True))
    assert after(policy, [*9 * [BAD_LOSS], CLEAN, *9 * [OVERFLOW]]) is None
    stop = after(policy, [BAD_LOSS])
    assert isinstance(stop, Stop)
    assert not stop.is_precision
    assert after(policy, 180 * [BAD_LOSS]) is None, "said once; the caller may not halt"
    assert policy.rung == 0


def test_a_clean_step_after_the_dwell_ends_the_blame() -> None:
    policy = blamed(policy_of(can_rerun=True))
    assert after(policy, 199 * [CLEAN]) is None
    assert policy.phase == "BLAMED"
    assert after(policy, [BAD_LOSS]) is None
    assert policy.phase == "BLAMED"
    assert after(policy, [CLEAN]) is None
    assert policy.phase == "STEADY"


def test_a_demotion_made_shortly_before_was_in_error() -> None:
    policy = policy_of("fp16", "bf16", "tf32", "fp32", can_rerun=True)
    for rung in ("bf16", "tf32"):
        assert confirmed(policy, judged(policy, 2 * [BAD_LOSS], is_precision=None, finite_in=())) is None
        assert policy.precision == rung
        assert after(policy, [CLEAN]) is None
    assert after(policy, 196 * [CLEAN]) is None
    assert blamed(policy).precision == "fp16"


def test_a_demotion_made_on_evidence_stays_whatever_comes_after_it() -> None:
    policy = policy_of(can_rerun=True)
    assert confirmed(policy, judged(policy, 2 * [BAD_LOSS], finite_in=("bf16",))) is None
    assert after(policy, 100 * [CLEAN]) is None
    assert blamed(policy).precision == "bf16"


def test_a_demotion_that_the_run_has_dwelt_in_stays() -> None:
    policy = policy_of(can_rerun=True)
    assert confirmed(policy, judged(policy, 2 * [BAD_LOSS], is_precision=None)) is None
    assert after(policy, 198 * [CLEAN]) is None
    assert blamed(policy).precision == "bf16"


def losses(*values: float) -> list[Signal]:
    return [Signal(loss=value) for value in values]


def test_a_run_whose_loss_has_grown_diverges_and_no_precision_mends_that() -> None:
    policy = policy_of(can_rerun=True)
    blame = after(policy, [*losses(*15 * [2.0], *8 * [9.0]), *2 * [BAD_LOSS]])
    assert blame == Blame(START, ANY)
    assert "4.5 times its best" in blame.reason


@pytest.mark.parametrize(
    "history",
    [
        losses(*15 * [2.0], *15 * [8.0]),
        losses(*15 * [2.0], *5 * [1e9]),
        losses(*15 * [2.0], *15 * [1e-7], *15 * [1e-6]),
        losses(*14 * [2.0], 1e9),
        losses(*15 * [-2.0], *15 * [9.0]),
        losses(*15 * [0.0], *15 * [9.0]),
        losses(*15 * [2.0], *15 * [math.inf, math.nan]),
    ],
    ids=["4 times", "not yet typical", "lower than at first", "too short", "negative", "zero", "not finite"],
)
def test_a_loss_that_has_not_clearly_grown_says_nothing(history: list[Signal]) -> None:
    assert isinstance(after(policy_of(can_rerun=True), [*history, *2 * [BAD_LOSS]]), Diagnose)
