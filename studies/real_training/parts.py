"""Models and data of the six trainings, for what is searched (workloads.py) and what is trained by hand (train.py).

Imports nothing of autotune_amp.
"""

from __future__ import annotations

import ast
import sysconfig
import time
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from torch.utils.data import Dataset, TensorDataset

LONGEST, VOCABULARY, PADDING = 384, 257, 256  # bytes, and one for padding
LATENCY_SECONDS = 0.002  # of a store somewhere in a network


@cache
def docstrings() -> list[bytes]:
    """Docstrings of the standard library: texts of very different lengths, cut off at LONGEST."""
    found = []
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(errors="replace"))):
            if isinstance(node, ast.FunctionDef | ast.ClassDef) and (text := ast.get_docstring(node)):
                found.append(text.encode()[:LONGEST])
    return found


class Docstrings(Dataset[Tensor]):
    def __len__(self) -> int:
        return len(docstrings())

    def __getitem__(self, index: int) -> Tensor:
        return torch.tensor(list(docstrings()[index]))


def pad(texts: list[Tensor]) -> dict[str, Tensor]:
    """Padded to the longest; padding is neither attended to nor learned."""
    tokens = nn.utils.rnn.pad_sequence(texts, batch_first=True, padding_value=PADDING)
    is_text = tokens != PADDING
    return {"input_ids": tokens, "attention_mask": is_text.long(), "labels": tokens.masked_fill(~is_text, -100)}


def language_model() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(
        GPT2Config(vocab_size=VOCABULARY, n_positions=LONGEST, n_embd=96, n_layer=2, n_head=4, use_cache=False)
    )


class StoredImages(Dataset[tuple[Tensor, int]]):
    """Digits, enlarged, from a store with LATENCY_SECONDS per image, and augmented in NumPy."""

    def __init__(self) -> None:
        self.raw = load_digits()

    def __len__(self) -> int:
        return len(self.raw.target)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        time.sleep(LATENCY_SECONDS)
        image = np.kron(self.raw.images[index].astype(np.float32) / 16, np.ones((3, 3), np.float32))
        image = np.roll(image, np.random.randint(-3, 4, 2), (0, 1)) + np.random.normal(0, 0.05, image.shape)
        return torch.from_numpy(image.astype(np.float32))[None], int(self.raw.target[index])


def convnet() -> nn.Module:
    def block(inputs: int, outputs: int) -> list[nn.Module]:
        return [nn.Conv2d(inputs, outputs, 3, padding=1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU()]

    return nn.Sequential(
        *block(1, 32),
        *block(32, 32),
        nn.MaxPool2d(2),
        *block(32, 64),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(64, 10),
    )


def small_images() -> TensorDataset:
    """Digits as images from -1 to 1."""
    return TensorDataset(torch.tensor(load_digits().images, dtype=torch.float32)[:, None] / 8 - 1)


NOISE = 32


def generator() -> nn.Module:
    return nn.Sequential(
        nn.Linear(NOISE, 128 * 4),
        nn.Unflatten(1, (128, 2, 2)),
        nn.ReLU(),
        nn.ConvTranspose2d(128, 64, 4, 2, 1),
        nn.ReLU(),
        nn.ConvTranspose2d(64, 1, 4, 2, 1),
        nn.Tanh(),
    )


def discriminator() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 64, 3, 2, 1),
        nn.LeakyReLU(0.2),
        nn.Conv2d(64, 128, 3, 2, 1),
        nn.LeakyReLU(0.2),
        nn.Flatten(),
        nn.Linear(128 * 4, 1),
    )


NUM_NOISE_STEPS = 200


class Denoiser(nn.Module):
    """Predicts the noise in an image, given how far the diffusion went."""

    def __init__(self, width: int = 48) -> None:
        super().__init__()
        self.time = nn.Embedding(NUM_NOISE_STEPS, width)
        self.enter = nn.Conv2d(1, width, 3, padding=1)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.GroupNorm(8, width), nn.SiLU(), nn.Conv2d(width, width, 3, padding=1)) for _ in range(4)
        )
        self.leave = nn.Conv2d(width, 1, 3, padding=1)

    def forward(self, images: Tensor, steps: Tensor) -> Tensor:
        hidden = self.enter(images) + self.time(steps)[:, :, None, None]
        for block in self.blocks:
            hidden = hidden + block(hidden)
        return self.leave(hidden)


def noised(images: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Images part of the way to noise, the noise, and how far they are."""
    steps = torch.randint(NUM_NOISE_STEPS, (len(images),), device=images.device)
    share = (torch.cos(steps / NUM_NOISE_STEPS * torch.pi / 2) ** 2)[:, None, None, None]
    noise = torch.randn_like(images)
    return share.sqrt() * images + (1 - share).sqrt() * noise, noise, steps


class Adapter(nn.Module):
    """A frozen linear layer with a trained low-rank one beside it."""

    def __init__(self, base: nn.Linear, rank: int = 4) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Linear(base.in_features, rank, bias=False)
        self.up = nn.Linear(rank, base.out_features, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.base(inputs) + self.up(self.down(inputs))


def adapted_classifier() -> nn.Module:
    """BERT, frozen, with adapters on its queries and values; says which module of the standard library a text is of."""
    from transformers import BertConfig, BertForSequenceClassification

    size = {"hidden_size": 128, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 512}
    model = BertForSequenceClassification(BertConfig(vocab_size=VOCABULARY, num_labels=2, **size))
    model.requires_grad_(False)
    for layer in model.bert.encoder.layer:
        attention: Any = layer.attention.self
        attention.query, attention.value = Adapter(attention.query), Adapter(attention.value)
    model.classifier.requires_grad_(True)
    return model


def sentences() -> TensorDataset:
    """The first 64 bytes of each docstring, and whether it speaks of what is returned."""
    texts = [text for text in docstrings() if len(text) >= 64]
    tokens = torch.tensor([list(text[:64]) for text in texts])
    return TensorDataset(tokens, torch.tensor([int(b"eturn" in text) for text in texts]))


class CheckpointedModel(nn.Module):
    """A causal transformer over bytes whose blocks are computed again in the backward pass."""

    def __init__(self, width: int = 128, num_blocks: int = 3, context: int = 64) -> None:
        super().__init__()
        self.embedding = nn.Embedding(256, width)
        self.position = nn.Parameter(torch.zeros(context, width))
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(width, 4, 4 * width, 0.0, "gelu", batch_first=True, norm_first=True)
            for _ in range(num_blocks)
        )
        self.head = nn.Linear(width, 256)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(context))

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.embedding(tokens) + self.position
        for block in self.blocks:
            hidden = checkpoint(block, hidden, self.mask, is_causal=True, use_reentrant=False)
        return self.head(hidden)


def compiled_model() -> nn.Module:
    model = CheckpointedModel()
    model.compile()
    return model


def source_text() -> TensorDataset:
    """Windows of 65 bytes of the standard library's sources."""
    text = b"\n".join(path.read_bytes() for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")))
    usable = len(text) // 65 * 65
    return TensorDataset(torch.frombuffer(bytearray(text[:usable]), dtype=torch.uint8).view(-1, 65).long()[:20000])


def next_byte_loss(model: nn.Module, tokens: Tensor) -> Tensor:
    return F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
