"""Loops of their own are held against fp32 as a whole step: what every optimizer would have stepped on."""

from __future__ import annotations

import copy
from contextlib import ExitStack, nullcontext
from typing import Any

import loop_samples
import pytest
import torch
from loop_samples import LOOPS, batches, mlp
from torch import Tensor, nn

from autotune_amp import Workload
from autotune_amp.core.outcome import CheckOutcome, Failure, Fidelity
from autotune_amp.core.precisions import Precision
from autotune_amp.core.setting import Setting
from autotune_amp.numerics.passes import Passes
from autotune_amp.precision import torch_state
from autotune_amp.trial import checks
from autotune_amp.trial.context import Context
from autotune_amp.trial.jobs import Check, CheckKind


def spec(precision: Precision, what: CheckKind = "fidelity") -> Check:
    return Check(
        what=what,
        candidate=Setting(precision=precision, batch_size=32),
        device="cpu",
        seed=3,
        torch_state=torch_state.capture(),
    )


def checked(workload: Workload, precision: Precision, what: CheckKind = "fidelity") -> CheckOutcome:
    return checks.check(Context(workload, is_kept=False), spec(precision, what), lambda _: None)


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize("name", sorted(LOOPS))
def test_a_healthy_loop_is_faithful_and_left_as_it_was(name: str, precision: Precision) -> None:
    context = Context(LOOPS[name](), is_kept=True)
    model: Any = context.model(torch.device("cpu"))
    before = copy.deepcopy(model.state_dict())
    found = checks.check(context, spec(precision), lambda _: None)
    torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)
    assert name != "gan" or model.held["num_steps"] == 0
    assert all(parameter.grad is None for parameter in model.parameters())
    assert isinstance(found, Fidelity)
    assert (found.verdict, found.num_paired_steps) == ("faithful", 8)
    trained = {"gan": ("nets.generator", "nets.discriminator"), "diffusion": ("denoiser",)}[name]
    assert found.worst_parameters
    assert all(parameter.name.startswith(trained) for parameter in found.worst_parameters)


def test_a_sum_in_low_precision_is_not() -> None:
    found = checked(loop_samples.sick(), "bf16")
    assert isinstance(found, Fidelity)
    assert (found.verdict, found.culprits) == ("unfaithful", ())


def test_weights_in_half_precision_are_unchecked() -> None:
    def build() -> dict[str, Any]:
        net = mlp(8, 1).bfloat16()
        return {"net": net, "optimizer": torch.optim.SGD(net.parameters(), lr=0.1)}

    found = checked(Workload(build=build, train_step=lambda *_: None, data=batches), "bf16")
    assert isinstance(found, Fidelity)
    assert found.verdict == "unchecked"
    assert "half precision" in found.reason


def test_a_call_that_does_not_step_is_unchecked() -> None:
    found = checked(loop_samples.accumulating(), "bf16")
    assert isinstance(found, Fidelity)
    assert (found.verdict, found.precision) == ("unchecked", "bf16")
    assert "step" in found.reason
    failure = checked(loop_samples.accumulating(), "fp16", "calibration")
    assert isinstance(failure, Failure)
    assert failure.kind == "workload_error"


def stepping_four_times(*, in_one_autocast: bool) -> Workload:
    """As epochs over one batch are written, around which an autocast may be."""

    def build() -> dict[str, Any]:
        net = mlp(8, 8)
        return {"net": net, "optimizer": torch.optim.SGD(net.parameters(), lr=0.5)}

    def train_step(state: dict[str, Any], batch: Tensor, amp: Any) -> None:
        with amp.autocast() if in_one_autocast else nullcontext():
            for _ in range(4):
                state["optimizer"].zero_grad()
                with nullcontext() if in_one_autocast else amp.autocast():
                    loss = nn.functional.mse_loss(state["net"](batch), batch)
                amp.backward(loss)
                amp.step(state["optimizer"])
                amp.update()

    return Workload(build=build, train_step=train_step, data=batches)


@pytest.mark.parametrize("in_one_autocast", [False, True])
def test_several_steps_in_a_call_are_said_not_to_be_followed(in_one_autocast: bool) -> None:
    found = checked(stepping_four_times(in_one_autocast=in_one_autocast), "bf16")
    assert isinstance(found, Fidelity)
    assert "4 optimizer steps in one call" in found.reason
    assert found.verdict == ("unfaithful" if in_one_autocast else "faithful")
    assert ("cast before the first" in found.reason) == in_one_autocast


def test_a_step_with_a_closure_is_unchecked() -> None:
    def build() -> dict[str, Any]:
        net = mlp(8, 8)
        return {"net": net, "optimizer": torch.optim.LBFGS(net.parameters(), lr=0.1, max_iter=2)}

    def train_step(state: dict[str, Any], batch: Tensor, amp: Any) -> None:
        def closure() -> Tensor:
            state["optimizer"].zero_grad()
            with amp.autocast():
                loss = nn.functional.mse_loss(state["net"](batch), batch)
            amp.backward(loss)
            return loss

        amp.step(state["optimizer"], closure)
        amp.update()

    found = checked(Workload(build=build, train_step=train_step, data=batches), "bf16")
    assert isinstance(found, Fidelity), found
    assert found.verdict == "unchecked"
    assert "closure" in found.reason


# -- one pass ----------------------------------------------------------------------------------------------------------


def clipping(state: dict[str, Any], batch: Tensor, amp: Any) -> None:
    with amp.autocast():
        loss = state["net"](batch).float().square().mean()
    amp.backward(loss)
    amp.unscale_(state["optimizer"])
    nn.utils.clip_grad_value_(state["net"].parameters(), 0.01)
    amp.step(state["optimizer"])
    amp.update()


def test_a_pass_holds_what_was_clipped_whatever_the_scale_and_sees_what_clipping_hides() -> None:
    def build() -> dict[str, Any]:
        net = nn.Linear(8, 1)
        return {"net": net, "optimizer": torch.optim.SGD(net.parameters(), lr=0.1)}

    context = Context(Workload(build=build, train_step=clipping, data=batches), is_kept=False)
    passes = Passes(checks._make_check_inputs(context, spec("bf16"), lambda event: None, ExitStack())[0])
    one, other = passes.run(0, "fp32"), passes.run(0, "fp32", scale=2.0**20)
    assert one.loss == other.loss
    torch.testing.assert_close(one.gradients, other.gradients, rtol=0, atol=0)
    assert one.gradients["net.weight"].abs().max() == pytest.approx(0.01)
    assert not passes.run(0, "fp16", scale=2.0**30).is_finite
    assert passes.run(0, "fp16", scale=2.0**4).is_finite
