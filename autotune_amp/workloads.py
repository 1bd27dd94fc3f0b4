"""Embedded default workload: a small causal transformer on random characters."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

from autotune_amp.core.workload import Workload

VOCABULARY, CONTEXT, WIDTH, HEADS, LAYERS = 96, 32, 96, 4, 2
NUM_SAMPLES, BATCH_SIZE = 4096, 32


class CharacterTransformer(nn.Module):
    """Model that returns token logits of shape (batch, CONTEXT, VOCABULARY) for tokens of shape (batch, CONTEXT)."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.position = nn.Parameter(torch.zeros(CONTEXT, WIDTH))
        layer = nn.TransformerEncoderLayer(
            WIDTH, HEADS, 4 * WIDTH, dropout=0.0, batch_first=True, norm_first=True, activation="gelu"
        )
        self.encoder = nn.TransformerEncoder(layer, LAYERS, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, VOCABULARY)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(CONTEXT))

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the logits of each next token."""
        hidden = self.embedding(tokens) + self.position
        logits: Tensor = self.head(self.encoder(hidden, mask=self.mask, is_causal=True))
        return logits


def loss(model: nn.Module, batch: list[Tensor]) -> Tensor:
    """Return the mean cross entropy of the next token, for tokens of shape (batch, CONTEXT + 1)."""
    (tokens,) = batch
    logits = model(tokens[:, :-1])
    return functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


def workload() -> Workload:
    """Return the workload that `autotune-amp search` measures without a TARGET; its baseline is fp32 at batch 32."""
    tokens = torch.randint(VOCABULARY, (NUM_SAMPLES, CONTEXT + 1), generator=torch.Generator().manual_seed(0))
    return Workload(
        model=CharacterTransformer,
        loss=loss,
        data=DataLoader(TensorDataset(tokens), batch_size=BATCH_SIZE, shuffle=True),
        optimizer=torch.optim.AdamW,
        name="embedded",
    )
