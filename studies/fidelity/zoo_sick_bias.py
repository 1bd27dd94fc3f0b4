"""Workloads that rounding pulls one way in every batch, which noise does not: examined after the rule was made.

What of them is harmed is what training says (raw/trainings_bias.jsonl), not what they were built for.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from case import Case
from samples import features, fixed, labelled
from torch import Tensor, nn
from zoo_healthy import cross_entropy, squared_error
from zoo_healthy_transformers import adamw
from zoo_sick_overflow import chain

from autotune_amp import Workload


class Applied(nn.Module):
    """A function of what comes in, in its precision."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


def with_middle(middle: Callable[[], nn.Module], num_outputs: int = 1, width: int = 32) -> nn.Module:
    return chain(
        enter=nn.Linear(16, width), act=nn.Tanh(), body=nn.Linear(width, width), middle=middle(),
        head=nn.Linear(width, num_outputs),
    )  # fmt: skip


def regression(name: str, function: Callable[[Tensor], Tensor]) -> Callable[[], Workload]:
    def make() -> Workload:
        return Workload(
            lambda: with_middle(lambda: Applied(function)), squared_error, lambda n: features(n, 16, 1), adamw, name
        )

    return make


class LargeResidual(nn.Module):
    """Four residual blocks on a stream whose every channel is around 1000, as after a badly scaled embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Sequential(nn.LayerNorm(32), nn.Linear(32, 32), nn.Tanh()) for _ in range(4)])
        self.norm = nn.LayerNorm(32)

    def forward(self, x: Tensor) -> Tensor:
        stream = x + 1000.0 * torch.sign(torch.arange(32, device=x.device) - 15.5).to(x.dtype)
        for block in self.blocks:
            stream = stream + block(stream).to(stream.dtype)
        out: Tensor = self.norm(stream - 1000.0 * torch.sign(torch.arange(32, device=x.device) - 15.5).to(x.dtype))
        return out


def residual_on_large_value() -> Workload:
    return Workload(
        lambda: with_middle(LargeResidual, 10), cross_entropy, lambda n: labelled(n, 16, 10), adamw,
        "residual_on_large_value",
    )  # fmt: skip


class HourOfYear(nn.Module):
    """The daily wave of an hour that takes the precision of the features."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.wave, self.head = nn.Linear(16, 32), nn.Linear(2, 32), nn.Linear(32, 1)

    def forward(self, x: Tensor, hour: Tensor) -> Tensor:
        h = self.enter(x)
        angle = hour.to(h.dtype)[:, None] * (2 * math.pi / 24)
        out: Tensor = self.head(torch.tanh(h + self.wave(torch.cat([angle.sin(), angle.cos()], 1))))
        return out


def hour_of_year() -> Workload:
    def hours(n: int) -> tuple[Tensor, Tensor, Tensor]:
        x, y = features(n, 16, 1)
        hour = torch.randint(8760, (n,))
        return x, hour, y + fixed(24, 1, seed=31)[hour % 24]

    def loss(model: Any, batch: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        x, hour, y = batch
        return F.mse_loss(model(x, hour).float(), y)

    return Workload(HourOfYear, loss, hours, adamw, "hour_of_year")


class RunningMean(nn.Module):
    """Takes off a running mean that is kept up in the precision of what comes in, as old normalisation layers do."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(32))

    def forward(self, x: Tensor) -> Tensor:
        raised = x + 100.0
        kept = self.get_buffer("mean").to(x.dtype)
        new = 0.99 * kept + 0.01 * raised.detach().mean(0)
        self.get_buffer("mean").copy_(new.float())
        return raised - new


def running_mean() -> Workload:
    return Workload(
        lambda: with_middle(RunningMean), squared_error, lambda n: features(n, 16, 1), adamw, "running_mean"
    )


class OneAfterAnother(nn.Module):
    """The mean of many positive numbers, added one after the other."""

    def forward(self, x: Tensor) -> Tensor:
        total = torch.zeros_like(x[:, 0])
        for one in F.softplus(x).unbind(1):
            total = total + one
        return total / x.shape[1]


def added_one_by_one() -> Workload:
    """400 numbers of about 1: bf16 adds nothing below its step, which is 2 from 256 on."""

    def model() -> nn.Module:
        return chain(enter=nn.Linear(4, 16), pool=OneAfterAnother(), head=nn.Linear(16, 1))

    def series(n: int) -> tuple[Tensor, Tensor]:
        x = torch.randn(n, 400, 4) + torch.randn(n, 1, 4)
        return x, torch.tanh(x.mean(1) @ fixed(4, 1, seed=32))

    return Workload(model, squared_error, series, adamw, "added_one_by_one")


class Kernel(nn.Module):
    """Similarities to centres, the distance by |a|^2 + |b|^2 - 2 ab."""

    def __init__(self) -> None:
        super().__init__()
        self.centres = nn.Parameter(20.0 + torch.randn(32, 32))

    def forward(self, x: Tensor) -> Tensor:
        x, centres = x + 20.0, self.centres.to(x.dtype)
        squared = x.square().sum(1, keepdim=True) + centres.square().sum(1) - 2 * x @ centres.T
        return torch.exp(-squared / 32)


def pairwise_distance() -> Workload:
    return Workload(
        lambda: with_middle(Kernel), squared_error, lambda n: features(n, 16, 1), adamw, "pairwise_distance"
    )


def near_one_cosine() -> Workload:
    """Embeddings that are nearly alike from the start are to be the teacher's by one minus their cosine."""

    def loss(model: Any, batch: tuple[Tensor, Tensor]) -> Tensor:
        x, y = batch
        out = model(x)
        ours = F.normalize(5.0 + out, dim=1)
        theirs = F.normalize(5.0 + y.to(out.dtype), dim=1)
        return 100 * (1 - (ours * theirs).sum(1)).mean()

    return Workload(lambda: with_middle(nn.Identity, 8), loss, lambda n: features(n, 16, 8), adamw, "near_one_cosine")


def price_from_return() -> Workload:
    """A price is foretold as the last one times one and a return of thousandths, and judged by the return."""

    def loss(model: Any, batch: tuple[Tensor, Tensor]) -> Tensor:
        x, y = batch
        price = 1.0 + model(x) / 1000
        return F.mse_loss((price.float() - 1.0) * 1000, y)

    return Workload(lambda: with_middle(nn.Identity), loss, lambda n: features(n, 16, 1), adamw, "price_from_return")


MADE = {
    # Growth of thousandths: 1 + r rounds to 1 in bf16, to steps of 2^-10 in fp16.
    "log_of_growth": lambda x: 1000 * torch.log(1 + x / 1000),
    "growth_of_log": lambda x: 1000 * (torch.exp(x / 1000) - 1),
    # What several libraries do so that nothing overflows: it saturates in fp16 alone.
    "clamped_to_the_end": lambda x: (x * 1e5).clamp(-torch.finfo(x.dtype).max, torch.finfo(x.dtype).max) / 1e5,
    # An angle that has gone round many times.
    "winding_angle": lambda x: torch.sin(x + 200 * math.pi),
    # The square root of a sum of squares around a large one: hypot with a leg of 60.
    "long_leg": lambda x: 60 * (torch.sqrt(x * x + 3600.0) - 60.0),
    # A difference of two sigmoids that nearly are one.
    "saturated_gate": lambda x: 1000 * (torch.sigmoid(x + 8) - torch.sigmoid(torch.full_like(x, 8.0))),
}

# Harmed in most of three seeds, by training of 500 steps.
HARMED = {
    "residual_on_large_value": ("bf16", "fp16"),
    "pairwise_distance": ("bf16",),
    "price_from_return": ("bf16", "fp16"),
    "log_of_growth": ("bf16",),
    "growth_of_log": ("bf16",),
    "winding_angle": ("bf16",),
    "long_leg": ("bf16", "fp16"),
    "saturated_gate": ("bf16",),
}
_MAKES = {
    "residual_on_large_value": residual_on_large_value,
    "hour_of_year": hour_of_year,
    "running_mean": running_mean,
    "added_one_by_one": added_one_by_one,
    "pairwise_distance": pairwise_distance,
    "near_one_cosine": near_one_cosine,
    "price_from_return": price_from_return,
    **{name: regression(name, function) for name, function in MADE.items()},
}
BIAS = tuple(Case(name, make, HARMED.get(name, ())) for name, make in _MAKES.items())
