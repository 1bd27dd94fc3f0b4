"""States that are no good: refused with nothing changed, or accepted and harmless."""

from __future__ import annotations

import copy
import json
import math
from typing import Any

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from resumable import ACCUMULATION_STEPS, CLEAN, STABLE, FeedForward, Run, comparable, normalized, used
from training import fp16

from autotune_amp.core.errors import FormatError, InvalidRequestError
from autotune_amp.runtime.controller import PrecisionController


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


def refused(controller: PrecisionController, state: Any) -> InvalidRequestError:
    before = repr((controller.state_dict(), controller.config, controller.get_scale()))
    with pytest.raises(InvalidRequestError) as caught:
        controller.load_state_dict(state)
    assert repr((controller.state_dict(), controller.config, controller.get_scale())) == before
    assert caught.value.next_step
    return caught.value


@pytest.mark.parametrize("state", [None, [], 3, "state", torch.zeros(3)])
def test_what_is_no_state_is_refused(state: Any) -> None:
    assert isinstance(refused(used(), state), FormatError)


@pytest.mark.parametrize("scale", [0.0, math.inf, math.nan, None, "1024", True, torch.tensor(0.0)])
def test_a_scale_that_cannot_work_is_refused(scale: Any) -> None:
    controller = used()
    state = controller.state_dict()
    broken = copy.deepcopy(state)
    broken["autotune_amp"]["steering"]["loss_scale"]["scale"] = scale
    refused(controller, broken)
    for given_state in (state, torch.amp.GradScaler("cpu").state_dict()):
        assert "finite number above 0" in refused(controller, given_state | {"scale": scale}).message


def test_a_scale_beyond_what_float32_or_the_floor_holds_is_brought_within_bounds() -> None:
    for extreme, expected in ((1e300, 2.0**24), (1e-300, 2.0**-24)):
        for is_plain in (True, False):
            controller = PrecisionController(fp16(), device="cpu")
            state = torch.amp.GradScaler("cpu").state_dict() if is_plain else controller.state_dict()
            state["scale"] = extreme
            if not is_plain:
                state["autotune_amp"]["steering"]["loss_scale"]["scale"] = extreme
            controller.load_state_dict(state)
            assert controller.get_scale() == expected


@pytest.mark.parametrize("key", ["scale", "growth_factor", "backoff_factor", "growth_interval", "_growth_tracker"])
def test_a_missing_key_is_named(key: str) -> None:
    controller = used()
    state = controller.state_dict()
    del state[key]
    assert f"`{key}`" in refused(controller, state).message


def test_a_newer_format_and_other_rungs_are_refused() -> None:
    controller = used()
    state = controller.state_dict()
    assert "saved in bf16" in refused(PrecisionController(fp16(fallback=["fp32"]), device="cpu"), state).message
    error = refused(controller, state | {"autotune_amp": {"format": 2, "all else": "is new"}})
    assert "format 2" in error.message
    assert error.next_step == "Upgrade autotune_amp."


def test_a_state_of_a_version_that_did_not_count_disabled_updates_has_steps_and_skips_add_up() -> None:
    controller = used()
    state = controller.state_dict()
    state["autotune_amp"]["steering"]["policy"]["num_updates"] -= 1
    state["autotune_amp"]["counters"]["num_steps"] += 2
    controller.load_state_dict(state)
    status = controller.status()
    assert status.num_steps + status.num_skips == status.num_updates


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
