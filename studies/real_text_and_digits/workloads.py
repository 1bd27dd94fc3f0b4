"""The two workloads of this study: characters of the standard library's sources, and scikit-learn's digits."""

from __future__ import annotations

import sysconfig
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset, TensorDataset

from autotune_amp import Workload

CONTEXT, WIDTH, HEADS, LAYERS = 32, 64, 4, 2


class Characters(Dataset[Tensor]):
    """Windows of CONTEXT + 1 bytes of the standard library's Python sources."""

    def __init__(self) -> None:
        folder = Path(sysconfig.get_paths()["stdlib"])
        text = b"\n".join(path.read_bytes() for path in sorted(folder.glob("*.py")))
        self.bytes = torch.frombuffer(bytearray(text), dtype=torch.uint8)

    def __len__(self) -> int:
        return (len(self.bytes) - 1) // CONTEXT

    def __getitem__(self, index: int) -> Tensor:
        return self.bytes[index * CONTEXT : index * CONTEXT + CONTEXT + 1].long()


class CharacterModel(nn.Module):
    """A causal transformer over bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(256, WIDTH)
        self.position = nn.Parameter(torch.zeros(CONTEXT, WIDTH))
        layer = nn.TransformerEncoderLayer(
            WIDTH, HEADS, 4 * WIDTH, dropout=0.1, batch_first=True, norm_first=True, activation="gelu"
        )
        self.encoder = nn.TransformerEncoder(layer, LAYERS, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, 256)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(CONTEXT))

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.encoder(self.embedding(tokens) + self.position, mask=self.mask, is_causal=True)
        logits: Tensor = self.head(hidden)
        return logits


def character_loss(model: nn.Module, tokens: Tensor) -> Tensor:
    return functional.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


def characters() -> Workload:
    return Workload(
        model=CharacterModel,
        loss=character_loss,
        data=DataLoader(Characters(), batch_size=32, shuffle=True),
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=3e-4),
        name="characters",
    )


def convnet() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1),
        nn.BatchNorm2d(32),
        nn.ReLU(),
        nn.Conv2d(32, 64, 3, padding=1),
        nn.BatchNorm2d(64),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(64, 10),
    )


def digits_data() -> TensorDataset:
    from sklearn.datasets import load_digits

    loaded = load_digits()
    images = torch.tensor(loaded.images, dtype=torch.float32).unsqueeze(1) / 16
    return TensorDataset(images, torch.tensor(loaded.target))


def digits_loss(model: nn.Module, batch: list[Tensor]) -> Tensor:
    images, labels = batch
    return functional.cross_entropy(model(images), labels)


def digits() -> Workload:
    return Workload(
        model=convnet,
        loss=digits_loss,
        data=DataLoader(digits_data(), batch_size=16, shuffle=True),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9),
        name="digits",
    )
