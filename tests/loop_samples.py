"""Loops of their own, written once for any `amp`: a GAN with two optimizers, a denoiser with an EMA and clipping."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from autotune_amp import Workload

NUM_STEPS = 50  # of the noise schedule


def batches(size: int) -> Any:
    """Points on a ring, without end and the same in every process."""
    generator = torch.Generator().manual_seed(1)
    while True:
        angle = 6.2832 * torch.rand(size, generator=generator)
        yield torch.stack([angle.cos(), angle.sin()] * 4, dim=1) + 0.1 * torch.randn(size, 8, generator=generator)


def mlp(width_in: int, width_out: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(width_in, 32), nn.LeakyReLU(0.2), nn.Linear(32, width_out))


def build_gan() -> dict[str, Any]:
    nets = SimpleNamespace(generator=mlp(4, 8), discriminator=mlp(8, 1))
    return {
        "nets": nets,
        "generator_optimizer": torch.optim.Adam(nets.generator.parameters(), lr=1e-3, betas=(0.5, 0.9)),
        "discriminator_optimizer": torch.optim.SGD(nets.discriminator.parameters(), lr=0.05),
        "num_steps": 0,
    }


def gan_step(state: dict[str, Any], real: Tensor, amp: Any) -> None:
    """The discriminator each time, the generator every other: alternating, with `detach`."""
    nets = state["nets"]
    noise = torch.randn(len(real), 4, device=real.device)
    state["discriminator_optimizer"].zero_grad()
    with amp.autocast():
        fake = nets.generator(noise)
        loss = functional.softplus(-nets.discriminator(real)).mean()
        loss = loss + functional.softplus(nets.discriminator(fake.detach())).mean()
    amp.backward(loss)
    amp.step(state["discriminator_optimizer"])
    if state["num_steps"] % 2 == 0:
        state["generator_optimizer"].zero_grad()
        with amp.autocast():
            loss = functional.softplus(-nets.discriminator(fake)).mean()
        amp.backward(loss)
        amp.step(state["generator_optimizer"])
    amp.update()
    state["num_steps"] += 1


@dataclass
class Diffusion:
    denoiser: nn.Module
    ema: nn.Module
    optimizer: torch.optim.Optimizer
    kept_share: Tensor  # of the signal, at each step of the noise schedule


def build_diffusion() -> Diffusion:
    denoiser = mlp(9, 8)
    ema = copy.deepcopy(denoiser).requires_grad_(requires_grad=False)
    optimizer = torch.optim.AdamW(denoiser.parameters(), lr=1e-3)
    return Diffusion(denoiser, ema, optimizer, torch.linspace(0.99, 0.01, NUM_STEPS))


def denoising_loss(state: Diffusion, clean: Tensor) -> Tensor:
    step = torch.randint(NUM_STEPS, (len(clean),), device=clean.device)
    noise = torch.randn_like(clean)
    kept = state.kept_share[step, None]
    noisy = kept.sqrt() * clean + (1 - kept).sqrt() * noise
    given = torch.cat([noisy, step[:, None] / NUM_STEPS], dim=1)
    return functional.mse_loss(state.denoiser(given).float(), noise)


def diffusion_step(state: Diffusion, clean: Tensor, amp: Any, loss: Callable[..., Tensor] = denoising_loss) -> None:
    with amp.autocast():
        value = loss(state, clean)
    amp.scale(value).backward()
    amp.unscale_(state.optimizer)
    nn.utils.clip_grad_norm_(state.denoiser.parameters(), 0.5)
    amp.step(state.optimizer)
    amp.update()
    state.optimizer.zero_grad(set_to_none=True)
    with torch.no_grad():
        for average, weight in zip(state.ema.parameters(), state.denoiser.parameters(), strict=True):
            average.lerp_(weight, 0.1)


def sick_loss(state: Diffusion, clean: Tensor) -> Tensor:
    """Adds up in low precision what all but cancels."""
    output = state.denoiser(torch.cat([clean, clean[:, :1]], dim=1))
    large = torch.full_like(output, 1000.0)
    found: Tensor = ((output + large).sum(dim=1) - large.sum(dim=1)).float().square().mean()
    return found


def sick_step(state: Diffusion, clean: Tensor, amp: Any) -> None:
    diffusion_step(state, clean, amp, sick_loss)


def gan() -> Workload:
    return Workload(build=build_gan, train_step=gan_step, data=batches, name="gan")


def diffusion() -> Workload:
    return Workload(build=build_diffusion, train_step=diffusion_step, data=batches, name="diffusion")


def sick() -> Workload:
    return Workload(build=build_diffusion, train_step=sick_step, data=batches, name="sick")


def build_accumulating() -> dict[str, Any]:
    net = mlp(8, 1)
    return {"net": net, "optimizer": torch.optim.SGD(net.parameters(), lr=0.01), "num_calls": 0, "num_steps": 0}


def accumulating_step(state: dict[str, Any], batch: Tensor, amp: Any) -> None:
    """Steps every fourth call."""
    with amp.autocast():
        loss = state["net"](batch).float().square().mean()
    amp.backward(loss / 4)
    state["num_calls"] += 1
    if state["num_calls"] % 4 == 0:
        amp.step(state["optimizer"])
        amp.update()
        state["optimizer"].zero_grad()
        state["num_steps"] += 1


def accumulating() -> Workload:
    return Workload(build=build_accumulating, train_step=accumulating_step, data=batches, name="accumulating")


LOOPS = {"gan": gan, "diffusion": diffusion}
