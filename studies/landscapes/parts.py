"""Models, data and losses of the landscapes, in plain PyTorch; nothing of autotune_amp.

A part is what a hand-written training needs; `workloads.py` makes a Workload of each. The data are made, of shapes and
statistics that training does not mind: speed and memory are what is measured.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import Dataset, TensorDataset


class Part(NamedTuple):
    """`todays_batch_size` is what a user may run today; `batch_sizes` is the grid of a landscape.

    `memory_limit_mib` is what a trial may take, so that the largest batches run out of it; None is what there is.
    """

    model: Callable[[], nn.Module]
    loss: Callable[[nn.Module, Sequence[Tensor]], Tensor]
    data: Callable[[], Dataset[Any]]
    optimizer: Callable[[Any], torch.optim.Optimizer]
    todays_batch_size: int
    batch_sizes: tuple[int, ...]
    memory_limit_mib: int | None = None


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=3e-4)


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)


def classify(model: nn.Module, batch: Sequence[Tensor]) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def next_token(model: nn.Module, batch: Sequence[Tensor]) -> Tensor:
    tokens = batch[0]
    scores = model(tokens[:, :-1])
    return F.cross_entropy(scores.flatten(0, 1), tokens[:, 1:].flatten())


def of_transformers(model: nn.Module, batch: Sequence[Tensor]) -> Tensor:
    loss: Tensor = model(batch[0], labels=batch[1]).loss
    return loss


def generator() -> torch.Generator:
    return torch.Generator().manual_seed(0)


def vectors(num_samples: int = 8192, num_features: int = 784) -> Dataset[Any]:
    g = generator()
    labels = torch.randint(10, (num_samples,), generator=g)
    return TensorDataset(torch.randn(num_samples, num_features, generator=g) + labels[:, None] / 10, labels)


def images(num_samples: int = 4096, side: int = 32) -> Dataset[Any]:
    g = generator()
    labels = torch.randint(10, (num_samples,), generator=g)
    pictures = torch.randn(num_samples, 3, side, side, generator=g) + labels[:, None, None, None] / 10
    return TensorDataset(pictures, labels)


def tokens(num_samples: int = 4096, length: int = 64, num_tokens: int = 512) -> Dataset[Any]:
    rows = torch.randint(num_tokens, (num_samples, length), generator=generator()).sort(dim=1).values
    return TensorDataset(rows, rows.clone())


def mlp() -> nn.Module:
    return nn.Sequential(
        nn.Linear(784, 1024),
        nn.ReLU(),
        nn.Linear(1024, 1024),
        nn.ReLU(),
        nn.Linear(1024, 1024),
        nn.ReLU(),
        nn.Linear(1024, 10),
    )


def convnet() -> nn.Module:
    def block(num_in: int, num_out: int, stride: int) -> list[nn.Module]:
        return [nn.Conv2d(num_in, num_out, 3, stride, 1), nn.BatchNorm2d(num_out), nn.ReLU()]

    layers = [*block(3, 32, 1), *block(32, 64, 2), *block(64, 64, 1), *block(64, 128, 2)]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(128, 10))


def convnet_channels_last() -> nn.Module:
    return convnet().to(memory_format=torch.channels_last)  # type: ignore[call-overload, no-any-return]


class Transformer(nn.Module):
    """A causal language model of torch's own layers."""

    def __init__(self, width: int, num_layers: int, length: int, num_tokens: int = 512) -> None:
        super().__init__()
        self.embed = nn.Embedding(num_tokens, width)
        self.position = nn.Parameter(torch.randn(length, width) / 50)
        layer = nn.TransformerEncoderLayer(width, width // 32, 4 * width, 0.0, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, num_layers, enable_nested_tensor=False)
        self.head = nn.Linear(width, num_tokens)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(length), persistent=False)

    def forward(self, rows: Tensor) -> Tensor:
        length = rows.shape[1]
        assert isinstance(self.mask, Tensor)
        hidden = self.embed(rows) + self.position[:length]
        scores: Tensor = self.head(self.layers(hidden, mask=self.mask[:length, :length], is_causal=True))
        return scores


class Recurrent(nn.Module):
    """A language model with an LSTM."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(512, 128)
        self.lstm = nn.LSTM(128, 256, num_layers=1, batch_first=True)
        self.head = nn.Linear(256, 512)

    def forward(self, rows: Tensor) -> Tensor:
        scores: Tensor = self.head(self.lstm(self.embed(rows))[0])
        return scores


def gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(
        GPT2Config(
            vocab_size=512,
            n_positions=64,
            n_embd=128,
            n_layer=4,
            n_head=4,
            bos_token_id=0,
            eos_token_id=1,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
        )
    )


def vit() -> nn.Module:
    from transformers import ViTConfig, ViTForImageClassification

    return ViTForImageClassification(
        ViTConfig(
            hidden_size=192,
            num_hidden_layers=4,
            num_attention_heads=3,
            intermediate_size=768,
            image_size=32,
            patch_size=4,
            num_labels=10,  # type: ignore[call-arg] # it goes through **kwargs
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
        )
    )


def _doublings(low: int, high: int) -> tuple[int, ...]:
    return tuple(2**power for power in range(low.bit_length() - 1, high.bit_length()))


PARTS: dict[str, Part] = {
    "mlp": Part(mlp, classify, vectors, adamw, 64, _doublings(8, 1024)),
    "convnet": Part(convnet, classify, images, sgd, 32, _doublings(2, 256)),
    "convnet_channels_last": Part(convnet_channels_last, classify, images, sgd, 32, _doublings(2, 256)),
    "transformer_small": Part(lambda: Transformer(64, 2, 64), next_token, tokens, adamw, 32, _doublings(2, 256)),
    "transformer_medium": Part(lambda: Transformer(192, 4, 64), next_token, tokens, adamw, 16, _doublings(1, 128), 320),
    "lstm": Part(Recurrent, next_token, lambda: tokens(length=32), adamw, 32, _doublings(2, 256)),
    "gpt2": Part(gpt2, of_transformers, tokens, adamw, 32, _doublings(1, 128)),
    "vit": Part(vit, of_transformers, images, adamw, 16, _doublings(1, 128), 600),
}
