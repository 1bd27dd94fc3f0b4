"""The loop that `windows` is made for, on a tiny model."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from training import batches

from autotune_amp.core.config import AmpConfig, FallbackPlan
from autotune_amp.runtime.controller import PrecisionController

HALVED = FallbackPlan(precision="bf16", batch_size=4, accumulation_steps=2, peak_memory_bytes=1, slowdown=1.5)
NEVER_FITS = 2**60  # bytes


def controller(config: AmpConfig, **options: Any) -> PrecisionController:
    return PrecisionController(config, device="cpu", **options)


def eights(num_batches: int, seed: int = 1) -> list[tuple[Tensor, Tensor]]:
    """Batches of eight samples."""
    fours = batches(2 * num_batches, seed=seed)
    return [(torch.cat([a, b]), torch.cat([c, d])) for (a, c), (b, d) in zip(fours[::2], fours[1::2], strict=True)]


def small() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 1))


class WindowLoop:
    """The loop that `windows` is made for."""

    def __init__(
        self,
        model: nn.Module,
        controller: PrecisionController,
        loss: Callable[[Tensor, Tensor], Tensor] = nn.functional.mse_loss,
    ) -> None:
        self.model = model
        self.loss = loss
        self.controller = controller
        self.optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        self.seen: list[Tensor] = []
        self.sizes: list[int] = []

    def run(self, loader: Iterable[tuple[Tensor, Tensor]]) -> WindowLoop:
        steered = self.controller
        for (inputs, targets), is_last in steered.windows(loader):
            self.seen.append(inputs)
            self.sizes.append(steered.window_size)
            with steered.autocast():
                loss = self.loss(self.model(inputs), targets) / steered.window_size
            steered.backward(loss)
            if is_last:
                steered.step(self.optimizer)
                self.optimizer.zero_grad()
                steered.update()
        return self


def fours(given: Iterable[tuple[Tensor, Tensor]]) -> list[tuple[Tensor, Tensor]]:
    """The same samples in batches of four."""
    return [
        pair for inputs, targets in given for pair in zip(torch.split(inputs, 4), torch.split(targets, 4), strict=True)
    ]
