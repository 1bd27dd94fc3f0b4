"""The six trainings as they are searched; train.py has them as one would write them by hand."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import parts
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from autotune_amp import Workload


def lengths() -> Workload:
    """A language model on padded texts of different lengths: a token mean."""

    def evaluate(model: nn.Module) -> None:
        with torch.no_grad():
            model(**parts.pad([parts.Docstrings()[index] for index in range(16)]))

    def write(model: nn.Module, optimizer: torch.optim.Optimizer, folder: Path) -> None:
        torch.save([model.state_dict(), optimizer.state_dict()], Path(folder) / "checkpoint.pt")

    return Workload(
        model=parts.language_model,
        loss=lambda model, batch: model(**batch).loss,
        data=DataLoader(parts.Docstrings(), batch_size=32, shuffle=True, collate_fn=parts.pad),
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=3e-4),
        evaluate=evaluate,
        checkpoint=write,
    )


def slow_images() -> Workload:
    """A convnet with BatchNorm, whose loader waits for a store."""
    return Workload(
        model=parts.convnet,
        loss=lambda model, batch: F.cross_entropy(model(batch[0]), batch[1]),
        data=DataLoader(parts.StoredImages(), batch_size=64, shuffle=True),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9),
    )


def gan() -> Workload:
    """Two models and two optimizers in turn."""

    def build() -> dict[str, Any]:
        made, judge = parts.generator(), parts.discriminator()
        settings: dict[str, Any] = {"lr": 2e-4, "betas": (0.5, 0.999)}
        return {
            "generator": made,
            "discriminator": judge,
            "generator_optimizer": torch.optim.Adam(made.parameters(), **settings),
            "discriminator_optimizer": torch.optim.Adam(judge.parameters(), **settings),
        }

    def train_step(state: dict[str, Any], batch: list[Tensor], amp: Any) -> None:
        (real,) = batch
        judge = state["discriminator"]
        with amp.autocast():
            made = state["generator"](torch.randn(len(real), parts.NOISE, device=real.device))
            of_real, of_made = judge(real), judge(made.detach())
            loss = F.softplus(-of_real).mean() + F.softplus(of_made).mean()
        state["discriminator_optimizer"].zero_grad()
        amp.backward(loss)
        amp.step(state["discriminator_optimizer"])
        with amp.autocast():
            loss = F.softplus(-judge(made)).mean()
        state["generator_optimizer"].zero_grad()
        amp.backward(loss)
        amp.step(state["generator_optimizer"])
        amp.update()

    return Workload(
        build=build, train_step=train_step, data=DataLoader(parts.small_images(), batch_size=64, shuffle=True)
    )


def diffusion() -> Workload:
    """Noise prediction with a moving average of the weights, and clipped gradients."""

    def build() -> dict[str, Any]:
        model = parts.Denoiser()
        average = copy.deepcopy(model).requires_grad_(False)
        return {"model": model, "average": average, "optimizer": torch.optim.AdamW(model.parameters(), lr=1e-3)}

    def train_step(state: dict[str, Any], batch: list[Tensor], amp: Any) -> None:
        images, noise, steps = parts.noised(batch[0])
        state["optimizer"].zero_grad()
        with amp.autocast():
            loss = F.mse_loss(state["model"](images, steps).float(), noise)
        amp.backward(loss)
        amp.unscale_(state["optimizer"])
        nn.utils.clip_grad_norm_(state["model"].parameters(), 1.0)
        amp.step(state["optimizer"])
        amp.update()
        with torch.no_grad():
            for slow, fast in zip(state["average"].parameters(), state["model"].parameters(), strict=True):
                slow.lerp_(fast, 0.01)

    return Workload(
        build=build, train_step=train_step, data=DataLoader(parts.small_images(), batch_size=64, shuffle=True)
    )


def adapters() -> Workload:
    """A frozen base with trained adapters."""
    return Workload(
        model=parts.adapted_classifier,
        loss=lambda model, batch: model(input_ids=batch[0], labels=batch[1]).loss,
        data=DataLoader(parts.sentences(), batch_size=64, shuffle=True),
        optimizer=lambda parameters: torch.optim.AdamW([p for p in parameters if p.requires_grad], lr=1e-3),
    )


def compiled() -> Workload:
    """A compiled transformer with gradient checkpointing."""
    return Workload(
        model=parts.compiled_model,
        loss=lambda model, batch: parts.next_byte_loss(model, batch[0]),
        data=DataLoader(parts.source_text(), batch_size=64, shuffle=True),
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=3e-4),
    )
