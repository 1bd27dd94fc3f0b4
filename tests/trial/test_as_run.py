"""Whether a step runs what cuDNN's TF32 flags concern: seen in a step where the modules do not tell."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import conv2d

from autotune_amp import Workload
from autotune_amp.core.setting import Setting
from autotune_amp.precision import torch_state
from autotune_amp.trial import worker
from autotune_amp.trial.context import make_model
from autotune_amp.trial.jobs import Trial
from autotune_amp.trial.worker import as_run, used_flags

SPEC = Trial(
    candidate=Setting(precision="fp32", batch_size=4, as_found=True), device="cpu", torch_state=torch_state.capture()
)
ALL = {"cudnn.conv", "cudnn.rnn"}
CONV = {"cudnn.conv"}
NONE: set[str] = set()
OFF = {f"{flag}.fp32_precision": "ieee" for flag in ("cuda.matmul", "cudnn.conv", "cudnn.rnn")} | {
    "autocast.cuda": None
}
DEFAULT = OFF | {"cudnn.conv.fp32_precision": "tf32", "cudnn.rnn.fp32_precision": "tf32"}


class Functional(nn.Module):
    """A convolution that no module tells of."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, 3, 3, 3))

    def forward(self, images: Tensor) -> Tensor:
        return conv2d(images, self.weight)


def images(batch_size: int) -> Tensor:
    return torch.randn(batch_size, 3, 8, 8)


def squared(model: nn.Module, batch: Tensor) -> Tensor:
    found: Tensor = model(batch).square().mean()
    return found


def job(model: Callable[[], nn.Module], loss: Callable[..., Tensor] = squared) -> Workload:
    return Workload(model, loss, images, lambda parameters: torch.optim.SGD(parameters, lr=0.01))


def loop(net: Callable[[], nn.Module]) -> Workload:
    def build() -> dict[str, Any]:
        made = net()
        return {"net": made, "optimizer": torch.optim.AdamW(made.parameters())}

    def step(state: dict[str, Any], batch: Tensor, amp: Any) -> None:
        with amp.autocast():
            loss = squared(state["net"], batch)
        amp.backward(loss)
        amp.step(state["optimizer"])
        state["optimizer"].zero_grad()

    return Workload(build=build, train_step=step, data=images)


def compiled(module: nn.Module) -> nn.Module:
    made: Any = torch.compile(module, backend="eager")
    return cast("nn.Module", made)


def loss_that_fails(model: nn.Module, batch: Tensor) -> Tensor:
    raise ValueError("no step")


def loss_of_an_operator_not_torchs_own(model: nn.Module, batch: Tensor) -> Tensor:
    return squared(model, torch.ops.autotune_amp_tests.unknown(batch))


@torch.library.custom_op("autotune_amp_tests::unknown", mutates_args=())
def unknown(batch: Tensor) -> Tensor:
    return batch * 2


@pytest.mark.parametrize(
    ("workload", "expected"),
    [
        (job(Functional), CONV),
        (job(lambda: nn.Linear(8, 8)), NONE),
        (job(lambda: compiled(Functional())), CONV),
        (job(lambda: compiled(nn.Linear(8, 8))), NONE),
        (loop(Functional), CONV),
        (loop(lambda: nn.Linear(8, 8)), NONE),
        (job(Functional, loss_that_fails), ALL),
        (job(lambda: nn.Linear(8, 8), loss_of_an_operator_not_torchs_own), ALL),
    ],
)
def test_the_flags_that_concern_a_step_are_seen_in_it(workload: Workload, expected: set[str]) -> None:
    assert used_flags(workload, make_model(workload), SPEC) == expected


@pytest.mark.parametrize(
    ("state", "used", "expected"),
    [
        (DEFAULT, NONE, ("fp32", True)),
        (DEFAULT, CONV, ("fp32", False)),
        (DEFAULT | {"cuda.matmul.fp32_precision": "tf32"}, None, ("tf32", True)),
        (OFF, None, ("fp32", True)),
    ],
)
def test_a_step_is_taken_where_that_alone_can_tell(
    state: dict[str, Any], used: set[str] | None, expected: tuple[str, bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    num_steps = []
    model = nn.Linear(2, 2)

    def seen(*_: object) -> set[str]:
        num_steps.append(1)
        return used or set()

    monkeypatch.setattr(worker, "used_flags", seen)
    found = as_run(job(lambda: model), model, torch.device("cuda"), state, 4, has_tf32=True)
    assert found == expected
    assert len(num_steps) == (used is not None)


def test_without_a_batch_size_all_flags_count_and_on_a_card_without_tf32_none() -> None:
    model, card = nn.Linear(2, 2), torch.device("cuda")
    assert as_run(job(lambda: model), model, card, DEFAULT, None, has_tf32=True) == ("fp32", False)
    assert as_run(job(lambda: model), model, card, DEFAULT, 4, has_tf32=False) == ("fp32", True)
