"""A NaN that one attention backend gives costs that backend, not the precision; simulated on the CPU by its flag."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autotune_amp import AmpConfig, PrecisionController
from autotune_amp.dimensions.attention import enabled_backends
from autotune_amp.precision import torch_state
from autotune_amp.runtime.diagnosis import Rerunner, diagnose
from autotune_amp.runtime.scaler import Ranks

CONFIG = AmpConfig(precision="bf16", batch_size=4, fallback=["fp32"], attention="cudnn")


@pytest.fixture(autouse=True)
def _as_it_was() -> Iterator[None]:
    before = torch_state.capture()
    yield
    torch_state.apply(before)


class Faulty(torch.autograd.Function):
    """Identity whose gradient is NaN in bf16 while all of `backends` are allowed to be used."""

    backends: tuple[str, ...] = ()

    @staticmethod
    def forward(ctx: Any, hidden: Tensor) -> Tensor:
        return hidden.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        is_bad = gradient.dtype == torch.bfloat16 and bool(enabled_backends().intersection(Faulty.backends))
        return gradient * float("nan") if is_bad else gradient


class Overflowing(Faulty):
    """Identity whose gradient overflows at a large loss scale while FlashAttention is allowed to be used."""

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        is_bad = bool(gradient.abs().amax() > 1.0) and "flash" in enabled_backends()
        return gradient * float("inf") if is_bad else gradient


class Attention(nn.Module):
    def __init__(self, function: type[Faulty] = Faulty) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.function = function

    def forward(self, hidden: Tensor) -> Tensor:
        hidden = self.linear(hidden)[:, None]
        return self.function.apply(nn.functional.scaled_dot_product_attention(hidden, hidden, hidden)[:, 0])  # type: ignore[no-any-return, no-untyped-call]


def train(controller: PrecisionController, *backends: str, num_steps: int = 8) -> None:
    """Train with these faulty backends from the fourth step on."""
    torch.manual_seed(0)
    model = Attention()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    controller.attach(model)
    for step in range(num_steps):
        Faulty.backends = backends if step >= 3 else ()
        inputs = torch.randn(4, 3, 8)
        controller.train_step(lambda inputs=inputs: model(inputs).square().mean(), optimizer)  # type: ignore[misc]


@pytest.mark.parametrize("faulty", ["cudnn", "flash"])
def test_the_backend_at_fault_is_excluded_and_bf16_stays(faulty: str) -> None:
    excluded = (faulty,)
    controller = PrecisionController(CONFIG, device="cpu")
    train(controller, faulty)
    status = controller.status()
    assert (status.precision, status.excluded_attention) == ("bf16", excluded)
    assert [move.kind for move in status.history] == ["attention"]
    assert ("cuDNN off" in status.history[0].reason) == (faulty == "cudnn")
    assert status.num_skips == 2
    assert not enabled_backends().intersection(excluded)
    assert controller.config.attention == ("as_found" if "cudnn" in excluded else "cudnn")
    saved = json.loads(json.dumps(controller.state_dict()))
    controller.detach()
    assert enabled_backends() >= set(excluded), "other training in this process is not concerned"
    resumed = PrecisionController(CONFIG, device="cpu")
    resumed.load_state_dict(saved)
    train(resumed, faulty, num_steps=6)
    assert (resumed.status().excluded_attention, resumed.status().num_skips) == (excluded, 2)


@pytest.mark.parametrize("faulty", [("math",), ("cudnn", "flash")])
def test_what_the_exclusion_of_no_single_backend_cures_is_precision_s_fault(faulty: tuple[str, ...]) -> None:
    controller = PrecisionController(CONFIG, device="cpu")
    train(controller, *faulty)
    status = controller.status()
    assert status.excluded_attention == ()
    assert [move.kind for move in status.history] in (["demotion"], ["pin"])
    assert enabled_backends() == {"cudnn", "flash", "efficient", "math"}


def test_an_overflow_by_the_loss_scale_alone_is_not_attention_s_fault() -> None:
    model, inputs = Attention(Overflowing), torch.ones(4, 3, 8)
    rerunner = Rerunner(model, lambda: model(inputs).square().mean(), "fp16", Ranks(torch.device("cpu")))
    finding = diagnose(rerunner, ("fp32",), 2.0**16)
    assert (finding.reproduced, finding.attention) == (True, ())


def test_a_backend_that_is_the_only_one_allowed_is_not_excluded() -> None:
    torch.backends.cuda.enable_math_sdp(False)
    controller = PrecisionController(CONFIG, device="cpu")
    train(controller, "flash")
    status = controller.status()
    assert status.excluded_attention == ()
    assert [(move.kind, "backward pass" in move.reason) for move in status.history] == [("demotion", True)]


def test_attention_inside_torch_s_own_layers_is_seen() -> None:
    Faulty.backends = ("flash",)

    class Encoder(nn.TransformerEncoderLayer):
        def forward(self, *args: Any, **kwargs: Any) -> Tensor:
            return Faulty.apply(super().forward(*args, **kwargs).bfloat16())  # type: ignore[no-any-return, no-untyped-call]

    model, inputs = Encoder(8, 2, 8, dropout=0.0, batch_first=True), torch.randn(2, 3, 8)
    rerunner = Rerunner(model, lambda: model(inputs).square().mean(), "bf16", Ranks(torch.device("cpu")))
    assert diagnose(rerunner, ("fp32",), 1.0).attention == ("flash",)
