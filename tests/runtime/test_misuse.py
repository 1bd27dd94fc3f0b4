"""What users get wrong: a clear error with a next step, or a no-op, as GradScaler has it. Never a harmed weight."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autotune_amp import AmpConfig, LossScale
from autotune_amp.core.errors import DeviceError, InvalidRequestError
from autotune_amp.hardware import cuda, mps, xpu
from autotune_amp.runtime.controller import PrecisionController


def config(**options: Any) -> AmpConfig:
    return AmpConfig(**{"precision": "fp16", "batch_size": 4, "loss_scale": LossScale(init_scale=1024.0), **options})


def make(**options: Any) -> PrecisionController:
    return PrecisionController(config(**options), device="cpu")


class Loop:
    """One linear layer and its optimizer; `step` is the plain loop's, for the reference."""

    def __init__(self, fused: bool = False) -> None:
        self.model = nn.Linear(4, 1)
        with torch.no_grad():
            self.model.weight.fill_(0.25)
            self.model.bias.fill_(0.0)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.125, fused=fused)

    def loss(self) -> Tensor:
        loss: Tensor = self.model(torch.ones(2, 4)).square().mean()
        return loss

    def plain(self, num_steps: int = 1) -> Loop:
        for _ in range(num_steps):
            self.optimizer.zero_grad()
            self.loss().backward()  # type: ignore[no-untyped-call]
            self.optimizer.step()
        return self

    def steered(self, scaler: torch.amp.GradScaler) -> Loop:
        self.optimizer.zero_grad()
        scaler.scale(self.loss()).backward()  # type: ignore[no-untyped-call]
        scaler.step(self.optimizer)
        scaler.update()
        return self

    def assert_is(self, other: Loop) -> None:
        assert torch.equal(self.model.weight, other.model.weight)
        assert torch.equal(self.model.bias, other.model.bias)


fused_or_not = pytest.mark.parametrize("fused", [False, True])


# -- the constructor ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("device", ["tpu", "cpu:0:0", "auto", "cuda:1", torch.device("cuda"), "xpu", "mps"])
def test_a_device_that_is_not_there_is_refused(device: str | torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (cuda, xpu, mps):
        monkeypatch.setattr(module, "is_built", lambda: False)
    with pytest.raises(DeviceError, match=f"(?i){str(device)[:3]}") as caught:
        PrecisionController(config(), device=device)
    assert caught.value.next_step


# -- the model ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("method", ["step", "unscale_"])
def test_trainable_parameters_in_half_precision_are_refused_before_the_first_step(
    method: str, dtype: torch.dtype
) -> None:
    loop, scaler = Loop(), make()
    loop.model.to(dtype)
    before = loop.model.weight.detach().clone()
    scaler.scale(loop.model(torch.ones(2, 4, dtype=dtype)).float().mean()).backward()
    name = str(dtype).removeprefix("torch.")
    with pytest.raises(InvalidRequestError, match=rf"parameter of shape \(1, 4\) is {name}") as caught:
        getattr(scaler, method)(loop.optimizer)
    assert "model.float()" in caught.value.next_step
    assert torch.equal(loop.model.weight, before)


def test_a_second_model_and_a_module_to_pin_that_is_not_there_are_refused() -> None:
    scaler = make(pinned_modules=("decoder",))
    with pytest.raises(InvalidRequestError, match="decoder") as caught:
        scaler.attach(nn.Linear(2, 2))
    assert "named_modules" in caught.value.next_step
    scaler.attach(nn.ModuleDict({"decoder": nn.Linear(2, 2)}))  # nothing of the first is left
    assert scaler.config.pinned_modules == ("decoder",)
    scaler, loop = make(pinned_modules=("decoder",)), Loop()
    for _ in range(2):
        with pytest.raises(InvalidRequestError, match="decoder"):
            scaler.train_step(loop.loss, loop.optimizer)
    scaler = make()
    scaler.attach(nn.Linear(2, 2))
    with pytest.raises(InvalidRequestError, match="attached already") as caught:
        scaler.attach(nn.Linear(2, 2))
    assert "another controller" in caught.value.next_step


# -- the loop ----------------------------------------------------------------------------------------------------------


@fused_or_not
def test_an_optimizer_without_gradients_is_left_alone(fused: bool) -> None:
    """GradScaler raises "No inf checks were recorded"; frameworks step all their optimizers in every iteration."""
    loop, idle, scaler = Loop(fused), Loop(fused), make()
    calls: list[str] = []
    scaler.on_step(lambda: calls.append("idle"), idle.optimizer)
    scaler.on_step(lambda: calls.append("any"))
    for _ in range(2):
        loop.optimizer.zero_grad()
        scaler.scale(loop.loss()).backward()
        assert not scaler.step(idle.optimizer)
        assert scaler.step(loop.optimizer)
        scaler.update()
    loop.assert_is(Loop().plain(2))
    idle.assert_is(Loop())
    assert calls == ["any", "any"]
    assert scaler.status().num_steps == 2


@fused_or_not
def test_an_update_without_any_gradient_counts_for_nothing(fused: bool) -> None:
    loop, scaler = Loop(fused), make()
    before = scaler.state_dict()
    scaler.scale(torch.ones((), requires_grad=True))
    assert not scaler.step(loop.optimizer)
    scaler.update()
    assert scaler.state_dict() == before
    loop.steered(scaler).assert_is(Loop().plain())


def test_update_before_anything_or_before_step_is_refused_and_the_step_may_follow() -> None:
    loop, scaler = Loop(), make()
    with pytest.raises(AssertionError, match="_scale is None"):  # as GradScaler says
        scaler.update()
    scaler.scale(loop.loss()).backward()
    with pytest.raises(InvalidRequestError, match="before step") as caught:
        scaler.update()
    assert "step(optimizer)" in caught.value.next_step
    scaler.step(loop.optimizer)
    scaler.update()
    loop.assert_is(Loop().plain())


@fused_or_not
@pytest.mark.parametrize(
    ("first", "then", "match"),
    [
        ("unscale_", "unscale_", r"unscale_\(\) has already been called on this optimizer"),
        ("step", "step", r"step\(\) has already been called since the last update"),
        ("step", "unscale_", r"unscale_\(\) is being called after step"),
    ],
)
def test_a_wrong_order_is_refused_as_gradscaler_refuses_it(first: str, then: str, match: str, fused: bool) -> None:
    loops = []
    for scaler in (make(), torch.amp.GradScaler("cpu", init_scale=1024.0)):
        loop = Loop(fused)
        scaler.scale(loop.loss()).backward()  # type: ignore[no-untyped-call]
        getattr(scaler, first)(loop.optimizer)
        with pytest.raises(RuntimeError, match=match):
            getattr(scaler, then)(loop.optimizer)
        loops.append(loop)
    loops[0].assert_is(loops[1])


class Sharpness(torch.optim.SGD):
    """An optimizer whose step cannot do without its closure, as SAM's."""

    def step(self, closure: Any) -> Any:  # type: ignore[override] # it has no default
        with torch.enable_grad():
            closure()
        return super().step()


@fused_or_not
@pytest.mark.parametrize(("args", "kwargs"), [([Loop.loss], {}), ([], {"closure": Loop.loss}), ([], {"closure": None})])
def test_a_step_with_a_closure_is_refused_with_what_to_call_instead(args: Any, kwargs: Any, fused: bool) -> None:
    """Without gradients, too, it must not be a no-op: only the closure makes them."""
    loop, scaler = Loop(fused), make()
    scaler.scale(loop.loss()).backward()
    loop.optimizer.zero_grad()
    with pytest.raises(InvalidRequestError, match="closure") as caught:
        scaler.step(loop.optimizer, *args, **kwargs)
    assert "controller.backward" in caught.value.next_step
    loop.assert_is(Loop())


@pytest.mark.parametrize("kind", [torch.optim.LBFGS, Sharpness])
@pytest.mark.parametrize("call", ["step", "step with a closure", "train_step"])
def test_optimizers_that_need_a_closure_are_refused_in_every_form(kind: Any, call: str) -> None:
    loop, scaler = Loop(), make()
    optimizer = kind(loop.model.parameters(), lr=0.1)
    scaler.backward(loop.loss())
    calls: dict[str, Any] = {
        "step": lambda: scaler.step(optimizer),
        "step with a closure": lambda: scaler.step(optimizer, loop.loss),
        "train_step": lambda: scaler.train_step(loop.loss, optimizer),
    }
    with pytest.raises(InvalidRequestError, match=kind.__name__) as caught:
        calls[call]()
    assert "plain loop" in caught.value.next_step
    loop.assert_is(Loop())


@pytest.mark.parametrize("norm", [float("nan"), -1.0, 0, True, "1"])
def test_a_norm_that_nothing_can_be_clipped_to_is_refused_before_anything_is_trained(norm: Any) -> None:
    loop, scaler = Loop(), make()
    with pytest.raises(InvalidRequestError, match="clip_norm"):
        scaler.train_step(loop.loss, loop.optimizer, clip_norm=norm)
    loop.assert_is(Loop())
    assert scaler.train_step(loop.loss, loop.optimizer, clip_norm=float("inf")), "which only measures"


@pytest.mark.parametrize("number", [1.5, -1, "1", None])
def test_an_epoch_that_no_checkpoint_could_bring_back_is_refused(number: Any) -> None:
    scaler = make()
    scaler.epoch(torch.tensor(2))  # type: ignore[arg-type] # a whole number as well
    with pytest.raises(InvalidRequestError, match="epoch"):
        scaler.epoch(number)
    scaler.load_state_dict(scaler.state_dict())
    assert scaler.status().epoch == 2


@pytest.mark.parametrize("scale", [0.0, float("inf"), float("nan"), -1.0, torch.tensor(0.0)])
def test_a_scale_that_harms_weights_is_refused_and_nothing_changes(scale: float | Tensor) -> None:
    loop, scaler = Loop(), make()
    scaler.scale(loop.loss()).backward()
    scaler.step(loop.optimizer)
    with pytest.raises(InvalidRequestError, match="loss scale given is"):
        scaler.update(scale)
    scaler.update()
    assert scaler.get_scale() == 1024.0
    loop.steered(scaler).assert_is(Loop().plain(2))


def test_variables_that_were_not_set_before_python_are_warned_of(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MALLOC_MMAP_THRESHOLD_", "1")
    make(environment={"MALLOC_MMAP_THRESHOLD_": "1"})
    assert caplog.messages == []
    make(environment={"MALLOC_MMAP_THRESHOLD_": "1", "MALLOC_TRIM_THRESHOLD_": "4711"})
    (said,) = caplog.messages
    assert said.endswith("export MALLOC_TRIM_THRESHOLD_=4711")
