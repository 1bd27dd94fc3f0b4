"""Healthy workloads: under bf16, and under fp16 with a proper loss scale, each trains as it does in fp32."""

from __future__ import annotations

import itertools
from typing import Any

import torch
import torch.nn.functional as F
from case import Case
from samples import features, fixed, images, labelled, tokens
from torch import Tensor, nn
from zoo_healthy_transformers import TRANSFORMERS, adamw

from autotune_amp import Workload


def cross_entropy(model: Any, batch: tuple[Tensor, Tensor]) -> Tensor:
    inputs, labels = batch
    return F.cross_entropy(model(inputs).flatten(0, -2), labels.flatten())


def squared_error(model: Any, batch: tuple[Tensor, Tensor]) -> Tensor:
    inputs, targets = batch
    return F.mse_loss(model(inputs), targets)


def mlp() -> Workload:
    def model() -> nn.Module:
        return nn.Sequential(
            nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10)
        )

    return Workload(model, cross_entropy, lambda n: labelled(n, 32, 10), adamw, "mlp")


def convnet() -> Workload:
    def model() -> nn.Module:
        stages = [
            [nn.Conv2d(i, o, 3, stride=2, padding=1, bias=False), nn.BatchNorm2d(o), nn.ReLU()]
            for i, o in ((3, 8), (8, 16), (16, 16))
        ]
        return nn.Sequential(*itertools.chain(*stages), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 10))

    def optimizer(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=0.05, momentum=0.9, weight_decay=1e-4)

    return Workload(model, cross_entropy, lambda n: images(n, 16, 10), optimizer, "convnet")


class Transformer(nn.Module):
    """Predicts the next token; `nn.TransformerEncoder` with a causal mask."""

    def __init__(self, is_pre_norm: bool, vocab: int = 64, length: int = 16, width: int = 32) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocab, width)
        self.positions = nn.Parameter(0.02 * torch.randn(length, width))
        layer = nn.TransformerEncoderLayer(width, 2, 64, dropout=0.1, batch_first=True, norm_first=is_pre_norm)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(width, vocab)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(length))

    def forward(self, ids: Tensor) -> Tensor:
        logits: Tensor = self.head(self.encoder(self.tokens(ids) + self.positions, mask=self.mask, is_causal=True))
        return logits


def next_tokens(n: int, vocab: int = 64, length: int = 16) -> tuple[Tensor, Tensor]:
    ids = tokens(n, length + 1, vocab)
    return ids[:, :-1], ids[:, 1:]


def pre_norm_transformer() -> Workload:
    return Workload(lambda: Transformer(True), cross_entropy, next_tokens, adamw, "pre_norm_transformer")


def post_norm_transformer() -> Workload:
    return Workload(lambda: Transformer(False), cross_entropy, next_tokens, adamw, "post_norm_transformer")


class Recurrent(nn.Module):
    """Predicts the next token with an LSTM of two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(64, 32)
        self.lstm = nn.LSTM(32, 32, num_layers=2, batch_first=True, dropout=0.1)
        self.head = nn.Linear(32, 64)

    def forward(self, ids: Tensor) -> Tensor:
        logits: Tensor = self.head(self.lstm(self.tokens(ids))[0])
        return logits


def lstm() -> Workload:
    return Workload(Recurrent, cross_entropy, next_tokens, adamw, "lstm")


def embedding_bag() -> Workload:
    """A bag of words classified; the table's gradients are sparse."""

    def model() -> nn.Module:
        return nn.Sequential(nn.EmbeddingBag(500, 32, sparse=True), nn.ReLU(), nn.Linear(32, 32), nn.Linear(32, 5))

    def bags(n: int) -> tuple[Tensor, Tensor]:
        labels = torch.randint(5, (n,))
        return labels[:, None] * 100 + torch.randint(100, (n, 12)), labels

    def optimizer(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=0.1)

    return Workload(model, cross_entropy, bags, optimizer, "embedding_bag")


class VariationalAutoencoder(nn.Module):
    """Gives the reconstruction, and mean and log variance of the code."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU())
        self.mean, self.log_variance = nn.Linear(64, 8), nn.Linear(64, 8)
        self.decoder = nn.Sequential(nn.Linear(8, 64), nn.GELU(), nn.Linear(64, 64))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        hidden = self.encoder(x)
        mean, log_variance = self.mean(hidden), self.log_variance(hidden)
        code = mean + torch.exp(0.5 * log_variance) * torch.randn_like(mean)
        return self.decoder(code), mean, log_variance


def low_rank(n: int) -> Tensor:
    return torch.tanh(torch.randn(n, 6) @ fixed(6, 64, seed=4))


def vae() -> Workload:
    def negative_evidence(model: Any, x: Tensor) -> Tensor:
        reconstruction, mean, log_variance = model(x)
        divergence = -0.5 * (1 + log_variance - mean * mean - log_variance.exp()).float().sum(1)
        return F.mse_loss(reconstruction, x) + 0.01 * divergence.mean()

    return Workload(VariationalAutoencoder, negative_evidence, low_rank, adamw, "vae")


class TwoViews(nn.Module):
    """Normalised embeddings of two views of one thing, and a learnt temperature."""

    def __init__(self) -> None:
        super().__init__()
        self.left = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 16))
        self.right = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 16))
        self.log_scale = nn.Parameter(torch.tensor(2.0))

    def forward(self, left: Tensor, right: Tensor) -> Tensor:
        similarity = F.normalize(self.left(left), dim=1) @ F.normalize(self.right(right), dim=1).T
        return similarity * self.log_scale.exp()


def contrastive() -> Workload:
    def views(n: int) -> tuple[Tensor, Tensor]:
        thing = torch.randn(n, 8)
        return tuple(thing @ fixed(8, 32, seed=seed) / 3 + 0.1 * torch.randn(n, 32) for seed in (5, 6))

    def in_batch_negatives(model: Any, batch: tuple[Tensor, Tensor]) -> Tensor:
        logits = model(*batch)
        own = torch.arange(len(logits), device=logits.device)
        return (F.cross_entropy(logits, own) + F.cross_entropy(logits.T, own)) / 2

    return Workload(TwoViews, in_batch_negatives, views, adamw, "contrastive")


def regression_1e3() -> Workload:
    """Unscaled targets of size 1e3: the loss starts at 1e6, so the safe loss scale is small."""

    def model() -> nn.Module:
        return nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 1))

    def thousands(n: int) -> tuple[Tensor, Tensor]:
        x, y = features(n, 16, 1)
        return x, 1000 * y

    return Workload(model, squared_error, thousands, adamw, "regression_1e3")


def dropout_mlp() -> Workload:
    def model() -> nn.Module:
        hidden = [(nn.Linear(i, 128), nn.ReLU(), nn.Dropout(0.5)) for i in (32, 128, 128)]
        return nn.Sequential(nn.Dropout(0.2), *itertools.chain(*hidden), nn.Linear(128, 10))

    return Workload(model, cross_entropy, lambda n: labelled(n, 32, 10), adamw, "dropout_mlp")


class TiedAutoencoder(nn.Module):
    """Decodes with the transposed weights of its encoder."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(64, 32), nn.Linear(32, 8)
        self.biases = nn.ParameterList([torch.zeros(32), torch.zeros(64)])

    def forward(self, x: Tensor) -> Tensor:
        code = torch.tanh(self.second(torch.tanh(self.first(x))))
        hidden = torch.tanh(F.linear(code, self.second.weight.T, self.biases[0]))
        return F.linear(hidden, self.first.weight.T, self.biases[1])


def tied_autoencoder() -> Workload:
    def reconstruction(model: Any, x: Tensor) -> Tensor:
        return F.mse_loss(model(x), x)

    return Workload(TiedAutoencoder, reconstruction, low_rank, adamw, "tied_autoencoder")


class PartlyTrained(nn.Module):
    """A frozen featuriser, a trained head, and a head that nothing calls."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Sequential(nn.Linear(32, 64), nn.Tanh()).requires_grad_(False)
        self.body = nn.Sequential(nn.Linear(64, 64), nn.ReLU())
        self.head, self.unused_head = nn.Linear(64, 10), nn.Linear(64, 3)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(self.body(self.frozen(x)))
        return logits


def unused_and_frozen() -> Workload:
    return Workload(PartlyTrained, cross_entropy, lambda n: labelled(n, 32, 10), adamw, "unused_and_frozen")


class SeveralHeads(nn.Module):
    """One body, a class, a number and a binary answer."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(32, 64), nn.LayerNorm(64), nn.SiLU(), nn.Linear(64, 64), nn.SiLU())
        self.kind, self.amount, self.answer = nn.Linear(64, 10), nn.Linear(64, 1), nn.Linear(64, 1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        hidden = self.body(x)
        return self.kind(hidden), self.amount(hidden)[:, 0], self.answer(hidden)[:, 0]


def several_losses() -> Workload:
    def summed(model: Any, batch: tuple[Tensor, Tensor]) -> Tensor:
        x, outputs = batch
        kind, amount, answer = model(x)
        return (
            F.cross_entropy(kind, outputs.argmax(1))
            + 0.5 * F.smooth_l1_loss(amount, outputs[:, 0])
            + 0.1 * F.binary_cross_entropy_with_logits(answer, (outputs[:, 1] > 0).float())
        )

    return Workload(SeveralHeads, summed, lambda n: features(n, 32, 10), adamw, "several_losses")


HEALTHY: tuple[Case, ...] = (
    Case("mlp", mlp),
    Case("convnet", convnet, note="BatchNorm, SGD with momentum"),
    Case("pre_norm_transformer", pre_norm_transformer),
    Case("post_norm_transformer", post_norm_transformer),
    Case("lstm", lstm, is_unsupported_in=("fp16",), note="oneDNN has no fp16 LSTM for training on the CPU"),
    Case("embedding_bag", embedding_bag, note="sparse gradients"),
    Case("vae", vae),
    Case("contrastive", contrastive, note="in-batch negatives, learnt temperature"),
    Case("regression_1e3", regression_1e3, note="targets of 1e3; a safe loss scale is about 2^4"),
    Case("dropout_mlp", dropout_mlp, note="dropout of a half after each layer"),
    Case("tied_autoencoder", tied_autoencoder, note="weights used twice, once transposed"),
    Case("unused_and_frozen", unused_and_frozen),
    Case("several_losses", several_losses),
    *TRANSFORMERS,
)
