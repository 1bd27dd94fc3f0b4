"""Sick workloads that are well at their first weights: what they have learned makes numbers that rounding spoils."""

from __future__ import annotations

from typing import Any

import torch
from case import Case
from samples import fixed
from torch import Tensor, nn
from zoo_healthy_transformers import adamw
from zoo_sick_overflow import chain

from autotune_amp import Workload


class Probability(nn.Module):
    """A sigmoid, in the precision of what comes in."""

    def forward(self, logits: Tensor) -> Tensor:
        return torch.sigmoid(logits)


def cross_entropy_by_hand() -> Workload:
    """Once a probability rounds to 1, its complement's logarithm is that of 0, and 0 times infinity is no number."""

    def model() -> nn.Module:
        return chain(
            enter=nn.Linear(16, 64), act=nn.GELU(), body=nn.Linear(64, 64), act2=nn.GELU(), head=nn.Linear(64, 1),
            probability=Probability(),
        )  # fmt: skip

    def separable(n: int) -> tuple[Tensor, Tensor]:
        x = torch.randn(n, 16)
        return x, (x @ fixed(16, 1, seed=21) > 0).float()

    def loss(model: Any, batch: tuple[Tensor, Tensor]) -> Tensor:
        x, y = batch
        p = model(x)
        by_hand: Tensor = -(y * torch.log(p) + (1 - y) * torch.log(1 - p))
        return by_hand.mean()

    return Workload(model, loss, separable, adamw, "cross_entropy_by_hand")


def angle_of_embeddings() -> Workload:
    """A student learns a teacher's directions by the angle: at a cosine that rounds to 1 its slope is infinite."""

    def model() -> nn.Module:
        return chain(enter=nn.Linear(16, 64), act=nn.GELU(), body=nn.Linear(64, 8))

    def taught(n: int) -> tuple[Tensor, Tensor]:
        x = torch.randn(n, 16)
        return x, nn.functional.normalize(x @ fixed(16, 8, seed=22))

    def loss(model: Any, batch: tuple[Tensor, Tensor]) -> Tensor:
        x, teacher = batch
        cosine = torch.einsum("nd,nd->n", nn.functional.normalize(model(x)), teacher)
        return torch.acos(cosine).mean()

    return Workload(model, loss, taught, adamw, "angle_of_embeddings")


SICK_LATER: tuple[Case, ...] = (
    Case(
        "cross_entropy_by_hand", cross_entropy_by_hand, ("bf16", "fp16"), note="p rounds to 1, in fp32 too in the end"
    ),
    Case("angle_of_embeddings", angle_of_embeddings, ("bf16",), note="a cosine rounds to 1"),
)
