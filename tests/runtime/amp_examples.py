"""PyTorch's documented AMP examples on tiny models: any GradScaler goes in, what it did to the weights comes out.

https://docs.pytorch.org/docs/stable/notes/amp_examples.html
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

Scaler: TypeAlias = torch.amp.GradScaler
Models: TypeAlias = Sequence[nn.Module]
Optimizers: TypeAlias = Sequence[torch.optim.Optimizer]
MakeOptimizer: TypeAlias = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]
# What an example does before its optimizers step.
Iteration: TypeAlias = Callable[[Scaler, Models, Optimizers, Tensor, Tensor], None]
# Parameters and loss scale after every update.
Trace: TypeAlias = list[tuple[list[Tensor], float]]

NUM_STEPS = 14
INIT_SCALE = 2.0**22  # some octaves above what the models below can bear
OPTIMIZERS: dict[str, MakeOptimizer] = {
    "SGD": lambda parameters: torch.optim.SGD(parameters, lr=0.02, momentum=0.5),
    # Without momentum: where the first step is skipped, torch's fused kernel leaves its buffer uninitialised.
    "fused SGD": lambda parameters: torch.optim.SGD(parameters, lr=0.02, fused=True),
    "Adam": lambda parameters: torch.optim.Adam(parameters, lr=0.01),
    "fused Adam": lambda parameters: torch.optim.Adam(parameters, lr=0.01, fused=True),
}
loss_fn = nn.functional.mse_loss


def grad_scaler(init_scale: float = INIT_SCALE) -> Scaler:
    return torch.amp.GradScaler("cpu", init_scale=init_scale, growth_interval=3)


def mlp(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))


def data() -> Iterator[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(7)
    for _ in range(NUM_STEPS):
        yield torch.randn(4, 8, generator=generator), torch.randn(4, 4, generator=generator)


def autocast() -> torch.autocast:
    return torch.autocast(device_type="cpu", dtype=torch.float16)


def noted(scaler: Scaler, *models: nn.Module) -> tuple[list[Tensor], float]:
    return [p.detach().clone() for model in models for p in model.parameters()], scaler.get_scale()


def run(
    scaler: Scaler, make_optimizer: MakeOptimizer, iteration: Iteration, new_scales: dict[int, Any] | None = None
) -> Trace:
    """`new_scales` are given to the update of that number."""
    models = [mlp(0), mlp(1)]
    optimizers = [make_optimizer(model.parameters()) for model in models]
    trace = []
    for number, (inputs, target) in enumerate(data()):
        for optimizer in optimizers:
            optimizer.zero_grad()
        iteration(scaler, models, optimizers, inputs, target)
        for optimizer in optimizers:
            if any(p.grad is not None for group in optimizer.param_groups for p in group["params"]):
                scaler.step(optimizer)
        scaler.update((new_scales or {}).get(number))
        trace.append(noted(scaler, *models))
    return trace


def typical_training(scaler: Scaler, models: Models, _: Optimizers, inputs: Tensor, target: Tensor) -> None:
    with autocast():
        loss = loss_fn(models[0](inputs), target)
    scaler.scale(loss).backward()  # type: ignore[no-untyped-call]


def gradient_clipping(scaler: Scaler, models: Models, optimizers: Optimizers, inputs: Tensor, target: Tensor) -> None:
    typical_training(scaler, models, optimizers, inputs, target)
    scaler.unscale_(optimizers[0])
    torch.nn.utils.clip_grad_norm_(models[0].parameters(), 0.1)


def gradient_accumulation(scaler: Scaler, models: Models, _: Optimizers, inputs: Tensor, target: Tensor) -> None:
    for half, its_target in zip(inputs.chunk(2), target.chunk(2), strict=True):
        with autocast():
            loss = loss_fn(models[0](half), its_target) / 2
        scaler.scale(loss).backward()  # type: ignore[no-untyped-call]


def gradient_penalty(scaler: Scaler, models: Models, _: Optimizers, inputs: Tensor, target: Tensor) -> None:
    with autocast():
        loss = loss_fn(models[0](inputs), target)
    scaled = torch.autograd.grad(scaler.scale(loss), list(models[0].parameters()), create_graph=True)
    inv_scale = 1.0 / scaler.get_scale()
    with autocast():
        loss = loss + torch.stack([(gradient * inv_scale).pow(2).sum() for gradient in scaled]).sum().sqrt()
    scaler.scale(loss).backward()  # type: ignore[no-untyped-call]


def several_models_losses_and_optimizers(
    scaler: Scaler, models: Models, optimizers: Optimizers, inputs: Tensor, target: Tensor
) -> None:
    with autocast():
        output0, output1 = (model(inputs) for model in models)
        loss0 = loss_fn(2 * output0 + 3 * output1, target)
        loss1 = loss_fn(3 * output0 - 5 * output1, target)
    scaler.scale(loss0).backward(retain_graph=True)  # type: ignore[no-untyped-call]
    scaler.scale(loss1).backward()  # type: ignore[no-untyped-call]
    scaler.unscale_(optimizers[0])


EXAMPLES: list[Iteration] = [
    typical_training,
    gradient_clipping,
    gradient_accumulation,
    gradient_penalty,
    several_models_losses_and_optimizers,
]
