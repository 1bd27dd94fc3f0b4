"""Workloads in which small contributions vanish, a normaliser saturates, or averages are kept in half precision.

Which of them are harmed is measured by training (raw/trainings_vanishing.jsonl): `HARMED` says so, whatever a case was
built for.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from case import Case
from samples import features, fixed, labelled
from torch import Tensor, nn
from zoo_healthy import cross_entropy, squared_error
from zoo_healthy_transformers import adamw
from zoo_sick_bias import regression
from zoo_sick_overflow import chain

from autotune_amp import Workload

# -- contributions that vanish -----------------------------------------------------------------------------------------


class Integrator(nn.Module):
    """Euler's method with 32 small steps, on a state around 2 that the features push."""

    def __init__(self) -> None:
        super().__init__()
        self.push, self.field, self.head = nn.Linear(16, 32), nn.Linear(32, 32), nn.Linear(32, 1)

    def forward(self, x: Tensor) -> Tensor:
        push = self.push(x)
        state = torch.full_like(push, 2.0)
        for _ in range(32):
            state = state + 0.015 * torch.tanh(self.field(state - 2.0) + push).to(state.dtype)
        out: Tensor = self.head(4 * (state - 2.0))
        return out


class SurvivalCurve(nn.Module):
    """The share that survives 32 intervals, each with a hazard of a few thousandths."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 32))

    def forward(self, x: Tensor) -> Tensor:
        survival = torch.ones_like(hazards := torch.sigmoid(self.body(x)) / 200)[:, 0]
        for hazard in hazards.unbind(1):
            survival = survival * (1 - hazard)
        return survival


def survival_curve() -> Workload:
    def cohorts(n: int) -> tuple[Tensor, Tensor]:
        x, y = features(n, 16, 1)
        return x, torch.sigmoid(2 * y[:, 0])

    def loss(model: Any, batch: tuple[Tensor, Tensor]) -> Tensor:
        x, y = batch
        return F.mse_loss((1 - model(x).float()) / 0.15, y)

    return Workload(SurvivalCurve, loss, cohorts, adamw, "survival_curve")


def rare_events() -> Workload:
    """Rates of thousandths by a softplus that is written as minus the logarithm of a sigmoid."""

    def events(n: int) -> tuple[Tensor, Tensor]:
        x, y = features(n, 16, 1)
        return x, 0.004 * torch.exp(y[:, 0])

    def loss(model: Any, batch: tuple[Tensor, Tensor]) -> Tensor:
        x, y = batch
        rate = -torch.log(torch.sigmoid(5.0 - model(x)[:, 0])).float() + 1e-5
        return 100 * (rate - y * torch.log(rate)).mean()

    return Workload(lambda: perceptron(1), loss, events, adamw, "rare_events")


def perceptron(num_outputs: int, width: int = 32) -> nn.Module:
    return chain(
        enter=nn.Linear(16, width), act=nn.Tanh(), body=nn.Linear(width, width), act2=nn.Tanh(),
        head=nn.Linear(width, num_outputs),
    )  # fmt: skip


def differences_of_levels() -> Workload:
    """Forecasts levels around 20 and is judged by their differences from hour to hour."""

    def loss(model: Any, batch: tuple[Tensor, Tensor]) -> Tensor:
        x, y = batch
        levels = 20.0 + model(x) / 4
        return F.mse_loss(4 * levels.diff(dim=1).float(), y)

    return Workload(lambda: perceptron(9), loss, lambda n: features(n, 16, 8), adamw, "differences_of_levels")


class Rotary(nn.Module):
    """One head of attention over tokens whose angles are made of positions in the precision of the features."""

    def __init__(self, vocab: int = 32, width: int = 32) -> None:
        super().__init__()
        self.tokens, self.head = nn.Embedding(vocab, width), nn.Linear(width, vocab)
        self.project = nn.Linear(width, 3 * width)

    def forward(self, ids: Tensor, start: Tensor) -> Tensor:
        query, key, value = self.project(self.tokens(ids)).chunk(3, -1)
        half = query.shape[-1] // 2
        position = (start[:, None] + torch.arange(ids.shape[1], device=ids.device)).to(query.dtype)
        frequency = (100.0 ** (-torch.arange(half, device=ids.device) / half)).to(query.dtype)
        angle = position[:, :, None] * frequency

        def turned(x: Tensor) -> Tensor:
            a, b = x.chunk(2, -1)
            return torch.cat([a * angle.cos() - b * angle.sin(), a * angle.sin() + b * angle.cos()], -1).to(x.dtype)

        mixed = F.scaled_dot_product_attention(
            turned(query)[:, None], turned(key)[:, None], value[:, None], is_causal=True
        )
        out: Tensor = self.head(mixed[:, 0])
        return out


def rotary_positions() -> Workload:
    """To say the token before the last one, far into a long text."""

    def text(n: int) -> tuple[Tensor, Tensor]:
        return torch.randint(32, (n, 24)), torch.randint(1000, 4000, (n,))

    def loss(model: Any, batch: tuple[Tensor, Tensor]) -> Tensor:
        ids, start = batch
        return F.cross_entropy(model(ids, start)[:, 1:].flatten(0, 1).float(), ids[:, :-1].flatten())

    def optimizer(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.AdamW(parameters, lr=1e-2)

    return Workload(Rotary, loss, text, optimizer, "rotary_positions")


# -- many classes ------------------------------------------------------------------------------------------------------

NUM_CLASSES = 400


def many_classes(n: int) -> tuple[Tensor, Tensor]:
    return labelled(n, 16, NUM_CLASSES)


class AlikeEmbeddings(nn.Module):
    """100 times the cosine to the embedding of each class, where all of them point nearly one way."""

    def __init__(self) -> None:
        super().__init__()
        self.body = perceptron(32)
        self.classes = nn.Parameter(torch.randn(NUM_CLASSES, 32))

    def forward(self, x: Tensor) -> Tensor:
        ours = F.normalize(3.0 + self.body(x).float(), dim=1)
        return 100 * ours @ F.normalize(3.0 + self.classes, dim=1).T


class Prototypes(nn.Module):
    """Minus the squared distance to each class, by |a|^2 - 2 ab + |b|^2 in the precision of the features."""

    def __init__(self) -> None:
        super().__init__()
        self.body = perceptron(32)
        self.classes = nn.Parameter(4.0 + 0.3 * torch.randn(NUM_CLASSES, 32))

    def forward(self, x: Tensor) -> Tensor:
        ours = 4.0 + self.body(x)
        classes = self.classes.to(ours.dtype)
        return (
            2 * ours @ classes.T
            - ours.square().sum(1, keepdim=True).to(ours.dtype)
            - classes.square().sum(1).to(ours.dtype)
        )


def classified(model: Callable[[], nn.Module], name: str) -> Callable[[], Workload]:
    return lambda: Workload(model, cross_entropy, many_classes, adamw, name)


def expected_bin() -> Workload:
    """A value as the mean of 400 bins under a softmax, the sum in the precision of the features."""

    def data(n: int) -> tuple[Tensor, Tensor]:
        x, y = features(n, 16, 1)
        return x, 250 + 2 * y[:, 0]

    def loss(model: Any, batch: tuple[Tensor, Tensor]) -> Tensor:
        x, y = batch
        out = model(x)
        bins = torch.arange(NUM_CLASSES, device=x.device) + 50.0
        found = (out.softmax(1).to(out.dtype) * bins.to(out.dtype)).sum(1).to(out.dtype)
        return F.mse_loss(found.float(), y)

    return Workload(lambda: perceptron(NUM_CLASSES), loss, data, adamw, "expected_bin")


# -- normalisers that saturate -----------------------------------------------------------------------------------------


class ClampedNorm(nn.Module):
    """Divides by the root of a sum of squares that a clamp keeps from overflowing."""

    def forward(self, x: Tensor) -> Tensor:
        squares = (x * x).clamp(max=torch.finfo(x.dtype).max / 64).sum(1, keepdim=True).to(x.dtype)
        return 5 * x / squares.clamp(min=1e-3).sqrt().to(x.dtype)


def of_all_sizes(norm: Callable[[], nn.Module], name: str) -> Callable[[], Workload]:
    """Inputs whose size says nothing and differs from sample to sample."""

    def data(n: int) -> tuple[Tensor, Tensor]:
        x, y = features(n, 16, 1)
        return x * 150 * torch.exp(torch.randn(n, 1)), y

    def model() -> nn.Module:
        return chain(
            enter=nn.Linear(16, 32, bias=False), norm=norm(), body=nn.Linear(32, 32), act=nn.Tanh(),
            head=nn.Linear(32, 1),
        )  # fmt: skip

    return lambda: Workload(model, squared_error, data, adamw, name)


# -- averages kept in half precision -----------------------------------------------------------------------------------


class Codebook(nn.Module):
    """Codes that follow fixed features by a moving average in the features' precision, as VQ-VAE's do."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.gain = nn.Linear(16, 16, bias=False), nn.Parameter(torch.ones(16))
        self.register_buffer("codes", 8.0 + torch.randn(32, 16))
        with torch.no_grad():
            self.encoder.weight.copy_(torch.eye(16))
        self.encoder.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        codes = self.get_buffer("codes")
        z = 8.0 + self.encoder(x)
        chosen = torch.cdist(z.detach().float(), codes).argmin(1)
        hits = F.one_hot(chosen, len(codes)).float()
        means = (hits.T @ z.detach().float()) / hits.sum(0).clamp(min=1)[:, None]
        kept, means = codes.to(z.dtype), means.to(z.dtype)
        moved = torch.where(hits.sum(0)[:, None] > 0, 0.99 * kept + 0.01 * means, kept)
        with torch.no_grad():
            codes.copy_(moved.float())
        code = kept[chosen]
        return self.gain * (code - 8.0)


def ema_codebook() -> Workload:
    def loss(model: Any, batch: Tensor) -> Tensor:
        return F.mse_loss(model(batch).float(), batch)

    def points(n: int) -> Tensor:
        labels = torch.randint(16, (n,))
        return fixed(16, 16, seed=41)[labels] + 0.1 * torch.randn(n, 16)

    return Workload(Codebook, loss, points, adamw, "ema_codebook")


class ClippedObservation(nn.Module):
    """Observations around 100, less a running mean in the features' precision, clipped as in reinforcement learning."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.body = nn.Linear(16, 16, bias=False), perceptron(1)
        self.register_buffer("mean", torch.zeros(16))
        with torch.no_grad():
            self.enter.weight.copy_(torch.eye(16))
        self.enter.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        raw = self.enter(x) + 100.0
        kept = self.get_buffer("mean").to(raw.dtype)
        mean = kept + 0.05 * (raw.detach().mean(0).to(raw.dtype) - kept)
        self.get_buffer("mean").copy_(mean.float())
        out: Tensor = self.body((raw - mean).clamp(-4, 4))
        return out


class MeanTeacher(nn.Module):
    """A classifier, and a teacher in bf16 that follows its weights by 2 % at each step."""

    def __init__(self) -> None:
        super().__init__()
        self.student, self.teacher = perceptron(10), perceptron(10).bfloat16().requires_grad_(False)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        with torch.no_grad():
            for theirs, ours in zip(self.teacher.parameters(), self.student.parameters(), strict=True):
                theirs.mul_(0.98).add_(0.02 * ours.to(theirs.dtype))
            taught = self.teacher(x.to(next(self.teacher.parameters()).dtype))
        return self.student(x), taught


def ema_teacher() -> Workload:
    def loss(model: Any, batch: tuple[Tensor, Tensor]) -> Tensor:
        x, labels = batch
        out, taught = model(x)
        likeness = F.mse_loss(out.float(), taught.float())
        return F.cross_entropy(out.float(), labels) + 3 * likeness

    return Workload(MeanTeacher, loss, lambda n: labelled(n, 16, 10), adamw, "ema_teacher")


class Gains(nn.Module):
    """Gains that start at 1 and are kept in bf16, whose steps are twice as large above 1 as below."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.head = nn.Linear(16, 16, bias=False), nn.Linear(16, 1, bias=False)
        with torch.no_grad():
            self.enter.weight.copy_(torch.eye(16))
        self.enter.weight.requires_grad_(False)
        self.head.weight.requires_grad_(False)
        self.gains = nn.Parameter(torch.ones(16, dtype=torch.bfloat16))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(torch.tanh(self.enter(x) * self.gains.float()))
        return out


def one_sided_gains() -> Workload:
    """From 1 an update of 0.003 goes down and never up; the best gains lie above."""

    def data(n: int) -> tuple[Tensor, Tensor]:
        x = torch.randn(n, 16)
        return x, torch.tanh(1.5 * x)

    def loss(model: Any, batch: tuple[Tensor, Tensor]) -> Tensor:
        x, y = batch
        return F.mse_loss(model(x).float(), model.head(y).float())

    def optimizer(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.Adam((p for p in parameters if p.requires_grad), lr=3e-3)

    return Workload(Gains, loss, data, optimizer, "one_sided_gains")


FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    # Chebyshev's tenth polynomial by its powers, whose terms of a thousand cancel.
    "chebyshev_by_powers": lambda x: _chebyshev(torch.tanh(x)),
    # The share of a small part in a large whole.
    "small_share": lambda x: 400 * (1 - 400 / (400 + torch.sigmoid(x))),
}


def _chebyshev(x: Tensor) -> Tensor:
    square = x * x
    fourth = square * square
    return 512 * fourth * fourth * square - 1280 * fourth * fourth + 1120 * fourth * square - 400 * fourth + 50 * square


_ALL = ("fp32", "bf16", "fp16")
# Harmed in most of three seeds, by training of 500 steps.
HARMED: dict[str, tuple[str, ...]] = {
    "integrator": ("bf16",),
    "survival_curve": ("bf16",),
    "rare_events": ("bf16",),
    "differences_of_levels": ("bf16",),
    "rotary_positions": ("bf16", "fp16"),
    "prototypes": ("bf16", "fp16"),
    "expected_bin": ("bf16",),
    "clamped_norm": ("fp16",),
    "ema_codebook": ("bf16", "fp16"),
    "clipped_observation": ("bf16",),
    "ema_teacher": _ALL,
    "one_sided_gains": _ALL,
    "small_share": ("bf16",),
}
_MAKES: dict[str, Callable[[], Workload]] = {
    "integrator": lambda: Workload(Integrator, squared_error, lambda n: features(n, 16, 1), adamw, "integrator"),
    "survival_curve": survival_curve,
    "rare_events": rare_events,
    "differences_of_levels": differences_of_levels,
    "rotary_positions": rotary_positions,
    "alike_embeddings": classified(AlikeEmbeddings, "alike_embeddings"),
    "prototypes": classified(Prototypes, "prototypes"),
    "expected_bin": expected_bin,
    "clamped_norm": of_all_sizes(ClampedNorm, "clamped_norm"),
    "ema_codebook": ema_codebook,
    "clipped_observation": lambda: Workload(
        ClippedObservation, squared_error, lambda n: features(n, 16, 1), adamw, "clipped_observation"
    ),
    "ema_teacher": ema_teacher,
    "one_sided_gains": one_sided_gains,
    **{name: regression(name, function) for name, function in FUNCTIONS.items()},
}
VANISHING = tuple(Case(name, make, HARMED.get(name, ())) for name, make in _MAKES.items())
