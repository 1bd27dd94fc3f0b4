"""Windows of four passes, two optimizers, clipping: compared with the same loop around a plain GradScaler."""

from __future__ import annotations

import copy
import functools
import math
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext

import pytest
import torch
from resumable import NAN
from torch import Tensor, nn
from training import Batch, Loop, batches, fp16, same, weights

from autotune_amp.core.config import AmpConfig, LossScale
from autotune_amp.core.precisions import Precision
from autotune_amp.runtime.controller import PrecisionController

ACCUMULATION_STEPS = 4
LARGE = 1e6  # past fp16, not bf16
_DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}
Scaler = torch.amp.GradScaler
Autocast = Callable[[], AbstractContextManager[object]]


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(8, 8), nn.ReLU())
        self.head = nn.Linear(8, 1)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.head(self.body(inputs))  # type: ignore[no-any-return]


class Training:
    """Two optimizers, clipped gradients, schedulers."""

    def __init__(self, model: Model) -> None:
        self.model = copy.deepcopy(model)
        self.optimizers: tuple[torch.optim.Optimizer, ...] = (
            torch.optim.SGD(self.model.body.parameters(), lr=0.05, momentum=0.9),
            torch.optim.Adam(self.model.head.parameters(), lr=0.01),
        )
        self.schedulers = [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9) for optimizer in self.optimizers]

    def step_schedulers(self) -> None:
        for scheduler in self.schedulers:
            scheduler.step()

    def loss(self, batch: Batch) -> Tensor:
        inputs, targets = batch
        return nn.functional.mse_loss(self.model(inputs), targets) / ACCUMULATION_STEPS

    def window(self, scaler: Scaler, autocast: Autocast, window: Sequence[Batch], *, spoils: int | None = None) -> None:
        """Every pass and the step; the gradients of the optimizer that `spoils` names are made infinite before."""
        for batch in window:
            with autocast():
                loss = self.loss(batch)
            scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
        for number, optimizer in enumerate(self.optimizers):
            parameters = optimizer.param_groups[0]["params"]
            if number == spoils:
                parameters[0].grad[0, 0] = math.inf
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(parameters, 0.5)
            scaler.step(optimizer)
        scaler.update()
        self.zero_grad()

    def zero_grad(self) -> None:
        for optimizer in self.optimizers:
            optimizer.zero_grad()

    def plain_window(self, precision: str, window: Sequence[Batch]) -> None:
        dtype = _DTYPES.get(precision)
        scaler = Scaler("cpu", init_scale=1024.0, enabled=precision == "fp16")
        self.window(scaler, lambda: torch.autocast("cpu", dtype=dtype) if dtype else nullcontext(), window)
        self.step_schedulers()


def steered(training: Training) -> PrecisionController:
    controller = PrecisionController(fp16(accumulation_steps=ACCUMULATION_STEPS), device="cpu")
    controller.on_step(training.step_schedulers)
    return controller


def windowed(num_windows: int) -> list[list[Batch]]:
    given = batches(num_windows * ACCUMULATION_STEPS)
    return [given[i : i + ACCUMULATION_STEPS] for i in range(0, len(given), ACCUMULATION_STEPS)]


def assert_same(one: Training, other: Training) -> None:
    assert same(one.model, other.model)
    assert [s.last_epoch for s in one.schedulers] == [s.last_epoch for s in other.schedulers]


@pytest.mark.parametrize(("asked_in", "where"), [(0, "forward"), (0, "backward"), (3, "forward"), (3, "backward")])
@pytest.mark.parametrize("expected", ["bf16", "fp32"])
def test_a_switch_asked_for_in_mid_window_happens_at_its_end(expected: Precision, where: str, asked_in: int) -> None:
    model = Model()
    given = windowed(3)
    mine, theirs = Training(model), Training(model)
    controller = steered(mine)
    controller.attach(mine.model)
    for index, batch in enumerate(given[0]):
        with controller.autocast():
            loss = mine.loss(batch)
            if (index, "forward") == (asked_in, where):
                controller.set_precision(expected)
        controller.backward(loss)
        if (index, "backward") == (asked_in, where):
            controller.set_precision(expected)
        assert controller.status().precision == "fp16"
    mine.window(controller, controller.autocast, [])
    for window in given[1:]:
        assert controller.status().precision == expected
        mine.window(controller, controller.autocast, window)
    for precision, window in zip(["fp16", expected, expected], given, strict=True):
        theirs.plain_window(precision, window)
    assert_same(mine, theirs)


@pytest.mark.parametrize("name", ["fp16", "bf16", "fp32"])
@pytest.mark.parametrize("bad_pass", [0, ACCUMULATION_STEPS - 1])
def test_one_bad_pass_voids_its_window_and_schedulers_count_the_steps_taken(name: Precision, bad_pass: int) -> None:
    """Warnings are errors: none about the order of scheduler and optimizer either, though the first step is skipped."""
    model = Model()
    mine, theirs = Training(model), Training(model)
    controller = steered(mine)
    controller.set_precision(name)
    for number, window in enumerate(windowed(6)):
        before = weights(mine.model)
        if number in (0, 3):
            bad = [NAN if index == bad_pass else batch for index, batch in enumerate(window)]
            mine.window(controller, controller.autocast, bad)
            assert all(torch.equal(value, before[key]) for key, value in mine.model.state_dict().items())
        else:
            mine.window(controller, controller.autocast, window)
            theirs.plain_window(name, window)
    assert_same(mine, theirs)
    status = controller.status()
    assert (status.num_updates, status.num_steps, status.num_skips) == (6, 4, 2)


def test_an_overflow_of_one_optimizer_skips_that_one_and_each_callback_counts_its_own() -> None:
    model = Model()
    mine, theirs = Training(model), Training(model)
    controller = PrecisionController(fp16(accumulation_steps=ACCUMULATION_STEPS), device="cpu")
    scaler = Scaler("cpu", init_scale=1024.0)
    counts: Counter[str] = Counter()
    controller.on_step(lambda: counts.update(["any"]))
    controller.on_step(lambda: counts.update(["body"]), mine.optimizers[0])
    controller.on_step(lambda: counts.update(["head"]), mine.optimizers[1])
    for number, window in enumerate(windowed(8)):
        spoils = 0 if number in (2, 5) else None
        mine.window(controller, controller.autocast, window, spoils=spoils)
        theirs.window(scaler, lambda: torch.autocast("cpu", dtype=torch.float16), window, spoils=spoils)
    assert counts == {"any": 8, "body": 6, "head": 8}
    assert same(mine.model, theirs.model)
    assert controller.get_scale() == scaler.get_scale() == 256.0


def test_optimizers_unscaled_together_step_both_optimizers_or_neither() -> None:
    mine = Training(Model())
    controller = steered(mine)
    for number, window in enumerate(windowed(4)):
        before = weights(mine.model)
        with controller.autocast():
            loss = mine.loss(window[0])
        controller.backward(loss)
        is_bad = number in (0, 2)
        if is_bad:
            mine.model.head.weight.grad[0, 0] = math.inf  # type: ignore[index]
        controller.unscale_together(mine.optimizers)
        assert {bool(controller.step(optimizer)) for optimizer in mine.optimizers} == {not is_bad}
        controller.update()
        mine.zero_grad()
        stayed = {key for key, value in mine.model.state_dict().items() if torch.equal(value, before[key])}
        assert stayed == (set(before) if is_bad else set())
    assert mine.schedulers[0].last_epoch == 2


class Rerunning:
    """Windows of two passes; the rerun is of the latest."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 1))
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=0.01)
        self.controller = PrecisionController(fp16(accumulation_steps=2), "cpu")
        self.controller.attach(self.net, self.loss)
        self.factor = 1.0
        self.inputs = torch.randn(4, 8)

    def loss(self) -> Tensor:
        return self.net(self.inputs * self.factor).float().square().mean() / 2  # type: ignore[no-any-return]

    def window(self, *factors: float, is_dropped: bool = False) -> None:
        for self.factor in factors:
            with self.controller.autocast():
                loss = self.loss()
            self.controller.backward(loss)
        if is_dropped:
            self.controller.discard_window()
        else:
            self.controller.step(self.optimizer)
            self.controller.update()
        self.optimizer.zero_grad()


@pytest.mark.parametrize(("factors", "told"), [((LARGE, 1.0), "an earlier pass"), ((1.0, LARGE), "first in module 0")])
def test_an_overflow_in_another_pass_than_the_one_run_again_is_stepped_down_from_at_once(
    factors: tuple[float, float], told: str
) -> None:
    loop = Rerunning()
    for given in [(1.0, 1.0)] * 5 + [factors] * 2:
        loop.window(*given)
    (record,) = loop.controller.status().history
    assert record.update == 7
    assert told in record.reason
    assert (record.kind == "demotion") == (told == "an earlier pass")


def test_a_dropped_window_leaves_no_trace() -> None:
    mine, theirs = Rerunning(), Rerunning()
    for loop in (mine, theirs):
        loop.window(1.0, 1.0)
        if loop is mine:
            loop.window(math.inf, 1.0, is_dropped=True)
            loop.controller.discard_window()  # of which there is none
        loop.window(1.0, 1.0)
    assert same(mine.net, theirs.net)
    status = mine.controller.status()
    assert (status.num_updates, status.num_skips) == (2, 0)


def test_a_gradient_penalty_that_scales_a_loss_twice_keeps_the_running_statistics() -> None:
    """Its first backward pass leaves no gradients in parameters, like a batch that the loop drops."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 1))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    controller = PrecisionController(fp16(), device="cpu")
    controller.attach(net)
    for inputs, targets in batches(5):
        optimizer.zero_grad()
        scale = controller.get_scale()
        with controller.autocast():
            loss = nn.functional.mse_loss(net(inputs), targets)
        gradients = torch.autograd.grad(controller.scale(loss), list(net.parameters()), create_graph=True)
        penalty = sum((gradient / scale).square().sum() for gradient in gradients)
        controller.scale(loss + penalty).backward()
        controller.step(optimizer)
        controller.update()
    assert net.state_dict()["1.num_batches_tracked"] == controller.status().num_steps > 0


@pytest.mark.parametrize("own_autocast", [None, torch.float16])
def test_bad_batches_whose_gradients_the_loop_drops_itself_cost_one_other_step(
    own_autocast: torch.dtype | None,
) -> None:
    net = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 1))
    loop = Loop(net, controller := PrecisionController(fp16(), device="cpu"), own_autocast=own_autocast)
    loop.step(batches(1)[0])
    for batch in batches(8):
        with controller.autocast() if own_autocast is None else torch.autocast("cpu", own_autocast):
            loss = nn.functional.mse_loss(net(NAN[0]), NAN[1])
        controller.scale(loss).backward()
        loop.optimizer.zero_grad()
        loop.step(batch)
    status = controller.status()
    assert (status.num_updates, status.num_skips, status.history) == (9, 1, ())
    assert all(torch.isfinite(buffer).all() for buffer in net.buffers())


def test_losses_that_are_scaled_before_a_single_backward_pass_share_a_window() -> None:
    net = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 1))
    controller = PrecisionController(fp16(), device="cpu")
    controller.attach(net)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    for inputs, targets in batches(4):
        optimizer.zero_grad()
        with controller.autocast():
            losses = [nn.functional.mse_loss(net(inputs), targets) for _ in range(2)]
        sum(controller.scale(loss) for loss in losses).backward()
        controller.step(optimizer)
        controller.update()
    assert controller.status().num_steps == 4
    assert net.state_dict()["1.num_batches_tracked"] == 8


@pytest.mark.parametrize("precision", ["fp16", "bf16"])
def test_a_step_left_out_after_clipping_does_not_touch_the_next(precision: Precision) -> None:
    """Loops leave out spikes: the next gradients are unscaled and checked as if the spike had not been."""
    mine, theirs = Rerunning(), Rerunning()
    for loop in (mine, theirs):
        config = fp16() if precision == "fp16" else AmpConfig(precision=precision, batch_size=4)
        controller, norms = PrecisionController(config, device="cpu"), []
        for factor in (1.0, 2.0, math.nan, 1.0):
            if loop is theirs and factor == 2.0:
                continue
            loop.factor = factor
            with controller.autocast():
                loss = loop.loss()
            controller.backward(loss)
            controller.unscale_(loop.optimizer)
            norms.append(float(nn.utils.clip_grad_norm_(loop.net.parameters(), 1.0)))
            if factor != 2.0:
                controller.step(loop.optimizer)
                controller.update()
            loop.optimizer.zero_grad()
        assert controller.status().num_steps == 2
        assert norms[-1] < 100
    assert all(map(torch.equal, mine.net.parameters(), theirs.net.parameters()))


@pytest.mark.parametrize(("own_autocast", "num_large"), [(None, 0), (None, 3), (torch.float16, 0)])
def test_steps_that_the_loop_skips_itself_count_as_those_skipped_for_it(
    own_autocast: torch.dtype | None, num_large: int
) -> None:
    """The scale begins so high that gradients overflow under a finite loss; a large input overflows in the forward."""
    mine, theirs, statuses = Rerunning(), Rerunning(), []
    called: list[Rerunning] = []
    for loop in (mine, theirs):
        controller = PrecisionController(fp16(loss_scale=LossScale(init_scale=2.0**22)), device="cpu")
        controller.attach(loop.net, loop.loss)
        controller.on_step(functools.partial(called.append, loop))
        for loop.factor in (*12 * [1.0], *num_large * [LARGE], 1.0):
            with controller.autocast() if own_autocast is None else torch.autocast("cpu", own_autocast):
                loss = loop.loss()
            controller.backward(loss)
            controller.unscale_(loop.optimizer)
            norm = nn.utils.clip_grad_norm_(loop.net.parameters(), 1.0)
            if loop is theirs or norm.isfinite():
                controller.step(loop.optimizer)
                controller.update()
            loop.optimizer.zero_grad()
        statuses.append(controller.status())
    one, other = statuses
    assert all(map(torch.equal, mine.net.parameters(), theirs.net.parameters()))
    assert own_autocast or same(mine.net, theirs.net)
    assert (one.num_steps, one.num_skips, one.scale) == (other.num_steps, other.num_skips, other.scale)
    assert one.num_steps == called.count(mine) > 0
    assert one.num_skips > 0
    assert [move.kind for move in one.history] == [move.kind for move in other.history] == ["pin"] * (num_large > 0)


def test_statistics_of_a_window_that_begins_after_its_forward_pass_are_undone() -> None:
    """As the second window of a training_step of Lightning, which is under one autocast."""
    loop = Rerunning()
    with loop.controller.autocast():
        for loop.factor in (1.0, math.nan):
            loop.controller.backward(loop.loss())
            loop.controller.step(loop.optimizer)
            loop.controller.update()
            loop.optimizer.zero_grad()
    assert loop.controller.status().num_skips == 1
    assert all(torch.isfinite(buffer).all() for buffer in loop.net.buffers())
    assert loop.net.state_dict()["1.num_batches_tracked"] == 1
