"""The landscapes' workloads as autotune_amp takes them, one function each: `workloads.py:mlp` and so on."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module

from parts import PARTS, of_transformers
from torch.utils.data import DataLoader

from autotune_amp import Workload


def make(name: str) -> Workload:
    part = PARTS[name]
    if part.loss is of_transformers:  # a user's script imports it once, not in every trial
        import_module(f"transformers.models.{name}.modeling_{name}")
    return Workload(
        model=part.model,
        loss=part.loss,
        data=DataLoader(part.data(), batch_size=part.todays_batch_size, shuffle=True, drop_last=True),
        optimizer=part.optimizer,
        name=name,
    )


def _factory(name: str) -> Callable[[], Workload]:
    def workload() -> Workload:
        return make(name)

    return workload


mlp, convnet, convnet_channels_last = map(_factory, ("mlp", "convnet", "convnet_channels_last"))
transformer_small, transformer_medium = map(_factory, ("transformer_small", "transformer_medium"))
lstm, gpt2, vit = map(_factory, ("lstm", "gpt2", "vit"))
