"""The held-out zoo, its sick half: workloads on which no threshold was chosen, each harmed in the precisions it names.

Written without sight of the code that judges them. Each was trained for 300 steps in fp32, bf16 and fp16, and where
pins heal it with its culprit pinned, before it was let in.
"""

from __future__ import annotations

import math
from functools import partial

import torch
import torch.nn.functional as F
from case import Case
from torch import Tensor, nn

from autotune_amp import Workload

adam = partial(torch.optim.AdamW, lr=1e-3)


class CosineScores(nn.Module):
    """Cosine attention that divides by the norms after the product: q.k itself is past 65504."""

    def forward(self, queries: Tensor, keys: Tensor) -> Tensor:
        norms = torch.linalg.vector_norm(queries.float(), dim=-1, keepdim=True)
        key_norms = torch.linalg.vector_norm(keys.float(), dim=-1, keepdim=True)
        return 10 * (queries @ keys.mT) / (norms * key_norms.mT)


class CosineAttention(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.query, self.key = nn.Linear(width, width), nn.Linear(width, width)
        self.value, self.out = nn.Linear(width, width), nn.Linear(width, width)
        self.scores = CosineScores()

    def forward(self, tokens: Tensor) -> Tensor:
        weights = self.scores(self.query(tokens), self.key(tokens)).softmax(-1)
        return self.out(weights @ self.value(tokens))


class SensorClassifier(nn.Module):
    """Raw readings, watts by the hundred, through one block of post-norm cosine attention."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.embed, self.attention, self.norm = nn.Linear(16, width), CosineAttention(width), nn.LayerNorm(width)
        self.feed_forward = nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.Linear(width, width))
        self.head = nn.Linear(width, 4)

    def forward(self, readings: Tensor) -> Tensor:
        tokens = self.embed(readings)
        tokens = self.norm(tokens + self.attention(tokens))
        return self.head((tokens + self.feed_forward(tokens)).mean(dim=1))


def late_cosine_attention() -> Workload:
    teacher = torch.randn(16, 4)

    def batch(n: int) -> tuple[Tensor, Tensor]:
        readings = 300 * (torch.randn(n, 12, 16) + torch.randn(n, 1, 16))
        return readings, (readings.mean(dim=1) @ teacher).argmax(-1)

    return Workload(SensorClassifier, lambda model, b: F.cross_entropy(model(b[0]).float(), b[1]), batch, adam)


class OctaveClock(nn.Module):
    """Sine and cosine of a whole number of seconds at eight octaves, in the type of the features that they go with.

    bf16 has no odd whole number past 256; fp16 has all of them to 2048, and halving is exact in both.
    """

    def forward(self, seconds: Tensor, like: Tensor) -> Tensor:
        octaves = 0.5 ** torch.arange(8, device=like.device, dtype=like.dtype)
        angles = seconds.to(like.dtype)[:, :, None] * octaves
        return torch.cat([angles.sin(), angles.cos()], dim=-1)


class EventForecaster(nn.Module):
    """Readings of a sensor with their times in seconds; a forecast for each."""

    def __init__(self, width: int = 48) -> None:
        super().__init__()
        self.embed, self.clock, self.clock_embed = nn.Linear(4, width), OctaveClock(), nn.Linear(16, width)
        self.norm = nn.LayerNorm(width)
        self.body = nn.Sequential(nn.Linear(width, 96), nn.GELU(), nn.Linear(96, 48), nn.GELU(), nn.Linear(48, 1))

    def forward(self, readings: Tensor, seconds: Tensor) -> Tensor:
        features = self.embed(readings)
        features = features + self.clock_embed(self.clock(seconds, features))
        return self.body(self.norm(features)).squeeze(-1)


def time_in_low_precision() -> Workload:
    teacher = torch.randn(4) / 2

    def batch(n: int) -> tuple[tuple[Tensor, Tensor], Tensor]:
        readings, seconds = torch.randn(n, 16, 4), torch.randint(1024, (n, 16)).float()
        return (readings, seconds), readings @ teacher + torch.sin(seconds) + torch.cos(seconds / 4)

    return Workload(EventForecaster, lambda model, b: F.mse_loss(model(*b[0]).float(), b[1]), batch, adam)


def finite_difference_poisson() -> Workload:
    """u'' = f by a network, its second derivative from three values a hundredth apart."""

    def model() -> nn.Module:
        layers = [nn.Linear(2, 48), nn.Tanh(), nn.Linear(48, 48), nn.Tanh(), nn.Linear(48, 1)]
        return nn.Sequential(*layers)

    def batch(n: int) -> tuple[Tensor, Tensor]:
        return 2 * torch.rand(n, 16) - 1, 1 + torch.rand(n, 1).expand(n, 16)

    def loss(model: nn.Module, b: tuple[Tensor, Tensor]) -> Tensor:
        place, strength = b
        h = 0.01

        def u(at: Tensor) -> Tensor:
            return model(torch.stack([at, strength], dim=-1)).squeeze(-1)

        curvature = (u(place + h) - 2 * u(place) + u(place - h)) / h**2
        residual = curvature + strength * math.pi**2 * torch.sin(math.pi * place)
        walls = u(torch.ones_like(place)) ** 2 + u(-torch.ones_like(place)) ** 2
        return (residual.float() ** 2).mean() / 10 + walls.float().mean()

    return Workload(model, loss, batch, adam)


class ForwardAlgorithm(nn.Module):
    """The probability of each sequence under a hidden Markov model, neither rescaled nor in logarithms."""

    def forward(self, transition: Tensor, likelihood: Tensor) -> Tensor:
        alpha = likelihood[:, 0] / likelihood.shape[-1]
        for step in range(1, likelihood.shape[1]):
            alpha = (alpha @ transition) * likelihood[:, step]
        return alpha.sum(-1).float().clamp(min=1e-37).log()


class NeuralMarkov(nn.Module):
    """Tables of a hidden Markov model, computed from embeddings of its states."""

    def __init__(self, num_states: int = 8, num_words: int = 16, width: int = 32) -> None:
        super().__init__()
        self.states = nn.Embedding(num_states, width)
        self.transition = nn.Linear(width, num_states)
        self.emission = nn.Sequential(nn.Linear(width, width), nn.Tanh(), nn.Linear(width, num_words))
        self.forward_algorithm = ForwardAlgorithm()

    def forward(self, words: Tensor) -> Tensor:
        transition = self.transition(self.states.weight).softmax(-1)
        emission = self.emission(self.states.weight).softmax(-1)
        return self.forward_algorithm(transition, emission.T[words])


def markov_probabilities() -> Workload:
    transition, emission = (3 * torch.randn(8, 8)).softmax(-1), (3 * torch.randn(8, 16)).softmax(-1)

    def batch(n: int) -> Tensor:
        state, words = torch.randint(8, (n,)), []
        for _ in range(24):
            words.append(torch.multinomial(emission[state], 1).squeeze(-1))
            state = torch.multinomial(transition[state], 1).squeeze(-1)
        return torch.stack(words, dim=1)

    return Workload(NeuralMarkov, lambda model, words: -model(words).mean(), batch, partial(adam, lr=1e-2))


HELD_OUT_SICK = (
    Case(
        "late_cosine_attention", late_cosine_attention, ("fp16",), r"attention\.scores", is_healable=True,
        note="q.k of 1e5 overflows fp16 before it is divided by the norms; bf16 has the range",
    ),
    Case(
        "time_in_low_precision", time_in_low_precision, ("bf16",), r"clock", is_healable=True,
        note="times to 1023 s rounded to multiples of 4 s by bf16; exact in fp16",
    ),
    Case(
        "finite_difference_poisson", finite_difference_poisson, ("bf16", "fp16"),
        note="a difference of close values over h^2 = 1e-4, in the loss; every layer rounds: no few pins heal",
    ),
    Case(
        "markov_probabilities", markov_probabilities, ("fp16",), r"forward_algorithm", is_healable=True,
        note="16^-24 flushes to 0 in fp16: the clamped loss is finite and has no gradient; bf16 has the range",
    ),
)  # fmt: skip
