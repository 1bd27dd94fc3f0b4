"""Small workloads, a sick and a healthy one for each rule that a recorded step shows: the sick line is marked."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from autotune_amp import Workload


class Block(nn.Module):
    """A linear layer, whose output is in half precision under autocast, and what `then` makes of it."""

    def __init__(self, then: Callable[[Tensor], Tensor], width: int = 16) -> None:
        super().__init__()
        self.enter = nn.Linear(16, width)
        self.then = then

    def forward(self, x: Tensor) -> Tensor:
        return self.then(self.enter(x))


class Net(nn.Module):
    """The block below another module, so that it has a qualified name."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.body = block

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.body(x)
        return out


def squares(model: Any, batch: Tensor) -> Tensor:
    found: Tensor = model(batch).float().square().mean()
    return found


def workload(then: Callable[[Tensor], Tensor], loss: Any = squares, width: int = 16) -> Workload:
    return Workload(lambda: Net(Block(then, width)), loss, lambda n: torch.randn(n, 16), name="sample")


# -- functions of a half-precision tensor ------------------------------------------------------------------------------


def masks_far(x: Tensor) -> Tensor:
    return x.masked_fill(x > 1, -1e9)  # sick: large_constant


def masks_near(x: Tensor) -> Tensor:
    return x.masked_fill(x > 1, torch.finfo(x.dtype).min).clamp(min=-10.0)


def masks_with_infinity(x: Tensor) -> Tensor:
    return x.masked_fill(x > 1, float("-inf")).exp()


def masks_in_fp32(x: Tensor) -> Tensor:
    return x.float().masked_fill(x > 1, -1e9).clamp(min=-10.0)


def adds_far(x: Tensor) -> Tensor:
    mask = torch.where(x > 1, -1e9, 0.0)
    return (x + mask.to(x.dtype)).clamp(min=-10.0)  # sick: large_constant


def guards_with_little(x: Tensor) -> Tensor:
    return x / (x.abs().mean(-1, keepdim=True) + 1e-8)  # sick: small_epsilon


def guards_with_enough(x: Tensor) -> Tensor:
    return x / (x.abs().mean(-1, keepdim=True) + 1e-5)


def guards_in_fp32(x: Tensor) -> Tensor:
    return x / (x.abs().mean(-1, keepdim=True).float() + 1e-8)


class Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:  # sick: autograd_function
        ctx.save_for_backward(x, weight)
        return x @ weight

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        return gradient @ weight.T, x.T @ gradient


class DecoratedProduct(torch.autograd.Function):
    @staticmethod
    @torch.amp.custom_fwd(device_type="cuda")  # type: ignore[untyped-decorator]
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight

    @staticmethod
    @torch.amp.custom_bwd(device_type="cuda")  # type: ignore[untyped-decorator]
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        return gradient @ weight.T, x.T @ gradient


class Doubled(torch.autograd.Function):
    """Elementwise in one tensor: autocast has nothing to do with it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return 2 * x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return 2 * gradient


WEIGHT = nn.Parameter(torch.eye(16))


def calls_product(x: Tensor) -> Tensor:
    out: Tensor = Product.apply(x, WEIGHT)  # type: ignore[no-untyped-call]
    return out


def calls_decorated(x: Tensor) -> Tensor:
    out: Tensor = DecoratedProduct.apply(x, WEIGHT)  # type: ignore[no-untyped-call]
    return out


def calls_doubled(x: Tensor) -> Tensor:
    out: Tensor = Doubled.apply(x)  # type: ignore[no-untyped-call]
    return out


def puts_half_into_fp32(x: Tensor) -> Tensor:
    out = torch.zeros(x.shape, device=x.device)
    rows = torch.arange(len(x), device=x.device)
    out[rows] = x  # sick: mixed_operands
    return out


def puts_its_own_into(x: Tensor) -> Tensor:
    out = torch.zeros(x.shape, device=x.device, dtype=x.dtype)
    rows = torch.arange(len(x), device=x.device)
    out[rows] = x
    return out


def scatters_half_into_fp32(x: Tensor) -> Tensor:
    index = torch.zeros(x.shape, dtype=torch.long, device=x.device)
    return torch.zeros(x.shape, device=x.device).scatter_add_(0, index, x)  # sick: mixed_operands


def multiplies_without_autocast(x: Tensor) -> Tensor:
    with torch.autocast("cuda", enabled=False):
        return x @ WEIGHT  # sick: mixed_operands


def multiplies_in_fp32(x: Tensor) -> Tensor:
    with torch.autocast(x.device.type, enabled=False):
        return x.float() @ WEIGHT


def factorises(x: Tensor) -> Tensor:
    gram = x.T @ x + torch.eye(16, dtype=x.dtype)
    return torch.linalg.cholesky(gram)  # type: ignore[no-any-return]  # sick: linear_algebra


def inverts(x: Tensor) -> Tensor:
    gram = x.T @ x + torch.eye(16, dtype=x.dtype)
    return torch.inverse(gram)  # sick: linear_algebra


def factorises_in_fp32(x: Tensor) -> Tensor:
    gram = x.T @ x
    return torch.linalg.cholesky(gram.float() + torch.eye(16))  # type: ignore[no-any-return]


def transforms(x: Tensor) -> Tensor:
    return torch.fft.rfft(x[:, :7]).abs()  # type: ignore[no-any-return]  # sick: fft


def transforms_in_two_dimensions(x: Tensor) -> Tensor:
    return torch.fft.fft2(x, s=(8, 12)).abs()  # type: ignore[no-any-return]  # sick: fft


def transforms_in_fp32(x: Tensor) -> Tensor:
    return torch.fft.rfft(x[:, :7].float()).abs()  # type: ignore[no-any-return]


def takes_a_quantile(x: Tensor) -> Tensor:
    return x / torch.quantile(x, 0.9)  # sick: half_kernels


def takes_a_quantile_in_fp32(x: Tensor) -> Tensor:
    return x / torch.quantile(x.float(), 0.9)


def casts(x: Tensor) -> Tensor:
    return x.half() + 1  # sick: manual_cast


def casts_by_name(x: Tensor) -> Tensor:
    return x.to(torch.bfloat16) + 1  # sick: manual_cast


def casts_to_another(x: Tensor) -> Tensor:
    return torch.ones(16).to(x.dtype) + x.float().to(x.dtype)


def nests(x: Tensor) -> Tensor:
    with torch.autocast("cuda", dtype=torch.float16):  # sick: nested_autocast
        return x @ WEIGHT


# -- losses ------------------------------------------------------------------------------------------------------------


def on_probabilities(model: Any, batch: Tensor) -> Tensor:
    chance = torch.sigmoid(model(batch))
    return functional.binary_cross_entropy(chance, torch.ones(batch.shape))  # sick: binary_cross_entropy


def by_module(model: Any, batch: Tensor) -> Tensor:
    chance = torch.sigmoid(model(batch))
    return nn.BCELoss()(chance.float(), torch.ones(batch.shape))  # type: ignore[no-any-return]  # sick: binary_cross_entropy


def on_logits(model: Any, batch: Tensor) -> Tensor:
    return functional.binary_cross_entropy_with_logits(model(batch), torch.ones(batch.shape))


def in_half(model: Any, batch: Tensor) -> Tensor:
    out = model(batch)
    found: Tensor = (out * out).mean()  # sick: loss
    return found


def of_sequences(model: Any, batch: Tensor) -> Tensor:
    """By lengths in tensors, which tensors without data cannot read: the CPU's autocast casts for it all the same."""
    frames = model(batch).log_softmax(-1)[:, None]
    labels, lengths = torch.ones(1, 2, dtype=torch.long), torch.tensor([len(batch)])
    return functional.ctc_loss(frames, labels, lengths, torch.tensor([2]), zero_infinity=True)


def identity(x: Tensor) -> Tensor:
    return x


# -- weights and sizes -------------------------------------------------------------------------------------------------


def half_weights() -> Workload:
    def loss(model: Any, batch: Tensor) -> Tensor:
        return squares(model, batch.to(WEIGHTS_DTYPE))

    return Workload(lambda: Net(Block(identity)).half(), loss, lambda n: torch.randn(n, 16))  # sick: weights


WEIGHTS_DTYPE = torch.float16


def frozen_half_weights() -> Workload:
    """As a quantised or adapted model keeps its base."""

    def model() -> nn.Module:
        base = nn.Linear(16, 16).to(WEIGHTS_DTYPE).requires_grad_(requires_grad=False)
        return nn.Sequential(base, nn.Linear(16, 16))

    def loss(model: Any, batch: Tensor) -> Tensor:
        return squares(model, batch.to(model[0].weight.dtype))

    return Workload(model, loss, lambda n: torch.randn(n, 16))


SAMPLES: dict[str, tuple[str, Callable[[], Workload]]] = {
    "masks_far": ("large_constant", lambda: workload(masks_far)),
    "adds_far": ("large_constant", lambda: workload(adds_far)),
    "guards_with_little": ("small_epsilon", lambda: workload(guards_with_little)),
    "Product": ("autograd_function", lambda: workload(calls_product)),
    "puts_half_into_fp32": ("mixed_operands", lambda: workload(puts_half_into_fp32)),
    "scatters_half_into_fp32": ("mixed_operands", lambda: workload(scatters_half_into_fp32)),
    "multiplies_without_autocast": ("mixed_operands", lambda: workload(multiplies_without_autocast)),
    "factorises": ("linear_algebra", lambda: workload(factorises)),
    "inverts": ("linear_algebra", lambda: workload(inverts)),
    "transforms": ("fft", lambda: workload(transforms)),
    "transforms_in_two_dimensions": ("fft", lambda: workload(transforms_in_two_dimensions)),
    "takes_a_quantile": ("half_kernels", lambda: workload(takes_a_quantile)),
    "casts": ("manual_cast", lambda: workload(casts)),
    "casts_by_name": ("manual_cast", lambda: workload(casts_by_name)),
    "nests": ("nested_autocast", lambda: workload(nests)),
    "on_probabilities": ("binary_cross_entropy", lambda: workload(identity, on_probabilities)),
    "by_module": ("binary_cross_entropy", lambda: workload(identity, by_module)),
    "in_half": ("loss", lambda: workload(identity, in_half)),
    "half_weights": ("weights", half_weights),
}
HEALTHY: dict[str, Callable[[], Workload]] = {
    **{
        then.__name__: lambda then=then: workload(then)  # type: ignore[misc]  # mypy knows no default of a lambda's
        for then in (
            *(masks_near, masks_with_infinity, masks_in_fp32, guards_with_enough, guards_in_fp32, calls_decorated),
            *(calls_doubled, puts_its_own_into, multiplies_in_fp32, factorises_in_fp32, casts_to_another),
            *(transforms_in_fp32, takes_a_quantile_in_fp32),
        )
    },
    "on_logits": lambda: workload(identity, on_logits),
    "of_sequences": lambda: workload(identity, of_sequences),
    "frozen_half_weights": frozen_half_weights,
}
