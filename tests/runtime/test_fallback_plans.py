"""Demotions to measured plans: batch size, memory, speed; compared with runs that had the plan from the start."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from training import fp16, same
from window_loop import HALVED, NEVER_FITS, WindowLoop, controller, eights, fours, small

from autotune_amp.core.config import AmpConfig, DemotedError, FallbackPlan
from autotune_amp.core.errors import InvalidRequestError, NoRungFitsError, TrainingStoppedError


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


def test_after_a_demotion_the_loaders_batches_are_split_as_the_plan_says() -> None:
    """Two batches without a finite loss trip; from there on all is as if the run had begun with the plan."""
    model = small()
    planned = copy.deepcopy(model)
    given = eights(5)
    bad = [(inputs * math.inf, targets) for inputs, targets in given[:2]]
    steered = controller(fp16(batch_size=8, fallback=[HALVED, "fp32"]))
    moves: list[AmpConfig] = []
    steered.on_move(lambda record: moves.append(record.config))
    loop = WindowLoop(model, steered).run([*bad, *given])
    (config,) = moves
    assert config == steered.config
    assert (config.precision, config.batch_size, config.accumulation_steps) == ("bf16", 4, 2)
    assert loop.sizes == [1, 1] + [2] * 10
    assert torch.equal(torch.cat(loop.seen[2:]), torch.cat([inputs for inputs, _ in given]))
    WindowLoop(planned, controller(AmpConfig(precision="bf16", batch_size=4, accumulation_steps=2))).run(fours(given))
    assert same(model, planned)


def test_checkpoint_and_stop_can_be_gone_on_with_from_the_errors_config() -> None:
    """The parameters after the restart equal those of a run that had been told to continue."""
    given = eights(5)
    bad = [(inputs * math.inf, targets) for inputs, targets in given[:2]]
    stopped_model = small()
    continued_model, resumed_model = copy.deepcopy(stopped_model), small()
    config = fp16(batch_size=8, fallback=[HALVED, "fp32"])
    continued = controller(config)
    WindowLoop(continued_model, continued).run([*given[:2], *bad, *given[2:]])

    stopping = controller(config, on_demotion="checkpoint_and_stop")
    with pytest.raises(DemotedError) as caught:
        WindowLoop(stopped_model, stopping).run([*given[:2], *bad, *given[2:]])
    after = caught.value.config
    assert (after.precision, after.batch_size, after.accumulation_steps) == ("bf16", 4, 2)
    assert "state_dict()" in caught.value.next_step

    resumed_model.load_state_dict(stopped_model.state_dict())
    resumed = controller(after)
    resumed.load_state_dict(stopping.state_dict())
    WindowLoop(resumed_model, resumed).run(fours(given[2:]))
    assert same(resumed_model, continued_model)
    one, other = resumed.status(), continued.status()
    assert (one.precision, one.num_updates, one.num_steps, one.num_skips, one.history) == (
        other.precision,
        other.num_updates,
        other.num_steps,
        other.num_skips,
        other.history,
    )


def test_the_same_config_can_be_used_to_go_on_after_checkpoint_and_stop() -> None:
    given = eights(5)
    bad = [(inputs * math.inf, targets) for inputs, targets in given[:2]]
    model = small()
    continued_model = copy.deepcopy(model)
    config = fp16(batch_size=8, fallback=[HALVED, "fp32"])
    WindowLoop(continued_model, controller(config)).run([*bad, *given])
    stopping = controller(config, on_demotion="checkpoint_and_stop")
    with pytest.raises(DemotedError):
        WindowLoop(model, stopping).run(bad)
    resumed = controller(config)
    resumed.load_state_dict(stopping.state_dict())
    assert resumed.config == stopping.config
    WindowLoop(model, resumed).run(given)
    assert same(model, continued_model)


def test_a_fallback_slower_than_accepted_is_passed_over() -> None:
    model = small()
    twin = copy.deepcopy(model)
    given = eights(4)
    bad = [(inputs * math.inf, targets) for inputs, targets in given[:2]]
    faster = FallbackPlan(precision="fp32", batch_size=8, slowdown=1.4)
    steered = controller(fp16(batch_size=8, fallback=[HALVED, faster]), max_slowdown=1.45)
    WindowLoop(model, steered).run([*bad, *given])
    assert steered.status().precision == "fp32"
    WindowLoop(twin, controller(AmpConfig(precision="fp32", batch_size=8))).run(given)
    assert same(model, twin)


def test_max_slowdown_needs_measured_fallbacks() -> None:
    with pytest.raises(InvalidRequestError, match="bf16 was not measured"):
        controller(fp16(), max_slowdown=2.0)


def test_a_plan_that_does_not_fit_gives_way_to_the_next() -> None:
    model = small()
    twin = copy.deepcopy(model)
    given = eights(4)
    bad = [(inputs * math.inf, targets) for inputs, targets in given[:2]]
    too_big = FallbackPlan(precision="bf16", batch_size=8, peak_memory_bytes=NEVER_FITS)
    steered = controller(fp16(batch_size=8, fallback=[too_big, "fp32"]))
    WindowLoop(model, steered).run([*bad, *given])
    assert steered.status().precision == "fp32"
    WindowLoop(twin, controller(AmpConfig(precision="fp32", batch_size=8))).run(given)
    assert same(model, twin)


def beyond_fp16(output: Tensor, targets: Tensor) -> Tensor:
    """A loss that fp16 alone cannot hold, in no module that could be pinned."""
    return nn.functional.mse_loss(torch.mm(output, torch.full((1, 1), 1e6)).float() * 1e-6, targets)


@pytest.mark.parametrize("reruns", [True, False])
def test_where_no_plan_fits_the_run_stops_and_no_plan_is_tried(reruns: bool) -> None:
    model = small()
    before = copy.deepcopy(model)
    too_big = [
        FallbackPlan(precision="bf16", batch_size=8, peak_memory_bytes=NEVER_FITS),
        FallbackPlan(precision="fp32", batch_size=8, peak_memory_bytes=NEVER_FITS),
    ]
    steered = controller(fp16(batch_size=8, fallback=too_big))
    (given,) = eights(1)
    precisions: set[Any] = set()

    def rerun() -> Tensor:
        with steered.autocast():
            return beyond_fp16(model(given[0]), given[1])

    steered.attach(model, rerun if reruns else None)
    model.register_forward_hook(lambda *_: precisions.add(steered.config.precision))
    # Without a rerun nobody can say whose fault it is.
    with pytest.raises(NoRungFitsError if reruns else TrainingStoppedError):
        WindowLoop(model, steered, beyond_fp16).run([given] * 20)
    assert precisions == {"fp16"}
    assert "GiB can be had" in "".join(record.reason for record in steered.status().history)
    assert same(model, before)


def test_after_a_diagnosis_the_next_plan_that_fits_is_taken_on_its_evidence() -> None:
    """Nothing is left to probation: the rerun was finite in fp32."""
    model = small()
    too_big = FallbackPlan(precision="bf16", batch_size=8, peak_memory_bytes=NEVER_FITS)
    steered = controller(fp16(batch_size=8, fallback=[too_big, "fp32"]))
    (given,) = eights(1)

    def rerun() -> Tensor:
        with steered.autocast():
            return beyond_fp16(model(given[0]), given[1])

    steered.attach(model, rerun)
    WindowLoop(model, steered, beyond_fp16).run([given] * 2)
    assert (steered.status().precision, steered._policy.phase) == ("fp32", "STEADY")
