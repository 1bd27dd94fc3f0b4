"""Checkpoints: resumed anywhere, a run goes on as if it had never been interrupted, bit for bit."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
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
)
from torch import nn
from training import Batch, fp16, same

from autotune_amp.core.config import LossScale
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
    "not attached": (
        normalized,
        STABLE,
        {"attaches": False},
        ([*CLEAN[:4], *[BEYOND_FP16] * 4, *CLEAN[4:8]], {}, {"demotion", "PROBATION"}),
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
def test_resumed_after_any_pass_a_run_goes_on_as_if_never_interrupted(name: str) -> None:
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
    for index in range(len(name) % 3, len(saved), 3):
        resumed = Run(other, config, **options).load(saved[index], controller_first=index % 2 > 0)
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
    for num_before in range(0, len(script), 3):
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


def test_a_controllers_state_is_good_for_a_plain_scaler() -> None:
    run = Run(normalized(), fp16(accumulation_steps=ACCUMULATION_STEPS, loss_scale=LossScale(growth_interval=3)))
    for batch in CLEAN[:8]:
        run.step(batch)
    state = run.controller.state_dict()
    plain = torch.amp.GradScaler("cpu")
    plain.load_state_dict(state)
    twin = copy.deepcopy(run.model)
    optimizer = torch.optim.Adam(twin.parameters(), lr=0.01)
    optimizer.load_state_dict(copy.deepcopy(run.optimizer.state_dict()))
    for index, (inputs, targets) in enumerate(CLEAN[8:20]):
        run.step((inputs, targets))
        with torch.autocast("cpu", torch.float16):
            loss = nn.functional.mse_loss(twin(inputs), targets) / ACCUMULATION_STEPS
        plain.scale(loss).backward()  # type: ignore[no-untyped-call]
        if index % 2:
            plain.step(optimizer)
            plain.update()
            optimizer.zero_grad()
    # Buffers differ: where a step is skipped, the attached model's running statistics are put back.
    assert all(map(torch.equal, run.model.parameters(), twin.parameters()))
    assert run.controller.get_scale() == plain.get_scale() > state["scale"]
