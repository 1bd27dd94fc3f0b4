"""Kinds of models beside the classics: graphs, adapters, and what makes pictures, finds or compares them.

Adapters by peft and graphs by torch-geometric are there where these are installed; both are written out here as well.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import timm
import torch
import torch.nn.functional as F
import torchvision.models as vision
import transformers as hf
from case import Case
from samples import fixed
from torch import Tensor, nn
from zoo_field_classics import (
    CLASSES,
    PIXELS,
    Reverse,
    adam,
    adamw,
    boxes,
    class_images,
    classifier,
    detection_loss,
    discriminator,
    llama_config,
    masks,
    next_token,
    picture,
    segmentation_loss,
    sgd,
)
from zoo_healthy import squared_error

from autotune_amp import Workload

# -- graphs ------------------------------------------------------------------------------------------------------------

NUM_NODES, NUM_EDGES = 20, 60


def graphs(n: int) -> tuple[Tensor, Tensor, Tensor]:
    """One large graph of n random ones: features of nodes, edges (2, E), and a class of each node."""
    x = torch.randn(n * NUM_NODES, 32)
    edges = torch.randint(NUM_NODES, (2, n * NUM_EDGES)) + NUM_NODES * torch.arange(n).repeat_interleave(NUM_EDGES)
    around = torch.zeros_like(x).index_add(0, edges[1], x[edges[0]])
    return x, edges, ((x + around) @ fixed(32, CLASSES, seed=51)).argmax(1)


def node_loss(model: Any, batch: tuple[Tensor, Tensor, Tensor]) -> Tensor:
    x, edges, labels = batch
    return F.cross_entropy(model(x, edges), labels)


class Isomorphism(nn.Module):
    """GIN: five rounds in which a perceptron with BatchNorm takes the sum over neighbours."""

    def __init__(self, width: int = 128) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(
                nn.Linear(i, width), nn.BatchNorm1d(width), nn.ReLU(), nn.Linear(width, width), nn.ReLU()
            )
            for i in (32, *[width] * 4)
        )  # fmt: skip
        self.head = nn.Linear(width, CLASSES)

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x + torch.zeros_like(x).index_add(0, edges[1], x[edges[0]]))
        out: Tensor = self.head(x)
        return out


class GraphAttention(nn.Module):
    """GAT: three layers of four heads, each with a softmax over the edges into a node."""

    def __init__(self, width: int = 32, num_heads: int = 4) -> None:
        super().__init__()
        self.num_heads = num_heads
        total = width * num_heads
        self.layers = nn.ModuleList(nn.Linear(i, total) for i in (32, total, total))
        self.scores = nn.ParameterList(nn.Parameter(0.2 * torch.randn(2, num_heads, width)) for _ in range(3))
        self.head = nn.Linear(total, CLASSES)

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        start, end = edges
        for layer, scores in zip(self.layers, self.scores, strict=True):
            h = layer(x).unflatten(1, (self.num_heads, -1))
            score = F.leaky_relu((h[start] * scores[0]).sum(-1) + (h[end] * scores[1]).sum(-1), 0.2)
            weight = torch.exp(score.float() - score.max().detach().float())
            total = torch.zeros(len(x), self.num_heads, device=x.device).index_add(0, end, weight)
            share = (weight / total[end].clamp(min=1e-6)).to(h.dtype)
            x = F.elu(torch.zeros_like(h).index_add(0, end, share[..., None] * h[start]) + h).flatten(1)
        out: Tensor = self.head(x)
        return out


def geometric(kind: str) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        from torch_geometric.nn import models

        return getattr(models, kind)(32, 128, num_layers=4, out_channels=CLASSES, norm="batch_norm")  # type: ignore[no-any-return]

    return make


def graph(name: str, model: Callable[[], nn.Module]) -> Case:
    return Case(name, lambda: Workload(model, node_loss, graphs, adamw, name))


GRAPHS = [graph("gin", Isomorphism), graph("gat", GraphAttention)]
if find_spec("torch_geometric"):
    GRAPHS += [graph(f"geometric_{kind.lower()}", geometric(kind)) for kind in ("GCN", "GraphSAGE", "GAT")]


# -- adapters ----------------------------------------------------------------------------------------------------------


class LowRank(nn.Module):
    """LoRA: a frozen linear layer and a product of two small matrices beside it."""

    def __init__(self, frozen: nn.Linear, rank: int = 8) -> None:
        super().__init__()
        self.frozen = frozen
        self.down = nn.Parameter(torch.randn(rank, frozen.in_features) / frozen.in_features**0.5)
        self.up = nn.Parameter(torch.zeros(frozen.out_features, rank))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.frozen(x.to(self.frozen.weight.dtype))
        beside = F.linear(F.linear(x.to(self.down.dtype), self.down), self.up)
        return out + 2.0 * beside.to(out.dtype)


def base() -> nn.Module:
    return hf.LlamaForCausalLM(llama_config(hf.LlamaConfig)())


def adapted(dtype: torch.dtype = torch.float32) -> nn.Module:
    """The Llama, frozen in `dtype`, with LoRA in fp32 at its queries and values."""
    model = base().to(dtype).requires_grad_(False)
    for layer in model.model.layers:  # type: ignore[union-attr] # transformers
        attention = layer.self_attn  # type: ignore[union-attr]
        attention.q_proj, attention.v_proj = LowRank(attention.q_proj), LowRank(attention.v_proj)
    return model


def by_peft() -> nn.Module:
    import peft

    config = peft.LoraConfig(r=8, lora_alpha=16, target_modules=["q_proj", "v_proj"])
    return peft.get_peft_model(base(), config)  # type: ignore[no-any-return]


def adapter(name: str, model: Callable[[], nn.Module]) -> Case:
    def loss(model: Any, batch: dict[str, Tensor]) -> Tensor:
        found: Tensor = model(**batch).loss
        return found

    return Case(name, lambda: Workload(model, loss, next_token, adamw, name))


ADAPTERS = [adapter("lora_llama", adapted), adapter("lora_on_bf16", lambda: adapted(torch.bfloat16))]
if find_spec("peft"):
    ADAPTERS.append(adapter("peft_lora_llama", by_peft))


# -- pictures ----------------------------------------------------------------------------------------------------------


class Modulated(nn.Module):
    """StyleGAN2's convolution: its weights are scaled by a style and brought back to unit length, sample by sample."""

    def __init__(self, i: int, o: int, style: int = 128) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(o, i, 3, 3))
        self.style = nn.Linear(style, i)
        nn.init.ones_(self.style.bias)
        self.noise_strength, self.bias = nn.Parameter(torch.zeros(())), nn.Parameter(torch.zeros(o))

    def forward(self, x: Tensor, style: Tensor) -> Tensor:
        n, i, *size = x.shape
        weight = self.weight / (9 * i) ** 0.5 * self.style(style)[:, None, :, None, None]
        weight = weight * torch.rsqrt(weight.float().square().sum((2, 3, 4), keepdim=True) + 1e-8)
        out = F.conv2d(x.reshape(1, n * i, *size), weight.flatten(0, 1), padding=1, groups=n).unflatten(1, (n, -1))[0]
        noise = self.noise_strength * torch.randn(n, 1, *size, device=x.device)
        return F.leaky_relu(out + noise + self.bias[:, None, None], 0.2) * 2**0.5


class StyleGenerator(nn.Module):
    """StyleGAN2's generator to 64 pixels: eight layers make a style of a code, and each resolution adds its colours."""

    def __init__(self) -> None:
        super().__init__()
        self.mapping = nn.Sequential(*(layer for _ in range(8) for layer in (nn.Linear(128, 128), nn.LeakyReLU(0.2))))
        self.start = nn.Parameter(torch.randn(1, 256, 4, 4))
        widths = (256, 256, 128, 64, 32)
        pairs = list(zip((256, *widths[:-1]), widths, strict=True))
        self.first = nn.ModuleList(Modulated(i, o) for i, o in pairs)
        self.second = nn.ModuleList(Modulated(o, o) for o in widths)
        self.colours = nn.ModuleList(nn.Conv2d(o, 3, 1) for o in widths)

    def forward(self, code: Tensor) -> Tensor:
        style = self.mapping(code * torch.rsqrt(code.square().mean(1, keepdim=True) + 1e-8))
        x, image = self.start.expand(len(code), -1, -1, -1), torch.zeros(len(code), 3, 4, 4, device=code.device)
        for level, (one, two, colour) in enumerate(zip(self.first, self.second, self.colours, strict=True)):
            if level:
                x, image = F.interpolate(x, scale_factor=2.0), F.interpolate(image, scale_factor=2.0, mode="bilinear")
            x = two(one(x, style), style)
            image = image + colour(x)
        return image


class StyleGan(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.generator, self.discriminator = StyleGenerator(), discriminator()


def style_loss(model: Any, batch: tuple[Tensor, Tensor]) -> Tensor:
    real, codes = batch
    fake = Reverse.apply(model.generator(codes))
    return F.softplus(-model.discriminator(real)).mean() + F.softplus(model.discriminator(fake)).mean()


def style_batch(n: int) -> tuple[Tensor, Tensor]:
    return torch.tanh(class_images(n)[0]), torch.randn(n, 128)


class ImageVae(nn.Module):
    """A convolutional variational autoencoder at 64 pixels."""

    def __init__(self) -> None:
        super().__init__()
        pairs = list(itertools.pairwise((3, 32, 64, 128, 256)))
        down = [nn.Sequential(nn.Conv2d(i, o, 4, 2, 1), nn.BatchNorm2d(o), nn.LeakyReLU()) for i, o in pairs]
        up = [nn.Sequential(nn.ReLU(), nn.ConvTranspose2d(o, i, 4, 2, 1)) for i, o in reversed(pairs)]
        self.encoder = nn.Sequential(*down, nn.Flatten(), nn.Linear(4096, 256))
        self.decoder = nn.Sequential(nn.Linear(128, 4096), nn.Unflatten(1, (256, 4, 4)), *up)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        mean, log_variance = self.encoder(x).float().chunk(2, 1)
        code = mean + torch.exp(log_variance / 2) * torch.randn_like(mean)
        return self.decoder(code), mean, log_variance


def vae_loss(model: Any, batch: Tensor) -> Tensor:
    out, mean, log_variance = model(batch)
    divergence = -0.5 * (1 + log_variance - mean.square() - log_variance.exp()).sum(1).mean()
    total: Tensor = F.mse_loss(out, batch) * 3 + divergence / 1000
    return total


class Upscaler(nn.Module):
    """EDSR: 16 residual blocks without normalisation, then twice the pixels."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.head = nn.Conv2d(3, width, 3, padding=1)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Conv2d(width, width, 3, padding=1), nn.ReLU(), nn.Conv2d(width, width, 3, padding=1))
            for _ in range(16)
        )
        self.tail = nn.Sequential(nn.Conv2d(width, 4 * width, 3, padding=1), nn.PixelShuffle(2), nn.Conv2d(width, 3, 1))

    def forward(self, x: Tensor) -> Tensor:
        h = first = self.head(x)
        for block in self.blocks:
            h = h + 0.1 * block(h)
        out: Tensor = self.tail(h + first)
        return out


def low_resolution(n: int) -> tuple[Tensor, Tensor]:
    x, _ = class_images(n)
    return F.avg_pool2d(x, 2), F.avg_pool2d(x, 3, 1, 1)


class Projected(nn.Module):
    """SimCLR's: a ResNet-18 and a projection head."""

    def __init__(self) -> None:
        super().__init__()
        self.body = vision.resnet18(num_classes=512)
        self.project = nn.Sequential(nn.ReLU(), nn.Linear(512, 128))

    def forward(self, x: Tensor) -> Tensor:
        return F.normalize(self.project(self.body(x)), dim=1)


def simclr_loss(model: Any, batch: tuple[Tensor, Tensor]) -> Tensor:
    likeness = model(batch[0]) @ model(batch[1]).T / 0.1
    return F.cross_entropy(likeness, torch.arange(len(likeness), device=likeness.device))


def two_views(n: int) -> tuple[Tensor, Tensor]:
    x, _ = class_images(n)
    return x + 0.3 * torch.randn_like(x), x.flip(3) + 0.3 * torch.randn_like(x)


class RadianceField(nn.Module):
    """NeRF's perceptron of eight layers over waves of the position."""

    def __init__(self, width: int = 256) -> None:
        super().__init__()
        self.first = nn.ModuleList(nn.Linear(i, width) for i in (60, *[width] * 3))
        self.second = nn.ModuleList(nn.Linear(i, width) for i in (width + 60, *[width] * 3))
        self.head = nn.Linear(width, 4)

    def forward(self, position: Tensor) -> Tensor:
        angles = (position[..., None] * 2.0 ** torch.arange(10, device=position.device)).flatten(-2)
        h = waves = torch.cat([angles.sin(), angles.cos()], -1)
        for layer in self.first:
            h = F.relu(layer(h))
        h = torch.cat([h, waves], -1)
        for layer in self.second:
            h = F.relu(layer(h))
        out: Tensor = torch.sigmoid(self.head(h))
        return out


def points(n: int) -> tuple[Tensor, Tensor]:
    position = torch.rand(128 * n, 3) * 2 - 1
    return position, torch.sigmoid(3 * torch.sin(3 * position @ fixed(3, 4, seed=52)))


VIEWS = [
    picture("stylegan2", StyleGan, style_loss, style_batch, adam),
    picture("vae_64", ImageVae, vae_loss, lambda n: class_images(n)[0], adamw),
    picture("edsr", Upscaler, squared_error, low_resolution, adamw),
    picture("simclr_resnet18", Projected, simclr_loss, two_views, sgd),
    picture("nerf", RadianceField, squared_error, points, adamw),
    picture(
        "fcos",
        lambda: vision.detection.fcos_resnet50_fpn(
            weights=None, weights_backbone=None, num_classes=2, min_size=PIXELS, max_size=PIXELS
        ),
        detection_loss, boxes, lambda parameters: torch.optim.SGD(parameters, lr=0.002, momentum=0.9),
    ),
    picture(
        "lraspp_mobilenet",
        lambda: vision.segmentation.lraspp_mobilenet_v3_large(weights_backbone=None, num_classes=2),
        segmentation_loss, masks, sgd,
    ),
    classifier("swin_v2_t", lambda: vision.swin_v2_t(num_classes=CLASSES), adamw),
    classifier("googlenet", lambda: vision.googlenet(aux_logits=False, init_weights=False, num_classes=CLASSES)),
    classifier("convnextv2_nano", lambda: timm.create_model("convnextv2_nano", num_classes=CLASSES), adamw),
    classifier("mobilevit_s", lambda: timm.create_model("mobilevit_s", num_classes=CLASSES), adamw),
]  # fmt: skip

KINDS = [*GRAPHS, *ADAPTERS, *VIEWS]
