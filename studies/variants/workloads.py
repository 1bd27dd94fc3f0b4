"""The trainings as autotune_amp takes them, one function each: `workloads.py:resnet` and so on."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module

from torch.utils.data import DataLoader
from trainings import TRAININGS, of_transformers

from autotune_amp import Workload


def make(name: str) -> Workload:
    part = TRAININGS[name]
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


convnet, resnet, gpt2, vit, t5, lstm, mlp, unet = map(_factory, TRAININGS)
