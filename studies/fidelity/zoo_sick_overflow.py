"""Sick workloads whose numbers leave fp16's range above: past 65504 they are infinite."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import torch
import torch.nn.functional as F
import transformers as hf
from samples import fixed, labelled, tokens
from torch import Tensor, nn
from zoo_healthy import cross_entropy
from zoo_healthy_transformers import adamw, own_loss

from autotune_amp import Workload


def chain(**modules: nn.Module) -> nn.Sequential:
    """A sequence whose modules have names."""
    return nn.Sequential(OrderedDict(modules))


def linear(num_inputs: int, num_outputs: int, gain: float = 1.0) -> nn.Linear:
    """A linear layer that starts `gain` times as large as usual."""
    layer = nn.Linear(num_inputs, num_outputs)
    with torch.no_grad():
        layer.weight *= gain
    return layer


def t5_feed_forward() -> Workload:
    """T5 whose first feed-forward block puts out some 1e5, as the released checkpoints' do; RMS norms take it back."""
    config = hf.T5Config(
        vocab_size=64, d_model=32, d_kv=16, d_ff=64, num_layers=2, num_decoder_layers=1, num_heads=2,
        decoder_start_token_id=0,
    )  # fmt: skip

    def model() -> nn.Module:
        made = hf.T5ForConditionalGeneration(config)
        with torch.no_grad():
            made.get_submodule("encoder.block.0.layer.1.DenseReluDense.wo").weight *= 3e5
        return made

    def reversed_sequence(n: int) -> dict[str, Tensor]:
        ids = tokens(n, 16, 64)
        return {"input_ids": ids, "labels": ids.flip(1)}

    return Workload(model, own_loss, reversed_sequence, adamw, "t5_feed_forward")


class GatedFeedForward(nn.Module):
    """A product of two projections, which `gain` takes to some gain^2 / 3."""

    def __init__(self, width: int, gain: float) -> None:
        super().__init__()
        self.gate, self.up, self.down = linear(width, 64, gain), linear(width, 64, gain), nn.Linear(64, width)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down(F.silu(self.gate(x)) * self.up(x))
        return out


class PreNormBlock(nn.Module):
    """A residual block that normalises what its inner module gets."""

    def __init__(self, width: int, gain: float = 1.0) -> None:
        super().__init__()
        self.norm, self.feed_forward = nn.LayerNorm(width), GatedFeedForward(width, gain)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.feed_forward(self.norm(x))


def gated_feed_forward() -> Workload:
    def model() -> nn.Module:
        blocks = nn.Sequential(PreNormBlock(32), PreNormBlock(32, gain=1000.0), PreNormBlock(32))
        return chain(enter=nn.Linear(32, 32), blocks=blocks, norm=nn.LayerNorm(32), head=nn.Linear(32, 10))

    return Workload(model, cross_entropy, lambda n: labelled(n, 32, 10), adamw, "gated_feed_forward")


class Gain(nn.Module):
    """Multiplies by a constant."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = factor

    def forward(self, x: Tensor) -> Tensor:
        return x * self.factor


def growing_logits() -> Workload:
    """Logits whose temperature of 1e4 is in the loss: 3e4 at first, past 65504 as the model grows sure of itself."""

    def model() -> nn.Module:
        return chain(
            enter=nn.Linear(32, 64), act=nn.GELU(), norm=nn.LayerNorm(64), gain=Gain(3000.0),
            head=linear(64, 10, gain=3.5),
        )  # fmt: skip

    def prototypes(n: int) -> tuple[Tensor, Tensor]:
        labels = torch.randint(10, (n,))
        return fixed(10, 32, seed=13)[labels] + 0.3 * torch.randn(n, 32), labels

    def tempered(model: Any, batch: tuple[Tensor, Tensor]) -> Tensor:
        x, labels = batch
        return F.cross_entropy(model(x).float() / 1e4, labels)

    def optimizer(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.Adam(parameters, lr=0.04)

    return Workload(model, tempered, prototypes, optimizer, "growing_logits")


class SquaringNorm(nn.Module):
    """RMS norm, its squares in whatever precision the activations have."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * (x * torch.rsqrt((x * x).mean(-1, keepdim=True) + 1e-6))


def squaring_norm() -> Workload:
    """Activations of 300: their squares are infinite, the norm puts out zeros, and every number stays finite."""

    def model() -> nn.Module:
        return chain(
            enter=nn.Linear(32, 64), act=nn.Tanh(), widen=linear(64, 64, gain=2000.0), norm=SquaringNorm(64),
            body=nn.Linear(64, 64), act2=nn.GELU(), head=nn.Linear(64, 10),
        )  # fmt: skip

    return Workload(model, cross_entropy, lambda n: labelled(n, 32, 10), adamw, "squaring_norm")


def summed_loss() -> Workload:
    """The logarithm of a squared error summed over 1e5 samples of a signal in the output's precision."""

    def model() -> nn.Module:
        return chain(enter=nn.Linear(32, 64), act=nn.Tanh(), body=nn.Linear(64, 64), leave=nn.Linear(64, 12_800))

    def signals(n: int) -> tuple[Tensor, Tensor]:
        code = torch.randn(n, 32)
        return code, 2 * torch.tanh(code @ fixed(32, 12_800, seed=8))

    def log_error(model: Any, batch: tuple[Tensor, Tensor]) -> Tensor:
        code, signal = batch
        output = model(code)
        error = output - signal.to(output.dtype)
        return torch.log((error * error).sum(dtype=error.dtype).float())

    return Workload(model, log_error, signals, adamw, "summed_loss")


class PaddedAttention(nn.Module):
    """Attention of one head whose additive mask has the scores' precision: -1e9 is minus infinity in fp16."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.query_key_value, self.leave = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor, is_kept: Tensor) -> Tensor:
        query, key, value = self.query_key_value(x).chunk(3, -1)
        scores = query @ key.transpose(1, 2) / x.shape[-1] ** 0.5
        mask = torch.where(is_kept[:, None, :] & is_kept[:, :, None], 0.0, -1e9).to(scores.dtype)
        out: Tensor = self.leave((scores + mask).softmax(-1).to(value.dtype) @ value)
        return out


class PaddedReader(nn.Module):
    """Classifies sequences; padded positions attend to nothing and are left out of the mean."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.norm, self.attention = nn.Embedding(64, 32), nn.LayerNorm(32), PaddedAttention(32)
        self.body, self.head = nn.Sequential(nn.Linear(32, 32), nn.GELU()), nn.Linear(32, 4)

    def forward(self, ids: Tensor, is_kept: Tensor) -> Tensor:
        x = self.tokens(ids)
        x = x + self.attention(self.norm(x), is_kept)
        pooled = x.masked_fill(~is_kept[..., None], 0).sum(1) / is_kept.sum(1, keepdim=True)
        logits: Tensor = self.head(self.body(pooled))
        return logits


def fully_masked_rows() -> Workload:
    def padded(n: int) -> tuple[Tensor, Tensor, Tensor]:
        labels = torch.randint(4, (n,))
        is_kept = torch.arange(16) < torch.randint(6, 16, (n, 1))
        return labels[:, None] * 8 + torch.randint(32, (n, 16)), is_kept, labels

    def loss(model: Any, batch: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        ids, is_kept, labels = batch
        return F.cross_entropy(model(ids, is_kept), labels)

    return Workload(PaddedReader, loss, padded, adamw, "fully_masked_rows")
