"""Sick workloads whose numbers leave fp16's range below: at 2^-25 and under they are zero."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from samples import features, fixed, labelled
from torch import Tensor, nn
from zoo_healthy import cross_entropy
from zoo_healthy_transformers import adamw
from zoo_sick_overflow import Gain, chain, linear

from autotune_amp import Workload


class MeanNormalise(nn.Module):
    """Divides by the mean of the magnitudes; 1e-8 keeps rows of zeros from 0/0, where it is not itself zero."""

    def forward(self, x: Tensor) -> Tensor:
        return x / (x.abs().mean(-1, keepdim=True) + 1e-8)


class MeanOverFrames(nn.Module):
    """(n, frames, width) to (n, width)."""

    def forward(self, x: Tensor) -> Tensor:
        return x.mean(1)


def vanishing_eps() -> Workload:
    """Frames of padding are zeros, and 1e-8 is zero in fp16."""

    def model() -> nn.Module:
        return chain(
            enter=nn.Linear(16, 32, bias=False), act=nn.ReLU(), normalise=MeanNormalise(), pool=MeanOverFrames(),
            body=nn.Linear(32, 32), act2=nn.ReLU(), head=nn.Linear(32, 10),
        )  # fmt: skip

    def padded_frames(n: int) -> tuple[Tensor, Tensor]:
        labels = torch.randint(10, (n,))
        frames = fixed(10, 1, 16, seed=7)[labels] + torch.randn(n, 12, 16)
        return frames * (torch.arange(12) < torch.randint(6, 12, (n, 1)))[..., None], labels

    return Workload(model, cross_entropy, padded_frames, adamw, "vanishing_eps")


class LogProbabilities(nn.Module):
    """Probabilities kept in the activations' precision, then their logarithm."""

    def forward(self, logits: Tensor) -> Tensor:
        probabilities = logits.softmax(-1).to(logits.dtype)
        return torch.log(probabilities + 1e-9)


def log_of_tiny() -> Workload:
    """Logits of size 8: many probabilities under 2^-25."""

    def model() -> nn.Module:
        return chain(
            enter=nn.Linear(32, 64), norm=nn.LayerNorm(64), body=nn.Linear(64, 64), norm2=nn.LayerNorm(64),
            head=linear(64, 10, gain=14.0), log_probabilities=LogProbabilities(),
        )  # fmt: skip

    def negative_log_likelihood(model: Any, batch: tuple[Tensor, Tensor]) -> Tensor:
        x, labels = batch
        return F.nll_loss(model(x).float(), labels)

    return Workload(model, negative_log_likelihood, lambda n: labelled(n, 32, 10), adamw, "log_of_tiny")


class LoudAndQuiet(nn.Module):
    """Two branches without a common layer."""

    def __init__(self) -> None:
        super().__init__()
        self.loud = nn.Linear(16, 1, bias=False)
        self.quiet = chain(analysis=nn.Linear(64, 64), synthesis=nn.Linear(64, 64))
        nn.init.zeros_(self.loud.weight)

    def forward(self, prices: Tensor, audio: Tensor) -> tuple[Tensor, Tensor]:
        return self.loud(prices)[:, 0], self.quiet(audio)


AUDIO_FULL_SCALE = 32_768.0


def quiet_branch() -> Workload:
    """Gradients of 2^-29 beside gradients of 2^13: no loss scale serves both.

    One branch gets raw prices of 1e4. The other puts out raw 16-bit audio: only its loss, a mean over 1e5 samples,
    brings it to full scale.
    """

    def batch(n: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        prices = 8192 * torch.randn(n, 16)
        worth = (prices / 8192) @ fixed(16, seed=9) / 4 + torch.randn(n)
        audio = 8000 * torch.randn(n, 256, 64)
        return prices, worth, audio, audio @ fixed(64, 64, seed=10) / 8

    def summed(model: Any, batch: tuple[Tensor, Tensor, Tensor, Tensor]) -> Tensor:
        prices, worth, audio, clean = batch
        worth_said, clean_said = model(prices, audio)
        quiet = ((clean_said.float() - clean) / AUDIO_FULL_SCALE).square().mean()
        return F.mse_loss(worth_said.float(), worth) + 10 * quiet

    def optimizer(parameters: Any) -> torch.optim.Optimizer:
        loud, *quiet = parameters
        return torch.optim.AdamW([{"params": [loud], "lr": 1e-6, "weight_decay": 0.0}, {"params": quiet, "lr": 3e-3}])

    return Workload(LoudAndQuiet, summed, batch, optimizer, "quiet_branch")


class Cosine(nn.Module):
    """Cosine similarity of rows, home-made."""

    def forward(self, left: Tensor, right: Tensor) -> Tensor:
        squares = (left * left).sum(-1, dtype=left.dtype) * (right * right).sum(-1, dtype=right.dtype)
        return (left * right).sum(-1, dtype=left.dtype) / (squares + 1e-24).sqrt()


class TinyTwins(nn.Module):
    """The similarity of two embeddings whose output is scaled down to 1e-5."""

    def __init__(self) -> None:
        super().__init__()
        self.left = chain(enter=nn.Linear(16, 32), act=nn.GELU(), leave=nn.Linear(32, 16), shrink=Gain(1e-4))
        self.right = chain(enter=nn.Linear(16, 32), act=nn.GELU(), leave=nn.Linear(32, 16), shrink=Gain(1e-4))
        self.similarity = Cosine()

    def forward(self, left: Tensor, right: Tensor) -> Tensor:
        similarity: Tensor = self.similarity(self.left(left), self.right(right))
        return similarity


def tiny_cosine() -> Workload:
    def pairs(n: int) -> tuple[Tensor, Tensor, Tensor]:
        left, right = features(n, 16, 1)[0], features(n, 16, 1)[0]
        return left, right, torch.tanh((left * right).mean(1) * 4)

    def squared_error(model: Any, batch: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        left, right, target = batch
        return F.mse_loss(model(left, right).float(), target)

    return Workload(TinyTwins, squared_error, pairs, adamw, "tiny_cosine")
