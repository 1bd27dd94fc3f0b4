"""One call a step: bit for bit the loop written out, the closure as the rerun, what is left behind where it raises."""

from __future__ import annotations

import logging
import pickle
from collections.abc import Callable, Iterable
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from training import Batch, batches, fp16, same

from autotune_amp.core.config import AmpConfig, LossScale
from autotune_amp.core.errors import InvalidRequestError, NotPrecisionError
from autotune_amp.runtime.controller import PrecisionController
from autotune_amp.runtime.train_step import trained_model


def network(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Dropout(0.2), nn.Linear(16, 1))


def two_optimizers(model: nn.Sequential) -> list[torch.optim.Optimizer]:
    return [torch.optim.AdamW(model[0].parameters(), lr=1e-2), torch.optim.SGD(model[3].parameters(), lr=1e-2)]


def _all(steps: Iterable[Any]) -> bool:
    """Whether all were taken, each of which is tried."""
    return all([bool(step) for step in steps])  # noqa: C419 # of a generator the rest would not be tried


def steered(config: AmpConfig, **options: Any) -> PrecisionController:
    return PrecisionController(config, device="cpu", **options)


# -- as the loop written out -----------------------------------------------------------------------------------------


@settings(max_examples=20, deadline=None)
@given(
    precision=st.sampled_from(["fp16", "bf16", "fp32"]),
    accumulation_steps=st.sampled_from([1, 3]),
    clip_norm=st.sampled_from([None, 0.5]),
    num_optimizers=st.sampled_from([1, 2]),
    is_weighed=st.booleans(),
    overflows=st.sets(st.integers(0, 13), max_size=3),
)
def test_it_is_the_loop_written_out_bit_for_bit(
    precision: Any,
    accumulation_steps: int,
    clip_norm: float | None,
    num_optimizers: int,
    is_weighed: bool,
    overflows: set[int],
) -> None:
    given_batches = [
        (inputs * (1e30 if place in overflows else 1), targets) for place, (inputs, targets) in enumerate(batches(14))
    ]
    weigh: Callable[[Batch], float] | None = (lambda batch: 1.0 + batch[0][0, 0].item() ** 2) if is_weighed else None
    loss_scale: dict[str, Any] = {"loss_scale": LossScale(init_scale=1024.0)} if precision == "fp16" else {}
    config = AmpConfig(precision=precision, batch_size=4, accumulation_steps=accumulation_steps, **loss_scale)

    def train(in_one_call: bool) -> tuple[nn.Module, list[tuple[bool, int]]]:
        model, stood, steps_taken = network(), [], [0]
        one: list[torch.optim.Optimizer] = [torch.optim.AdamW(model.parameters())]
        optimizers = one if num_optimizers == 1 else two_optimizers(model)
        controller = steered(config, halt=False)

        def loss() -> Tensor:
            return mse_loss(model(inputs), targets)

        def count() -> None:
            steps_taken[0] += 1

        controller.attach(model, loss)
        controller.on_step(count)
        torch.manual_seed(1)
        is_first = True
        for (inputs, targets), is_last in controller.windows(given_batches, weigh):  # noqa: B007 # `loss` reads them
            if in_one_call:
                taken = bool(controller.train_step(loss, optimizers, clip_norm=clip_norm))
                assert is_last or not taken
            else:
                taken = written_out(controller, loss, optimizers, is_first, is_last)
            is_first = is_last
            if is_last:
                stood.append((taken, steps_taken[0]))
        return model, stood

    def written_out(
        controller: PrecisionController,
        loss: Callable[[], Tensor],
        optimizers: list[torch.optim.Optimizer],
        is_first: bool,
        is_last: bool,
    ) -> bool:
        if is_first:
            for optimizer in optimizers:
                optimizer.zero_grad()
        with controller.autocast():
            value = loss()
        controller.backward(value * controller.window_share if is_weighed else value / controller.window_size)
        if not is_last:
            return False
        if clip_norm is not None:
            for optimizer in optimizers:
                controller.unscale_(optimizer)
            held = [p for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]]
            nn.utils.clip_grad_norm_(held, clip_norm)
        taken = _all(controller.step(optimizer) for optimizer in optimizers)
        controller.update()
        return taken

    (model, stood), (expected, expected_stood) = train(in_one_call=True), train(in_one_call=False)
    assert same(model, expected)
    assert stood == expected_stood


@pytest.mark.parametrize("fused", [False, True])
def test_it_gives_the_loss_and_the_norm_before_clipping(fused: bool) -> None:
    model = nn.Linear(8, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, fused=fused)
    controller = steered(fp16())
    inputs, targets = batches(1)[0]
    with controller.autocast():
        expected = mse_loss(model(inputs), targets)
    stepped = controller.train_step(lambda: mse_loss(model(inputs), targets), optimizer, clip_norm=1e-3)
    assert stepped
    assert stepped.loss is not None
    assert torch.equal(stepped.loss, expected.detach())
    assert stepped.grad_norm is not None
    assert stepped.grad_norm > 0.01
    held = torch.stack([parameter.grad.norm() for parameter in model.parameters() if parameter.grad is not None])
    assert float(held.norm()) == pytest.approx(1e-3, rel=1e-3)


def test_what_a_late_verdict_gives_is_known_without_a_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    from autotune_amp.runtime.scaler import StepResult

    late = [StepResult(torch.tensor(0.0)), StepResult(torch.tensor(1.0)), StepResult(0)]
    assert not StepResult.all_of(late, torch.ones(()), None)
    assert StepResult.all_of([late[0], late[2]], torch.ones(()), None)
    assert not StepResult.all_of([StepResult(-1)], torch.ones(()), None), "no gradients: no step"


# -- the closure is the rerun ------------------------------------------------------------------------------------------


def test_bad_batches_are_told_from_precision_without_a_word_more() -> None:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    controller = steered(fp16())
    good, bad = batches(8), [(torch.full((4, 8), torch.nan), torch.zeros(4, 1))] * 40

    def train(given: list[Batch]) -> None:
        for inputs, targets in given:
            controller.train_step(lambda: mse_loss(model(inputs), targets), optimizer)

    train(good)
    with pytest.raises(NotPrecisionError, match="input"):
        train(bad)
    assert controller.status().precision == "fp16"
    assert all(bool(value.isfinite().all()) for value in model.state_dict().values()), "batch norm's, too"


def test_what_fp16_cannot_hold_is_pinned_by_the_closure_alone() -> None:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    controller = steered(fp16())
    for place, (inputs, targets) in enumerate(batches(24)):
        inputs = inputs * (1e6 if place > 8 else 1)
        controller.train_step(lambda: mse_loss(model(inputs), targets), optimizer)
    moves = controller.status().history
    assert [move.kind for move in moves] == ["pin"]
    assert controller.status().pinned_modules == ("0",)
    controller.detach()
    assert type(model[0]) is nn.Linear, "as it was"


def test_a_gan_is_diagnosed_for_the_model_that_is_attached_alone() -> None:
    generator, discriminator = nn.Linear(4, 8), nn.Linear(8, 1)
    theirs = torch.optim.SGD(discriminator.parameters(), lr=0.01), torch.optim.SGD(generator.parameters(), lr=0.01)
    controller = steered(fp16())
    noise = torch.randn(4, 4)
    for _ in range(2):
        controller.train_step(lambda: discriminator(generator(noise).detach()).square().mean(), theirs[0])
        attached = controller._executor.model
        assert attached is not None
        assert attached.given is discriminator
        assert controller._policy.can_rerun
        controller.train_step(lambda: discriminator(generator(noise)).mean(), theirs[1])
        assert not controller._policy.can_rerun


# -- which model -------------------------------------------------------------------------------------------------------

MODEL = nn.Sequential(nn.Linear(2, 2))


def loss_of(model: nn.Module, batch: Tensor) -> Tensor:
    loss: Tensor = model(batch).sum()
    return loss


def loss_by_global(batch: Tensor) -> Tensor:
    return loss_of(MODEL, batch)


class Trainer:
    def __init__(self, model: nn.Module) -> None:
        self.parts = {"model": model}
        self.batch = torch.ones(2)

    def loss(self) -> Tensor:
        return loss_of(self.parts["model"], self.batch)


def test_the_model_is_found_by_the_names_in_the_closures_code() -> None:
    model, batch = MODEL, torch.ones(2)
    wrapped = nn.ModuleDict({"inner": model})
    average = nn.Linear(2, 2)  # somebody else's parameters
    trainer = Trainer(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def with_default(given: nn.Module = model) -> Tensor:
        return loss_of(given, batch)

    ways: list[tuple[Callable[[], Any], nn.Module]] = [
        (lambda: loss_of(model, batch), model),
        (lambda: loss_by_global(batch), model),
        (lambda: torch.stack([loss_of(model, part) for part in batch]), model),
        (partial(loss_of, model, batch), model),
        (partial(loss_of, model=model, batch=batch), model),
        (trainer.loss, model),
        (lambda: trainer.loss(), model),
        (lambda: loss_of(wrapped["inner"], batch) + loss_of(average, batch), wrapped),
        (with_default, model),
    ]
    for closure, expected in ways:
        assert trained_model(closure, [optimizer]) is expected


def test_models_side_by_side_and_none_at_all_are_said_once(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, logger="autotune_amp.runtime")
    encoder, decoder = nn.Linear(8, 8), nn.Linear(8, 1)
    optimizer = torch.optim.SGD([*encoder.parameters(), *decoder.parameters()], lr=0.01)
    controller = steered(fp16())
    for inputs, targets in batches(3):
        assert controller.train_step(lambda: mse_loss(decoder(encoder(inputs)), targets), optimizer)
    assert controller._executor.model is None
    assert caplog.text.count("controller.attach(model)") == 1
    hidden = SimpleNamespace(get=lambda: None)
    assert trained_model(lambda: hidden.get(), [optimizer]) is None


# -- mistakes ----------------------------------------------------------------------------------------------------------


def test_a_closure_without_a_loss_is_refused_and_leaves_nothing_behind() -> None:
    model = nn.Linear(8, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    controller = steered(fp16())
    inputs, targets = batches(1)[0]

    def forgets() -> Any:
        mse_loss(model(inputs), targets)

    wrong: list[Any] = [forgets, lambda: mse_loss(model(inputs), targets).item(), lambda: model(inputs)]
    for closure in wrong:
        with pytest.raises(InvalidRequestError, match="The closure must return the loss"):
            controller.train_step(closure, optimizer)
        assert model.weight.grad is None
    assert controller.train_step(lambda: mse_loss(model(inputs), targets), optimizer), "it goes on"
    assert (controller.status().num_updates, controller.status().num_skips) == (1, 0)


@pytest.mark.parametrize("failing", [0, 1])
def test_a_window_in_which_a_pass_raised_is_void_and_leaves_no_gradient_for_the_next(failing: int) -> None:
    model = nn.Linear(8, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    controller = steered(fp16(accumulation_steps=2))
    given_batches = batches(4)
    before = model.weight.detach().clone()

    def loss(place: int) -> Tensor:
        value = mse_loss(model(given_batches[place][0]), given_batches[place][1])
        if place == failing:
            raise torch.OutOfMemoryError("as the user's code may meet")
        return value

    steps = []
    for place, (_, is_last) in enumerate(controller.windows(given_batches)):
        try:
            steps.append((is_last, bool(controller.train_step(lambda: loss(place), optimizer))))
        except torch.OutOfMemoryError:
            assert model.weight.grad is None
        if place == 1:
            assert torch.equal(model.weight, before)
    assert steps == [(failing == 0, False), (False, False), (True, True)]


def test_a_config_that_accumulates_wants_windows() -> None:
    model = nn.Linear(8, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with pytest.raises(InvalidRequestError, match=r"controller\.windows") as raised:
        steered(fp16(accumulation_steps=4)).train_step(lambda: model(torch.ones(1, 8)).sum(), optimizer)
    assert "accumulates 4" in raised.value.message


def test_two_calls_for_one_pass_of_a_window_are_refused() -> None:
    generator, discriminator = nn.Linear(4, 8), nn.Linear(8, 1)
    one, other = (torch.optim.SGD(model.parameters(), lr=0.01) for model in (generator, discriminator))
    controller = steered(fp16(accumulation_steps=2))
    passes = controller.windows(batches(4))
    next(passes)
    controller.train_step(lambda: discriminator(generator(torch.ones(2, 4))).mean(), one)
    with pytest.raises(InvalidRequestError, match="called twice"):
        controller.train_step(lambda: discriminator(torch.ones(2, 8)).mean(), other)


def test_a_step_walks_through_no_module_of_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    controller = steered(fp16(accumulation_steps=2))
    walks = Mock(return_value=iter(()))
    for number, ((inputs, targets), _) in enumerate(controller.windows(batches(6))):
        if number == 2:
            monkeypatch.setattr(nn.Module, "named_modules", walks)
        controller.train_step(lambda: mse_loss(model(inputs), targets), optimizer)
    walks.assert_not_called()


def test_lbfgs_is_refused_before_anything_runs() -> None:
    model = nn.Linear(8, 1)
    with pytest.raises(InvalidRequestError, match="LBFGS"):
        steered(fp16()).train_step(lambda: pytest.fail("it ran"), torch.optim.LBFGS(model.parameters()))


def test_what_a_callback_raises_after_a_step_undoes_nothing_of_it() -> None:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    controller = steered(fp16())
    inputs, targets = batches(1)[0]
    controller.on_step(lambda: [][0])
    with pytest.raises(IndexError):
        controller.train_step(lambda: mse_loss(model(inputs), targets), optimizer)
    assert model.get_buffer("1.num_batches_tracked") == 1


def test_what_the_user_attaches_is_used_as_given_and_takes_the_place_of_what_was_found() -> None:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    controller = steered(fp16())
    inputs, targets = batches(1)[0]

    def loss() -> Tensor:
        return mse_loss(model(inputs), targets)

    controller.train_step(loss, optimizer)
    copied = pickle.loads(pickle.dumps(controller))
    assert copied.status().num_steps == 1

    def mine() -> Tensor:
        return loss()

    found = controller._executor.model
    assert found is not None
    found.pin(("0",))  # as a diagnosis does
    controller.attach(model, mine)
    assert controller.status().pinned_modules == ("0",)
    controller.train_step(loss, optimizer)
    attached = controller._executor.model
    assert attached is not None
    assert attached.rerun is mine
    with pytest.raises(InvalidRequestError, match="attached already"):
        controller.attach(model)


def test_a_rerun_that_fails_is_asked_once(caplog: pytest.LogCaptureFixture) -> None:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    controller = steered(fp16(), halt=False)
    num_calls = [0]

    def loss(inputs: Tensor, targets: Tensor) -> Tensor:
        num_calls[0] += 1
        assert num_calls[0] <= len(done) + 1, "it draws from the loader, say"
        return mse_loss(model(inputs), targets)

    done: list[bool] = []
    for place, (inputs, targets) in enumerate(batches(40)):
        num_calls[0] = len(done)
        spoilt = inputs * (torch.nan if place > 8 else 1)
        done.append(bool(controller.train_step(lambda: loss(spoilt, targets), optimizer)))
    assert caplog.text.count("The run goes on without it") == 1


def test_gradients_that_are_sparse_missing_or_frozen_train_as_any() -> None:
    embedding, unused, frozen = nn.Embedding(8, 4, sparse=True), nn.Linear(4, 4), nn.Linear(4, 1)
    frozen.requires_grad_(False)
    model = nn.ModuleList([embedding, unused, frozen])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = embedding.weight.detach().clone()
    assert steered(fp16()).train_step(lambda: model[2](model[0](torch.tensor([1, 1, 3]))).mean(), optimizer)
    changed = (embedding.weight != before).any(dim=1)
    assert changed.tolist() == [place in (1, 3) for place in range(8)]
