"""Ten training runs at the size in which people run them, in plain PyTorch, the most important first.

`trainings()` returns them. Nothing of autotune_amp is imported, and no weights are loaded: data and initial values are
random, since only speed and memory are measured. Models of transformers and torchvision are imported when one is built.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

Batch = tuple[Tensor, ...]


@dataclass(frozen=True)
class Training:
    """One training run.

    `make_batch(num_samples, index)` returns a batch on the CPU; the same arguments return the same batch.
    `optimizer(parameters, **options)` takes `fused=True` where `has_fused_optimizer` is set. `batch_size` is what the
    user runs today. `compile_seconds` is how long one setting with torch.compile is expected to take.
    """

    name: str
    model: Callable[[], nn.Module]
    loss: Callable[[nn.Module, Batch], Tensor]
    make_batch: Callable[[int, int], Batch]
    optimizer: Callable[..., torch.optim.Optimizer]
    batch_size: int
    has_convolutions: bool = False
    has_fused_optimizer: bool = True
    compile_seconds: float = 60.0


Parameters = Iterable[nn.Parameter]


def adamw(parameters: Parameters, **options: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=3e-4, **options)


def sgd(parameters: Parameters, **options: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9, weight_decay=1e-4, **options)


def rmsprop(parameters: Parameters, **options: Any) -> torch.optim.Optimizer:
    """EfficientNet's optimizer, with the values of torchvision's references. PyTorch has no fused RMSprop."""
    return torch.optim.RMSprop(parameters, lr=0.01, alpha=0.9, eps=0.0316, momentum=0.9, weight_decay=1e-5, **options)


def generator_of(index: int) -> torch.Generator:
    return torch.Generator().manual_seed(index)


def make_tokens(num_samples: int, index: int, length: int, vocabulary: int) -> Batch:
    return (torch.randint(vocabulary, (num_samples, length), generator=generator_of(index)),)


def make_labelled_images(num_samples: int, index: int, side: int) -> Batch:
    generator = generator_of(index)
    images = torch.randn(num_samples, 3, side, side, generator=generator)
    return images, torch.randint(1000, (num_samples,), generator=generator)


def classify(model: nn.Module, batch: Batch) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def make_llama(tiny: bool) -> nn.Module:
    """A Llama of 125 million parameters, which earlier notes of this project call 160M."""
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 768, "intermediate_size": 2048, "num_hidden_layers": 12, "num_attention_heads": 12}
    if tiny:
        sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = LlamaConfig(
        vocab_size=500 if tiny else 32000,
        num_key_value_heads=4,
        max_position_embeddings=1024,
        attn_implementation="sdpa",
        use_cache=False,
        **sizes,
    )
    return LlamaForCausalLM(config)


def causal_lm_loss(model: nn.Module, batch: Batch) -> Tensor:
    loss: Tensor = model(input_ids=batch[0], labels=batch[0]).loss
    return loss


def make_resnet50(tiny: bool) -> nn.Module:
    from torchvision.models.resnet import Bottleneck, ResNet

    return ResNet(Bottleneck, [1, 1, 1, 1] if tiny else [3, 4, 6, 3])


class GPTBlock(nn.Module):
    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.feed_forward = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        heads = self.qkv(self.norm1(x)).view(batch, length, 3, self.num_heads, width // self.num_heads)
        query, key, value = heads.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        return x + self.feed_forward(self.norm2(x))


class GPT(nn.Module):
    """A GPT of 30 million parameters."""

    def __init__(self, vocabulary: int = 8192, width: int = 512, num_layers: int = 8, length: int = 512) -> None:
        super().__init__()
        self.embedding, self.position = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.blocks = nn.Sequential(*[GPTBlock(width, 8) for _ in range(num_layers)])
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        positions = self.position(torch.arange(tokens.shape[1], device=tokens.device))
        logits: Tensor = self.head(self.norm(self.blocks(self.embedding(tokens) + positions)))
        return logits


def next_token_loss(model: nn.Module, batch: Batch) -> Tensor:
    tokens = batch[0]
    return F.cross_entropy(model(tokens)[:, :-1].flatten(0, 1).float(), tokens[:, 1:].flatten())


def make_vit(tiny: bool) -> nn.Module:
    from torchvision.models import VisionTransformer

    if tiny:
        return VisionTransformer(32, 16, num_layers=2, num_heads=4, hidden_dim=64, mlp_dim=128)
    return VisionTransformer(224, 16, num_layers=12, num_heads=12, hidden_dim=768, mlp_dim=3072)


class UNetBlock(nn.Module):
    """Two convolutions around the embedding of the diffusion time, a skip connection, and attention if asked."""

    def __init__(self, in_channels: int, out_channels: int, time_width: int, has_attention: bool) -> None:
        super().__init__()
        self.norm1, self.conv1 = nn.GroupNorm(32, in_channels), nn.Conv2d(in_channels, out_channels, 3, padding=1)
        self.time = nn.Linear(time_width, out_channels)
        self.norm2, self.conv2 = nn.GroupNorm(32, out_channels), nn.Conv2d(out_channels, out_channels, 3, padding=1)
        self.skip = nn.Identity() if in_channels == out_channels else nn.Conv2d(in_channels, out_channels, 1)
        self.attention = UNetAttention(out_channels) if has_attention else nn.Identity()

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        hidden = self.conv1(F.silu(self.norm1(x))) + self.time(F.silu(time))[:, :, None, None]
        hidden = self.conv2(F.silu(self.norm2(hidden)))
        out: Tensor = self.attention(hidden + self.skip(x))
        return out


class UNetAttention(nn.Module):
    """Self-attention with heads of 64 channels over the pixels of an image."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.num_heads = max(1, channels // 64)
        self.norm = nn.GroupNorm(32, channels)
        self.qkv, self.out = nn.Linear(channels, 3 * channels), nn.Linear(channels, channels)

    def forward(self, x: Tensor) -> Tensor:
        batch, channels, height, width = x.shape
        pixels = self.norm(x).flatten(2).transpose(1, 2)
        heads = self.qkv(pixels).view(batch, height * width, 3, self.num_heads, channels // self.num_heads)
        query, key, value = heads.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(query, key, value).transpose(1, 2).reshape(pixels.shape)
        return x + self.out(mixed).transpose(1, 2).reshape(x.shape)


class UNet(nn.Module):
    """The noise predictor of DDPM (Ho et al. 2020) as for CIFAR-10, 36 million parameters, on images of 64 pixels."""

    def __init__(self, width: int = 128, multipliers: tuple[int, ...] = (1, 2, 2, 2), attention_level: int = 2) -> None:
        super().__init__()
        self.width, time_width, num_blocks = width, 4 * width, 2
        self.time = nn.Sequential(nn.Linear(width, time_width), nn.SiLU(), nn.Linear(time_width, time_width))
        self.first = nn.Conv2d(3, width, 3, padding=1)
        self.down, self.up = nn.ModuleList(), nn.ModuleList()
        channels, skipped = width, [width]
        for level, multiplier in enumerate(multipliers):
            for _ in range(num_blocks):
                self.down.append(UNetBlock(channels, multiplier * width, time_width, level == attention_level))
                channels = multiplier * width
                skipped.append(channels)
            if level < len(multipliers) - 1:
                self.down.append(nn.Conv2d(channels, channels, 3, stride=2, padding=1))
                skipped.append(channels)
        self.middle1 = UNetBlock(channels, channels, time_width, True)
        self.middle2 = UNetBlock(channels, channels, time_width, False)
        for level, multiplier in reversed(list(enumerate(multipliers))):
            for _ in range(num_blocks + 1):
                in_channels = channels + skipped.pop()
                self.up.append(UNetBlock(in_channels, multiplier * width, time_width, level == attention_level))
                channels = multiplier * width
            if level > 0:
                upsample = nn.Upsample(scale_factor=2, mode="nearest")
                self.up.append(nn.Sequential(upsample, nn.Conv2d(channels, channels, 3, padding=1)))
        self.norm, self.last = nn.GroupNorm(32, channels), nn.Conv2d(channels, 3, 3, padding=1)

    def forward(self, x: Tensor, steps: Tensor) -> Tensor:
        frequencies = torch.arange(self.width // 2, device=x.device) * (-math.log(10000) / (self.width // 2))
        angles = steps[:, None] * frequencies.exp()
        time = self.time(torch.cat([angles.sin(), angles.cos()], dim=1))
        x = self.first(x)
        skipped = [x]
        for layer in self.down:
            x = layer(x, time) if isinstance(layer, UNetBlock) else layer(x)
            skipped.append(x)
        x = self.middle2(self.middle1(x, time), time)
        for layer in self.up:
            x = layer(torch.cat([x, skipped.pop()], dim=1), time) if isinstance(layer, UNetBlock) else layer(x)
        predicted: Tensor = self.last(F.silu(self.norm(x)))
        return predicted


def make_images(num_samples: int, index: int, side: int) -> Batch:
    return make_labelled_images(num_samples, index, side)[:1]


def noise_prediction_loss(model: nn.Module, batch: Batch) -> Tensor:
    """Mean squared error of the predicted noise, with the cosine schedule of 1,000 steps."""
    images = batch[0]
    steps = torch.randint(1000, (len(images),), device=images.device)
    angle = (steps * (math.pi / 2000))[:, None, None, None]
    noise = torch.randn_like(images)
    return F.mse_loss(model(angle.cos() * images + angle.sin() * noise, steps).float(), noise)


def make_t5(tiny: bool) -> nn.Module:
    """T5-small, 60 million parameters: the sizes are T5Config's defaults."""
    from transformers import T5Config, T5ForConditionalGeneration

    sizes: dict[str, Any] = {"d_model": 64, "d_kv": 16, "d_ff": 128, "num_layers": 2, "num_heads": 4} if tiny else {}
    return T5ForConditionalGeneration(T5Config(decoder_start_token_id=0, use_cache=False, **sizes))


def make_text_pairs(num_samples: int, index: int, shortest: int, longest: int) -> Batch:
    """Sources, their mask, and targets of a quarter of the length, padded to the longest source of the batch.

    The batches are grouped by length. The longest source of a batch is drawn between `shortest` and `longest`, one in
    each quarter of the range for four batches, and is the same for every batch size, so that speeds can be compared.
    """
    generator = generator_of(index)
    quarter = (2, 0, 3, 1)[index % 4] + torch.rand((), generator=generator).item()
    length = round(shortest + (longest - shortest) * quarter / 4)
    lengths = torch.randint(max(shortest, length // 2), length + 1, (num_samples, 1), generator=generator)
    lengths[0] = length
    mask = torch.arange(length) < lengths
    source = torch.randint(1, 32000, (num_samples, length), generator=generator) * mask
    target = torch.randint(1, 32000, (num_samples, length // 4), generator=generator)
    target[torch.arange(length // 4) >= lengths // 4] = -100
    return source, mask.long(), target


def text_pairs_loss(model: nn.Module, batch: Batch) -> Tensor:
    loss: Tensor = model(input_ids=batch[0], attention_mask=batch[1], labels=batch[2]).loss
    return loss


def make_bert(tiny: bool) -> nn.Module:
    """BERT-base, 110 million parameters: the sizes are BertConfig's defaults."""
    from transformers import BertConfig, BertForMaskedLM

    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128}
    return BertForMaskedLM(BertConfig(**sizes) if tiny else BertConfig())


def make_masked_tokens(num_samples: int, index: int, length: int) -> Batch:
    """Tokens of which 15 % are replaced by the mask's token 103, and the labels of those."""
    (tokens,) = make_tokens(num_samples, index, length, 30522)
    is_masked = torch.rand(tokens.shape, generator=generator_of(index + 1000)) < 0.15
    return tokens.masked_fill(is_masked, 103), tokens.masked_fill(~is_masked, -100)


def masked_lm_loss(model: nn.Module, batch: Batch) -> Tensor:
    loss: Tensor = model(input_ids=batch[0], labels=batch[1]).loss
    return loss


def make_mlp() -> nn.Module:
    hidden = [nn.Linear(512, 512), nn.GELU(), nn.LayerNorm(512), nn.Linear(512, 512), nn.GELU(), nn.Linear(512, 1)]
    return nn.Sequential(nn.Linear(128, 512), nn.GELU(), nn.LayerNorm(512), *hidden)


def make_table_rows(num_samples: int, index: int) -> Batch:
    generator = generator_of(index)
    return torch.randn(num_samples, 128, generator=generator), torch.randn(num_samples, 1, generator=generator)


def regress(model: nn.Module, batch: Batch) -> Tensor:
    return F.mse_loss(model(batch[0]), batch[1])


class LSTM(nn.Module):
    """A language model of two LSTM layers, 37 million parameters at a width of 1,024."""

    def __init__(self, width: int = 1024, vocabulary: int = 10000) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.lstm = nn.LSTM(width, width, num_layers=2, batch_first=True)
        self.head = nn.Linear(width, vocabulary)

    def forward(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.head(self.lstm(self.embedding(tokens))[0])
        return logits


def make_efficientnet() -> nn.Module:
    from torchvision.models import efficientnet_b0

    return efficientnet_b0()


def trainings(tiny: bool = False) -> list[Training]:
    """Return the ten training runs, the most important first; `tiny` shrinks models, shapes and batches for a CPU."""
    side, length = (32, 32) if tiny else (224, 1024)
    short = 32 if tiny else 512
    images = partial(make_labelled_images, side=side)
    gpt = partial(GPT, 500, 64, 2, short) if tiny else GPT
    lstm, vocabulary = (partial(LSTM, 64, 500), 500) if tiny else (LSTM, 10000)
    steps = 17 if tiny else 129

    def batch(size: int) -> int:
        return 2 if tiny else size

    def tokens(length: int, num_tokens: int) -> Callable[[int, int], Batch]:
        return partial(make_tokens, length=length, vocabulary=500 if tiny else num_tokens)

    pairs = partial(make_text_pairs, shortest=8 if tiny else 64, longest=short)
    masked = partial(make_masked_tokens, length=32 if tiny else 256)
    noisy = partial(make_images, side=16 if tiny else 64)
    unet = partial(UNet, 32) if tiny else UNet
    return [
        Training("llama", partial(make_llama, tiny), causal_lm_loss, tokens(length, 32000), adamw, batch(8)),
        Training("resnet50", partial(make_resnet50, tiny), classify, images, sgd, batch(64), has_convolutions=True),
        Training("gpt", gpt, next_token_loss, tokens(short, 8192), adamw, batch(16)),
        Training("vit_b16", partial(make_vit, tiny), classify, images, adamw, batch(32)),
        Training("unet", unet, noise_prediction_loss, noisy, adamw, batch(16), has_convolutions=True),
        Training("t5_small", partial(make_t5, tiny), text_pairs_loss, pairs, adamw, batch(16), compile_seconds=100.0),
        Training("bert", partial(make_bert, tiny), masked_lm_loss, masked, adamw, batch(16)),
        Training("mlp", make_mlp, regress, make_table_rows, adamw, batch(256), compile_seconds=20.0),
        Training("lstm", lstm, next_token_loss, tokens(steps, vocabulary), adamw, batch(32), compile_seconds=30.0),
        Training(
            "efficientnet_b0",
            make_efficientnet,
            classify,
            images,
            rmsprop,
            batch(64),
            has_convolutions=True,
            has_fused_optimizer=False,
        ),
    ]
