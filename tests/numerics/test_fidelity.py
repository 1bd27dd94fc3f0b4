"""A check where weights are kept in low precision, where fp32 itself fails, and where the model raises."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from fidelity_subjects import Applied, chain, checked, compiled, everything_of, running_sum
from fp16_subjects import Batch, Transformer, build, convnet, mean_square, mlp, subject
from torch import Tensor, nn
from torch.nn import functional

from autotune_amp.core.config import Precision
from autotune_amp.core.errors import InvalidRequestError
from autotune_amp.numerics.fidelity import check

# -- weights in low precision ------------------------------------------------------------------------------------------


def in_its_dtype(model: nn.Module, batch: Batch) -> Tensor:
    output = model(batch.x.to(next(model.parameters()).dtype))
    return functional.cross_entropy(output.float(), batch.y.argmax(1))


def adam(lr: float) -> Callable[[nn.Module], torch.optim.Optimizer]:
    return lambda model: torch.optim.Adam(model.parameters(), lr=lr, eps=1e-8)


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize(("lr", "verdict"), [(1e-5, "doubtful"), (1e-3, "faithful")])
def test_bf16_weights_lose_small_updates(precision: Precision, lr: float, verdict: str) -> None:
    torch.manual_seed(0)
    made = subject(mlp().bfloat16(), in_its_dtype, make_optimizer=adam(lr))
    found = checked(made, precision)
    assert found.verdict == verdict, found.reason
    assert found.low_weights is not None
    assert found.low_weights.weights == "bf16"
    assert (found.low_weights.lost_share > 0.5) == (verdict == "doubtful")
    if verdict == "doubtful":
        assert "round away on weights kept in low precision" in found.reason
        assert "model.float()" in found.next_step
        assert found.culprits == ()


def test_the_issues_figure_of_bf16_weights_end_to_end() -> None:
    torch.manual_seed(0)
    model = nn.Linear(256, 64, bias=False)
    with torch.no_grad():
        model.weight.normal_(std=0.02)
    made = subject(
        model.bfloat16(), in_its_dtype, x=lambda: torch.randn(8, 256), y=lambda: torch.randn(8, 64),
        make_optimizer=adam(1e-5),
    )  # fmt: skip
    found = checked(made, "bf16")
    assert found.low_weights is not None
    assert found.low_weights.lost_share == pytest.approx(0.84, abs=0.03)
    octaves, counts = zip(*found.gradient_histogram, strict=True)
    assert max(octaves) - min(octaves) <= 12, "what is 2^-12 of the largest moves nothing"
    assert 0.9 * 256 * 64 < sum(counts) <= 256 * 64


def test_compiled_bf16_weights() -> None:
    torch.manual_seed(0)
    model = compiled(mlp().bfloat16())
    found = checked(subject(model, in_its_dtype, make_optimizer=adam(1e-5)), "bf16")
    assert found.verdict == "doubtful"
    assert found.low_weights is not None


def test_fp16_weights_under_adam_are_unfaithful_because_of_the_weights() -> None:
    torch.manual_seed(0)
    made = subject(
        chain(a=nn.Linear(8, 16), act=nn.ReLU(), head=nn.Linear(16, 4)).half(), in_its_dtype, make_optimizer=adam(1e-3)
    )
    found = checked(made, "fp32")
    assert found.verdict == "unfaithful"
    assert "no longer finite" in found.reason
    assert "Keep the weights in fp32 (model.float())" in found.next_step
    assert found.low_weights is not None
    assert found.low_weights.weights == "fp16"


def test_a_frozen_base_in_bf16_under_adapters_in_fp32_loses_nothing() -> None:
    class Adapted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.base = nn.Linear(8, 16).bfloat16().requires_grad_(False)
            self.down, self.up, self.head = nn.Linear(8, 2), nn.Linear(2, 16), nn.Linear(16, 4)

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.head(self.base(x.to(self.base.weight.dtype)).float() + self.up(self.down(x)).float())
            return out

    torch.manual_seed(0)
    found = checked(subject(Adapted()), "bf16")
    assert found.verdict == "faithful"
    assert found.low_weights is None


# -- what is not the precision's fault ---------------------------------------------------------------------------------


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("from_batch", [0, 5])
def test_where_fp32_itself_is_not_finite_the_check_says_nothing(bad: float, from_batch: int) -> None:
    def loss(model: nn.Module, batch: Batch) -> Tensor:
        return mean_square(model, batch) * (bad if batch.number >= from_batch else 1.0)

    torch.manual_seed(0)
    found = checked(subject(mlp(), loss), "bf16")
    assert found.verdict == "unchecked"
    assert "fp32 itself" in found.reason
    assert "before relying on it" in found.next_step
    assert found.culprits == ()


@pytest.mark.parametrize(("lr", "has_moved"), [(0.0, False), (0.01, True)])
def test_it_is_said_where_training_moves_no_weight(lr: float, has_moved: bool) -> None:
    torch.manual_seed(0)
    made = subject(mlp(), make_optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=lr))
    found = checked(made, "bf16")
    assert (found.verdict, found.has_moved) == ("faithful", has_moved)
    assert ("no weight moved in the training run" in found.reason) == (not has_moved)


class OwnError(Exception):
    pass


@pytest.mark.parametrize("failing", ["fp32", "bf16", "third batch"])
def test_what_the_model_raises_comes_through_and_leaves_the_model_as_it_was(failing: str) -> None:
    def loss(model: nn.Module, batch: Batch) -> Tensor:
        value = mean_square(model, batch)
        is_low = torch.is_autocast_enabled("cpu")
        if {"fp32": not is_low, "bf16": is_low, "third batch": batch.number == 2}[failing]:
            raise OwnError
        return value

    torch.manual_seed(0)
    made = subject(convnet(), loss, x=lambda: torch.randn(8, 2, 6, 6))
    before = everything_of(made.model)
    with pytest.raises(OwnError):
        check(made, "bf16", batch_size=8)
    torch.testing.assert_close(everything_of(made.model), before, rtol=0, atol=0)


def test_an_lstm_under_fp16_on_the_cpu_raises_what_onednn_raises() -> None:
    class Lstm(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = nn.LSTM(8, 4, batch_first=True)

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.body(x[:, None])[0][:, 0]
            return out

    torch.manual_seed(0)
    made = subject(Lstm())
    assert checked(made, "bf16").verdict == "faithful"
    before = everything_of(made.model)
    with pytest.raises(RuntimeError, match="primitive descriptor for the LSTM"):
        check(made, "fp16", batch_size=8)
    torch.testing.assert_close(everything_of(made.model), before, rtol=0, atol=0)


def test_a_pin_on_a_module_that_is_not_there_is_refused() -> None:
    with pytest.raises(InvalidRequestError, match="no module named 'tail'"):
        check(build("MLP"), "bf16", batch_size=8, pinned_modules=["tail"])


def test_a_module_that_cannot_be_run_twice_does_no_harm() -> None:
    class Once(nn.Linear):
        is_used = False

        def forward(self, x: Tensor) -> Tensor:
            if self.is_used:
                raise RuntimeError("twice")
            self.is_used = True
            return super().forward(x)

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        once = model.get_submodule("body")
        assert isinstance(once, Once)
        once.is_used = False
        return mean_square(model, batch)

    torch.manual_seed(0)
    model = chain(enter=nn.Linear(8, 16), body=Once(16, 16), middle=Applied(running_sum), head=nn.Linear(16, 4))
    found = checked(subject(model, loss), "bf16")
    assert found.verdict == "unfaithful"
    assert found.culprits == found.healing_pins == ("middle",)


def test_the_draws_are_the_same_in_the_whole_check() -> None:
    """Dropout in fp32 and bf16: the mask of each batch is one mask, whatever the pass."""
    masks: dict[int, set[bytes]] = {}

    class Noting(Transformer):
        number = 0

        def forward(self, x: Tensor) -> Tensor:
            kept = functional.dropout(torch.ones(64, dtype=self.head(x).dtype), 0.5) != 0
            masks.setdefault(self.number, set()).add(kept.numpy().tobytes())
            return super().forward(x)

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        assert isinstance(model, Noting)
        model.number = batch.number
        return mean_square(model, batch)

    torch.manual_seed(0)
    found = checked(subject(Noting(), loss, x=lambda: torch.randn(8, 3, 8)), "bf16")
    assert found.verdict == "faithful"
    assert len(masks) == 8
    assert all(len(seen) == 1 for seen in masks.values())
    assert len(set.union(*masks.values())) == 8
