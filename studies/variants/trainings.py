"""Models, data and losses of the eight trainings, in plain PyTorch; nothing of autotune_amp. Five are those of
`../landscapes`."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import Dataset, TensorDataset

sys.path.insert(0, str(Path(__file__).parent.parent / "landscapes"))
from parts import PARTS, classify, images, of_transformers, tokens


class Training(NamedTuple):
    """What a hand-written training needs; `optimizer` takes the parameters and torch's own options."""

    model: Callable[[], nn.Module]
    loss: Callable[[nn.Module, Sequence[Tensor]], Tensor]
    data: Callable[[], Dataset[Any]]
    optimizer: Callable[..., torch.optim.Optimizer]
    todays_batch_size: int


def adamw(parameters: Any, **options: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=3e-4, **options)


def sgd(parameters: Any, **options: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9, **options)


class Residual(nn.Module):
    """Two convolutions beside a shortcut."""

    def __init__(self, num_in: int, num_out: int, stride: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(num_in, num_out, 3, stride, 1, bias=False)
        self.second = nn.Conv2d(num_out, num_out, 3, 1, 1, bias=False)
        self.norm1, self.norm2 = nn.BatchNorm2d(num_out), nn.BatchNorm2d(num_out)
        self.shortcut = nn.Identity() if num_in == num_out and stride == 1 else nn.Conv2d(num_in, num_out, 1, stride)

    def forward(self, x: Tensor) -> Tensor:
        inner = self.norm2(self.second(F.relu(self.norm1(self.first(x)))))
        return F.relu(inner + self.shortcut(x))


def resnet() -> nn.Module:
    widths = (32, 32, 64, 64, 128, 128)
    blocks = [Residual(a, b, 1 if a == b else 2) for a, b in zip((32, *widths), widths, strict=False)]
    stem = [nn.Conv2d(3, 32, 3, 1, 1, bias=False), nn.BatchNorm2d(32), nn.ReLU()]
    return nn.Sequential(*stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(128, 10))


class UNet(nn.Module):
    """Two levels down and up again, each step up beside what was there on the way down."""

    def __init__(self) -> None:
        super().__init__()

        def twice(num_in: int, num_out: int) -> nn.Module:
            layers: list[nn.Module] = []
            for width in (num_in, num_out):
                layers += [nn.Conv2d(width, num_out, 3, padding=1), nn.GroupNorm(8, num_out), nn.SiLU()]
            return nn.Sequential(*layers)

        self.enter, self.down1, self.down2 = twice(3, 32), twice(32, 64), twice(64, 128)
        self.up2, self.up1 = nn.ConvTranspose2d(128, 64, 2, 2), nn.ConvTranspose2d(64, 32, 2, 2)
        self.merge2, self.merge1, self.leave = twice(128, 64), twice(64, 32), nn.Conv2d(32, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        high = self.enter(x)
        middle = self.down1(F.max_pool2d(high, 2))
        low = self.down2(F.max_pool2d(middle, 2))
        middle = self.merge2(torch.cat([middle, self.up2(low)], 1))
        out: Tensor = self.leave(self.merge1(torch.cat([high, self.up1(middle)], 1)))
        return out


def denoise(model: nn.Module, batch: Sequence[Tensor]) -> Tensor:
    return F.mse_loss(model(batch[0]), batch[1])


def noisy_images() -> Dataset[Any]:
    g = torch.Generator().manual_seed(0)
    clean = F.interpolate(torch.randn(2048, 3, 8, 8, generator=g), 32, mode="bilinear")
    return TensorDataset(clean + torch.randn(clean.shape, generator=g) / 2, clean)


def t5() -> nn.Module:
    from transformers import T5Config, T5ForConditionalGeneration

    return T5ForConditionalGeneration(
        T5Config(
            vocab_size=512, d_model=128, d_kv=32, d_ff=512, num_layers=3, num_heads=4, dropout_rate=0.0,
            decoder_start_token_id=0, pad_token_id=0,
        )
    )  # fmt: skip


def _of(name: str, optimizer: Callable[..., torch.optim.Optimizer]) -> Training:
    part = PARTS[name]
    return Training(part.model, part.loss, part.data, optimizer, part.todays_batch_size)


TRAININGS: dict[str, Training] = {
    "convnet": _of("convnet", sgd),
    "resnet": Training(resnet, classify, images, sgd, 32),
    "gpt2": _of("gpt2", adamw),
    "vit": _of("vit", adamw),
    "t5": Training(t5, of_transformers, lambda: tokens(length=48), adamw, 16),
    "lstm": _of("lstm", adamw),
    "mlp": _of("mlp", adamw),
    "unet": Training(UNet, denoise, noisy_images, adamw, 16),
}
