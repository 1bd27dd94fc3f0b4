"""A check of healthy trainings, each difficult in a way of its own: all are faithful."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from typing import Any

import msgspec
import pytest
import torch
from fidelity_subjects import chain, checked, compiled
from fp16_subjects import SUBJECTS, Batch, build, convnet, mean_square, mlp, subject
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from autotune_amp.core.config import Precision
from autotune_amp.numerics.fidelity import check
from autotune_amp.numerics.passes import Subject


def several_losses(model: nn.Module, batch: Batch) -> Tensor:
    out = model(batch.x)
    total: Tensor = functional.mse_loss(out["out"], batch.y) + 0.1 * out["more"].square().mean()
    return total


class Dictionary(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.out, self.more = nn.Linear(8, 8), nn.Linear(8, 4), nn.Linear(8, 1)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        hidden = self.body(x).relu()
        return {"out": self.out(hidden), "more": self.more(hidden)}


class UsedTwice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.act, self.head = nn.Linear(8, 8), nn.ReLU(inplace=True), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.act(self.body(self.act(self.body(x)))))
        return out


class ReentrantCheckpoint(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.enter, self.body, self.head = nn.Linear(8, 16), nn.Linear(16, 16), nn.Linear(16, 4)
        self.dropout = nn.Dropout(0.3)

    def forward(self, x: Tensor) -> Tensor:
        inner = checkpoint(lambda h: self.dropout(self.body(h)), self.enter(x), use_reentrant=True)
        out: Tensor = self.head(inner)
        return out


class ByChance(nn.Module):
    """Stochastic depth by Python's generator."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(8, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(x + self.body(x) if random.random() < 0.5 else x)
        return out


class Odd(nn.Module):
    """A complex parameter, one without entries, buffers that are expanded, that come late and that change size."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.head = nn.Linear(8, 8), nn.Linear(8, 4)
        self.filter = nn.Parameter(torch.randn(5, dtype=torch.complex64))
        self.nothing = nn.Parameter(torch.zeros(0, 3))
        self.register_buffer("expanded", torch.arange(1.0, 5.0).expand(8, -1))
        self.register_buffer("count", torch.zeros((), dtype=torch.long))
        self.register_buffer("cache", torch.ones(1), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        if self.get_buffer("cache").shape != (4,):
            self.cache = torch.ones(4)
        self.get_buffer("count").add_(1)
        x = torch.fft.irfft(torch.fft.rfft(self.enter(x).float()) * self.filter)
        out: Tensor = self.head(x) * self.get_buffer("expanded") * self.get_buffer("cache") + self.nothing.sum()
        return out


def partly_eval() -> nn.Module:
    model = convnet()
    model.get_submodule("1").eval()
    return chain(body=model, dropout=nn.Dropout(0.2))


def groups(model: nn.Module) -> torch.optim.Optimizer:
    first, *others = model.parameters()
    given: list[dict[str, Any]] = [{"params": [first], "lr": 1e-3, "weight_decay": 0.0}, {"params": others}]
    return torch.optim.AdamW(given, lr=1e-4)


def images() -> Tensor:
    return torch.randn(8, 2, 6, 6)


HEALTHY: dict[str, Callable[[], Subject]] = {
    **{name: partial(build, name) for name in SUBJECTS if name not in ("clamped", "sum over 1e5 elements")},
    "BatchNorm and dropout, partly in eval": lambda: subject(partly_eval(), x=images),
    "several losses from a dictionary": lambda: subject(Dictionary(), several_losses),
    "used twice, in-place": lambda: subject(UsedTwice()),
    "reentrant checkpoint": lambda: subject(ReentrantCheckpoint()),
    "Python's draws": lambda: subject(ByChance()),
    "parameter groups": lambda: subject(mlp(), make_optimizer=groups),
    "loss of shape (1,)": lambda: subject(mlp(), lambda model, batch: mean_square(model, batch)[None]),
    "targets of 1e3": lambda: subject(mlp(), y=lambda: 1e3 * torch.randn(8, 4)),
    "equal batches": lambda: repeated(subject(mlp())),
}


def repeated(made: Subject) -> Subject:
    return Subject(made.model, made.loss, [made.batches[0]] * 8, made.make_optimizer, made.device)


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize("name", sorted(HEALTHY))
def test_healthy_trainings_are_faithful(name: str, precision: Precision) -> None:
    torch.manual_seed(0)
    found = checked(HEALTHY[name](), precision)
    assert found.verdict == "faithful", found.reason
    assert found.next_step == f"Train in {precision}."
    assert found.noise_ratio is not None
    assert found.noise_ratio < 0.1
    assert found.loss_error is not None
    assert found.loss_error < 0.02
    assert found.gradient_cosine == pytest.approx(1, abs=1e-3)
    assert found.gradient_norm_ratio == pytest.approx(1, abs=0.02)
    assert found.forward_max is not None
    assert (found.loss_scale is None) == (precision == "bf16")
    assert 1 <= len(found.worst_parameters) <= 5


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_odd_parameters_and_buffers(precision: Precision) -> None:
    torch.manual_seed(0)
    made = subject(Odd())
    made.model(made.batches[0].x)  # its cache has its size
    assert checked(made, precision).verdict == "faithful"
    assert made.model.get_buffer("count") == 1


def test_a_cache_that_comes_during_the_check_stays() -> None:
    torch.manual_seed(0)
    made = subject(Odd())
    assert check(made, "bf16", batch_size=8).verdict == "faithful"
    assert made.model.get_buffer("cache").shape == (4,)
    assert made.model.get_buffer("count") == 0


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_a_compiled_model_is_checked_under_the_users_names(precision: Precision) -> None:
    torch.manual_seed(0)
    found = checked(subject(compiled(mlp())), precision)
    assert found.verdict == "faithful"
    assert {damage.name for damage in found.worst_parameters} <= {"0.weight", "0.bias", "2.weight", "2.bias"}


def test_strict_fp32_against_itself_is_faithful_without_noise() -> None:
    found = checked(build("transformer with dropout"), "fp32")
    assert (found.verdict, found.noise_ratio, found.training_gap) == ("faithful", 0.0, 0.0)


def test_the_same_check_twice_says_the_same() -> None:
    made = build("transformer with dropout")
    one, again = checked(made, "bf16"), checked(made, "bf16")
    same = {"seconds": 0.0, "fp32_step_seconds": None}
    assert msgspec.structs.replace(one, **same) == msgspec.structs.replace(again, **same)
