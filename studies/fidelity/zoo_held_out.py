"""The held-out zoo, its healthy half: workloads on which no threshold was chosen. The examination, not the lesson.

Written without sight of the code that judges them; each was trained for 300 steps in fp32, bf16 and fp16 before it was
let in. The sick half stands in zoo_held_out_sick.py.
"""

from __future__ import annotations

import math
from functools import partial

import torch
import torch.nn.functional as F
from case import Case
from torch import Tensor, nn
from transformers import (
    DebertaV2Config,
    DebertaV2ForTokenClassification,
    SegformerConfig,
    SegformerForSemanticSegmentation,
)
from zoo_held_out_sick import HELD_OUT_SICK

from autotune_amp import Workload

__all__ = ["HELD_OUT_HEALTHY", "HELD_OUT_SICK"]

adam = partial(torch.optim.AdamW, lr=1e-3)


class ResidualBlock(nn.Module):
    """Group norm, SiLU, convolution, twice, the noise level added between."""

    def __init__(self, num_in: int, num_out: int, num_time: int) -> None:
        super().__init__()
        self.norm_in, self.conv_in = nn.GroupNorm(4, num_in), nn.Conv2d(num_in, num_out, 3, padding=1)
        self.norm_out, self.conv_out = nn.GroupNorm(4, num_out), nn.Conv2d(num_out, num_out, 3, padding=1)
        self.time = nn.Linear(num_time, num_out)
        self.skip = nn.Conv2d(num_in, num_out, 1)

    def forward(self, images: Tensor, time: Tensor) -> Tensor:
        hidden = self.conv_in(F.silu(self.norm_in(images))) + self.time(time)[:, :, None, None]
        return self.skip(images) + self.conv_out(F.silu(self.norm_out(hidden)))


class DenoisingUnet(nn.Module):
    """Two resolutions and one skip connection; predicts the noise that was added."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.time = nn.Sequential(nn.Linear(16, 32), nn.SiLU(), nn.Linear(32, 32))
        self.stem = nn.Conv2d(1, width, 3, padding=1)
        self.down = ResidualBlock(width, width, 32)
        self.shrink = nn.Conv2d(width, width, 3, stride=2, padding=1)
        self.middle = ResidualBlock(width, width, 32)
        self.up = ResidualBlock(2 * width, width, 32)
        self.norm, self.head = nn.GroupNorm(4, width), nn.Conv2d(width, 1, 3, padding=1)

    def forward(self, images: Tensor, level: Tensor) -> Tensor:
        phases = level[:, None] * torch.arange(1, 9, device=level.device) * math.pi
        time = self.time(torch.cat([phases.sin(), phases.cos()], dim=1))
        fine = self.down(self.stem(images), time)
        coarse = self.middle(self.shrink(fine), time)
        hidden = self.up(torch.cat([fine, F.interpolate(coarse, scale_factor=2.0)], dim=1), time)
        return self.head(F.silu(self.norm(hidden)))


def unet_denoiser() -> Workload:
    def batch(n: int) -> tuple[Tensor, Tensor, Tensor]:
        grid = torch.linspace(-1, 1, 16)
        centre, level = torch.rand(n, 2, 1, 1) - 0.5, torch.rand(n)
        images = 2 * torch.exp(-8 * ((grid[:, None] - centre[:, 0]) ** 2 + (grid - centre[:, 1]) ** 2))[:, None] - 1
        noise, angle = torch.randn_like(images), (0.5 * math.pi * level)[:, None, None, None]
        return angle.cos() * images + angle.sin() * noise, level, noise

    return Workload(DenoisingUnet, lambda model, b: F.mse_loss(model(b[0], b[1]).float(), b[2]), batch, adam)


class GraphConvolution(nn.Module):
    """Three rounds of messages along a normalised adjacency matrix."""

    def __init__(self, num_features: int = 8, width: int = 32, num_classes: int = 4) -> None:
        super().__init__()
        widths = [num_features, width, width]
        self.messages = nn.ModuleList(nn.Linear(given, width) for given in widths)
        self.dropout, self.head = nn.Dropout(0.1), nn.Linear(width, num_classes)

    def forward(self, nodes: Tensor, adjacency: Tensor) -> Tensor:
        for message in self.messages:
            nodes = self.dropout(F.relu(adjacency @ message(nodes)))
        return self.head(nodes)


def graph_convolution() -> Workload:
    teacher = torch.randn(8, 4)

    def batch(n: int) -> tuple[Tensor, Tensor, Tensor]:
        edges = (torch.rand(n, 12, 12) < 0.15).float().triu(1)
        edges = edges + edges.mT + torch.eye(12)
        root_degree = edges.sum(-1, keepdim=True).sqrt()
        adjacency, nodes = edges / (root_degree * root_degree.mT), torch.randn(n, 12, 8)
        return nodes, adjacency, (adjacency @ adjacency @ nodes @ teacher).argmax(-1)

    def loss(model: nn.Module, b: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        return F.cross_entropy(model(b[0], b[1]).flatten(0, 1), b[2].flatten())

    return Workload(GraphConvolution, loss, batch, adam)


def deberta_tagging() -> Workload:
    classes = torch.randint(5, (64,))
    config = DebertaV2Config(
        vocab_size=64, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64,
        max_position_embeddings=32, relative_attention=True, position_buckets=8, pos_att_type=["p2c", "c2p"],
        share_att_key=True, norm_rel_ebd="layer_norm", num_labels=5,
    )  # fmt: skip

    def batch(n: int) -> dict[str, Tensor]:
        tokens = torch.randint(64, (n, 16))
        is_there = torch.arange(16) < torch.randint(8, 17, (n, 1))
        labels = classes[tokens.roll(1, dims=1)].where(is_there, -100)  # the class of the token before
        return {"input_ids": tokens, "attention_mask": is_there.long(), "labels": labels}

    return Workload(lambda: DebertaV2ForTokenClassification(config), lambda model, b: model(**b).loss, batch, adam)


def segformer_segmentation() -> Workload:
    config = SegformerConfig(  # dropout and stochastic depth as the library has them
        depths=[1, 1, 1, 1], hidden_sizes=[8, 16, 16, 32], decoder_hidden_size=16, num_attention_heads=[1, 1, 2, 2],
        mlp_ratios=[2, 2, 2, 2], num_labels=3,
    )  # fmt: skip

    def batch(n: int) -> dict[str, Tensor]:
        grid, centre, radius = torch.arange(32.0), 8 + 16 * torch.rand(n, 2, 1, 1), 4 + 6 * torch.rand(n, 1, 1)
        across, down = (grid - centre[:, 0]).abs(), (grid[:, None] - centre[:, 1]).abs()
        is_disc = torch.rand(n, 1, 1) < 0.5
        inside = (across**2 + down**2 < radius**2).where(is_disc, torch.maximum(across, down) < radius)
        labels = inside.long() * (1 + is_disc.long())
        colour = torch.tensor([[0.0, 0.0, 0.0], [1.0, 0.2, -0.5], [-0.5, 0.2, 1.0]])
        images = colour[labels].permute(0, 3, 1, 2) + 0.5 * torch.randn(n, 3, 32, 32)
        return {"pixel_values": images, "labels": labels}

    return Workload(lambda: SegformerForSemanticSegmentation(config), lambda model, b: model(**b).loss, batch, adam)


class ActorCritic(nn.Module):
    """A body, and on it a policy over five actions and a value."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(10, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh())
        self.policy, self.value = nn.Linear(64, 5), nn.Linear(64, 1)

    def forward(self, states: Tensor) -> tuple[Tensor, Tensor]:
        hidden = self.body(states)
        return self.policy(hidden), self.value(hidden).squeeze(-1)


def actor_critic() -> Workload:
    teacher = torch.randn(10, 5)

    def batch(n: int) -> tuple[Tensor, Tensor, Tensor]:
        states, actions = torch.randn(n, 20, 10), torch.randint(5, (n, 20))  # the behaviour policy is uniform
        rewards = torch.tanh(states @ teacher / 2).gather(-1, actions[..., None]).squeeze(-1)
        return states, actions, rewards + 0.1 * torch.randn(n, 20)

    def loss(model: nn.Module, b: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        states, actions, rewards = b
        logits, values = model(states)
        log_policy, values = F.log_softmax(logits.float(), dim=-1), values.float()
        chosen = log_policy.gather(-1, actions[..., None]).squeeze(-1)
        importance = (5 * chosen.detach().exp()).clamp(max=2.0)  # truncated, as V-trace's
        advantage = rewards - values.detach()
        entropy = -(log_policy.exp() * log_policy).sum(-1).mean()
        value_loss = (importance * (rewards - values) ** 2).mean()
        return -(importance * advantage * chosen).mean() + 0.5 * value_loss - 0.02 * entropy

    return Workload(ActorCritic, loss, batch, adam)


class NeuralOde(nn.Module):
    """One field, its weights shared by every stage of every Runge-Kutta step."""

    def __init__(self, num_dims: int = 4, num_steps: int = 8) -> None:
        super().__init__()
        self.field = nn.Sequential(nn.Linear(num_dims, 64), nn.Tanh(), nn.Linear(64, num_dims))
        self.num_steps = num_steps

    def forward(self, state: Tensor) -> Tensor:
        h = 1 / self.num_steps
        for _ in range(self.num_steps):
            k1 = self.field(state)
            k2 = self.field(state + 0.5 * h * k1)
            k3 = self.field(state + 0.5 * h * k2)
            k4 = self.field(state + h * k3)
            state = state + h / 6 * (k1 + 2 * k2 + 2 * k3 + k4)
        return state


def neural_ode() -> Workload:
    rotation = torch.randn(4, 4)
    flow = torch.linalg.matrix_exp(rotation - rotation.mT)

    def batch(n: int) -> tuple[Tensor, Tensor]:
        state = torch.randn(n, 16, 4)
        return state, state @ flow + 0.05 * torch.randn(n, 16, 4)

    return Workload(NeuralOde, lambda model, b: F.mse_loss(model(b[0]).float(), b[1]), batch, adam)


HELD_OUT_HEALTHY = (
    Case("unet_denoiser", unet_denoiser, note="U-Net by hand, group norm and SiLU, predicts added noise"),
    Case("graph_convolution", graph_convolution, note="dense normalised adjacency, labels per node"),
    Case("deberta_tagging", deberta_tagging, note="disentangled attention, padded sequences"),
    Case(
        "segformer_segmentation", segformer_segmentation,
        note="stochastic depth draws torch.rand in the activations' type: fp32's draws rounded, on this CPU",
    ),
    Case("actor_critic", actor_critic, note="V-trace-like policy gradient; the loss crosses zero as it learns"),
    Case("neural_ode", neural_ode, note="weight-shared recurrence, 32 evaluations of one field"),
)  # fmt: skip
