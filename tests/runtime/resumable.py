"""A training that can be saved after any backward pass, and batches that send it through every state."""

from __future__ import annotations

import copy
import io
import math
from typing import Any

import torch
from torch import Tensor, nn
from training import Batch, batches, fp16, timeless

from autotune_amp.core.config import AmpConfig, LossScale
from autotune_amp.runtime.controller import PrecisionController

STABLE = LossScale(init_scale=1024.0)
ACCUMULATION_STEPS = 2
CLEAN = batches(60)
NAN: Batch = (torch.full((4, 8), math.nan), torch.zeros(4, 1))
BEYOND_FP16: Batch = (torch.full((4, 8), 1e5), torch.zeros(4, 1))
LARGE_GRADIENT: Batch = (torch.full((4, 8), 100.0), torch.zeros(4, 1))  # overflows at a scale of 65536 and thereabouts


class FeedForward(nn.Module):
    """T5's feed-forward output reached 66246 > 65504 (transformers#5651); a norm follows, so fp32 trains on it well."""

    def __init__(self) -> None:
        super().__init__()
        self.wi = nn.Linear(8, 8)
        self.wo = nn.Linear(8, 8)
        self.norm = nn.LayerNorm(8)
        self.head = nn.Linear(8, 1)
        with torch.no_grad():
            self.wo.bias.copy_(torch.linspace(-66246.0, 66246.0, 8))

    def forward(self, inputs: Tensor) -> Tensor:
        return self.head(self.norm(self.wo(torch.relu(self.wi(inputs)))))  # type: ignore[no-any-return]


def normalized() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 1))


class Run:
    """A training that can be saved after any backward pass."""

    def __init__(self, model: nn.Module, config: AmpConfig, *, attaches: bool = True, reruns: bool = True) -> None:
        self.model = copy.deepcopy(model)
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.01)
        self.controller = PrecisionController(config, device="cpu", halt=False)
        self.num_passes = 0
        self.batch: Batch = NAN
        if attaches:
            self.controller.attach(self.model, self.rerun if reruns else None)

    def rerun(self) -> Tensor:
        inputs, targets = self.batch
        with self.controller.autocast():
            return nn.functional.mse_loss(self.model(inputs), targets)

    def step(self, batch: Batch) -> dict[str, Any]:
        """One backward pass, with the optimizer's step where it ends the window; gives everything there is to know."""
        self.batch = batch
        self.controller.backward(self.rerun() / ACCUMULATION_STEPS)
        self.num_passes += 1
        if self.num_passes % ACCUMULATION_STEPS == 0:
            self.controller.step(self.optimizer)
            self.controller.update()
            self.optimizer.zero_grad()
        return self.facts()

    def facts(self) -> dict[str, Any]:
        status = self.controller.status()
        return {
            "weights": {name: value.tolist() for name, value in self.model.state_dict().items()},
            "state": timeless(self.controller.state_dict()),
            "scale": status.scale,
            "precision": status.precision,
            "is_enabled": status.is_enabled,
            "pinned": status.pinned_modules,
            "history": status.history,
            "counts": (status.num_updates, status.num_steps, status.num_skips, status.amp_share),
        }

    def save(self) -> bytes:
        written = io.BytesIO()
        checkpoint = {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "controller": self.controller.state_dict(),
            "gradients": [parameter.grad for parameter in self.model.parameters()],
            "num_passes": self.num_passes,
        }
        torch.save(checkpoint, written)
        return written.getvalue()

    def load(self, saved: bytes, *, controller_first: bool = False) -> Run:
        checkpoint = torch.load(io.BytesIO(saved), weights_only=True)
        if controller_first:
            self.controller.load_state_dict(checkpoint["controller"])
        self.model.load_state_dict(checkpoint["model"])
        self.optimizer.load_state_dict(checkpoint["optimizer"])
        if not controller_first:
            self.controller.load_state_dict(checkpoint["controller"])
        for parameter, gradient in zip(self.model.parameters(), checkpoint["gradients"], strict=True):
            parameter.grad = gradient
        self.num_passes = checkpoint["num_passes"]
        return self


def comparable(facts: dict[str, Any]) -> dict[str, str]:
    """NaN equals NaN here."""
    return {key: repr(value) for key, value in facts.items()}


def used() -> PrecisionController:
    """A controller in mid-run, in bf16 with a history."""
    run = Run(normalized(), fp16(accumulation_steps=ACCUMULATION_STEPS, loss_scale=STABLE), reruns=False)
    for batch in [*CLEAN[:4], *[BEYOND_FP16] * 4, CLEAN[4]]:
        run.step(batch)
    return run.controller
