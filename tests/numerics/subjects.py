"""Small trainings, each difficult in a way of its own, and what holds of every check of one."""

from __future__ import annotations

import gc
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, NamedTuple

import msgspec
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn import functional

from autotune_amp.core.outcome import Fidelity
from autotune_amp.core.precisions import Precision
from autotune_amp.numerics.calibration import MAX_LOG2_SCALE, MIN_LOG2_SCALE
from autotune_amp.numerics.experiment import NUM_PAIRED_STEPS
from autotune_amp.numerics.fidelity import check
from autotune_amp.numerics.passes import CheckInputs, Gradients, Passes
from autotune_amp.precision.forward_wrapper import is_pinned

CPU = torch.device("cpu")


class Batch(NamedTuple):
    number: int
    x: Tensor
    y: Tensor


def storages_on_fake_gpu() -> dict[int, torch.UntypedStorage]:
    """Return the storages of the process's CUDA fake tensors that something still refers to, by their address."""
    gc.collect()
    living = [each for each in gc.get_objects() if type(each) is FakeTensor and each.device.type == "cuda"]
    return {storage._cdata: storage for storage in (each.untyped_storage() for each in living)}


def mean_square(model: nn.Module, batch: Batch) -> Tensor:
    return functional.mse_loss(model(batch.x), batch.y)


def times(factor: float) -> Callable[[nn.Module, Batch], Tensor]:
    return lambda model, batch: factor * mean_square(model, batch)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD((p for p in model.parameters() if p.requires_grad), lr=1e-3, momentum=0.5)


def slow_sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=1e-9)


def subject(
    model: nn.Module,
    loss: Callable[[nn.Module, Any], Tensor] = mean_square,
    *,
    x: Callable[[], Tensor] = lambda: torch.randn(8, 8),
    y: Callable[[], Tensor] = lambda: torch.randn(8, 4),
    num_batches: int = 8,
    make_optimizer: Callable[[nn.Module], torch.optim.Optimizer] = sgd,
) -> CheckInputs:
    batches = [Batch(number, x(), y()) for number in range(num_batches)]
    return CheckInputs(model=model, loss=loss, batches=batches, make_optimizer=make_optimizer, device=CPU, seed=3)


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 4))


def convnet() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(16, 4)
    )


class Transformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.2, batch_first=True)
        self.head = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        head: Tensor = self.head(self.layer(x).mean(1))
        return head


class Tied(nn.Module):
    def __init__(self, *, sparse: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(32, 8, sparse=sparse)
        self.head = nn.Linear(8, 32, bias=False)
        if not sparse:
            self.head.weight = self.embedding.weight

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(self.embedding(x))
        return logits


class Partly(nn.Module):
    """With a frozen layer and one that is never called."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Linear(8, 8).requires_grad_(False)
        self.unused = nn.Linear(8, 8)
        self.used = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        used: Tensor = self.used(self.frozen(x))
        return used


def cross_entropy(model: nn.Module, batch: Batch) -> Tensor:
    return functional.cross_entropy(model(batch.x).flatten(0, -2), batch.y.flatten())


def adam_and_sparse_adam(model: nn.Module) -> torch.optim.Optimizer:
    assert isinstance(model, Tied)
    return torch.optim.SparseAdam(model.embedding.parameters(), lr=1e-3)


def tokens() -> Tensor:
    return torch.randint(32, (4, 6))


SUBJECTS: dict[str, Callable[[], CheckInputs]] = {
    "MLP": lambda: subject(mlp()),
    "convnet with BatchNorm": lambda: subject(convnet(), x=lambda: torch.randn(8, 2, 6, 6)),
    "transformer with dropout": lambda: subject(Transformer(), x=lambda: torch.randn(8, 3, 8)),
    "loss of 1e-6": lambda: subject(mlp(), times(1e-6)),
    "loss of 1e6": lambda: subject(mlp(), times(1e6), make_optimizer=slow_sgd),
    "tied weights": lambda: subject(Tied(), cross_entropy, x=tokens, y=tokens),
    "sparse embedding": lambda: subject(
        Tied(sparse=True), cross_entropy, x=tokens, y=tokens, make_optimizer=adam_and_sparse_adam
    ),
    "unused and frozen parameters": lambda: subject(Partly()),
}


def build(name: str) -> CheckInputs:
    torch.manual_seed(0)
    return SUBJECTS[name]()


def brute_force(passes: Passes, index: int) -> int | None:
    """The largest safe power of two, every one of them tried for real."""
    safe = [
        exponent
        for exponent in range(MIN_LOG2_SCALE, MAX_LOG2_SCALE + 1)
        if passes.run(index, "fp16", scale=2.0**exponent).is_finite
    ]
    assert safe == list(range(MIN_LOG2_SCALE, MIN_LOG2_SCALE + len(safe)))
    return safe[-1] if safe else None


def dense(gradients: Gradients) -> Tensor:
    """All entries in one vector."""
    return torch.cat([(g.to_dense() if g.is_sparse else g).flatten() for g in gradients.values()])


# -- whole checks ------------------------------------------------------------------------------------------------------

MAX_PASSES, MAX_LONG_PASSES = 60, 1000  # of a check, and of one that trains for longer


def checked(made: CheckInputs, precision: Precision, **options: Any) -> Fidelity:
    """A check, what holds of every one asserted."""
    before = everything_of(made.model)
    found = check(made, precision, batch_size=8, **options)
    after = everything_of(made.model)
    assert before.keys() == after.keys()
    torch.testing.assert_close(after, before, rtol=0, atol=0, equal_nan=True)
    assert found.num_passes <= (MAX_PASSES if found.verdict == "faithful" else MAX_LONG_PASSES)
    assert found.precision == precision
    assert found.batch_size == 8
    assert found.reason.endswith(".")
    assert not found.reason.endswith("..")
    assert found.next_step.endswith(".")
    assert found.seconds > 0
    assert msgspec.json.decode(msgspec.json.encode(found), type=Fidelity).verdict == found.verdict
    if found.verdict == "faithful":
        assert not found.culprits
        assert not found.healing_pins
        assert found.num_paired_steps == NUM_PAIRED_STEPS
        assert found.fp32_step_seconds is not None
    return found


def everything_of(model: nn.Module) -> dict[str, Any]:
    state: dict[str, Any] = {}
    for name, value in (*model.named_parameters(), *model.named_buffers()):
        state[name] = value.detach().clone()
        state[name + ".address"] = value.data_ptr()
        state[name + ".flags"] = (float(value.requires_grad), float(value.grad is None))
    for name, module in model.named_modules():
        hooks = (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks)
        state[name + ".module"] = (float(module.training), float(is_pinned(module)), *(float(len(h)) for h in hooks))
        assert type(module).__name__ != "_Patched"
        state[name + ".class"] = float(id(type(module)))
    return state


def chain(**modules: nn.Module) -> nn.Sequential:
    return nn.Sequential(OrderedDict(modules))


class Applied(nn.Module):
    """A function as a module without weights."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


def compiled(model: nn.Module) -> nn.Module:
    torch._dynamo.reset()
    made: Any = torch.compile(model, backend="eager")
    assert isinstance(made, nn.Module)
    return made


def running_sum(x: Tensor) -> Tensor:
    level = torch.full_like(x, 1000.0)
    for _ in range(8):
        level = level + 0.1 * x
    return level - 1000.0


def with_middle(function: Callable[[Tensor], Tensor], loss: Any = mean_square) -> CheckInputs:
    return subject(
        chain(enter=nn.Linear(8, 16), middle=Applied(function), body=nn.Linear(16, 16), head=nn.Linear(16, 4)), loss
    )
