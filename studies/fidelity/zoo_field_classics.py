"""The models of the field at their real depth, as torchvision, timm and transformers build them; all are healthy.

Each is trained in bf16 by a published recipe, or has no part that a recipe keeps in fp32. Inputs are small (64 pixels,
32 tokens, a batch of 8), so that a step takes a second on a CPU; depth, width and normalisation are the model's own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import timm
import torch
import torch.nn.functional as F
import torchvision.models as vision
import transformers as hf
from case import Case
from samples import fixed, images, labelled, tokens
from torch import Tensor, nn

from autotune_amp import Workload

PIXELS, LENGTH, VOCAB, CLASSES = 64, 32, 512, 10


def cross_entropy(model: Any, batch: tuple[Tensor, Tensor]) -> Tensor:
    inputs, labels = batch
    return F.cross_entropy(model(inputs), labels)


def own_loss(model: Any, batch: dict[str, Tensor]) -> Tensor:
    """The loss that the library's model computes itself."""
    loss: Tensor = model(**batch).loss
    return loss


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.02, momentum=0.9, weight_decay=1e-4)


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=3e-4)


def noise_images(n: int) -> tuple[Tensor, Tensor]:
    """Images of noise with labels that say nothing of them."""
    return torch.randn(n, 3, PIXELS, PIXELS), torch.randint(CLASSES, (n,))


def class_images(n: int) -> tuple[Tensor, Tensor]:
    return images(n, PIXELS, CLASSES)


def classifier(name: str, make: Callable[[], nn.Module], optimizer: Any = sgd, data: Any = class_images) -> Case:
    return Case(name, lambda: Workload(make, cross_entropy, data, optimizer, name))


CLASSIFIERS: list[Case] = [
    classifier(name, lambda build=build: build(num_classes=CLASSES))  # type: ignore[misc] # bound now
    for name, build in (
        ("resnet18", vision.resnet18),
        ("resnet50", vision.resnet50),
        ("resnet101", vision.resnet101),
        ("resnext50", vision.resnext50_32x4d),
        ("densenet121", vision.densenet121),
        ("mobilenet_v2", vision.mobilenet_v2),
        ("mobilenet_v3_large", vision.mobilenet_v3_large),
        ("efficientnet_b0", vision.efficientnet_b0),
        ("regnet_y_400mf", vision.regnet_y_400mf),
        ("shufflenet_v2", vision.shufflenet_v2_x1_0),
        ("squeezenet", vision.squeezenet1_1),
        ("mnasnet", vision.mnasnet1_0),
        ("vgg11_bn", vision.vgg11_bn),
    )
] + [
    classifier(name, lambda build=build: build(num_classes=CLASSES), adamw)  # type: ignore[misc] # bound now
    for name, build in (("convnext_tiny", vision.convnext_tiny), ("swin_t", vision.swin_t))
]
CLASSIFIERS += [
    classifier("vit_b_16", lambda: vision.VisionTransformer(PIXELS, 16, 12, 12, 768, 3072, num_classes=CLASSES), adamw),
    classifier("resnet50_noise", lambda: vision.resnet50(num_classes=CLASSES), data=noise_images),
    classifier("mobilenet_v2_noise", lambda: vision.mobilenet_v2(num_classes=CLASSES), data=noise_images),
    classifier("densenet121_noise", lambda: vision.densenet121(num_classes=CLASSES), data=noise_images),
]
CLASSIFIERS += [
    classifier(name, lambda kind=kind: timm.create_model(kind, num_classes=CLASSES), optimizer)  # type: ignore[misc] # bound
    for name, kind, optimizer in (
        ("resnet50_gn", "resnet50_gn", sgd),
        ("efficientnetv2_s", "tf_efficientnetv2_s", sgd),
        ("mixer", "mixer_s32_224", adamw),
        ("nfnet", "dm_nfnet_f0", sgd),
        ("ghostnet", "ghostnet_100", sgd),
        ("hrnet_w18", "hrnet_w18_small", sgd),
        ("res2net50", "res2net50_26w_4s", sgd),
        ("dla34", "dla34", sgd),
        ("repvgg_a0", "repvgg_a0", sgd),
        ("xception", "legacy_xception", sgd),
    )
    if kind != "mixer_s32_224"  # it takes one size of image
]


# -- pictures to pictures ----------------------------------------------------------------------------------------------


def masks(n: int) -> tuple[Tensor, Tensor]:
    """Images whose bright halves are to be found."""
    x, _ = images(n, PIXELS, CLASSES)
    return x, (F.avg_pool2d(x.mean(1, keepdim=True), 5, 1, 2)[:, 0] > 0).long()


def segmentation_loss(model: Any, batch: tuple[Tensor, Tensor]) -> Tensor:
    inputs, labels = batch
    out = model(inputs)
    return F.cross_entropy(out["out"] if isinstance(out, dict) else out, labels)


class Block(nn.Module):
    """Two convolutions with a normalisation each, beside a shortcut; told the time by an addition."""

    def __init__(self, i: int, o: int, norm: Callable[[int], nn.Module], time_width: int) -> None:
        super().__init__()
        self.first = nn.Sequential(norm(i), nn.SiLU(), nn.Conv2d(i, o, 3, padding=1))
        self.time = nn.Linear(time_width, o)
        self.second = nn.Sequential(norm(o), nn.SiLU(), nn.Conv2d(o, o, 3, padding=1))
        self.shortcut = nn.Conv2d(i, o, 1) if i != o else nn.Identity()

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        h = self.first(x) + self.time(time)[:, :, None, None]
        out: Tensor = self.second(h) + self.shortcut(x)
        return out


class UNet(nn.Module):
    """A U-Net of four levels with two blocks each, told the time; with GroupNorm that of DDPM."""

    def __init__(self, norm: Callable[[int], nn.Module], width: int = 32, channels: int = 3) -> None:
        super().__init__()
        widths = [width, width * 2, width * 4, width * 4]
        self.time = nn.Sequential(nn.Linear(64, 128), nn.SiLU(), nn.Linear(128, 128))
        self.head = nn.Conv2d(3, width, 3, padding=1)
        ins = [width, *widths[:-1]]
        self.down = nn.ModuleList([Block(i, o, norm, 128) for i, o in zip(ins, widths, strict=True)])
        self.down2 = nn.ModuleList([Block(o, o, norm, 128) for o in widths])
        self.middle = Block(widths[-1], widths[-1], norm, 128)
        self.up = nn.ModuleList([Block(2 * o, i, norm, 128) for i, o in zip(ins, widths, strict=True)])
        self.tail = nn.Sequential(norm(width), nn.SiLU(), nn.Conv2d(width, channels, 3, padding=1))

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        frequencies = torch.exp(torch.arange(32, device=x.device) * -0.3)
        angles = time[:, None].float() * frequencies
        told = self.time(torch.cat([angles.sin(), angles.cos()], 1))
        x = self.head(x)
        kept = []
        for one, two in zip(self.down, self.down2, strict=True):
            x = two(one(x, told), told)
            kept.append(x)
            x = F.avg_pool2d(x, 2)
        x = self.middle(x, told)
        for block in reversed(self.up):
            x = F.interpolate(x, scale_factor=2)
            x = block(torch.cat([x, kept.pop()], 1), told)
        out: Tensor = self.tail(x)
        return out


def group_norm(width: int) -> nn.Module:
    return nn.GroupNorm(8, width)


def denoising(model: Any, batch: tuple[Tensor, Tensor, Tensor]) -> Tensor:
    """DDPM's: the noise that was put on images, found by a model that is told how much."""
    clean, noise, time = batch
    level = torch.cos(time / 1000 * 1.57)[:, None, None, None]
    return F.mse_loss(model(level * clean + (1 - level**2).sqrt() * noise, time), noise)


def noisy_images(n: int) -> tuple[Tensor, Tensor, Tensor]:
    x, _ = images(n, 32, CLASSES)
    return x, torch.randn_like(x), torch.randint(1000, (n,)).float()


class StillUNet(nn.Module):
    """The U-Net without a time."""

    def __init__(self) -> None:
        super().__init__()
        self.body = UNet(nn.BatchNorm2d, channels=2)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.body(x, x.new_zeros(len(x)))
        return out


def generator() -> nn.Module:
    """DCGAN's at 64 pixels."""
    layers: list[nn.Module] = [nn.Unflatten(1, (100, 1, 1))]
    for i, o, stride in ((100, 256, 1), (256, 128, 2), (128, 64, 2), (64, 32, 2)):
        layers += [
            nn.ConvTranspose2d(i, o, 4, stride, 0 if stride == 1 else 1, bias=False),
            nn.BatchNorm2d(o),
            nn.ReLU(),
        ]
    return nn.Sequential(*layers, nn.ConvTranspose2d(32, 3, 4, 2, 1), nn.Tanh())


def discriminator() -> nn.Module:
    layers: list[nn.Module] = [nn.Conv2d(3, 32, 4, 2, 1), nn.LeakyReLU(0.2)]
    for i, o in ((32, 64), (64, 128), (128, 256)):
        layers += [nn.Conv2d(i, o, 4, 2, 1, bias=False), nn.BatchNorm2d(o), nn.LeakyReLU(0.2)]
    return nn.Sequential(*layers, nn.Conv2d(256, 1, 4), nn.Flatten(0))


class Gan(nn.Module):
    """DCGAN, its two losses as one: the generator's gradients come back turned round."""

    def __init__(self) -> None:
        super().__init__()
        self.generator, self.discriminator = generator(), discriminator()


class Reverse(torch.autograd.Function):
    """The identity, whose gradient is turned round."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:  # noqa: ARG004 # the interface's
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override] # noqa: ARG004 # the interface's
        return -gradient


def gan_loss(model: Any, batch: tuple[Tensor, Tensor]) -> Tensor:
    real, codes = batch
    fake = Reverse.apply(model.generator(codes))
    of_real, of_fake = model.discriminator(real), model.discriminator(fake)
    right = F.binary_cross_entropy_with_logits(of_real, torch.ones_like(of_real))
    return right + F.binary_cross_entropy_with_logits(of_fake, torch.zeros_like(of_fake))


def gan_batch(n: int) -> tuple[Tensor, Tensor]:
    return torch.tanh(images(n, PIXELS, CLASSES)[0]), torch.randn(n, 100)


def adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=2e-4, betas=(0.5, 0.999))


def boxes(n: int) -> tuple[Tensor, Tensor]:
    """Images of one bright square, and where it lies: left, top, right, bottom."""
    x = 0.1 * torch.rand(n, 3, PIXELS, PIXELS)
    corners = torch.randint(0, PIXELS - 24, (n, 2)).float()
    found = torch.cat([corners, corners + 20], 1)
    for image, (left, top, right, bottom) in zip(x, found.long().tolist(), strict=True):
        image[:, top:bottom, left:right] += 0.8
    return x, found


def detection_loss(model: Any, batch: tuple[Tensor, Tensor]) -> Tensor:
    x, found = batch
    one = torch.ones(1, dtype=torch.long, device=x.device)
    losses = model(list(x), [{"boxes": box[None], "labels": one} for box in found])
    total: Tensor = sum(losses.values())
    return total


def picture(name: str, model: Callable[[], nn.Module], loss: Any, data: Any, optimizer: Any) -> Case:
    return Case(name, lambda: Workload(model, loss, data, optimizer, name))


PICTURES = [
    picture("ddpm_unet", lambda: UNet(group_norm), denoising, noisy_images, adamw),
    picture("unet_bn", StillUNet, segmentation_loss, masks, adamw),
    picture(
        "fcn_resnet50",
        lambda: vision.segmentation.fcn_resnet50(weights_backbone=None, num_classes=2),
        segmentation_loss, masks, sgd,
    ),
    picture(
        "deeplabv3_mobilenet",
        lambda: vision.segmentation.deeplabv3_mobilenet_v3_large(weights_backbone=None, num_classes=2),
        segmentation_loss, masks, sgd,
    ),
    picture(
        "retinanet",
        lambda: vision.detection.retinanet_resnet50_fpn(
            weights=None, weights_backbone=None, num_classes=2, min_size=PIXELS, max_size=PIXELS
        ),
        detection_loss, boxes, lambda parameters: torch.optim.SGD(parameters, lr=0.002, momentum=0.9),
    ),
    picture("dcgan", Gan, gan_loss, gan_batch, adam),
]  # fmt: skip


# -- words, sounds and tables ------------------------------------------------------------------------------------------


def next_token(n: int) -> dict[str, Tensor]:
    ids = tokens(n, LENGTH, VOCAB)
    return {"input_ids": ids, "labels": ids}


def masked_token(n: int) -> dict[str, Tensor]:
    ids = tokens(n, LENGTH, VOCAB - 1)
    masked = torch.rand(n, LENGTH) < 0.2
    masked[:, 0] = True
    return {"input_ids": ids.masked_fill(masked, VOCAB - 1), "labels": ids.masked_fill(~masked, -100)}


def spectrograms(n: int) -> dict[str, Tensor]:
    """Whisper's: 2 s of 80 mel bands, and the tokens that are said."""
    ids = tokens(n, 12, VOCAB)
    return {"input_features": fixed(VOCAB, 80, 1, seed=7)[ids[:, 0]] + torch.randn(n, 80, 200), "labels": ids}


def waves(n: int) -> dict[str, Tensor]:
    """wav2vec's: 0.25 s of a tone in noise, and its class."""
    labels = torch.randint(4, (n,))
    time = torch.arange(4000) / 16000
    tones = torch.sin(2 * torch.pi * 200.0 * 2.0 ** labels[:, None] * time)
    return {"input_values": tones + 0.5 * torch.randn(n, 4000), "labels": labels}


def pairs(n: int) -> dict[str, Any]:
    """CLIP's: an image of a class, and a text of the same."""
    pixels, labels = class_images(n)
    ids = (labels[:, None] * 40 + torch.randint(40, (n, 16))).clamp(max=VOCAB - 2)
    ids[:, -1] = VOCAB - 1
    return {"pixel_values": pixels, "input_ids": ids, "attention_mask": torch.ones_like(ids), "return_loss": True}


NO_ENDS = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}


def library(name: str, kind: Any, config: Callable[[], Any], data: Any, note: str = "") -> Case:
    def make() -> Workload:
        return Workload(lambda: kind(config()), own_loss, data, adamw, name)

    return Case(name, make, note=note)


def llama_config(kind: Any, **more: Any) -> Callable[[], Any]:
    """Twelve layers, as those of 160 M parameters have."""
    return lambda: kind(
        vocab_size=VOCAB, hidden_size=768, intermediate_size=2048, num_hidden_layers=12, num_attention_heads=12,
        num_key_value_heads=4, max_position_embeddings=LENGTH, **NO_ENDS, **more,
    )  # fmt: skip


LANGUAGE = [
    library("bert_base", hf.BertForMaskedLM, lambda: hf.BertConfig(vocab_size=VOCAB), masked_token),
    library("distilbert", hf.DistilBertForMaskedLM, lambda: hf.DistilBertConfig(vocab_size=VOCAB), masked_token),
    library("gpt2_small", hf.GPT2LMHeadModel, lambda: hf.GPT2Config(vocab_size=VOCAB, **NO_ENDS), next_token),
    library("llama_160m", hf.LlamaForCausalLM, llama_config(hf.LlamaConfig), next_token),
    library("qwen2_160m", hf.Qwen2ForCausalLM, llama_config(hf.Qwen2Config), next_token),
    library("gemma_160m", hf.GemmaForCausalLM, llama_config(hf.GemmaConfig, head_dim=64), next_token),
    library(
        "pythia_160m",
        hf.GPTNeoXForCausalLM,
        lambda: hf.GPTNeoXConfig(
            vocab_size=VOCAB, hidden_size=768, num_hidden_layers=12, num_attention_heads=12, intermediate_size=3072,
            **NO_ENDS,
        ),
        next_token,
    ),
    library(
        "t5_small",
        hf.T5ForConditionalGeneration,
        lambda: hf.T5Config(vocab_size=VOCAB, decoder_start_token_id=0, pad_token_id=0, eos_token_id=None),
        next_token,
        note="fp16 overflows in its trained feed-forward layers; not at its first weights",
    ),
    library(
        "whisper_tiny",
        hf.WhisperForConditionalGeneration,
        lambda: hf.WhisperConfig(
            vocab_size=VOCAB, d_model=384, encoder_layers=4, decoder_layers=4, encoder_attention_heads=6,
            decoder_attention_heads=6, encoder_ffn_dim=1536, decoder_ffn_dim=1536, max_source_positions=100,
            decoder_start_token_id=1, **NO_ENDS | {"pad_token_id": 0},
        ),
        spectrograms,
    ),
    library(
        "wav2vec2_base",
        hf.Wav2Vec2ForSequenceClassification,
        lambda: hf.Wav2Vec2Config(num_labels=4, mask_time_prob=0.0, mask_feature_prob=0.0),
        waves,
    ),
    library(
        "clip",
        hf.CLIPModel,
        lambda: hf.CLIPConfig(
            text_config={"vocab_size": VOCAB, "max_position_embeddings": 16, "eos_token_id": VOCAB - 1},
            vision_config={"image_size": PIXELS, "patch_size": 16},
        ),
        pairs,
    ),
]  # fmt: skip


class Recurrent(nn.Module):
    """AWD's shape: three layers of LSTM over embedded tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCAB, 256)
        self.lstm = nn.LSTM(256, 512, num_layers=3, batch_first=True, dropout=0.2)
        self.head = nn.Linear(512, VOCAB)

    def forward(self, ids: Tensor) -> Tensor:
        logits: Tensor = self.head(self.lstm(self.tokens(ids))[0])
        return logits


def sequence_loss(model: Any, batch: dict[str, Tensor]) -> Tensor:
    ids = batch["input_ids"]
    return F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())


def deep_table(norm: bool) -> Callable[[], nn.Module]:
    """Eight layers of 512, with BatchNorm or plain."""

    def make() -> nn.Module:
        layers: list[nn.Module] = [nn.Linear(64, 512)]
        for _ in range(7):
            layers += [*([nn.BatchNorm1d(512)] if norm else []), nn.ReLU(), nn.Linear(512, 512)]
        return nn.Sequential(*layers, nn.ReLU(), nn.Linear(512, CLASSES))

    return make


def table(n: int) -> tuple[Tensor, Tensor]:
    return labelled(n, 64, CLASSES)


TABLES = [
    Case("lstm_3", lambda: Workload(Recurrent, sequence_loss, next_token, adamw)),
    Case("table_mlp", lambda: Workload(deep_table(False), cross_entropy, table, adamw)),
    Case("table_mlp_bn", lambda: Workload(deep_table(True), cross_entropy, table, adamw)),
]

CLASSICS = [*TABLES, *CLASSIFIERS, *PICTURES, *LANGUAGE]
