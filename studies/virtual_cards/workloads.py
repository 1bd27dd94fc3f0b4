"""Six workloads with every dimension a 32nd of a model that people train, for a card that magnifies them by 32 again.

A width of 768 is 24 here, a length of 1024 is 32, an image of 181 x 181 pixels has 32 x 32: a matrix product is as
large to the clock as that of the whole model, and its numbers cost a CPU a 32,768th. Layers, heads and batch are whole.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, TensorDataset

from autotune_amp import Workload

MAGNIFICATION = 32
NUM_SAMPLES = 4096


class Part(NamedTuple):
    """`todays_batch_size` is what a user may run today; `batch_sizes` is the grid of the landscape."""

    model: Callable[[], nn.Module]
    loss: Callable[[nn.Module, Sequence[Tensor]], Tensor]
    data: Callable[[], Dataset[Any]]
    todays_batch_size: int
    batch_sizes: tuple[int, ...]


def make_mlp() -> nn.Module:
    """Four layers 1024 wide."""
    hidden = [layer for _ in range(3) for layer in (nn.Linear(32, 32), nn.ReLU())]
    return nn.Sequential(nn.Linear(24, 32), nn.ReLU(), *hidden, nn.Linear(32, 10))


def _convolution(num_in: int, num_out: int, stride: int = 1) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(num_in, num_out, 3, stride, 1, bias=False), nn.BatchNorm2d(num_out), nn.ReLU())


class Residual(nn.Module):
    def __init__(self, num_in: int, num_out: int) -> None:
        super().__init__()
        stride = num_out // num_in
        self.body = nn.Sequential(_convolution(num_in, num_out, stride), _convolution(num_out, num_out))
        self.skip = nn.Identity() if stride == 1 else nn.Conv2d(num_in, num_out, 1, stride, bias=False)

    def forward(self, images: Tensor) -> Tensor:
        return F.relu(self.body(images) + self.skip(images))


def make_convnet() -> nn.Module:
    """ResNet-18, with its 64 to 512 channels."""
    blocks = [Residual(a, b) for a, b in ((2, 2), (2, 2), (2, 4), (4, 4), (4, 8), (8, 8), (8, 16), (16, 16))]
    return nn.Sequential(_convolution(3, 2), *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 10))


class UNet(nn.Module):
    """Three levels of 64 to 512 channels."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(_convolution(3, 2), _convolution(2, 2))
        self.down = nn.ModuleList(
            nn.Sequential(_convolution(c, 2 * c, 2), _convolution(2 * c, 2 * c)) for c in (2, 4, 8)
        )
        self.up = nn.ModuleList(nn.ConvTranspose2d(2 * c, c, 2, 2) for c in (8, 4, 2))
        self.join = nn.ModuleList(nn.Sequential(_convolution(2 * c, c), _convolution(c, c)) for c in (8, 4, 2))
        self.head = nn.Conv2d(2, 2, 1)

    def forward(self, images: Tensor) -> Tensor:
        levels = [self.first(images)]
        for down in self.down:
            levels.append(down(levels[-1]))
        found = levels.pop()
        for up, join in zip(self.up, self.join, strict=True):
            found = join(torch.cat([levels.pop(), up(found)], dim=1))
        scores: Tensor = self.head(found)
        return scores


def make_gpt2() -> nn.Module:
    """DistilGPT-2: six layers of GPT-2 at its whole length."""
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(
        GPT2Config(
            vocab_size=1571,
            n_positions=32,
            n_embd=24,
            n_layer=6,
            n_head=12,
            bos_token_id=0,
            eos_token_id=1,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
            attn_implementation="eager",
        )
    )


def make_vit() -> nn.Module:
    """ViT-B/16 at 384 pixels, with six of its twelve layers."""
    from transformers import ViTConfig, ViTForImageClassification

    return ViTForImageClassification(
        ViTConfig(
            hidden_size=24,
            num_hidden_layers=6,
            num_attention_heads=12,
            intermediate_size=96,
            image_size=16,
            patch_size=4,
            num_labels=10,  # type: ignore[call-arg] # it goes through **kwargs
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
            attn_implementation="eager",
        )
    )


def make_t5() -> nn.Module:
    """T5-small at its whole length of 512, with four of its six layers on either side."""
    from transformers import T5Config, T5ForConditionalGeneration

    return T5ForConditionalGeneration(
        T5Config(
            vocab_size=1004,
            d_model=16,
            d_kv=2,
            num_heads=8,
            d_ff=64,
            num_layers=4,
            dropout_rate=0.0,
            decoder_start_token_id=0,
            pad_token_id=0,
            attn_implementation="eager",
        )
    )


def classify(model: nn.Module, batch: Sequence[Tensor]) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def of_transformers(model: nn.Module, batch: Sequence[Tensor]) -> Tensor:
    loss: Tensor = model(batch[0], labels=batch[1]).loss
    return loss


def _generator() -> torch.Generator:
    return torch.Generator().manual_seed(0)


def _pictures(*shape: int, labels: tuple[int, ...] = ()) -> Dataset[Any]:
    g = _generator()
    num_classes = 2 if labels else 10
    classes = torch.randint(num_classes, (NUM_SAMPLES, *labels), generator=g)
    return TensorDataset(torch.randn(NUM_SAMPLES, *shape, generator=g), classes)


def _tokens(length: int, num_tokens: int) -> Dataset[Any]:
    rows = torch.randint(num_tokens, (NUM_SAMPLES, length), generator=_generator()).sort(dim=1).values
    return TensorDataset(rows, rows.clone())


def _doublings(low: int, high: int) -> tuple[int, ...]:
    return tuple(2**power for power in range(low.bit_length() - 1, high.bit_length()))


PARTS: dict[str, Part] = {
    "mlp": Part(make_mlp, classify, lambda: _pictures(24), 64, _doublings(8, 1024)),
    "convnet": Part(make_convnet, classify, lambda: _pictures(3, 8, 8), 64, _doublings(8, 1024)),
    "gpt2": Part(make_gpt2, of_transformers, lambda: _tokens(32, 1571), 8, _doublings(1, 128)),
    "vit": Part(make_vit, of_transformers, lambda: _pictures(3, 16, 16), 16, _doublings(2, 256)),
    "t5": Part(make_t5, of_transformers, lambda: _tokens(16, 1004), 16, _doublings(2, 256)),
    "unet": Part(UNet, classify, lambda: _pictures(3, 32, 32, labels=(32, 32)), 8, _doublings(1, 128)),
}


def _factory(name: str) -> Callable[[], Workload]:
    part = PARTS[name]

    def workload() -> Workload:
        return Workload(
            model=part.model,
            loss=part.loss,
            data=DataLoader(part.data(), batch_size=part.todays_batch_size, shuffle=True, drop_last=True),
            optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-3),
            name=name,
        )

    return workload


# A search takes path/workloads.py:mlp and so on.
mlp, convnet, unet, gpt2, vit, t5 = map(_factory, ("mlp", "convnet", "unet", "gpt2", "vit", "t5"))
