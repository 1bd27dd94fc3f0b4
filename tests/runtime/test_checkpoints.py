"""Checkpoints: resumed anywhere, a run goes on as if it had never been interrupted; what is no good is refused."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from resumable import (
    ACCUMULATION_STEPS,
    BEYOND_FP16,
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
from training import Batch, fp16, same

from autotune_amp.core.config import LossScale
from autotune_amp.core.errors import FormatError, InvalidRequestError
from autotune_amp.runtime.controller import PrecisionController

# Each: the batches, what is done by hand before some of them, and what the run must have gone through.
Script = tuple[Sequence[Batch], dict[int, Callable[[PrecisionController], None]], set[str]]
SCRIPTS: dict[str, tuple[Callable[[], nn.Module], LossScale, dict[str, bool], Script]] = {
    "growing, overflowing, hysteresis": (
        normalized,
        LossScale(init_scale=2.0**18, growth_interval=2, hysteresis=2),
        {},
        (
            [*CLEAN[:8], LARGE_GRADIENT, *CLEAN[:5], LARGE_GRADIENT, LARGE_GRADIENT, *CLEAN[:8]],
            {},
            {"fp16", "STEADY", "STARTUP"},
        ),
    ),
    "pinned": (FeedForward, STABLE, {}, (CLEAN[:16], {}, {"pin", "fp16"})),
    "stepped down without a rerun": (
        normalized,
        STABLE,
        {"reruns": False},
        ([*CLEAN[:4], *[BEYOND_FP16] * 4, *CLEAN[4:12]], {}, {"demotion", "PROBATION", "bf16"}),
    ),
    "blamed": (normalized, STABLE, {}, ([*CLEAN[:4], *[NAN] * 6, CLEAN[4], NAN, *CLEAN[5:11]], {}, {"BLAMED"})),
    "reverted": (
        normalized,
        STABLE,
        {"reruns": False},
        ([*CLEAN[:4], *[NAN] * 10, *CLEAN[4:10], NAN, *CLEAN[10:13]], {}, {"revert", "PROBATION", "BLAMED", "stop"}),
    ),
    "by hand": (
        normalized,
        STABLE,
        {},
        (
            [*CLEAN[:9], NAN, *CLEAN[9:20]],
            {
                2: lambda steered: steered.set_precision("fp32"),
                6: lambda steered: steered.set_precision("fp16"),
                12: lambda steered: steered.disable(),
                16: lambda steered: steered.enable(),
            },
            {"by_hand", "fp32", "fp16"},
        ),
    ),
}


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_resumed_run_goes_on_as_if_never_interrupted(name: str) -> None:
    make, loss_scale, options, (script, by_hand, expected) = SCRIPTS[name]
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

    facts, saved, seen = go_on(Run(model, config, **options), 0)
    assert expected <= seen
    # Within a window, too, but for running statistics: they are undone only where one process saw the whole window.
    for index in range(1, len(saved), 3 if make is FeedForward else 4):
        resumed = Run(other, config, **options).load(saved[index], controller_first=index % 8 > 4)
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


def test_a_plain_scalers_state_goes_on_bit_for_bit_as_it_would_have() -> None:
    model = normalized()
    script = [*CLEAN[:6], LARGE_GRADIENT, *CLEAN[6:12], LARGE_GRADIENT, LARGE_GRADIENT, *CLEAN[12:20]]

    def step(model: nn.Module, scaler: torch.amp.GradScaler, optimizer: torch.optim.Optimizer, batch: Batch) -> None:
        inputs, targets = batch
        with torch.autocast("cpu", torch.float16):
            loss = nn.functional.mse_loss(model(inputs), targets)
        scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()

    rule: dict[str, Any] = {"growth_factor": 4.0, "backoff_factor": 0.25, "growth_interval": 3}
    for num_before in (0, 7, 16):
        old, mine, theirs = (copy.deepcopy(model) for _ in range(3))
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**18, **rule)
        optimizer = torch.optim.SGD(old.parameters(), lr=0.01, momentum=0.9)
        for batch in script[:num_before]:
            step(old, scaler, optimizer, batch)
        controller = PrecisionController(fp16(loss_scale=LossScale(init_scale=1024.0)), device="cpu")
        plain = torch.amp.GradScaler("cpu", init_scale=1024.0)
        for resumed, own in ((mine, controller), (theirs, plain)):
            own.load_state_dict(scaler.state_dict())
            resumed.load_state_dict(old.state_dict())
            its = torch.optim.SGD(resumed.parameters(), lr=0.01, momentum=0.9)
            its.load_state_dict(copy.deepcopy(optimizer.state_dict()))
            for batch in script[num_before:]:
                step(resumed, own, its, batch)
        assert same(mine, theirs)
        assert controller.get_scale() == plain.get_scale()
        assert {key: controller.state_dict()[key] for key in plain.state_dict()} == plain.state_dict()


# -- states that are no good -------------------------------------------------------------------------------------------


def refused(controller: PrecisionController, state: Any) -> InvalidRequestError:
    before = repr((controller.state_dict(), controller.config, controller.get_scale()))
    with pytest.raises(InvalidRequestError) as caught:
        controller.load_state_dict(state)
    assert repr((controller.state_dict(), controller.config, controller.get_scale())) == before
    assert caught.value.next_step
    return caught.value


@pytest.mark.parametrize("state", [None, [], 3, "state", torch.zeros(3)])
def test_what_is_no_state_is_refused(state: Any) -> None:
    assert isinstance(refused(PrecisionController(fp16(), "cpu"), state), FormatError)


@pytest.mark.parametrize("scale", [0.0, math.inf, math.nan, None, "1024", True, torch.tensor(0.0)])
def test_a_scale_that_cannot_work_is_refused(scale: Any) -> None:
    controller = used()
    state = controller.state_dict()
    broken = copy.deepcopy(state)
    broken["autotune_amp"]["steering"]["loss_scale"]["scale"] = scale
    refused(controller, broken)
    for given_state in (state, torch.amp.GradScaler("cpu").state_dict()):
        assert "finite number above 0" in refused(controller, given_state | {"scale": scale}).message


def test_a_newer_format_and_other_rungs_are_refused() -> None:
    controller = used()
    state = controller.state_dict()
    assert "saved in bf16" in refused(PrecisionController(fp16(fallback=["fp32"]), device="cpu"), state).message
    error = refused(controller, state | {"autotune_amp": {"format": 2, "all else": "is new"}})
    assert "format 2" in error.message
    assert error.next_step == "Upgrade autotune_amp."


def test_a_pin_on_a_module_that_is_not_there_is_refused() -> None:
    run = Run(FeedForward(), fp16(accumulation_steps=ACCUMULATION_STEPS, loss_scale=STABLE))
    for batch in CLEAN[:4]:
        run.step(batch)
    state = run.controller.state_dict()
    assert state["autotune_amp"]["pinned"] == ["wo"]
    assert "wo" in refused(Run(normalized(), fp16()).controller, state).message


def leaves(node: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The path to every part of a nested document."""
    items = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()
    return [path, *(leaf for key, value in items for leaf in leaves(value, (*path, key)))]


VALID = used().state_dict()
JUNK = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 10**9),
    st.floats(),
    st.text(max_size=3),
    st.lists(st.integers(), max_size=2),
    st.dictionaries(st.text(max_size=3), st.integers(), max_size=2),
)


@settings(max_examples=60, phases=[Phase.explicit, Phase.generate])
@given(st.data())
def test_a_damaged_state_is_refused_and_nothing_changed_or_it_works(data: st.DataObject) -> None:
    """One to three parts anywhere are lost or replaced by anything."""
    state = copy.deepcopy(VALID)
    for _ in range(data.draw(st.integers(1, 3))):
        path = data.draw(st.sampled_from([path for path in leaves(state) if path]))
        node: Any = state
        for key in path[:-1]:
            node = node[key]
        if data.draw(st.booleans()):
            del node[path[-1]]
            if not state:
                return
        else:
            node[path[-1]] = data.draw(JUNK)
    run = Run(normalized(), fp16(accumulation_steps=ACCUMULATION_STEPS, loss_scale=STABLE), reruns=False)
    before = comparable(run.facts())
    try:
        run.controller.load_state_dict(state)
    except InvalidRequestError:
        assert comparable(run.facts()) == before
        return
    scale = run.controller.get_scale()
    assert 2.0**-24 <= scale <= 2.0**24
    assert all(map(math.isfinite, (scale, run.step(CLEAN[0])["scale"], run.step(CLEAN[1])["scale"])))
    assert all(parameter.isfinite().all() for parameter in run.model.parameters())


def test_the_state_is_plain_and_a_copy() -> None:
    controller = used()
    state = controller.state_dict()
    assert json.loads(json.dumps(state)) == state
    kept = copy.deepcopy(state)
    controller.load_state_dict(torch.amp.GradScaler("cpu", init_scale=8.0).state_dict())
    assert controller.state_dict() != kept
    assert state == kept
