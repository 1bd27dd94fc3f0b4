"""Windows of four passes, two optimizers, clipping: compared with the same loop around a plain GradScaler."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from training import Batch, batches, fp16, same, weights

from autotune_amp.core.setting import Precision
from autotune_amp.runtime.controller import PrecisionController

ACCUMULATION_STEPS = 4
NAN: Batch = (torch.full((4, 8), math.nan), torch.zeros(4, 1))
_DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}
Scaler = torch.amp.GradScaler
Autocast = Callable[[], AbstractContextManager[object]]


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)
    torch._dynamo.reset()


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(8, 8), nn.ReLU())
        self.head = nn.Linear(8, 1)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.head(self.body(inputs))  # type: ignore[no-any-return]


class Training:
    """Two optimizers, clipped gradients, a scheduler, an average of the weights."""

    def __init__(self, model: Model) -> None:
        self.model = self.run = model
        self.optimizers: tuple[torch.optim.Optimizer, ...] = (
            torch.optim.SGD(model.body.parameters(), lr=0.05, momentum=0.9),
            torch.optim.Adam(model.head.parameters(), lr=0.01),
        )
        self.schedulers = [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9) for optimizer in self.optimizers]
        self.average = torch.optim.swa_utils.AveragedModel(model)

    def step_schedulers(self) -> None:
        for scheduler in self.schedulers:
            scheduler.step()

    def update_average(self) -> None:
        self.average.update_parameters(self.model)

    def forward_and_backward(self, scaler: Scaler, autocast: Autocast, batch: Batch) -> None:
        inputs, targets = batch
        with autocast():
            loss = nn.functional.mse_loss(self.run(inputs), targets) / ACCUMULATION_STEPS
        scaler.scale(loss).backward()  # type: ignore[no-untyped-call]

    def step(self, scaler: Scaler) -> None:
        for optimizer in self.optimizers:
            scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(self.model.parameters(), 0.5)
        for optimizer in self.optimizers:
            scaler.step(optimizer)
        scaler.update()
        for optimizer in self.optimizers:
            optimizer.zero_grad()


def plain_window(training: Training, scaler: Scaler, precision: str, window: Sequence[Batch]) -> None:
    dtype = _DTYPES.get(precision)

    def autocast() -> AbstractContextManager[object]:
        return nullcontext() if dtype is None else torch.autocast("cpu", dtype=dtype)

    for batch in window:
        training.forward_and_backward(scaler, autocast, batch)
    training.step(scaler)
    training.step_schedulers()
    training.update_average()


def steered_training(training: Training, *, attached: bool = False, **options: Any) -> PrecisionController:
    controller = PrecisionController(fp16(accumulation_steps=ACCUMULATION_STEPS), device="cpu", **options)
    controller.on_step(training.step_schedulers)
    controller.on_step(training.update_average)
    if attached:
        controller.attach(training.run)
    return controller


def windowed(num_windows: int) -> list[list[Batch]]:
    given = batches(num_windows * ACCUMULATION_STEPS)
    return [given[i : i + ACCUMULATION_STEPS] for i in range(0, len(given), ACCUMULATION_STEPS)]


def assert_same(one: Training, other: Training) -> None:
    assert same(one.model, other.model)
    assert same(one.average, other.average)
    assert [scheduler.last_epoch for scheduler in one.schedulers] == [
        scheduler.last_epoch for scheduler in other.schedulers
    ]


MOVES: list[tuple[Callable[[PrecisionController], None], Precision]] = [
    (lambda controller: controller.set_precision("bf16"), "bf16"),
    (lambda controller: controller.set_precision("fp32"), "fp32"),
    (lambda controller: controller.disable(), "fp32"),
]


@pytest.mark.parametrize(("ask", "expected"), MOVES)
def test_a_switch_asked_for_in_mid_window_happens_at_its_end(
    ask: Callable[[PrecisionController], None], expected: Precision
) -> None:
    """Asked before or after the backward pass of any of the four, inside the autocast or out of it."""
    given = windowed(4)
    model = Model()
    places = [(index, where) for index in (0, 1, 3) for where in ("in forward", "before backward", "after it")]
    for place in places:
        mine, theirs = (Training(copy.deepcopy(model)) for _ in range(2))
        controller = steered_training(mine, attached=True)
        for number, window in enumerate(given):
            for index, (inputs, targets) in enumerate(window):
                is_asked = number == 1 and index == place[0]
                with controller.autocast():
                    loss = nn.functional.mse_loss(mine.run(inputs), targets) / ACCUMULATION_STEPS
                    if is_asked and place[1] == "in forward":
                        ask(controller)
                if is_asked and place[1] == "before backward":
                    ask(controller)
                controller.backward(loss)
                if is_asked and place[1] == "after it":
                    ask(controller)
                assert controller.status().precision == ("fp16" if number < 2 else expected)
            mine.step(controller)
            assert controller.status().precision == ("fp16" if number < 1 else expected)
        scaler, off = Scaler("cpu", init_scale=1024.0), Scaler("cpu", enabled=False)
        for window in given[:2]:
            plain_window(theirs, scaler, "fp16", window)
        for window in given[2:]:
            plain_window(theirs, off, expected, window)
        assert_same(mine, theirs)


def test_a_switch_asked_for_between_windows_happens_at_once() -> None:
    model = Model()
    mine, theirs = Training(copy.deepcopy(model)), Training(copy.deepcopy(model))
    controller = steered_training(mine)
    scaler, off = Scaler("cpu", init_scale=1024.0), Scaler("cpu", enabled=False)
    moves: tuple[Precision, ...] = ("bf16", "fp16", "fp32")
    for name, window in zip(moves, windowed(3), strict=True):
        controller.set_precision(name)
        assert controller.config.precision == name
        for batch in window:
            mine.forward_and_backward(controller, controller.autocast, batch)
        mine.step(controller)
        plain_window(theirs, scaler if name == "fp16" else off, name, window)
    assert_same(mine, theirs)


@pytest.mark.parametrize("name", ["fp16", "bf16", "fp32"])
@pytest.mark.parametrize("bad_pass", range(ACCUMULATION_STEPS))
def test_one_bad_pass_voids_its_window_and_scheduler_and_average_count_the_steps_taken(
    name: Precision, bad_pass: int
) -> None:
    """Warnings are errors: none about the order of scheduler and optimizer either, though the first step is skipped."""
    given = windowed(6)
    model = Model()
    mine, theirs = Training(copy.deepcopy(model)), Training(copy.deepcopy(model))
    controller = steered_training(mine)
    controller.set_precision(name)
    scaler = Scaler("cpu", init_scale=1024.0, enabled=name == "fp16")
    for number, window in enumerate(given):
        is_bad = number in (0, 3)
        before = weights(mine.model)
        for index, batch in enumerate(window):
            mine.forward_and_backward(controller, controller.autocast, NAN if is_bad and index == bad_pass else batch)
        mine.step(controller)
        if is_bad:
            assert all(torch.equal(value, before[key]) for key, value in mine.model.state_dict().items())
        else:
            plain_window(theirs, scaler, name, window)
    assert_same(mine, theirs)
    status = controller.status()
    assert (status.num_updates, status.num_steps, status.num_skips) == (6, 4, 2)
    assert mine.average.n_averaged == 4
    assert status.scale == scaler.get_scale()


def test_a_scale_that_is_too_large_skips_whole_windows_as_gradscaler_does() -> None:
    """The first optimizer alone overflows: only that one is skipped, and each callback counts its own."""
    given = windowed(8)
    model = Model()
    mine, theirs = Training(copy.deepcopy(model)), Training(copy.deepcopy(model))
    controller = PrecisionController(fp16(accumulation_steps=ACCUMULATION_STEPS), device="cpu")
    scaler = Scaler("cpu", init_scale=1024.0)
    counts = {"any": 0, "body": 0, "head": 0}

    def count(key: str) -> Callable[[], None]:
        def counted() -> None:
            counts[key] += 1

        return counted

    controller.on_step(count("any"))
    controller.on_step(count("body"), mine.optimizers[0])
    controller.on_step(count("head"), mine.optimizers[1])
    for number, window in enumerate(given):
        for training, own, autocast in (
            (mine, controller, controller.autocast),
            (theirs, scaler, lambda: torch.autocast("cpu", dtype=torch.float16)),
        ):
            for batch in window:
                training.forward_and_backward(own, autocast, batch)
            if number in (2, 5):
                gradient = training.model.body[0].weight.grad
                assert isinstance(gradient, Tensor)
                gradient[0, 0] = math.inf
            for optimizer in training.optimizers:
                own.unscale_(optimizer)
                nn.utils.clip_grad_norm_(optimizer.param_groups[0]["params"], 0.5)
                own.step(optimizer)
            own.update()
            for optimizer in training.optimizers:
                optimizer.zero_grad()
    assert counts == {"any": 8, "body": 6, "head": 8}
    assert same(mine.model, theirs.model)
    assert controller.get_scale() == scaler.get_scale() == 256.0


def test_step_together_steps_both_optimizers_or_neither() -> None:
    given = windowed(5)
    model = Model()
    mine, theirs = Training(copy.deepcopy(model)), Training(copy.deepcopy(model))
    controller = steered_training(mine)
    stepped = []
    for number, window in enumerate(given):
        for batch in window:
            mine.forward_and_backward(controller, controller.autocast, batch)
        if number in (0, 3):
            gradient = mine.model.head.weight.grad
            assert gradient is not None
            gradient[0, 0] = math.inf
        stepped.append(controller.step_together(mine.optimizers))
        controller.update()
        for optimizer in mine.optimizers:
            optimizer.zero_grad()
    assert stepped == [False, True, True, False, True]
    scaler = Scaler("cpu", init_scale=1024.0)
    for number, window in enumerate(given):
        if number not in (0, 3):
            for batch in window:
                theirs.forward_and_backward(scaler, lambda: torch.autocast("cpu", dtype=torch.float16), batch)
            for optimizer in theirs.optimizers:
                scaler.step(optimizer)
                optimizer.zero_grad()
            scaler.update()
            theirs.step_schedulers()
            theirs.update_average()
    assert_same(mine, theirs)
