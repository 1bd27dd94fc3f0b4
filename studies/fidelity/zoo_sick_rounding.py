"""Sick workloads whose numbers stay in range but lose what matters to rounding, in bf16 or in both half precisions."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from samples import features, fixed, labelled
from torch import Tensor, nn
from zoo_healthy import cross_entropy, squared_error
from zoo_healthy_transformers import adamw
from zoo_sick_overflow import chain

from autotune_amp import Workload


class RunningLevel(nn.Module):
    """The change of a level of 1000 after all its increments, one after the other in their own precision."""

    def forward(self, increments: Tensor) -> Tensor:
        start = torch.full_like(increments[:, 0], 1000.0)
        level = start
        for increment in increments.unbind(1):
            level = level + increment
        return level - start


def running_sum() -> Workload:
    """Increments of 0.2 on a level of 1000, where fp16 has steps of 0.5 and bf16 of 4."""

    def model() -> nn.Module:
        return chain(
            enter=nn.Linear(8, 32), act=nn.Tanh(), body=nn.Linear(32, 32), act2=nn.Tanh(), increment=nn.Linear(32, 1),
            level=RunningLevel(),
        )  # fmt: skip

    def series(n: int) -> tuple[Tensor, Tensor]:
        x = torch.randn(n, 96, 8)
        return x, 0.2 * torch.tanh(x @ fixed(8, 1, seed=11)).sum(1)

    return Workload(model, squared_error, series, adamw, "running_sum")


def large_offset() -> Workload:
    """Raw inputs of 3000 and spread 1 go into a frozen layer whose bias takes the offset away again."""
    offset = 3000.0

    def model() -> nn.Module:
        raw = nn.Linear(16, 64).requires_grad_(False)
        with torch.no_grad():
            raw.bias -= offset * raw.weight.sum(1)
        return chain(raw_input=raw, act=nn.Tanh(), body=nn.Linear(64, 64), act2=nn.GELU(), head=nn.Linear(64, 1))

    def readings(n: int) -> tuple[Tensor, Tensor]:
        x, y = features(n, 16, 1)
        return x + offset, y

    return Workload(model, squared_error, readings, adamw, "large_offset")


class Calendar(nn.Module):
    """Adds the weekday's sine and cosine to the features; the day's number takes their precision."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.embed = nn.Linear(14, width)

    def forward(self, x: Tensor, day: Tensor) -> Tensor:
        weekday = torch.remainder(day.to(x.dtype), 7.0)[:, None]
        angles = weekday * (2 * math.pi / 7) * torch.arange(1, 8, device=x.device, dtype=x.dtype)
        return x + self.embed(torch.cat([angles.sin(), angles.cos()], 1))


class Forecast(nn.Module):
    """A number from features and the day's number."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.calendar = nn.Linear(8, 32), Calendar(32)
        self.body, self.head = nn.Sequential(nn.Linear(32, 32), nn.Tanh()), nn.Linear(32, 1)

    def forward(self, x: Tensor, day: Tensor) -> Tensor:
        out: Tensor = self.head(self.body(self.calendar(self.enter(x), day)))
        return out


def calendar() -> Workload:
    """Day numbers up to 2000: fp16 holds them exactly, bf16 in steps of up to 8."""

    def days(n: int) -> tuple[Tensor, Tensor, Tensor]:
        x, y = features(n, 8, 1)
        day = torch.randint(1000, 2000, (n,))
        return x, day, 0.3 * y[:, 0] + fixed(7, seed=12)[day % 7]

    def loss(model: Any, batch: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        x, day, target = batch
        return F.mse_loss(model(x, day)[:, 0].float(), target)

    def optimizer(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.AdamW(parameters, lr=3e-3)

    return Workload(Forecast, loss, days, optimizer, "calendar")


class MomentNorm(nn.Module):
    """Normalises x + 200 by its variance taken as E[x^2] - E[x]^2."""

    def __init__(self) -> None:
        super().__init__()
        self.level = nn.Parameter(torch.tensor(200.0))

    def forward(self, x: Tensor) -> Tensor:
        shifted = x + self.level.to(x.dtype)
        mean = shifted.mean(-1, keepdim=True)
        variance = (shifted * shifted).mean(-1, keepdim=True) - mean * mean
        return (shifted - mean) / torch.sqrt(variance.clamp(min=0) + 1e-3)


def variance_of_moments() -> Workload:
    """Two numbers of 40,000 whose difference is 1: fp16 has steps of 32 there, bf16 of 256."""

    def model() -> nn.Module:
        return chain(
            enter=nn.Linear(32, 64), act=nn.GELU(), body=nn.Linear(64, 64), norm=MomentNorm(), act2=nn.GELU(),
            head=nn.Linear(64, 10),
        )  # fmt: skip

    return Workload(model, cross_entropy, lambda n: labelled(n, 32, 10), adamw, "variance_of_moments")


class BinaryEntropy(nn.Module):
    """Binary cross entropy of each label, from probabilities and one minus them in the activations' precision."""

    def forward(self, logits: Tensor, labels: Tensor) -> Tensor:
        probability = torch.sigmoid(logits)
        return -torch.where(labels, torch.log(probability), torch.log(1 - probability))


class Tagger(nn.Module):
    """The mean loss of 32 labels for each sample."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.norm, self.body = nn.Linear(32, 64), nn.LayerNorm(64), nn.Linear(64, 64)
        self.act, self.head, self.entropy = nn.GELU(), nn.Linear(64, 32), BinaryEntropy()
        nn.init.constant_(self.head.bias, 11.0)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        loss: Tensor = self.entropy(self.head(self.act(self.body(self.norm(self.enter(x))))), labels)
        return loss


def one_minus_probability() -> Workload:
    """Logits of 11: one minus the probability is 2^-16, and 1 - 2^-16 is 1 in both half precisions."""

    def tagged(n: int) -> tuple[Tensor, Tensor]:
        x, outputs = features(n, 32, 32)
        return x, outputs > -1.0

    def loss(model: Any, batch: tuple[Tensor, Tensor]) -> Tensor:
        mean: Tensor = model(*batch).float().mean()
        return mean

    def optimizer(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.AdamW(parameters, lr=3e-3)

    return Workload(Tagger, loss, tagged, optimizer, "one_minus_probability")


def _low_weights_loss(model: Any, batch: tuple[Tensor, Tensor]) -> Tensor:
    x, labels = batch
    return F.cross_entropy(model(x.to(next(model.parameters()).dtype)).float(), labels)


def _classifier(width: int, dtype: torch.dtype) -> nn.Module:
    return chain(
        enter=nn.Linear(32, width), act=nn.ReLU(), body=nn.Linear(width, width), act2=nn.ReLU(),
        head=nn.Linear(width, 10),
    ).to(dtype)  # fmt: skip


def bf16_weights() -> Workload:
    """bf16 weights and a learning rate of 1e-5: most updates are under half a step and round away."""

    def optimizer(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.AdamW(parameters, lr=1e-5, weight_decay=0.0)

    def prototypes(n: int) -> tuple[Tensor, Tensor]:
        labels = torch.randint(10, (n,))
        return fixed(10, 32, seed=13)[labels] + 0.3 * torch.randn(n, 32), labels

    return Workload(
        lambda: _classifier(256, torch.bfloat16), _low_weights_loss, prototypes, optimizer, "bf16_weights"
    )  # fmt: skip


def fp16_weights() -> Workload:
    """fp16 weights under Adam: squared gradients and the eps of 1e-8 are both zero, and the update is m / 0."""

    def optimizer(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.Adam(parameters, lr=1e-3, eps=1e-8)

    return Workload(
        lambda: _classifier(64, torch.float16), _low_weights_loss, lambda n: labelled(n, 32, 10), optimizer,
        "fp16_weights",
    )  # fmt: skip
