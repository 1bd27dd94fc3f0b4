"""Hard training runs, tiny, each with what is really at fault. Seeded: the same weights and data for every policy."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TypeAlias

import torch
from torch import Tensor, nn

Batch: TypeAlias = tuple[Tensor, Tensor]
NUM_SAMPLES, WIDTH, NUM_HELD_OUT = 16, 8, 512


class Case:
    """A regression on a random teacher that nothing is wrong with. The other cases say what they change."""

    title = "nothing wrong"
    at_fault = "nothing"
    num_steps = 300
    start_scale: float | None = None  # of every policy; None: each its own

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(WIDTH, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 1))

    def teacher(self, generator: torch.Generator) -> Callable[[Tensor], Tensor]:
        first = torch.randn(WIDTH, 16, generator=generator) / math.sqrt(WIDTH)
        second = torch.randn(16, 1, generator=generator) / 4
        return lambda inputs: torch.tanh(inputs @ first) @ second

    def sample(self, num_samples: int, generator: torch.Generator) -> Tensor:
        return torch.randn(num_samples, WIDTH, generator=generator)

    def data(self, seed: int) -> tuple[list[Batch], Batch]:
        """The batches to train on, in order, and one held out."""
        generator = torch.Generator().manual_seed(seed)
        teacher = self.teacher(generator)
        inputs = [self.sample(NUM_SAMPLES, generator) for _ in range(self.num_steps)]
        held_out = self.sample(NUM_HELD_OUT, generator)
        return [(given, teacher(given)) for given in inputs], (held_out, teacher(held_out))

    def is_poisoned(self, step: int) -> bool:
        """Whether the batch of this step is replaced by NaN."""
        del step
        return False

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        return nn.functional.mse_loss(output.float(), target)

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=0.05)

    def before_step(self, optimizer: torch.optim.Optimizer, step: int) -> None:
        """A mistake in the schedule of the learning rate, where there is one."""


def grow_with_each_step(optimizer: torch.optim.Optimizer, weights: list[Tensor], factor: float) -> None:
    """Each step really taken enlarges `weights`: hundreds of steps show what days of training do."""

    def grow(*_: object) -> None:
        with torch.no_grad():
            for weight in weights:
                weight.mul_(factor)

    optimizer.register_step_post_hook(grow)


class FeedForward(nn.Module):
    """T5's shape: a feed-forward block beside a residual, a norm over their sum, a head.

    `wo` is large from the start: the largest activation of 512 random samples is 30,000.
    """

    def __init__(self) -> None:
        super().__init__()
        self.wi = nn.Linear(WIDTH, 16)
        self.wo = nn.Linear(16, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, 1)
        with torch.no_grad():
            hidden = self.wo(torch.relu(self.wi(torch.randn(512, WIDTH))))
            self.wo.weight.mul_(30_000 / hidden.abs().max())

    def forward(self, inputs: Tensor) -> Tensor:
        return self.head(self.norm(inputs + self.wo(torch.relu(self.wi(inputs)))))


class GrowingFeedForward(Case):
    """wo's weights, which the norm behind them leaves free to grow, take its output past fp16's 65504."""

    title = "feed-forward overflow after a while"
    at_fault = "precision"
    num_steps = 400

    def model(self) -> nn.Module:
        return FeedForward()

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        assert isinstance(model, FeedForward)
        large = model.wo.weight
        others = [parameter for parameter in model.parameters() if parameter is not large]
        # The step of a large weight is a share of its size, as Adafactor's is, with which T5 was trained.
        relative = large.square().mean().sqrt().item()
        groups = [{"params": [large], "lr": 0.005 * relative}, {"params": others, "lr": 0.005}]
        optimizer = torch.optim.Adam(groups)
        grow_with_each_step(optimizer, [large], 1.005)
        return optimizer


class Attention(nn.Module):
    """One head without a norm on queries and keys; its query attends to the tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.query = nn.Linear(WIDTH, WIDTH, bias=False)
        self.key = nn.Linear(WIDTH, WIDTH, bias=False)
        self.value = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        logits = self.query(tokens) @ self.key(tokens).transpose(-1, -2) / math.sqrt(WIDTH)
        return torch.softmax(logits, dim=-1) @ self.value(tokens)


class AttentionModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = Attention()
        self.head = nn.Sequential(nn.Linear(WIDTH, 16), nn.ReLU(), nn.Linear(16, 1))

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(tokens + self.attention(tokens)).mean(dim=1)


class GrowingLogits(Case):
    """Queries and keys grow; softmax, in fp32, does not mind."""

    title = "attention logits grow without bound"
    at_fault = "precision"
    num_steps = 400
    NUM_TOKENS = 6
    GROWTH = 1.02

    def model(self) -> nn.Module:
        return AttentionModel()

    def sample(self, num_samples: int, generator: torch.Generator) -> Tensor:
        return torch.randn(num_samples, self.NUM_TOKENS, WIDTH, generator=generator)

    def teacher(self, generator: torch.Generator) -> Callable[[Tensor], Tensor]:
        one = super().teacher(generator)
        return lambda tokens: one(tokens).mean(dim=1)

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        assert isinstance(model, AttentionModel)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.005)
        grow_with_each_step(optimizer, [model.attention.query.weight, model.attention.key.weight], self.GROWTH)
        return optimizer


class SlowlyGrowingLogits(GrowingLogits):
    """Slow enough for gradients to vanish behind a saturated softmax, where they no longer matter."""

    title = "attention logits grow more slowly"
    num_steps = 700
    GROWTH = 1.012


class TinyGradients(Case):
    """The loss is 2^-26 of what it was and the learning rate 2^26 times: in fp32 nothing changes.

    From 2^16 a scaler need not move to train as fp32 does.
    """

    title = "tiny gradients, each rule's own first scale"
    FACTOR = 2.0**-26

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        return super().loss(output, target) * self.FACTOR

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=0.05 / self.FACTOR)


class TinyGradientsAtOne(TinyGradients):
    title = "tiny gradients, all start at scale 1"
    at_fault = "precision"
    start_scale = 1.0


class BlowUp(Case):
    """From step 150 on the learning rate is 20 times what it was: fp32 diverges too, within ten steps or so."""

    title = "a learning rate that diverges"
    at_fault = "not precision"
    LEARNING_RATE_FACTOR = 20.0

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(WIDTH, 16), nn.ReLU(), nn.Linear(16, 1))

    def before_step(self, optimizer: torch.optim.Optimizer, step: int) -> None:
        if step == 150:
            for group in optimizer.param_groups:
                group["lr"] *= self.LEARNING_RATE_FACTOR


class SlowBlowUp(BlowUp):
    """One layer, so that the divergence is no faster than exponential: fp32 stays finite long after fp16 is not."""

    title = "a learning rate that diverges slowly"
    num_steps = 600
    LEARNING_RATE_FACTOR = 16.0

    def model(self) -> nn.Module:
        return nn.Linear(WIDTH, 1)


class OnePoisonedBatch(Case):
    title = "one NaN batch"

    def is_poisoned(self, step: int) -> bool:
        return step == 150


class PoisonedBurst(Case):
    title = "20 NaN batches running"
    at_fault = "not precision"

    def is_poisoned(self, step: int) -> bool:
        return 150 <= step < 170


class PoisonedBurstWithoutBatchNorm(PoisonedBurst):
    """Without running statistics to spoil, a skipped step harms nothing."""

    title = "20 NaN batches running, no BatchNorm"

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(WIDTH, 16), nn.ReLU(), nn.Linear(16, 1))


class SumReduced(TinyGradients):
    """A sum over so much that gradients overflow above scale 2^-6 or so, and are fine below (fairseq#515)."""

    title = "sum-reduced loss, fine at a tiny scale"
    FACTOR = 2.0**21


CASES: tuple[Case, ...] = (
    GrowingFeedForward(),
    GrowingLogits(),
    SlowlyGrowingLogits(),
    TinyGradients(),
    TinyGradientsAtOne(),
    BlowUp(),
    SlowBlowUp(),
    OnePoisonedBatch(),
    PoisonedBurst(),
    PoisonedBurstWithoutBatchNorm(),
    SumReduced(),
    Case(),
)
