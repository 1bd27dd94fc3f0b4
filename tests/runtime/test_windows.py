"""`windows`, `validation`, `disable` and `enable`: compared with loops written by hand."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from training import batches, fp16, same, weights
from window_loop import HALVED, WindowLoop, controller, eights, small

from autotune_amp.core.config import AmpConfig, FallbackPlan, LossScale
from autotune_amp.core.errors import InvalidRequestError
from autotune_amp.runtime import windows
from autotune_amp.runtime.controller import PrecisionController


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


def test_a_partial_last_window_steps_with_what_is_left() -> None:
    model = small()
    twin = copy.deepcopy(model)
    given = batches(8)
    steered = controller(AmpConfig(precision="bf16", batch_size=4, accumulation_steps=3))
    loop = WindowLoop(model, steered).run(given)
    assert loop.sizes == [3, 3, 3, 3, 3, 3, 2, 2]
    assert steered.window_size == 3
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


def test_a_loop_left_early_leaves_no_window_behind() -> None:
    steered = controller(AmpConfig(precision="fp32", batch_size=4, accumulation_steps=3))
    for _, is_last in steered.windows(batches(2)):
        assert not is_last
        assert steered.window_size == 2
        break
    assert steered.window_size == 3
    assert list(steered.windows([])) == []


def test_a_move_asked_for_in_mid_window_changes_the_very_next_windows_shape() -> None:
    model = small()
    twin = copy.deepcopy(model)
    given = eights(4)
    steered = controller(AmpConfig(precision="fp16", batch_size=8, loss_scale=LossScale(), fallback=[HALVED]))
    loop = WindowLoop(model, steered)
    calls: list[int] = []

    def ask(module: nn.Module, inputs: object, output: object) -> None:
        calls.append(1)
        if len(calls) == 2:  # inside the second window's forward pass
            steered.set_precision("bf16")

    model.register_forward_hook(ask)
    loop.run(given)
    assert [len(inputs) for inputs in loop.seen] == [8, 8, 4, 4, 4, 4]
    scaler = torch.amp.GradScaler("cpu")
    optimizer = torch.optim.SGD(twin.parameters(), lr=0.05)
    for inputs, targets in given[:2]:
        with torch.autocast("cpu", torch.float16):
            loss = nn.functional.mse_loss(twin(inputs), targets)
        scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
        scaler.step(optimizer)
        optimizer.zero_grad()
        scaler.update()
    for inputs, targets in given[2:]:
        for some_inputs, some_targets in zip(torch.split(inputs, 4), torch.split(targets, 4), strict=True):
            with torch.autocast("cpu", torch.bfloat16):
                loss = nn.functional.mse_loss(twin(some_inputs), some_targets) / 2
            loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
    assert same(model, twin)


def tensors(piece: Any) -> list[Tensor]:
    return [leaf for leaf in torch.utils._pytree.tree_leaves(piece) if isinstance(leaf, Tensor)]


@pytest.mark.parametrize(
    "wrap",
    [
        lambda x, y: x,
        lambda x, y: (x, y),
        lambda x, y: [x, y],
        lambda x, y: {"inputs": x, "targets": y},
        lambda x, y: {"inputs": {"ids": x, "more": [y, (x, "text")]}, "epoch": 3, "nothing": None},
    ],
)
@pytest.mark.parametrize("num_samples", [8, 7, 5, 3, 1])
def test_batches_of_any_nesting_are_split_and_every_sample_is_seen_once(
    wrap: Callable[[Tensor, Tensor], Any], num_samples: int
) -> None:
    x, y = torch.randn(num_samples, 3), torch.arange(num_samples)
    batch = wrap(x, y)
    pieces = list(windows.split(batch, 4))
    assert 1 <= len(pieces) <= 4
    assert all(type(piece) is type(batch) for piece in pieces)
    for parts, whole in zip(zip(*map(tensors, pieces), strict=True), tensors(batch), strict=True):
        assert torch.equal(torch.cat(parts), whole)
        assert max(map(len, parts)) <= 2
    if isinstance(batch, dict) and "epoch" in batch:
        assert all(piece["epoch"] == 3 and piece["inputs"]["more"][1][1] == "text" for piece in pieces)


@pytest.mark.parametrize(
    "batch",
    [
        (torch.zeros(4, 2), torch.zeros(3)),
        {"inputs": torch.zeros(4, 2), "weight": torch.tensor(1.0)},
        "a string",
        object(),
        torch.tensor(1.0),
        torch.zeros(0, 2),
    ],
)
def test_what_cannot_be_split_is_refused_with_a_way_out(batch: Any) -> None:
    steered = controller(AmpConfig(precision="fp16", batch_size=8, loss_scale=LossScale(), fallback=[HALVED]))
    steered.set_precision("bf16")
    with pytest.raises(InvalidRequestError, match="cannot be split") as caught:
        list(steered.windows([batch]))
    assert "checkpoint_and_stop" in caught.value.next_step


@pytest.mark.parametrize(
    ("plan", "expected"),
    [((8, 1), (1, 1)), ((4, 2), (1, 2)), ((2, 4), (1, 4)), ((8, 3), (3, 1)), ((4, 4), (2, 2)), ((1, 16), (2, 8))],
)
def test_the_shape_of_a_window(plan: tuple[int, int], expected: tuple[int, int]) -> None:
    assert windows.shape(8, *plan) == expected


@pytest.mark.parametrize("plan", [(4, 1), (4, 3), (3, 3), (16, 1), (5, 8)])
def test_a_plan_that_is_no_whole_number_of_the_loaders_batches_is_refused(plan: tuple[int, int]) -> None:
    batch_size, accumulation_steps = plan
    halved = FallbackPlan(precision="bf16", batch_size=batch_size, accumulation_steps=accumulation_steps)
    steered = controller(AmpConfig(precision="fp16", batch_size=8, loss_scale=LossScale(), fallback=[halved]))
    steered.set_precision("bf16")
    with pytest.raises(InvalidRequestError, match="cannot be made") as caught:
        list(steered.windows(eights(2)))
    assert "checkpoint_and_stop" in caught.value.next_step


@pytest.mark.parametrize("name", ["fp16", "bf16", "fp32"])
def test_validation_leaves_the_scaler_and_batch_norm_alone(name: Any) -> None:
    """In mid-window, with infinite inputs: the run goes on as if it had not been."""
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 1))
    twin = copy.deepcopy(model)
    config = fp16(accumulation_steps=2) if name == "fp16" else AmpConfig(precision=name, batch_size=4)
    given = batches(12)

    def run(model: nn.Module, *, validates: bool) -> PrecisionController:
        steered = controller(config)
        steered.attach(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        for index, (inputs, targets) in enumerate(given):
            with steered.autocast():
                loss = nn.functional.mse_loss(model(inputs), targets)
            steered.backward(loss)
            if validates:
                before, state = weights(model), steered.state_dict()
                model.eval()
                with steered.validation():
                    output = model(inputs * math.inf)
                    nn.functional.mse_loss(output, targets)
                model.train()
                assert not output.requires_grad
                assert output.dtype == {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}[name]
                assert steered.state_dict() == state
                assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
            if index % 2:
                steered.step(optimizer)
                steered.update()
                optimizer.zero_grad()
        return steered

    one, other = run(model, validates=True), run(twin, validates=False)
    assert same(model, twin)
    assert one.state_dict() == other.state_dict()


@pytest.mark.parametrize("own_autocast", [False, True])
@pytest.mark.parametrize("is_penalized", [False, True])
def test_while_disabled_training_is_plain_fp32_and_then_goes_on_as_before(
    own_autocast: bool, is_penalized: bool
) -> None:
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
        if is_penalized:
            (gradient, *_) = torch.autograd.grad(
                scaler.scale(loss), list(model.parameters()), create_graph=True, retain_graph=True
            )
            with autocast:
                loss = loss + (gradient / scaler.get_scale()).square().sum()
        scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()

    mine = torch.optim.SGD(model.parameters(), lr=0.02)
    theirs = torch.optim.SGD(twin.parameters(), lr=0.02)
    off = torch.amp.GradScaler("cpu", enabled=False)
    for index in range(9):
        is_off = 3 <= index < 6
        if index == 3:
            steered.disable()
        if index == 6:
            steered.enable()
        ours = torch.autocast("cpu", torch.float16) if own_autocast else steered.autocast()
        step(model, steered, ours, mine, index)
        plain = torch.autocast("cpu", torch.float16, enabled=not is_off)
        step(twin, off if is_off else scaler, plain, theirs, index)
        assert same(model, twin)
        assert steered.get_scale() == (1.0 if is_off else scaler.get_scale())
        status = steered.status()
        assert (status.precision, status.is_enabled) == ("fp32" if is_off else "fp16", not is_off)
        assert steered.is_enabled() is not is_off
    assert steered.status().amp_share == pytest.approx(1 - 3 / steered.status().num_steps)


def test_weighed_passes_add_up_to_the_mean_over_all_that_counts() -> None:
    torch.manual_seed(0)
    inputs, labels = torch.randn(12, 6), torch.randint(3, (12,))
    labels[torch.tensor([0, 1, 2, 5])] = -100  # of three batches 1, 3 and 4 labels count
    labels[8:] = torch.where(labels[8:] == -100, 0, labels[8:])
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
