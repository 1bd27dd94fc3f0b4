"""When the policy trips, what it makes of the answers that it asks for, what it remembers; its loss scale's rule.

A rung is an index: 0 fp16, 1 bf16, 2 fp32 unless a test says.
"""

from __future__ import annotations

import json
import random
from functools import partial
from typing import Any
from unittest.mock import ANY

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from autotune_amp.core.config import MIN_LOSS_SCALE, LossScale
from autotune_amp.core.errors import InvalidRequestError
from autotune_amp.core.precisions import Precision
from autotune_amp.runtime.policy import (
    DWELL_STEPS,
    MAX_PROMOTIONS,
    NUM_BLAMED_STEPS,
    PROMOTION_STEPS,
    Action,
    DiagnosisResult,
    Policy,
    ScaleRule,
    Signal,
)

CLEAN = Signal()
OVERFLOW = Signal(overflow=True)
BAD_LOSS = Signal(overflow=True, loss_nonfinite=True)  # the gradients of such a loss are not finite either
LOST = Signal(lost_share=0.02)
START = 65536.0
TENTATIVE = Action("demotion", ANY, 1, is_tentative=True)
DIAGNOSE, BLAME, REVERT, WARN = (Action(kind, ANY) for kind in ("diagnose", "not_precision", "revert", "warn"))
STOP, NO_RUNG = Action("stop", ANY), Action("stop", ANY, is_precision=True)
rescaled = partial(Action, "rescale", ANY, 0)
STARTING = {"is_settled": False}
RERUNS = {"can_rerun": True}


def policy_of(*rungs: Precision, is_settled: bool = True, loss_scale: LossScale | None = None, **more: Any) -> Policy:
    policy = Policy(rungs or ("fp16", "bf16", "fp32"), loss_scale, **more)
    if is_settled:
        assert after(policy, 4 * [CLEAN]) is None
        assert policy.phase == "STEADY"
    return policy


def after(policy: Policy, signals: list[Signal]) -> Action | None:
    """What the last of `signals` calls for; those before it call for nothing."""
    for signal in signals[:-1]:
        assert policy.observe(signal) is None
    return policy.observe(signals[-1])


def confirmed(policy: Policy, action: Action | None) -> Action | None:
    assert action is not None
    return policy.confirm(action)


def judged(policy: Policy, signals: list[Signal], **more: Any) -> Action | None:
    """What follows from `signals` and a rerun that puts the fault on precision."""
    diagnose = after(policy, signals)
    assert diagnose is not None
    assert diagnose == DIAGNOSE
    return policy.answer_diagnosis(
        diagnose.reason, DiagnosisResult(**{"reproduced": True, "is_precision": True, "finite_in": ("fp32",), **more})
    )


def blamed(policy: Policy) -> Policy:
    """After two bad losses and a rerun that says that it is not precision."""
    assert confirmed(policy, judged(policy, 2 * [BAD_LOSS], is_precision=False, finite_in=())) is None
    assert policy.phase == "BLAMED"
    return policy


def losses(*values: float) -> list[Signal]:
    return [Signal(loss=value) for value in values]


# -- what trips, and what only just does not ---------------------------------------------------------------------------

SPREAD = [BAD_LOSS, *23 * [CLEAN], BAD_LOSS, *24 * [CLEAN], BAD_LOSS]  # three in 50
EIGHT = [*7 * [OVERFLOW, *27 * [CLEAN]], *3 * [CLEAN], OVERFLOW]  # in 200
FLOOR = {"loss_scale": LossScale(init_scale=4.0, min_scale=1.0)}
HELD = {"loss_scale": LossScale(init_scale=2.0, min_scale=1.0, max_scale=2.0)}
GROWN = losses(*15 * [2.0], *8 * [9.0])
CASES: dict[str, tuple[tuple[Precision, ...], dict[str, Any], list[Signal], Action | None]] = {
    "two bad losses running": ((), {}, [BAD_LOSS, CLEAN, BAD_LOSS, BAD_LOSS], TENTATIVE),
    "three bad losses in 50 steps": ((), RERUNS, SPREAD, DIAGNOSE),
    "three bad losses in 51 steps": ((), {}, [*SPREAD[:-1], CLEAN, BAD_LOSS], None),
    "gradients in bf16, which has no scale": (("bf16",), RERUNS, 2 * [OVERFLOW], DIAGNOSE),
    "bad losses in the last rung": (("fp32",), {}, 2 * [BAD_LOSS], BLAME),
    "an overflow across the floor": ((), FLOOR, 3 * [OVERFLOW], TENTATIVE),
    "eight skips that cost three octaves": ((), RERUNS, 8 * [OVERFLOW], DIAGNOSE),
    "eight skips in 200 steps": ((), {}, EIGHT, TENTATIVE),
    "eight skips in 201 steps": ((), {}, [*EIGHT[:-1], CLEAN, OVERFLOW], None),
    "no rung below": (("fp16",), {}, 8 * [OVERFLOW], WARN),
    "skips grown back from": ((), {"loss_scale": LossScale(growth_interval=1)}, 100 * [OVERFLOW, CLEAN], None),
    "three octaves past hysteresis": ((), {"loss_scale": LossScale(hysteresis=8)}, 10 * [OVERFLOW], TENTATIVE),
    "the first descent": ((), STARTING, [*10 * [OVERFLOW], *3 * [CLEAN], *10 * [OVERFLOW], *4 * [CLEAN]], None),
    "a first descent to nothing": ((), STARTING, 41 * [OVERFLOW], TENTATIVE),
    "underflow raises the scale": ((), {}, [LOST], rescaled(START * 64)),
    "to its cap at most": ((), {"loss_scale": LossScale(max_scale=START * 2)}, [LOST], rescaled(START * 2)),
    "underflow where overflows hold it down": ((), {}, [OVERFLOW, *198 * [CLEAN], LOST], TENTATIVE),
    "underflow long after an overflow": ((), {}, [OVERFLOW, *199 * [CLEAN], LOST], rescaled(START * 32)),
    "little is lost": ((), {}, [Signal(lost_share=0.01)], None),
    "no gradient where there is no loss": ((), {}, [Signal(lost_share=1.0, loss=0.0)], None),
    "underflow with no rung below": (("fp16",), HELD, [OVERFLOW, LOST], WARN),
    "a loss that has grown": ((), RERUNS, [*GROWN, *2 * [BAD_LOSS]], BLAME),
    "a loss that has stayed grown": ((), RERUNS, [*losses(*15 * [2.0], *15 * [9.0]), *2 * [BAD_LOSS]], BLAME),
    "a loss still below where it began": (
        (),
        RERUNS,
        [*losses(*15 * [10.0], *15 * [1.0], *15 * [6.0]), *2 * [BAD_LOSS]],
        DIAGNOSE,
    ),
    "4 times": ((), RERUNS, [*losses(*15 * [2.0], *15 * [8.0]), *2 * [BAD_LOSS]], DIAGNOSE),
    "not yet typical": ((), RERUNS, [*losses(*15 * [2.0], *5 * [1e9]), *2 * [BAD_LOSS]], DIAGNOSE),
}


@pytest.mark.parametrize("name", CASES)
def test_what_the_last_of_these_signals_calls_for(name: str) -> None:
    rungs, options, signals, expected = CASES[name]
    assert after(policy_of(*rungs, **options), signals) == expected


def test_a_bad_loss_leaves_the_scale_as_it_was_and_is_watched_until_it_is_long_past() -> None:
    policy = policy_of()
    assert not policy.is_watching
    watched = []
    for signal in [BAD_LOSS, *50 * [CLEAN]]:
        policy.observe(signal)
        watched.append(policy.is_watching)
    assert watched == 50 * [True] + [False]
    assert policy.scale.scale == policy.scale_before_burst == START
    assert policy.num_updates == 55


def test_the_floor_is_12_octaves_below_where_the_run_settled_however_the_start_ends() -> None:
    policy = policy_of(is_settled=False)
    assert after(policy, [*20 * [OVERFLOW], *4 * [CLEAN]]) is None
    assert (policy.scale.scale, policy.scale.floor) == (2.0**-4, 2.0**-16)
    policy = policy_of(is_settled=False)
    policy.move_by_hand("fp16")
    assert (policy.phase, policy.scale.floor) == ("STEADY", 1.0)
    assert blamed(policy_of(is_settled=False, can_rerun=True)).scale.floor == 1.0


def test_a_raise_that_an_overflow_undid_is_not_tried_again_until_a_move() -> None:
    policy = policy_of()
    assert confirmed(policy, after(policy, [LOST])) is None
    assert after(policy, [OVERFLOW, *250 * [CLEAN]]) is None
    assert after(policy, [LOST]) == TENTATIVE, "however long ago that was"
    policy.move_by_hand("fp16")
    assert after(policy, [LOST]) == rescaled(ANY)


def test_underflow_that_nothing_can_be_done_about_is_told_once_in_a_dwell() -> None:
    policy = policy_of("fp16", loss_scale=HELD["loss_scale"])
    assert after(policy, [OVERFLOW, LOST]) == WARN
    assert after(policy, (DWELL_STEPS - 1) * [LOST]) is None
    assert policy.observe(LOST) is not None


def test_advice_after_a_long_descent_is_followed_by_a_stop() -> None:
    policy = policy_of(is_settled=False)
    policy.can_move = False
    assert after(policy, 41 * [OVERFLOW]) == Action("advise", ANY)
    policy.advise()
    assert policy.phase == "ADVISED"
    assert after(policy, (NUM_BLAMED_STEPS - 2) * [OVERFLOW]) == NO_RUNG


# -- PROBATION: stepped down with nothing to rerun ---------------------------------------------------------------------


@pytest.mark.parametrize("first", [[], [OVERFLOW], [BAD_LOSS, OVERFLOW]])
def test_a_tentative_demotion_stands_with_a_clean_step_and_falls_with_three_bad_ones(first: list[Signal]) -> None:
    accepted, reverted = policy_of(), policy_of()
    for policy in (accepted, reverted):
        assert confirmed(policy, after(policy, 2 * [BAD_LOSS])) is None
        assert (policy.rung, policy.phase) == (1, "PROBATION")
    assert after(accepted, [*first, CLEAN]) is None
    assert (accepted.rung, accepted.phase) == (1, "STEADY")
    revert = after(reverted, [*first, *(3 - len(first)) * [BAD_LOSS]])
    assert revert == REVERT
    assert confirmed(reverted, revert) == STOP
    assert (reverted.rung, reverted.phase, reverted.scale.scale) == (0, "BLAMED", START)


# -- BLAMED: not precision ---------------------------------------------------------------------------------------------


def test_the_scale_from_before_the_burst_is_given_back_and_does_not_grow() -> None:
    policy = policy_of(can_rerun=True, loss_scale=LossScale(growth_interval=3))
    signals = [CLEAN, OVERFLOW, OVERFLOW, BAD_LOSS, BAD_LOSS]
    before = policy.scale.scale
    blame = judged(policy, signals, is_precision=False, finite_in=())
    assert blame == BLAME
    assert policy.scale.scale == before / 4
    assert confirmed(policy, blame) is None
    assert after(policy, [*10 * [CLEAN], BAD_LOSS]) is None
    assert policy.scale.scale == before


def test_overflows_after_the_burst_back_the_scale_off_and_count_to_the_stop_once_it_is_at_its_floor() -> None:
    policy = blamed(policy_of(can_rerun=True, loss_scale=LossScale(min_scale=1.0)))
    assert after(policy, [*16 * [OVERFLOW], CLEAN, *9 * [OVERFLOW]]) is None
    assert policy.scale.scale == 1.0
    assert after(policy, [OVERFLOW]) == STOP


def test_octaves_that_were_gained_back_do_not_count_to_the_scale_from_before_the_skips() -> None:
    policy = policy_of(can_rerun=True, loss_scale=LossScale(growth_interval=10))
    assert after(policy, [*5 * [OVERFLOW], *10 * [CLEAN], *3 * [OVERFLOW]]) == DIAGNOSE
    assert policy.scale.scale == START / 2**7
    assert policy.scale_before_burst == START


def test_ten_bad_steps_in_a_row_stop_a_blamed_run() -> None:
    policy = blamed(policy_of(can_rerun=True))
    assert after(policy, [*9 * [BAD_LOSS], CLEAN, *9 * [BAD_LOSS]]) is None
    assert after(policy, [BAD_LOSS]) == STOP
    assert after(policy, 180 * [BAD_LOSS]) is None, "said once; the caller may not halt"
    assert policy.rung == 0


def test_a_clean_step_after_the_dwell_ends_the_blame() -> None:
    policy = blamed(policy_of(can_rerun=True))
    assert after(policy, [*199 * [CLEAN], BAD_LOSS]) is None
    phase_before = policy.phase
    assert after(policy, [CLEAN]) is None
    assert (phase_before, policy.phase) == ("BLAMED", "STEADY")


def test_a_tentative_demotion_made_shortly_before_was_in_error() -> None:
    on_trial: dict[str, Any] = {"is_precision": None, "finite_in": ()}
    for num_clean, more, ends_in in [
        (196, on_trial, "fp16"),
        (199, on_trial, "bf16"),
        (100, {"finite_in": ("bf16",)}, "bf16"),
    ]:
        policy = policy_of(can_rerun=True)
        assert confirmed(policy, judged(policy, 2 * [BAD_LOSS], **more)) is None
        assert policy.precision == "bf16"
        assert after(policy, num_clean * [CLEAN]) is None
        assert blamed(policy).precision == ends_in


# -- Diagnose ----------------------------------------------------------------------------------------------------------

ANSWERS: list[tuple[dict[str, Any], Action]] = [
    ({"finite_in": ("bf16", "fp32")}, Action("demotion", ANY, 1)),
    ({}, Action("demotion", ANY, 2)),
    ({"finite_in": ()}, NO_RUNG),
    ({"is_precision": None, "finite_in": (), "pins": ("ff.wo",)}, TENTATIVE),
    ({"pins": ("ff.wo",)}, Action("pin", ANY, modules=("ff.wo",))),
    ({"is_precision": False}, BLAME),
    ({"reproduced": False}, WARN),
]


@pytest.mark.parametrize(("answer", "expected"), ANSWERS)
def test_what_follows_from_a_rerun(answer: dict[str, Any], expected: Action) -> None:
    assert judged(policy_of(can_rerun=True), 2 * [BAD_LOSS], **answer) == expected


def test_modules_are_pinned_once_and_then_it_steps_down() -> None:
    policy = policy_of(can_rerun=True)
    pin = judged(policy, [OVERFLOW, BAD_LOSS, BAD_LOSS], pins=("ff.wo",))
    assert policy.scale.scale == START / 2
    assert confirmed(policy, pin) is None
    assert (policy.rung, policy.phase, policy.scale.scale) == (0, "STEADY", START)
    assert judged(policy, 2 * [BAD_LOSS], pins=("ff.wi",)) == Action("demotion", ANY, 2)


def test_what_the_rerun_does_not_show_twice_without_a_clean_step_is_stepped_down_from_on_trial() -> None:
    policy = policy_of(can_rerun=True)
    for _ in range(3):
        assert judged(policy, 2 * [BAD_LOSS], reproduced=False) == WARN
        assert after(policy, NUM_BLAMED_STEPS * [CLEAN]) is None
    assert judged(policy, 2 * [BAD_LOSS], reproduced=False) == WARN
    assert after(policy, (NUM_BLAMED_STEPS - 1) * [BAD_LOSS]) is None
    assert judged(policy, [BAD_LOSS], reproduced=False) == TENTATIVE


def test_a_declined_trip_is_not_repeated_before_the_dwell_is_over() -> None:
    policy = policy_of()
    assert after(policy, 2 * [BAD_LOSS]) == TENTATIVE
    policy.decline()
    assert after(policy, (DWELL_STEPS - 1) * [BAD_LOSS]) is None
    assert policy.observe(BAD_LOSS) == TENTATIVE


def test_withdrawn_and_refused_rungs_are_passed_over_and_the_reasons_told_in_the_end() -> None:
    policy = policy_of("fp16", "bf16", "tf32", "fp32")
    policy.withdraw("bf16", "emulated")
    policy.withdraw("fp16", "the run is in it")
    demote = after(policy, 2 * [BAD_LOSS])
    assert demote == Action("demotion", ANY, 2, is_tentative=True)
    demote = policy.refuse(demote, "out of memory")
    assert demote == Action("demotion", ANY, 3, is_tentative=True)
    stop = policy.refuse(demote, "too slow")
    assert stop == NO_RUNG
    assert stop.reason.endswith("bf16: emulated; tf32: out of memory; fp32: too slow")


def test_a_rung_refused_after_a_rerun_leaves_the_reruns_evidence_standing() -> None:
    policy = policy_of(can_rerun=True)
    demote = judged(policy, 2 * [BAD_LOSS], finite_in=("bf16",))
    assert demote is not None
    assert policy.refuse(demote, "out of memory") == NO_RUNG


# -- Promote -----------------------------------------------------------------------------------------------------------


def stepped_down(**more: Any) -> Policy:
    """In bf16, on evidence, after a burst that took the scale from 65536 to 256."""
    policy = policy_of(**{"can_rerun": True, "promotes": True, **more})
    assert confirmed(policy, judged(policy, 8 * [OVERFLOW], finite_in=("bf16",))) is None
    assert (policy.precision, policy.scale.scale) == ("bf16", 256)
    return policy


def probe_after(policy: Policy, num_clean: int) -> Action:
    probe = after(policy, num_clean * [CLEAN])
    assert probe is not None
    assert probe.kind == "probe"
    return probe


def test_after_2000_clean_steps_a_probe_that_is_finite_promotes() -> None:
    policy = stepped_down()
    assert after(policy, [*(PROMOTION_STEPS - 1) * [CLEAN], OVERFLOW]) is None
    probe = probe_after(policy, PROMOTION_STEPS)
    assert probe == Action("probe", ANY, 0, START * 16), "bad steps below do not change what scale it needs"
    promote = policy.probed(probe, is_finite=True)
    assert promote == Action("promotion", ANY, 0)
    assert confirmed(policy, promote) is None
    assert (policy.precision, policy.phase, policy.scale.scale) == ("fp16", "STEADY", START)
    capped = stepped_down(loss_scale=LossScale(max_scale=2 * START))
    assert probe_after(capped, PROMOTION_STEPS).scale == 2 * START


@pytest.mark.parametrize("options", [{"promotes": False}, {"can_rerun": False}, {"withdrawn": {"fp16": "too slow"}}])
def test_nobody_is_promoted_unasked_untried_or_to_what_is_withdrawn(options: dict[str, Any]) -> None:
    policy = stepped_down()
    for name, value in options.items():
        setattr(policy, name, value)
    assert after(policy, 3 * PROMOTION_STEPS * [CLEAN]) is None


def test_a_promotion_names_a_loss_scale_where_there_is_one() -> None:
    given: dict[Precision, str] = {"fp16": " at scale 4", "bf16": ""}
    for precision, scale in given.items():
        found = Policy([precision, "fp32"]).probed(Action("probe", "2000 clean steps", 0, 4.0), is_finite=True)
        assert found is not None
        assert found.reason == f"2000 clean steps, and finite{scale}"


def test_each_failure_doubles_the_wait_and_three_promotions_are_the_most() -> None:
    policy = stepped_down()
    assert policy.probed(probe_after(policy, PROMOTION_STEPS), is_finite=False) is None
    for num_failures in range(1, MAX_PROMOTIONS + 1):
        probe = probe_after(policy, PROMOTION_STEPS * 2**num_failures)
        assert confirmed(policy, policy.probed(probe, is_finite=True)) is None
        assert confirmed(policy, judged(policy, 2 * [BAD_LOSS], finite_in=("bf16",))) is None
    assert after(policy, 40 * PROMOTION_STEPS * [CLEAN]) is None


def test_a_promotion_fails_with_the_first_demotion_after_it_alone() -> None:
    policy = stepped_down()
    assert confirmed(policy, policy.probed(probe_after(policy, PROMOTION_STEPS), is_finite=True)) is None
    for finite_in in ("bf16", "fp32"):
        assert confirmed(policy, judged(policy, 2 * [BAD_LOSS], finite_in=(finite_in,))) is None
        assert (policy.precision, policy.num_failures) == (finite_in, 1)


# -- by hand, and what is saved ----------------------------------------------------------------------------------------


def test_a_hand_moves_to_any_rung_there_is_and_ends_what_was_going_on() -> None:
    policy = blamed(policy_of(can_rerun=True))
    policy.move_by_hand("fp32")
    assert (policy.rung, policy.phase, policy.precision) == (2, "STEADY", "fp32")
    policy.move_by_hand("fp16")
    assert (policy.rung, policy.is_scaling, policy.scale.scale) == (0, True, START)
    with pytest.raises(InvalidRequestError, match="tf32") as refused:
        policy.move_by_hand("tf32")
    assert 'fallback=["tf32"]' in refused.value.next_step
    assert policy.rung == 0


def test_a_run_goes_on_without_the_rungs_above_the_one_that_was_saved() -> None:
    saved = policy_of("fp16", "bf16", "fp32")
    assert confirmed(saved, after(saved, 2 * [BAD_LOSS])) is None
    assert (saved.precision, saved.phase) == ("bf16", "PROBATION")
    with_a_way_back, without = policy_of(), policy_of("bf16", "fp32")
    with_a_way_back.restore(with_a_way_back.validated(saved.state_dict()))
    assert after(with_a_way_back, 3 * [BAD_LOSS]) == REVERT
    without.restore(without.validated(saved.state_dict()))
    assert (without.precision, without.phase) == ("bf16", "STEADY")
    assert after(without, 2 * [BAD_LOSS]) == TENTATIVE


def test_a_state_from_another_machine_brings_back_no_rung_that_this_one_lacks() -> None:
    saved, policy = policy_of(), policy_of()
    saved.withdraw("fp32", "too slow")
    policy.withdraw("bf16", "emulated")
    policy.restore(policy.validated(saved.state_dict()))
    assert policy.withdrawn == {"bf16": "emulated", "fp32": "too slow"}


def test_nothing_random_breaks_the_policy_and_saved_and_loaded_it_does_the_same() -> None:
    draw = random.Random(0)
    for _ in range(20):
        options: dict[str, Any] = {
            "can_rerun": draw.random() < 0.7,
            "promotes": True,
            "loss_scale": LossScale(growth_interval=10),
        }
        policy = policy_of(is_settled=False, **options)
        for _ in range(20):
            twin = policy_of(is_settled=False, **options)
            twin.restore(twin.validated(json.loads(json.dumps(policy.state_dict()))))
            overflow, bad_loss, longest = draw.choice(
                [(0.0, 0.0, 3000), (0.05, 0.02, 300), (0.3, 0.3, 30), (1.0, 0, 9)]
            )
            for _ in range(draw.randint(1, longest)):
                share = draw.random() if draw.random() < 0.01 else None
                signal = Signal(draw.random() < overflow, draw.random() < bad_loss, share)
                action, other = policy.observe(signal), twin.observe(signal)
                while action is not None:
                    assert action == other
                    answer: tuple[Any, ...] = (action,)
                    if action.kind in ("stop", "warn"):
                        break
                    if action.kind == "diagnose":
                        finite_in = tuple(rung for rung in policy.rungs if draw.random() < 0.8)
                        is_precision = draw.choice((True, True, False, None))
                        pins = ("layer",) if draw.random() < 0.2 else ()
                        answer = (
                            action.reason,
                            DiagnosisResult(draw.random() < 0.9, finite_in, None, pins, is_precision),
                        )
                    method = {"diagnose": "answer_diagnosis", "probe": "probed"}.get(action.kind, "confirm")
                    more = {"is_finite": draw.random() < 0.9} if action.kind == "probe" else {}
                    action, other = (getattr(each, method)(*answer, **more) for each in (policy, twin))
                assert policy.num_promotions <= MAX_PROMOTIONS
                assert MIN_LOSS_SCALE <= policy.scale.floor <= policy.scale.scale <= policy.scale.max_scale
            assert twin.state_dict() == policy.state_dict()


# -- the loss scale's rule: GradScaler's -------------------------------------------------------------------------------


def tell(rule: ScaleRule, overflow: bool) -> None:
    rule.overflow() if overflow else rule.clean()


@given(
    overflows=st.lists(st.booleans(), max_size=200),
    init_scale=st.floats(2.0**-10, 2.0**30),
    growth_factor=st.floats(1.01, 8.0),
    backoff_factor=st.floats(0.05, 0.99),
    growth_interval=st.integers(1, 6),
)
def test_within_its_bounds_the_scale_is_gradscalers_to_the_bit(overflows: list[bool], **parameters: Any) -> None:
    smallest, largest = MIN_LOSS_SCALE, 2.0**100
    rule = ScaleRule(LossScale(min_scale=smallest, max_scale=largest, **parameters))
    scaler = torch.amp.GradScaler("cpu", **parameters)
    scaler.scale(torch.zeros(()))
    assert rule.scale == scaler.get_scale()
    for overflow in overflows:
        tell(rule, overflow)
        found = {torch.device("cpu"): torch.tensor(float(overflow))}
        scaler._per_optimizer_states[0]["found_inf_per_device"] = found
        scaler.update()
        if not smallest <= scaler.get_scale() <= largest:
            assert rule.scale == (smallest if overflow else largest)
            return
        assert rule.scale == scaler.get_scale()
        assert rule.growth_tracker == scaler._get_growth_tracker()


@given(overflows=st.lists(st.booleans(), max_size=200), hysteresis=st.integers(1, 4), growth_interval=st.integers(1, 5))
def test_the_scale_backs_off_from_the_last_of_its_hysteresis_on_until_it_grows(
    overflows: list[bool], hysteresis: int, growth_interval: int
) -> None:
    rule = ScaleRule(
        LossScale(init_scale=2.0**-10, max_scale=2.0**1000, hysteresis=hysteresis, growth_interval=growth_interval)
    )
    num_since_growth = 0
    for overflow in overflows:
        before = rule.scale
        tell(rule, overflow)
        if overflow:
            num_since_growth += 1
            halves = num_since_growth >= hysteresis and before > rule.floor
            assert rule.scale == (before / 2 if halves else before)
        elif rule.scale > before:
            num_since_growth = 0


@pytest.mark.parametrize(("init_scale", "hysteresis"), [(1.0, 5), (1.5, 1)])
def test_the_floor_is_crossed_by_the_overflow_that_it_alone_holds_up(init_scale: float, hysteresis: int) -> None:
    rule = ScaleRule(LossScale(init_scale=init_scale, min_scale=1.0, hysteresis=hysteresis))
    for left in reversed(range(hysteresis)):
        assert rule.would_cross_floor == (left == 0)
        assert rule.overflow() == (left == 0)
    assert rule.scale == 1.0


@pytest.mark.parametrize(("largest_safe", "num_skips"), [(1000.0, 16), (2.0**-6, 22 + (20_000 - 22) // 2001)])
def test_a_run_that_is_stable_at_some_scale_costs_a_few_skips_and_no_trip(largest_safe: float, num_skips: int) -> None:
    """As with a loss that is summed, far below 1."""
    policy = policy_of(is_settled=False)
    overflows = []
    for _ in range(20_000):
        overflows.append(policy.scale.scale > largest_safe)
        assert policy.observe(Signal(overflow=overflows[-1])) is None
    assert (policy.rung, policy.phase, sum(overflows)) == (0, "STEADY", num_skips)
