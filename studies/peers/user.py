"""What a user has before a tool is asked: model, data, optimizer; and what of it the tool left changed."""

from __future__ import annotations

import hashlib
import json
import os
import random
import resource
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

sys.path.insert(0, str(Path(__file__).parent.parent / "landscapes"))
from parts import PARTS, Part, next_token, of_transformers

__all__ = ["LIMIT", "PARTS", "User", "advise", "limit_memory", "status_bytes"]

LIMIT = "STUDY_LIMIT_BYTES"
HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


class User(NamedTuple):
    """`sizes_tried` is filled with the batch size of every forward pass that a tool asked for."""

    part: Part
    dataset: Any
    model: nn.Module
    optimizer: torch.optim.Optimizer
    sizes_tried: list[int]

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        size = len(batch[0])
        if not self.sizes_tried or self.sizes_tried[-1] != size:
            self.sizes_tried.append(size)
        return self.part.loss(model, batch)

    def loader(self, batch_size: int) -> DataLoader[Any]:
        return DataLoader(self.dataset, batch_size=batch_size, shuffle=True, drop_last=True)

    def example(self) -> tuple[Any, Callable[..., Tensor] | None]:
        """One batch of today's size as inputs and targets, or a dict, and the loss where it is not the usual one."""
        with torch.random.fork_rng(devices=[]):  # what the example draws is not the tool's doing
            first, second = next(iter(self.loader(self.part.todays_batch_size)))
        if self.part.loss is of_transformers:
            return {"input_ids" if first.dim() == 2 else "pixel_values": first, "labels": second}, None
        if self.part.loss is next_token:
            return (first[:, :-1], first[:, 1:]), lambda out, rows: F.cross_entropy(out.flatten(0, 1), rows.flatten())
        return (first, second), None


def status_bytes(name: str) -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(f"{name}:"))
    return int(line.split()[1]) * 1024


def limit_memory() -> None:
    """To what run.py gives every process alike that asks a tool or trains: a tool's own modules are within it."""
    if LIMIT in os.environ:
        allowed = int(os.environ[LIMIT])
        resource.setrlimit(resource.RLIMIT_DATA, (allowed, allowed))


def held_bytes(name: str) -> int:
    """What Python holds with torch, the data and the code of the model."""
    part = PARTS[name]
    _ = part.data(), part.model()
    return status_bytes("VmData")


def observe(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    modules = list(model.modules())
    state = [value for entry in optimizer.state.values() for value in entry.values()]
    backends: Any = torch.backends
    return {
        "parameters": digest(model.parameters()),
        "buffers": digest(model.buffers()),
        "gradients": digest(p.grad for p in model.parameters()),
        "optimizer": [digest(state), [{**group, "params": len(group["params"])} for group in optimizer.param_groups]],
        "training mode": [module.training for module in modules],
        "requires_grad": [p.requires_grad for p in model.parameters()],
        "dtype, device and memory format": [(p.dtype, p.device, p.stride()) for p in model.parameters()],
        "hooks": [len(getattr(module, name)) for module in modules for name in HOOKS],
        "module classes": [type(module) for module in modules],
        "random numbers of torch": digest([torch.get_rng_state()]),
        "random numbers of numpy and Python": [str(np.random.get_state()), random.getstate()],
        "global backend flags": [
            torch.get_float32_matmul_precision(),
            backends.cudnn.benchmark,
            backends.cudnn.deterministic,
            torch.are_deterministic_algorithms_enabled(),
            torch.get_num_threads(),
            torch.get_default_dtype(),
        ],
    }


def digest(values: Iterable[Any]) -> list[str]:
    return [
        hashlib.sha256(value.detach().contiguous().numpy().tobytes()).hexdigest()
        if isinstance(value, Tensor)
        else repr(value)
        for value in values
    ]


def advise(seek: Callable[[User], dict[str, Any]]) -> None:
    """Print as one JSON line what `seek` advises for the part named on the command line, and what it changed."""
    part = PARTS[sys.argv[1]]
    torch.manual_seed(0)
    dataset, model = part.data(), part.model()
    user = User(part, dataset, model, part.optimizer(model.parameters()), [])
    limit_memory()
    before = observe(model, user.optimizer)
    found = seek(user)
    after = observe(model, user.optimizer)
    changed = [name for name in before if before[name] != after[name]]
    print("\n" + json.dumps({**found, "changed": changed, "sizes_tried": user.sizes_tried}))


if __name__ == "__main__":
    print(held_bytes(sys.argv[1]))
