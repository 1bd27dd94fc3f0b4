"""A loop with an autocast of its own, the scaler's line alone changed: what fails for good is told and stopped."""

from __future__ import annotations

import logging
import math

import pytest
import torch
from torch import Tensor, nn
from torch.nn.modules import module as modules

from autotune_amp import AmpConfig, LossScale
from autotune_amp.core.errors import NoRungFitsError, NotPrecisionError
from autotune_amp.core.precisions import Precision
from autotune_amp.runtime import diagnosis, train_step
from autotune_amp.runtime.controller import PrecisionController


@pytest.fixture(autouse=True)
def nothing_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a process where no other test has compiled anything."""
    monkeypatch.setattr(diagnosis, "_is_anything_compiled", lambda: False)


def test_a_forward_pass_is_looked_at_however_late_its_verdict_is() -> None:
    """Behind a fused optimizer that of the next update is read before any forward pass runs."""
    watch = diagnosis.ForwardWatch()
    assert watch.saw_bad_loss() is None
    assert watch.saw_bad_loss() is None
    with torch.autocast("cpu", dtype=torch.float16):
        nn.Linear(4, 8)(torch.full((2, 4), LARGE))
    assert watch.saw_bad_loss() == "a module Linear"
    watch.end()
    assert not modules._global_forward_hooks


def test_a_forward_pass_of_validation_is_not_looked_at() -> None:
    watch = diagnosis.ForwardWatch()
    assert watch.saw_bad_loss() is None
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.float16):
        nn.Linear(4, 8)(torch.full((2, 4), LARGE))
    assert watch.saw_bad_loss() is None
    watch.end()


class Training:
    """A deep enough model under ``torch.autocast`` in fp16; `factor` is the input's, past fp16's range where large."""

    def __init__(self, controller: PrecisionController) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-3)
        self.controller = controller
        self.num_steps = 0

    def loss(self, factor: float) -> Tensor:
        with torch.autocast("cpu", dtype=torch.float16):
            return self.model(torch.full((2, 4), factor)).float().square().mean()  # type: ignore[no-any-return]

    def run(self, *factors: float) -> Training:
        for factor in factors:
            self.optimizer.zero_grad()
            self.controller.backward(self.loss(factor))
            self.num_steps += bool(self.controller.step(self.optimizer))
            self.controller.update()
        return self

    def weights(self) -> list[Tensor]:
        return [parameter.detach().clone() for parameter in self.model.parameters()]


LARGE = 1e6


def controller(*, fallback: tuple[Precision, ...] = ("bf16", "fp32"), halt: bool = True) -> PrecisionController:
    config = AmpConfig(
        precision="fp16",
        batch_size=2,
        loss_scale=LossScale(init_scale=1024.0),
        fallback=fallback,
    )
    return PrecisionController(config, device="cpu", halt=halt)


@pytest.mark.parametrize("fallback", [("bf16", "fp32"), ()])
def test_a_forward_pass_that_overflows_for_good_stops_the_run_and_names_the_lines(
    fallback: tuple[Precision, ...],
) -> None:
    training = Training(controller(fallback=fallback)).run(*20 * [1.0])
    before = training.weights()

    with pytest.raises(NoRungFitsError) as caught:
        training.run(*40 * [LARGE])

    assert "Linear" in caught.value.message
    assert "with controller.autocast():" in caught.value.next_step
    assert ("fallback=" in caught.value.next_step) is (not fallback)
    status = training.controller.status()
    assert [move.kind for move in status.history] == ["advice", "stop"]
    assert (status.num_steps, status.num_overflows, status.num_bad_batches) == (20, 10, 0)
    assert all(torch.equal(one, other) for one, other in zip(before, training.weights(), strict=True))
    assert not modules._global_forward_hooks, "nothing is watched any more"


def test_where_anything_is_compiled_the_advice_says_what_is_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(diagnosis, "_is_anything_compiled", lambda: True)
    training = Training(controller(halt=False)).run(*20 * [1.0], *6 * [LARGE])
    status = training.controller.status()
    assert (status.num_overflows, status.num_bad_batches) == (0, 6)
    (advice,) = (move.reason for move in status.history if move.kind == "advice")
    assert "counted as bad batches" in advice
    assert not modules._global_forward_hooks
    monkeypatch.setattr(diagnosis, "_is_anything_compiled", lambda: False)
    status = Training(controller(halt=False)).run(*20 * [1.0], *6 * [LARGE]).controller.status()
    assert not any("counted as" in move.reason for move in status.history)


def test_a_burst_before_does_not_put_the_stop_off() -> None:
    training = Training(controller()).run(*20 * [1.0], LARGE, LARGE, *20 * [1.0])
    with pytest.raises(NoRungFitsError):
        training.run(*15 * [LARGE])
    assert training.controller.status().num_updates < 60


def test_a_run_that_goes_on_after_its_stop_is_judged_anew() -> None:
    training = Training(controller()).run(*8 * [1.0])
    for _ in range(2):
        with pytest.raises(NoRungFitsError):
            training.run(*15 * [LARGE])


def test_bursts_that_end_stop_nothing() -> None:
    training = Training(controller()).run(*5 * [*5 * [1.0], *6 * [LARGE]], 1.0)
    assert training.num_steps == 26
    assert [move.kind for move in training.controller.status().history] == ["advice"]
    assert not modules._global_forward_hooks


def test_without_halting_it_is_said_once_and_steps_go_on_being_skipped() -> None:
    training = Training(controller(halt=False)).run(*8 * [1.0], *60 * [LARGE], *4 * [1.0])
    assert training.num_steps == 12
    assert [move.kind for move in training.controller.status().history] == ["advice", "stop"]


def test_a_bad_batch_is_not_counted_as_an_overflow() -> None:
    training = Training(controller()).run(*8 * [1.0], *5 * [math.nan], 1.0)
    status = training.controller.status()
    assert (status.num_overflows, status.num_bad_batches) == (0, 5)


def test_the_line_that_is_named_mends_it() -> None:
    training = Training(steered := controller())

    def loss(factor: float) -> Tensor:
        with steered.autocast():
            return training.model(torch.full((2, 4), factor)).float().square().mean()  # type: ignore[no-any-return]

    training.loss = loss  # type: ignore[method-assign]
    training.run(*8 * [1.0], *20 * [LARGE])
    assert steered.status().precision == "bf16"


def test_the_loss_scale_of_a_first_descent_stops_nothing() -> None:
    steered = controller()
    training = Training(steered)
    for _ in range(9):
        loss = training.loss(1.0)
        steered.backward(loss)
        for parameter in training.model.parameters():
            parameter.grad = torch.full_like(parameter, math.inf)
        steered.step(training.optimizer)
        steered.update()
    training.run(*4 * [1.0])
    assert steered.status().history == ()
    assert steered.get_scale() == 2.0


# -- weights that are not finite already -------------------------------------------------------------------------------


@pytest.mark.parametrize("form", ["own autocast", "autocast", "rerun", "train_step"])
@pytest.mark.parametrize("precision", ["fp16", "bf16"])
def test_weights_that_are_nan_are_named_before_precision_data_or_learning_rate(form: str, precision: Precision) -> None:
    loss_scale = LossScale(init_scale=1024.0) if precision == "fp16" else None
    config = AmpConfig(precision=precision, batch_size=2, loss_scale=loss_scale, fallback=["fp32"])
    steered = PrecisionController(config, device="cpu")
    training = Training(steered)
    with torch.no_grad():
        training.model[2].get_parameter("bias").fill_(math.nan)
    inputs = torch.ones(2, 4)

    def loss() -> Tensor:
        return training.model(inputs).float().square().mean()  # type: ignore[no-any-return]

    if form == "rerun":
        steered.attach(training.model, loss)

    def train() -> None:
        for _ in range(4):
            step()

    def step() -> None:
        if form == "train_step":
            steered.train_step(loss, training.optimizer)
            return
        with torch.autocast("cpu", dtype=torch.float16) if form == "own autocast" else steered.autocast():
            value = loss()
        steered.backward(value)
        steered.step(training.optimizer)
        steered.update()

    with pytest.raises(NotPrecisionError, match="weights are not finite") as caught:
        train()
    assert "checkpoint" in caught.value.next_step
    assert "learning rate" not in str(caught.value)
    assert ("2.bias" in caught.value.message) is (form in ("rerun", "train_step"))
    assert [move.kind for move in steered.status().history] == ["stop"]


# -- optimizers without gradients --------------------------------------------------------------------------------------


@pytest.mark.parametrize("guard", [True, False])
@pytest.mark.parametrize("precision", ["fp16", "bf16", "fp32"])
def test_an_optimizer_of_another_copy_is_told_of_loudly_and_again(
    precision: Precision, guard: bool, caplog: pytest.LogCaptureFixture
) -> None:
    loss_scale = LossScale(init_scale=1024.0) if precision == "fp16" else None
    steered = PrecisionController(
        AmpConfig(precision=precision, batch_size=2, loss_scale=loss_scale),
        device="cpu",
        guard=guard,
    )
    model, copied = nn.Linear(4, 1), nn.Linear(4, 1)
    optimizer = torch.optim.SGD(copied.parameters(), lr=0.1)

    def told_after(num_updates: int) -> int:
        for _ in range(num_updates):
            steered.backward(model(torch.ones(2, 4)).square().mean())
            steered.step(optimizer)
            steered.update()
        return sum(record.levelno == logging.ERROR for record in caplog.records)

    assert told_after(2) == 0
    assert told_after(1) == 1
    assert "SGD" in caplog.messages[-1]
    assert "another copy" in caplog.messages[-1]
    assert told_after(26) == 1
    assert told_after(1) == 2


def test_optimizers_that_take_turns_and_rest_for_a_while_are_not_told_of(caplog: pytest.LogCaptureFixture) -> None:
    parts = nn.Linear(4, 1), nn.Linear(4, 1)
    optimizers = [torch.optim.SGD(part.parameters(), lr=0.1) for part in parts]
    steered = controller()

    def run(*turns: int) -> None:
        for turn in turns:
            for optimizer in optimizers:
                optimizer.zero_grad()
            steered.backward(parts[turn](torch.ones(2, 4)).square().mean())
            for optimizer in optimizers:
                steered.step(optimizer)
            steered.update()

    run(*10 * [0, 0, 1], *90 * [0], 1)
    assert not [record for record in caplog.records if record.levelno == logging.ERROR]
    run(*100 * [0])
    (told,) = [record for record in caplog.records if record.levelno == logging.ERROR]
    assert "number 2" in told.getMessage()


# -- no underflow ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("init_scale", [1024.0, 65536.0])
def test_a_constant_loss_is_no_underflow(init_scale: float) -> None:
    config = AmpConfig(
        precision="fp16", batch_size=2, loss_scale=LossScale(init_scale=init_scale), fallback=["bf16", "fp32"]
    )
    steered = PrecisionController(config, device="cpu")
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(150):
        steered.train_step(lambda: model(torch.ones(2, 4)).float().sum() * 0.0 + 1.0, optimizer)
    status = steered.status()
    assert (status.precision, status.history, status.scale) == ("fp16", (), init_scale)
    assert not status.flushed_share


def test_what_cannot_be_watched_is_trained_and_said(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise TypeError("its class cannot be changed")

    monkeypatch.setattr(train_step, "AttachedModel", refuse)
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    steered = controller()
    for _ in range(4):
        assert steered.train_step(lambda: model(torch.ones(2, 4)).float().square().mean(), optimizer)
    assert "cannot be watched" in caplog.text
    assert "not diagnosed" in caplog.text


@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")
def test_a_torchscript_module_is_trained() -> None:
    model = torch.jit.script(nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    steered = controller()
    for _ in range(3):
        assert steered.train_step(lambda: model(torch.ones(2, 4)).float().square().mean(), optimizer)
