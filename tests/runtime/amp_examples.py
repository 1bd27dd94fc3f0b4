"""PyTorch's documented AMP examples on tiny models: any GradScaler goes in, what it did to the weights comes out."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

Scaler: TypeAlias = torch.amp.GradScaler
NUM_STEPS = 14
INIT_SCALE = 2.0**22  # some octaves above what the models below can bear
# Parameters and loss scale after every update.
Trace: TypeAlias = list[tuple[list[Tensor], float]]


def grad_scaler(init_scale: float = INIT_SCALE) -> Scaler:
    return torch.amp.GradScaler("cpu", init_scale=init_scale, growth_interval=3)


def mlp(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))


def data(num_batches: int = NUM_STEPS) -> Iterator[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(7)
    for _ in range(num_batches):
        yield torch.randn(4, 8, generator=generator), torch.randn(4, 4, generator=generator)


def autocast() -> torch.autocast:
    return torch.autocast(device_type="cpu", dtype=torch.float16)


loss_fn = nn.functional.mse_loss
MakeOptimizer: TypeAlias = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]
OPTIMIZERS: dict[str, MakeOptimizer] = {
    "SGD": lambda parameters: torch.optim.SGD(parameters, lr=0.02, momentum=0.5),
    # Without momentum: where the first step is skipped, torch's fused kernel leaves its buffer uninitialised.
    "fused SGD": lambda parameters: torch.optim.SGD(parameters, lr=0.02, fused=True),
    "Adam": lambda parameters: torch.optim.Adam(parameters, lr=0.01),
    "fused Adam": lambda parameters: torch.optim.Adam(parameters, lr=0.01, fused=True),
}


def noted(scaler: Scaler, *models: nn.Module) -> tuple[list[Tensor], float]:
    return [p.detach().clone() for model in models for p in model.parameters()], scaler.get_scale()


# -- the examples of https://docs.pytorch.org/docs/stable/notes/amp_examples.html --------------------------------------


def typical_training(scaler: Scaler, make_optimizer: MakeOptimizer) -> Trace:
    model = mlp()
    optimizer = make_optimizer(model.parameters())
    trace = []
    for input, target in data():  # noqa: A001 # the documented example's name
        optimizer.zero_grad()
        with autocast():
            output = model(input)
            loss = loss_fn(output, target)
        scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
        scaler.step(optimizer)
        scaler.update()
        trace.append(noted(scaler, model))
    return trace


def gradient_clipping(scaler: Scaler, make_optimizer: MakeOptimizer) -> Trace:
    model = mlp()
    optimizer = make_optimizer(model.parameters())
    trace = []
    for input, target in data():  # noqa: A001
        optimizer.zero_grad()
        with autocast():
            loss = loss_fn(model(input), target)
        scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        scaler.step(optimizer)
        scaler.update()
        trace.append(noted(scaler, model))
    return trace


def gradient_accumulation(scaler: Scaler, make_optimizer: MakeOptimizer) -> Trace:
    model = mlp()
    optimizer = make_optimizer(model.parameters())
    trace, iters_to_accumulate = [], 2
    for i, (input, target) in enumerate(data(2 * NUM_STEPS)):  # noqa: A001
        with autocast():
            loss = loss_fn(model(input), target)
            loss = loss / iters_to_accumulate
        scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
        if (i + 1) % iters_to_accumulate == 0:
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            trace.append(noted(scaler, model))
    return trace


def gradient_penalty(scaler: Scaler, make_optimizer: MakeOptimizer) -> Trace:
    model = mlp()
    optimizer = make_optimizer(model.parameters())
    trace = []
    for input, target in data():  # noqa: A001
        optimizer.zero_grad()
        with autocast():
            loss = loss_fn(model(input), target)
        scaled_grad_params = torch.autograd.grad(
            outputs=scaler.scale(loss), inputs=list(model.parameters()), create_graph=True
        )
        inv_scale = 1.0 / scaler.get_scale()
        grad_params = [p * inv_scale for p in scaled_grad_params]
        with autocast():
            grad_norm = torch.zeros(())
            for grad in grad_params:
                grad_norm = grad_norm + grad.pow(2).sum()
            loss = loss + grad_norm.sqrt()
        scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
        scaler.step(optimizer)
        scaler.update()
        trace.append(noted(scaler, model))
    return trace


def several_models_losses_and_optimizers(scaler: Scaler, make_optimizer: MakeOptimizer) -> Trace:
    model0, model1 = mlp(0), mlp(1)
    optimizer0, optimizer1 = make_optimizer(model0.parameters()), make_optimizer(model1.parameters())
    trace = []
    for input, target in data():  # noqa: A001
        optimizer0.zero_grad()
        optimizer1.zero_grad()
        with autocast():
            output0, output1 = model0(input), model1(input)
            loss0 = loss_fn(2 * output0 + 3 * output1, target)
            loss1 = loss_fn(3 * output0 - 5 * output1, target)
        scaler.scale(loss0).backward(retain_graph=True)  # type: ignore[no-untyped-call]
        scaler.scale(loss1).backward()  # type: ignore[no-untyped-call]
        scaler.unscale_(optimizer0)
        scaler.step(optimizer0)
        scaler.step(optimizer1)
        scaler.update()
        trace.append(noted(scaler, model0, model1))
    return trace


class MyMM(torch.autograd.Function):
    @staticmethod
    @torch.amp.custom_fwd(device_type="cpu")  # type: ignore[untyped-decorator]
    def forward(ctx: Any, a: Tensor, b: Tensor) -> Tensor:
        ctx.save_for_backward(a, b)
        return a.mm(b)

    @staticmethod
    @torch.amp.custom_bwd(device_type="cpu")  # type: ignore[untyped-decorator]
    def backward(ctx: Any, *grads: Any) -> Any:
        a, b = ctx.saved_tensors
        return grads[0].mm(b.t()), a.t().mm(grads[0])


class MyFloat32Func(torch.autograd.Function):
    @staticmethod
    @torch.amp.custom_fwd(device_type="cpu", cast_inputs=torch.float32)  # type: ignore[untyped-decorator]
    def forward(ctx: Any, input: Tensor) -> Tensor:  # noqa: A002
        ctx.save_for_backward(input)
        return input.square()

    @staticmethod
    @torch.amp.custom_bwd(device_type="cpu")  # type: ignore[untyped-decorator]
    def backward(ctx: Any, *grads: Any) -> Any:
        return 2 * ctx.saved_tensors[0] * grads[0]


class Custom(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(8, 16), nn.Parameter(torch.randn(16, 4) / 4)

    def forward(self, inputs: Tensor) -> Any:
        hidden: Any = MyFloat32Func.apply(self.first(inputs))  # type: ignore[no-untyped-call]
        return MyMM.apply(hidden.half(), self.second.half())  # type: ignore[no-untyped-call]


def custom_autograd_functions(scaler: Scaler, make_optimizer: MakeOptimizer) -> Trace:
    model = Custom()
    optimizer = make_optimizer(model.parameters())
    trace = []
    for input, target in data():  # noqa: A001
        optimizer.zero_grad()
        with autocast():
            loss = loss_fn(model(input), target)
        scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
        scaler.step(optimizer)
        scaler.update()
        trace.append(noted(scaler, model))
    return trace


EXAMPLES = [
    typical_training,
    gradient_clipping,
    gradient_accumulation,
    gradient_penalty,
    several_models_losses_and_optimizers,
    custom_autograd_functions,
]
