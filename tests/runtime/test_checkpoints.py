"""Checkpoints: resumed anywhere, a run goes on as if it had never been interrupted; what is no good is refused."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from resumable import (
    ACCUMULATION_STEPS,
    CLEAN,
    LARGE_GRADIENT,
    NAN,
    STABLE,
    FeedForward,
    Run,
    comparable,
    normalized,
    used,
)
from torch import nn
from training import Batch, Loop, fp16

from autotune_amp.core.config import LossScale
from autotune_amp.core.errors import FormatError, InvalidRequestError
from autotune_amp.runtime.controller import PrecisionController

# Each: the batches, and what the run must have gone through.
SCRIPTS: dict[str, tuple[Callable[[], nn.Module], LossScale, Sequence[Batch], set[str]]] = {
    "growing, overflowing, hysteresis": (
        normalized,
        LossScale(init_scale=2.0**18, growth_interval=2, hysteresis=2),
        [*CLEAN[:8], LARGE_GRADIENT, *CLEAN[:5], LARGE_GRADIENT, LARGE_GRADIENT, *CLEAN[:8]],
        {"fp16", "STEADY", "STARTUP"},
    ),
    "pinned": (FeedForward, STABLE, CLEAN[:16], {"pin", "fp16"}),
    "reverted": (
        normalized,
        STABLE,
        [*CLEAN[:4], *[NAN] * 10, *CLEAN[4:10], NAN, *CLEAN[10:13]],
        {"revert", "PROBATION", "BLAMED", "stop"},
    ),
    "by hand": (normalized, STABLE, [*CLEAN[:9], NAN, *CLEAN[9:20]], {"by_hand", "fp32", "fp16"}),
}
BY_HAND: dict[int, Callable[[PrecisionController], None]] = {
    2: lambda steered: steered.set_precision("fp32"),
    6: lambda steered: steered.set_precision("fp16"),
    12: lambda steered: steered.disable(),
    16: lambda steered: steered.enable(),
}


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_resumed_run_goes_on_as_if_never_interrupted(name: str) -> None:
    make, loss_scale, script, expected = SCRIPTS[name]
    by_hand, reruns = BY_HAND if name == "by hand" else {}, name != "reverted"
    model, other = make(), make()
    config = fp16(accumulation_steps=ACCUMULATION_STEPS, loss_scale=loss_scale)

    def go_on(run: Run, start: int) -> tuple[list[dict[str, str]], list[bytes], set[str]]:
        facts, saved, seen = [], [], set()
        for index in range(start, len(script)):
            if index in by_hand:
                by_hand[index](run.controller)
            step = run.step(script[index])
            facts.append(comparable(step))
            seen |= {step["precision"], step["state"]["autotune_amp"]["steering"]["policy"]["phase"]}
            seen |= {record.kind for record in step["history"]}
            saved.append(b"" if start else run.save())
        return facts, saved, seen

    facts, saved, seen = go_on(Run(model, config, reruns=reruns), 0)
    assert expected <= seen
    # Within a window, too, but for running statistics: they are undone only where one process saw the whole window.
    for index in range(1, len(saved), 3 if make is FeedForward else 4):
        resumed = Run(other, config, reruns=reruns).load(saved[index], controller_first=index % 8 > 4)
        assert comparable(resumed.facts()) == facts[index], index
        assert go_on(resumed, index + 1)[0] == facts[index + 1 :], index


def test_a_run_rolled_back_in_the_same_objects_takes_its_later_pins_and_rung_back() -> None:
    model = FeedForward()
    run = Run(model, fp16(accumulation_steps=ACCUMULATION_STEPS, loss_scale=STABLE))
    saved, before = run.save(), comparable(run.facts())
    facts = [comparable(run.step(batch)) for batch in CLEAN[:8]]
    assert run.controller.status().pinned_modules == ("wo",)
    assert comparable(run.load(saved).facts()) == before
    assert [comparable(run.step(batch)) for batch in CLEAN[:8]] == facts


def test_a_state_loaded_while_an_action_waits_for_the_end_of_an_autocast_drops_the_action() -> None:
    model = normalized()
    controller = PrecisionController(fp16(), device="cpu", halt=False)
    loop = Loop(model, controller)
    saved = controller.state_dict()

    for _ in range(2):
        with controller.autocast():
            loop.step(NAN)
    controller.load_state_dict(saved)
    loop.run(6 * [NAN])
    assert {move.kind for move in controller.status().history} == {"not_precision"}


# -- states that are no good -------------------------------------------------------------------------------------------


def refused(controller: PrecisionController, state: Any) -> InvalidRequestError:
    before = repr((controller.state_dict(), controller.config, controller.get_scale()))
    with pytest.raises(InvalidRequestError) as caught:
        controller.load_state_dict(state)
    assert repr((controller.state_dict(), controller.config, controller.get_scale())) == before
    assert caught.value.next_step
    return caught.value


@pytest.mark.parametrize("scale", [0.0, math.inf, math.nan, None, "1024", True, torch.tensor(0.0)])
def test_a_scale_that_cannot_work_is_refused(scale: Any) -> None:
    controller = used()
    state = controller.state_dict()
    broken = copy.deepcopy(state)
    broken["autotune_amp"]["steering"]["loss_scale"]["scale"] = scale
    refused(controller, broken)
    for given_state in (state, torch.amp.GradScaler("cpu").state_dict()):
        assert "finite number above 0" in refused(controller, given_state | {"scale": scale}).message


@pytest.mark.parametrize("state", [None, [], {"scale": 8.0}, {"autotune_amp": 3}, {"_growth_tracker": "one"}])
def test_what_is_no_state_or_a_damaged_one_is_refused(state: Any) -> None:
    controller = used()
    damaged = state and {**controller.state_dict(), **state} if "scale" not in (state or ()) else state
    assert isinstance(refused(controller, damaged), FormatError)


POLICY, RULE = "autotune_amp.steering.policy.", "autotune_amp.steering.loss_scale."
COUNTERS = "autotune_amp.counters."
DAMAGES: list[tuple[str, Any]] = [
    *[(key, value) for key in ("_growth_tracker", RULE + "growth_tracker") for value in (2**31, 10**30, -1, 0.5)],
    *[("growth_factor", value) for value in (0.5, -2.0, math.inf, math.nan)],
    *[("backoff_factor", value) for value in (2.0, 0.0, -0.5, math.nan)],
    *[("growth_interval", value) for value in (0, -1, 2.5, 10**30)],
    *[(RULE + "floor", value) for value in (0.0, -1.0, math.inf, math.nan, 1e300)],
    (RULE + "hysteresis_left", 10**30),
    *[(POLICY + "phase", value) for value in ("LOST", "", None, 3)],
    *[(POLICY + name, -1) for name in ("num_updates", "dwell", "bad_run", "quiet_until", "rung")],
    *[(POLICY + "demoted_from", value) for value in (-1, 1, 7, None)],
    *[(POLICY + "scale_before_burst", value) for value in (0.0, math.inf, math.nan)],
    *[(POLICY + "first_loss", value) for value in (math.inf, math.nan)],
    (POLICY + "recent_losses", [math.nan]),
    (POLICY + "recent_losses", [1.0] * 15),  # which are summed up at that many
    (POLICY + "octaves", [[1]]),
    (POLICY + "octaves", [[1, math.inf]]),
    (POLICY + "withdrawn", {"fp4": "unknown"}),
    (POLICY + "num_failures", 10**9),
    ("autotune_amp.steering.precision", "fp4"),
    *[(COUNTERS + "totals.seconds", {"fp16": value}) for value in (math.inf, math.nan, -1.0)],
    (COUNTERS + "totals.num_steps", {"fp4": 1}),
    (COUNTERS + "totals_at_reset.num_steps", {"fp16": -1}),
    *[(COUNTERS + "totals." + name, -1) for name in ("num_updates", "num_overflows", "num_bad_batches", "num_moves")],
    *[(COUNTERS + "flushed_share", value) for value in (-0.1, 1.5, math.nan)],
    (COUNTERS + "num_passes", -1),
    *[(COUNTERS + "wishes", [wish]) for wish in (["set_precision", "fp8"], ["act", ""], ["leap", ""])],
    (COUNTERS + "waiting", [[[], []]]),
    *[(COUNTERS + "waiting", [[values, [0]]]) for values in ([7.0, 1.0], [0.0], [0.0, 1.0, 9.0], [math.nan, 1.0])],
    (COUNTERS + "waiting", [[[0.0, 1.0], [-1]]]),
    ("autotune_amp.history", [{}]),
]


@pytest.mark.parametrize(("path", "value"), DAMAGES)
def test_a_number_that_no_run_can_hold_is_refused_before_anything_is_changed(path: str, value: Any) -> None:
    controller = used()
    state = copy.deepcopy(controller.state_dict()) | {"scale": 4.0}
    state["autotune_amp"]["steering"]["loss_scale"]["scale"] = 4.0  # what would be seen if any of it was taken
    *way, last = path.split(".")
    part = state
    for name in way:
        part = part[name]
    assert last in part
    part[last] = value
    refused(controller, state)


@pytest.mark.parametrize("name", ["growth_factor", "backoff_factor"])
@pytest.mark.parametrize("value", [-1.0, math.nan, math.inf])
def test_a_factor_that_no_checkpoint_could_bring_back_is_refused_where_it_is_set(name: str, value: float) -> None:
    controller = used()
    before = controller.state_dict()
    with pytest.raises(InvalidRequestError, match=name):
        getattr(controller, f"set_{name}")(value)
    assert controller.state_dict() == before


@pytest.mark.parametrize("change", [{"update": -1}, {"kind": "leap"}, {"before": "fp4"}, {"config": "{}"}])
def test_a_move_that_cannot_have_been_is_refused(change: dict[str, Any]) -> None:
    run = Run(FeedForward(), fp16(accumulation_steps=ACCUMULATION_STEPS, loss_scale=STABLE))
    for batch in CLEAN[:4]:
        run.step(batch)
    state = run.controller.state_dict()
    (record,) = state["autotune_amp"]["history"]
    state["autotune_amp"]["history"] = [record | change]
    refused(run.controller, state)


def test_a_newer_format_and_other_rungs_are_refused() -> None:
    controller = used()
    state = controller.state_dict()
    assert "saved in bf16" in refused(PrecisionController(fp16(fallback=["fp32"]), device="cpu"), state).message
    error = refused(controller, state | {"autotune_amp": {"format": 3, "all else": "is new"}})
    assert "format 3" in error.message
    assert "the version that saved it" in error.next_step


def test_a_pin_on_a_module_that_is_not_there_is_refused() -> None:
    run = Run(FeedForward(), fp16(accumulation_steps=ACCUMULATION_STEPS, loss_scale=STABLE))
    for batch in CLEAN[:4]:
        run.step(batch)
    state = run.controller.state_dict()
    assert state["autotune_amp"]["pinned"] == ["wo"]
    assert "wo" in refused(Run(normalized(), fp16()).controller, state).message
