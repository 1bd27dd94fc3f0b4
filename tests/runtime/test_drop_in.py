"""In GradScaler's place without another change: PyTorch's documented AMP examples, same weights bit for bit."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from itertools import pairwise
from typing import Any, TypeAlias

import pytest
import torch
from torch import Tensor, nn

from autotune_amp import AmpConfig, LossScale
from autotune_amp.core.precisions import Precision
from autotune_amp.precision import torch_state
from autotune_amp.runtime.controller import PrecisionController

Scaler: TypeAlias = torch.amp.GradScaler
Models: TypeAlias = Sequence[nn.Module]
Optimizers: TypeAlias = Sequence[torch.optim.Optimizer]
MakeOptimizer: TypeAlias = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]
# What an example does before its optimizers step.
Iteration: TypeAlias = Callable[[Scaler, Models, Optimizers, Tensor, Tensor], None]
# Parameters and loss scale after every update.
Trace: TypeAlias = list[tuple[list[Tensor], float]]

NUM_STEPS = 14
INIT_SCALE = 2.0**22  # some octaves above what the models below can bear
OPTIMIZERS: dict[str, MakeOptimizer] = {
    "SGD": lambda parameters: torch.optim.SGD(parameters, lr=0.02, momentum=0.5),
    # Without momentum: where the first step is skipped, torch's fused kernel leaves its buffer uninitialised.
    "fused SGD": lambda parameters: torch.optim.SGD(parameters, lr=0.02, fused=True),
    "Adam": lambda parameters: torch.optim.Adam(parameters, lr=0.01),
    "fused Adam": lambda parameters: torch.optim.Adam(parameters, lr=0.01, fused=True),
}
loss_fn = nn.functional.mse_loss


def grad_scaler(init_scale: float = INIT_SCALE) -> Scaler:
    return torch.amp.GradScaler("cpu", init_scale=init_scale, growth_interval=3)


def mlp(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))


def data() -> Iterator[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(7)
    for _ in range(NUM_STEPS):
        yield torch.randn(4, 8, generator=generator), torch.randn(4, 4, generator=generator)


def autocast() -> torch.autocast:
    return torch.autocast(device_type="cpu", dtype=torch.float16)


def noted(scaler: Scaler, *models: nn.Module) -> tuple[list[Tensor], float]:
    return [p.detach().clone() for model in models for p in model.parameters()], scaler.get_scale()


def run(
    scaler: Scaler, make_optimizer: MakeOptimizer, iteration: Iteration, new_scales: dict[int, Any] | None = None
) -> Trace:
    """`new_scales` are given to the update of that number."""
    models = [mlp(0), mlp(1)]
    optimizers = [make_optimizer(model.parameters()) for model in models]
    trace = []
    for number, (inputs, target) in enumerate(data()):
        for optimizer in optimizers:
            optimizer.zero_grad()
        iteration(scaler, models, optimizers, inputs, target)
        for optimizer in optimizers:
            if any(p.grad is not None for group in optimizer.param_groups for p in group["params"]):
                scaler.step(optimizer)
        scaler.update((new_scales or {}).get(number))
        trace.append(noted(scaler, *models))
    return trace


def typical_training(scaler: Scaler, models: Models, _: Optimizers, inputs: Tensor, target: Tensor) -> None:
    with autocast():
        loss = loss_fn(models[0](inputs), target)
    scaler.scale(loss).backward()  # type: ignore[no-untyped-call]


def gradient_clipping(scaler: Scaler, models: Models, optimizers: Optimizers, inputs: Tensor, target: Tensor) -> None:
    typical_training(scaler, models, optimizers, inputs, target)
    scaler.unscale_(optimizers[0])
    torch.nn.utils.clip_grad_norm_(models[0].parameters(), 0.1)


def gradient_accumulation(scaler: Scaler, models: Models, _: Optimizers, inputs: Tensor, target: Tensor) -> None:
    for half, its_target in zip(inputs.chunk(2), target.chunk(2), strict=True):
        with autocast():
            loss = loss_fn(models[0](half), its_target) / 2
        scaler.scale(loss).backward()  # type: ignore[no-untyped-call]


def gradient_penalty(scaler: Scaler, models: Models, _: Optimizers, inputs: Tensor, target: Tensor) -> None:
    with autocast():
        loss = loss_fn(models[0](inputs), target)
    scaled = torch.autograd.grad(scaler.scale(loss), list(models[0].parameters()), create_graph=True)
    inv_scale = 1.0 / scaler.get_scale()
    with autocast():
        loss = loss + torch.stack([(gradient * inv_scale).pow(2).sum() for gradient in scaled]).sum().sqrt()
    scaler.scale(loss).backward()  # type: ignore[no-untyped-call]


def several_models_losses_and_optimizers(
    scaler: Scaler, models: Models, optimizers: Optimizers, inputs: Tensor, target: Tensor
) -> None:
    with autocast():
        output0, output1 = (model(inputs) for model in models)
        loss0 = loss_fn(2 * output0 + 3 * output1, target)
        loss1 = loss_fn(3 * output0 - 5 * output1, target)
    scaler.scale(loss0).backward(retain_graph=True)  # type: ignore[no-untyped-call]
    scaler.scale(loss1).backward()  # type: ignore[no-untyped-call]
    scaler.unscale_(optimizers[0])


EXAMPLES: list[Iteration] = [
    typical_training,
    gradient_clipping,
    gradient_accumulation,
    gradient_penalty,
    several_models_losses_and_optimizers,
]


# -- the same in a controller ------------------------------------------------------------------------------------------


def controller(init_scale: float = INIT_SCALE) -> PrecisionController:
    loss_scale = LossScale(init_scale=init_scale, growth_interval=3, max_scale=2.0**60)
    return PrecisionController(AmpConfig(precision="fp16", batch_size=4, loss_scale=loss_scale), device="cpu")


def assert_same(got: Trace, expected: Trace) -> None:
    assert [scale for _, scale in got] == [scale for _, scale in expected]
    for mine, theirs in zip(got, expected, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(mine[0], theirs[0], strict=True))


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("example", EXAMPLES)
def test_the_documented_examples_end_with_the_same_weights(example: Iteration, name: str) -> None:
    expected = run(grad_scaler(), OPTIMIZERS[name], example)
    scales = [scale for _, scale in expected]
    assert any(after < before for before, after in pairwise(scales)), "no overflow to compare"
    assert any(after > before for before, after in pairwise(scales)), "no growth to compare"
    assert not torch.equal(expected[0][0][0], expected[-1][0][0]), "no step to compare"
    assert_same(run(controller(), OPTIMIZERS[name], example), expected)


def test_its_own_interface_does_what_gradscalers_does_and_step_says_whether_it_was_taken() -> None:
    model, other = mlp(0), mlp(1)
    scaler, optimizer = controller(), OPTIMIZERS["SGD"](model.parameters())
    trace: Trace = []
    for inputs, targets in data():
        before = [p.detach().clone() for p in model.parameters()]
        optimizer.zero_grad()
        with scaler.autocast():
            loss = loss_fn(model(inputs), targets)
        scaler.backward(loss)
        stepped = scaler.step(optimizer)
        scaler.update()
        assert bool(stepped) == any(not torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
        trace.append(noted(scaler, model, other))
    assert not scaler.status().is_advisory
    assert_same(trace, run(grad_scaler(), OPTIMIZERS["SGD"], typical_training))


@pytest.mark.parametrize("guard", [True, False])
def test_passes_after_a_step_inside_one_autocast_see_the_new_weights(guard: bool) -> None:
    """As in a training_step of Lightning that steps by hand, several times."""
    losses = []
    for is_around in (True, False):
        model = mlp()
        config = AmpConfig(precision="bf16", batch_size=4)
        scaler, optimizer = PrecisionController(config, "cpu", guard=guard), OPTIMIZERS["SGD"](model.parameters())
        with scaler.autocast() if is_around else nullcontext():
            for inputs, targets in data():
                optimizer.zero_grad()
                with nullcontext() if is_around else scaler.autocast():
                    loss = loss_fn(model(inputs), targets)
                scaler.backward(loss)
                scaler.step(optimizer)
                scaler.update()
                losses.append(loss.item())
    assert losses[:NUM_STEPS] == losses[NUM_STEPS:]


# -- the rest of the interface -----------------------------------------------------------------------------------------


def test_scale_keeps_the_shape_of_what_it_is_given() -> None:
    one, two, three = (torch.tensor(value) for value in (1.0, 2.0, 3.0))
    cases: list[Any] = [one, [one], (one, two), [one, (two, [three])]]
    for outputs in cases:
        assert controller(8.0).scale(outputs) == grad_scaler(8.0).scale(outputs)
    given: Iterator[Tensor] = iter([one, two])
    assert list(controller(8.0).scale(given)) == [8.0, 16.0]


@pytest.mark.parametrize("outputs", [5.0, [5.0], None])
def test_scale_refuses_what_gradscaler_refuses(outputs: Any) -> None:
    for scaler in (grad_scaler(), controller()):
        with pytest.raises(ValueError, match="outputs must be a Tensor or an iterable of Tensors"):
            scaler.scale(outputs)


@pytest.mark.parametrize("name", ["SGD", "fused SGD"])
@pytest.mark.parametrize("value", [2.0**12, torch.tensor(2.0**12)], ids=["float", "tensor"])
def test_update_takes_a_new_scale_and_keeps_the_growth_tracker(value: float | Tensor, name: str) -> None:
    for at in (1, 4, 5, 6, 12):
        mine, theirs = (
            run(scaler, OPTIMIZERS[name], typical_training, {at: value}) for scaler in (controller(), grad_scaler())
        )
        assert_same(mine, theirs)


def loaded(scaler: Scaler) -> Scaler:
    """What goes on from a plain GradScaler's state, of which a controller reads the same keys."""
    kept = {"scale", "growth_factor", "backoff_factor", "growth_interval", "_growth_tracker"}
    state = {name: value for name, value in scaler.state_dict().items() if name in kept} | {"_growth_tracker": 1}
    new = controller(1024.0) if isinstance(scaler, PrecisionController) else grad_scaler(1024.0)
    new.load_state_dict(state)
    assert new.state_dict()["_growth_tracker"] == 1
    return new


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda scaler: pickle.loads(pickle.dumps(scaler)), loaded])
def test_a_copy_between_two_updates_goes_on_as_gradscalers_does(copied: Callable[[Scaler], Scaler]) -> None:
    scalers = [controller(), grad_scaler()]
    for scaler in scalers:
        scaler.set_growth_factor(4.0)
        scaler.set_backoff_factor(0.25)
        scaler.set_growth_interval(2)
        assert (scaler.get_growth_factor(), scaler.get_backoff_factor()) == (4.0, 0.25)
        assert scaler.get_growth_interval() == 2
    for _ in range(2):
        mine, theirs = (run(scaler, OPTIMIZERS["SGD"], typical_training) for scaler in scalers)
        assert_same(mine, theirs)
        scalers = [copied(scaler) for scaler in scalers]


# -- bf16 and fp32, with and without the guard -------------------------------------------------------------------------


def train(precision: Precision, name: str, scaler: PrecisionController | None) -> list[Tensor]:
    """The parameters after every step; at the sixth a gradient is NaN while the loss is finite."""
    model = mlp()
    optimizer = OPTIMIZERS[name](model.parameters())
    flat = []
    for step, (inputs, targets) in enumerate(data()):
        optimizer.zero_grad()
        plain = torch.autocast("cpu", dtype=torch.bfloat16, enabled=precision == "bf16")
        with plain if scaler is None else scaler.autocast():
            loss = loss_fn(model(inputs), targets)
        (loss if scaler is None else scaler.scale(loss)).backward()
        if step == 5:
            next(model.parameters()).grad.fill_(float("nan"))  # type: ignore[union-attr]
        if scaler is None:
            optimizer.step()
        else:
            scaler.step(optimizer)
            scaler.update()
        flat.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
    return flat


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_bf16_and_fp32_train_as_a_plain_loop_and_the_guard_skips_a_nan_step(precision: Precision, name: str) -> None:
    config = AmpConfig(precision=precision, batch_size=4)
    plain = train(precision, name, None)
    guard, off = PrecisionController(config, "cpu"), PrecisionController(config, "cpu", guard=False)
    assert (guard.is_enabled(), off.is_enabled(), off.get_scale()) == (True, False, 1.0)
    unguarded, guarded = train(precision, name, off), train(precision, name, guard)
    assert all(torch.equal(a.nan_to_num(9.0), b.nan_to_num(9.0)) for a, b in zip(unguarded, plain, strict=True))
    assert unguarded[5].isnan().any()
    assert all(torch.equal(a, b) for a, b in zip(guarded[:5], plain[:5], strict=True))
    assert torch.equal(guarded[5], guarded[4])
    assert guarded[-1].isfinite().all()
    assert not torch.equal(guarded[-1], guarded[5])


# -- parameters that GradScaler itself cannot unscale ------------------------------------------------------------------


class Spectral(nn.Module):
    """A layer in the frequency domain, as neural operators have: its gradient comes conjugated when it is read."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(8, 8)
        self.mix = nn.Parameter(torch.randn(5, dtype=torch.complex64))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = torch.fft.irfft(torch.fft.rfft(self.enter(x).float()) * self.mix.conj(), n=8)
        return out


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_complex_parameters_are_trained_as_without_a_controller(precision: Precision) -> None:
    torch.manual_seed(0)
    mine = Spectral()
    theirs = copy.deepcopy(mine)
    loss_scale = LossScale(init_scale=1024.0) if precision == "fp16" else None
    config = AmpConfig(precision=precision, batch_size=4, loss_scale=loss_scale)
    guard = PrecisionController(config, device="cpu")
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.01, foreach=False) for model in (mine, theirs)]
    for inputs, _ in data():
        with guard.autocast():
            loss = mine(inputs).square().mean()
        guard.backward(loss)
        assert guard.step(optimizers[0])
        guard.update()
        optimizers[0].zero_grad()
        optimizers[1].zero_grad()
        with torch_state.autocast(precision, "cpu"):
            loss = theirs(inputs).square().mean()
        loss.backward()
        optimizers[1].step()
    torch.testing.assert_close(mine.state_dict(), theirs.state_dict(), rtol=0.05 if precision == "fp16" else 0, atol=0)
    guard.backward(mine(inputs).square().mean() * torch.inf)
    before = mine.mix.detach().clone()
    assert not guard.step(optimizers[0])
    assert torch.equal(before, mine.mix)
