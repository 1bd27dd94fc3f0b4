"""`windows`, `validation`, `disable` and `enable`, measured plans: compared with loops written by hand."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from training import Batch, Loop, batches, fp16, same, weights

from autotune_amp.core.config import AmpConfig, DemotedError, FallbackPlan, LossScale
from autotune_amp.core.errors import InvalidRequestError, TrainingStoppedError
from autotune_amp.runtime import windows
from autotune_amp.runtime.controller import PrecisionController

HALVED = FallbackPlan(precision="bf16", batch_size=4, accumulation_steps=2, peak_memory_bytes=1, slowdown=1.5)
NEVER_FITS = 2**60  # bytes
TOO_BIG = FallbackPlan(precision="bf16", batch_size=8, peak_memory_bytes=NEVER_FITS)


def controller(config: AmpConfig, **options: Any) -> PrecisionController:
    return PrecisionController(config, device="cpu", **options)


def eights(num_batches: int, seed: int = 1) -> list[tuple[Tensor, Tensor]]:
    """Batches of eight samples."""
    fours = batches(2 * num_batches, seed=seed)
    return [(torch.cat([a, b]), torch.cat([c, d])) for (a, c), (b, d) in zip(fours[::2], fours[1::2], strict=True)]


def small() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 1))


class WindowLoop:
    """The loop that `windows` is made for."""

    def __init__(
        self,
        model: nn.Module,
        controller: PrecisionController,
        loss: Callable[[Tensor, Tensor], Tensor] = nn.functional.mse_loss,
    ) -> None:
        self.model = model
        self.loss = loss
        self.controller = controller
        self.optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        self.seen: list[Tensor] = []
        self.sizes: list[int] = []

    def run(self, loader: Iterable[tuple[Tensor, Tensor]]) -> WindowLoop:
        steered = self.controller
        for (inputs, targets), is_last in steered.windows(loader):
            self.seen.append(inputs)
            self.sizes.append(steered.window_size)
            with steered.autocast():
                loss = self.loss(self.model(inputs), targets) / steered.window_size
            steered.backward(loss)
            if is_last:
                steered.step(self.optimizer)
                self.optimizer.zero_grad()
                steered.update()
        return self


def fours(given: Iterable[tuple[Tensor, Tensor]]) -> list[tuple[Tensor, Tensor]]:
    """The same samples in batches of four."""
    return [
        pair for inputs, targets in given for pair in zip(torch.split(inputs, 4), torch.split(targets, 4), strict=True)
    ]


def test_a_partial_last_window_steps_with_what_is_left_and_a_loop_left_early_leaves_nothing() -> None:
    model = small()
    twin = copy.deepcopy(model)
    given = batches(8)
    steered = controller(AmpConfig(precision="bf16", batch_size=4, accumulation_steps=3))
    for _, is_last in steered.windows(given[:2]):
        assert (is_last, steered.window_size) == (False, 2)
        break
    assert steered.window_size == 3
    loop = WindowLoop(model, steered).run(given)
    assert loop.sizes == [3, 3, 3, 3, 3, 3, 2, 2]
    assert steered.status().num_steps == 3
    optimizer = torch.optim.SGD(twin.parameters(), lr=0.05)
    for window in (given[:3], given[3:6], given[6:]):
        for inputs, targets in window:
            with torch.autocast("cpu", torch.bfloat16):
                loss = nn.functional.mse_loss(twin(inputs), targets) / len(window)
            loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
    assert same(model, twin)


@pytest.mark.parametrize("batch", [(torch.zeros(4, 2), torch.zeros(3)), torch.zeros(0, 2), "text"])
def test_what_cannot_be_split_is_refused_with_a_way_out(batch: Any) -> None:
    steered = controller(fp16(batch_size=8, fallback=[HALVED]))
    steered.set_precision("bf16")
    with pytest.raises(InvalidRequestError, match="cannot be split") as caught:
        list(steered.windows([batch]))
    assert "checkpoint_and_stop" in caught.value.next_step


def test_the_shape_of_a_window_or_that_it_is_no_whole_number_of_the_loaders_batches() -> None:
    shapes = {(8, 1): (1, 1), (4, 2): (1, 2), (2, 4): (1, 4), (8, 3): (3, 1), (4, 4): (2, 2), (1, 16): (2, 8)}
    assert {plan: windows.shape(8, *plan) for plan in shapes} == shapes
    for plan in [(4, 1), (4, 3), (3, 3), (16, 1), (5, 8)]:
        with pytest.raises(InvalidRequestError, match="cannot be made") as caught:
            windows.shape(8, *plan)
        assert "checkpoint_and_stop" in caught.value.next_step


def test_validation_leaves_the_scaler_and_batch_norm_alone() -> None:
    """In mid-window, with infinite inputs."""
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 1))
    steered = controller(fp16(accumulation_steps=2))
    steered.attach(model)
    ((inputs, targets),) = batches(1)
    with steered.autocast():
        loss = nn.functional.mse_loss(model(inputs), targets)
    steered.backward(loss)
    before, state = weights(model), steered.state_dict()
    model.eval()
    with steered.validation():
        output = model(inputs * math.inf)
    assert (output.requires_grad, output.dtype) == (False, torch.float16)
    assert repr(steered.state_dict()) == repr(state)
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())


@pytest.mark.parametrize("own_autocast", [False, True])
def test_while_disabled_training_is_plain_fp32_and_then_goes_on_as_before(own_autocast: bool) -> None:
    """Also where the code divides by `get_scale`, as the documented gradient penalty does."""
    model = small()
    twin = copy.deepcopy(model)
    given = batches(9)
    steered = controller(fp16(loss_scale=LossScale(init_scale=1024.0, growth_interval=2)))
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)
    if own_autocast:
        steered.attach(model)

    def step(model: nn.Module, scaler: torch.amp.GradScaler, autocast: Any, optimizer: Any, index: int) -> None:
        inputs, targets = given[index]
        with autocast:
            loss = nn.functional.mse_loss(model(inputs), targets)
        (gradient, *_) = torch.autograd.grad(scaler.scale(loss), list(model.parameters()), create_graph=True)
        with autocast:
            loss = loss + (gradient / scaler.get_scale()).square().sum()
        scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()

    mine, theirs = (torch.optim.SGD(m.parameters(), lr=0.02) for m in (model, twin))
    off = torch.amp.GradScaler("cpu", enabled=False)
    for index in range(9):
        is_off = 3 <= index < 6
        (steered.disable if is_off else steered.enable)()
        ours = torch.autocast("cpu", torch.float16) if own_autocast else steered.autocast()
        step(model, steered, ours, mine, index)
        step(twin, off if is_off else scaler, torch.autocast("cpu", torch.float16, enabled=not is_off), theirs, index)
        assert same(model, twin)
        assert steered.get_scale() == (1.0 if is_off else scaler.get_scale())
        status = steered.status()
        assert (status.precision, status.is_enabled) == ("fp32" if is_off else "fp16", not is_off)
    assert steered.status().amp_share == pytest.approx(1 - 3 / steered.status().num_steps)


def test_weighed_passes_add_up_to_the_mean_over_all_that_counts() -> None:
    inputs, labels = torch.randn(12, 6), torch.randint(3, (12,))
    labels[torch.tensor([0, 1, 2, 5])] = -100  # of three batches 1, 3 and 4 labels count
    given = list(zip(torch.split(inputs, 4), torch.split(labels, 4), strict=True))
    model, whole = nn.Linear(6, 3), nn.Linear(6, 3)
    whole.load_state_dict(model.state_dict())
    nn.functional.cross_entropy(whole(inputs), labels).backward()  # type: ignore[no-untyped-call]

    steered = controller(AmpConfig(precision="fp32", batch_size=4, accumulation_steps=3))
    shares = []
    for (some, targets), _ in steered.windows(given, weigh=lambda batch: (batch[1] != -100).sum()):
        shares.append(steered.window_share)
        loss = nn.functional.cross_entropy(model(some), targets) * steered.window_share
        loss.backward()  # type: ignore[no-untyped-call]
    assert shares == pytest.approx([1 / 8, 3 / 8, 4 / 8])
    for ours, theirs in zip(model.parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad)


def test_unweighed_passes_have_equal_shares_and_a_window_that_counts_nothing_has_none() -> None:
    steered = controller(AmpConfig(precision="fp32", batch_size=4, accumulation_steps=2))
    assert steered.window_share == 0.5
    assert [steered.window_share for _ in steered.windows(batches(3))] == [0.5, 0.5, 1.0]
    assert [steered.window_share for _ in steered.windows(batches(2), weigh=lambda _: 0)] == [0.0, 0.0]


def test_a_loop_that_was_left_takes_no_shares_from_the_next() -> None:
    steered = controller(AmpConfig(precision="fp32", batch_size=4, accumulation_steps=2))
    weights = iter([1, 1, 1, 3])
    left, going = (steered.windows(batches(2), weigh=lambda _: next(weights)) for _ in range(2))
    next(left)
    next(going)
    left.close()  # type: ignore[attr-defined]  # as where nothing holds it any more
    assert steered.window_share == 0.25


# -- demotions to measured plans, compared with runs that had the plan from the start ----------------------------------


def bad_first(given: list[Batch]) -> list[Batch]:
    """Two batches without a finite loss, which trip."""
    return [*((inputs * math.inf, targets) for inputs, targets in given[:2]), *given]


def test_after_a_demotion_the_loaders_batches_are_split_as_the_plan_says() -> None:
    model = small()
    planned = copy.deepcopy(model)
    samples = eights(5)
    steered = controller(fp16(batch_size=8, fallback=[HALVED, "fp32"]))
    moves: list[AmpConfig] = []
    steered.on_move(lambda record: moves.append(record.config))
    loop = WindowLoop(model, steered).run(bad_first(samples))
    assert moves == [steered.config]
    assert (moves[0].precision, moves[0].batch_size, moves[0].accumulation_steps) == ("bf16", 4, 2)
    assert loop.sizes == [1, 1] + [2] * 10
    assert torch.equal(torch.cat(loop.seen[2:]), torch.cat([inputs for inputs, _ in samples]))
    WindowLoop(planned, controller(AmpConfig(precision="bf16", batch_size=4, accumulation_steps=2))).run(fours(samples))
    assert same(model, planned)


def test_a_loop_that_keeps_its_batches_ends_with_the_config_of_a_plan_for_smaller_ones() -> None:
    """Such a plan's memory was measured with its own batches."""
    steered = controller(fp16(batch_size=8, fallback=[HALVED, "fp32"]))
    with pytest.raises(DemotedError) as caught:
        Loop(small(), steered, attaches=False).run(bad_first(eights(2)))
    found = caught.value.config
    assert (found, found.precision, found.batch_size) == (steered.config, "bf16", 4)
    assert "windows(loader)" in caught.value.next_step


@pytest.mark.parametrize("is_loaded", [False, True])
def test_a_loop_that_keeps_its_batches_ends_at_a_plan_that_was_loaded_or_asked_for_too(is_loaded: bool) -> None:
    steered, other = (controller(fp16(batch_size=8, fallback=[HALVED, "fp32"])) for _ in range(2))
    loop = Loop(small(), steered, attaches=False).run(eights(1))
    other.set_precision("bf16")
    if is_loaded:
        steered.load_state_dict(other.state_dict())
    else:
        steered.set_precision("bf16")
    with pytest.raises(DemotedError) as caught:
        loop.run(eights(1))
    assert caught.value.config == steered.config == other.config
    assert "windows(loader)" in caught.value.next_step
    WindowLoop(small(), other).run(eights(1))  # which splits them


@pytest.mark.parametrize("restarts_with", ["the error's config", "the same config"])
def test_checkpoint_and_stop_can_be_gone_on_with(restarts_with: str) -> None:
    """The parameters after the restart equal those of a run that had been told to continue."""
    samples = eights(5)
    model = small()
    continued_model = copy.deepcopy(model)
    config = fp16(batch_size=8, fallback=[HALVED, "fp32"])
    continued = controller(config)
    WindowLoop(continued_model, continued).run(bad_first(samples))
    stopping = controller(config, on_demotion="checkpoint_and_stop")
    with pytest.raises(DemotedError) as caught:
        WindowLoop(model, stopping).run(bad_first(samples))
    is_same = restarts_with == "the same config"
    resumed = controller(config if is_same else caught.value.config)
    resumed.load_state_dict(stopping.state_dict())
    assert resumed.config == stopping.config
    WindowLoop(model, resumed).run(samples if is_same else fours(samples))
    assert same(model, continued_model)
    one, other = resumed.status(), continued.status()
    assert (one.num_updates, one.num_steps, one.history) == (other.num_updates, other.num_steps, other.history)


def test_a_plan_that_does_not_fit_is_passed_over() -> None:
    model = small()
    twin = copy.deepcopy(model)
    samples = eights(4)
    faster = FallbackPlan(precision="fp32", batch_size=8, slowdown=1.4)
    steered = controller(fp16(batch_size=8, fallback=[TOO_BIG, faster]))
    WindowLoop(model, steered).run(bad_first(samples))
    assert steered.status().precision == "fp32"
    WindowLoop(twin, controller(AmpConfig(precision="fp32", batch_size=8))).run(samples)
    assert same(model, twin)


def beyond_fp16(output: Tensor, targets: Tensor) -> Tensor:
    """A loss that fp16 alone cannot hold, in no module that could be pinned."""
    return nn.functional.mse_loss(torch.mm(output, torch.full((1, 1), 1e6)).float() * 1e-6, targets)


@pytest.mark.parametrize("reruns", [True, False])
@pytest.mark.parametrize("last_fits", [True, False])
def test_where_no_plan_fits_the_run_stops_and_else_the_evidence_holds_for_the_next(
    reruns: bool, last_fits: bool
) -> None:
    model = small()
    before = copy.deepcopy(model)
    last = FallbackPlan(precision="fp32", batch_size=8, peak_memory_bytes=None if last_fits else NEVER_FITS)
    steered = controller(fp16(batch_size=8, fallback=[TOO_BIG, last]))
    (only,) = eights(1)

    def rerun() -> Tensor:
        with steered.autocast():
            return beyond_fp16(model(only[0]), only[1])

    steered.attach(model, rerun if reruns else None)
    loop = WindowLoop(model, steered, beyond_fp16)
    if last_fits:
        loop.run([only] * 2)
        # What a rerun showed is not left to probation.
        assert (steered.status().precision, steered._policy.phase) == ("fp32", "STEADY" if reruns else "PROBATION")
        return
    with pytest.raises(TrainingStoppedError):
        loop.run([only] * 20)
    assert steered.status().precision == "fp16"
    assert "GiB can be had" in "".join(record.reason for record in steered.status().history)
    assert same(model, before)
