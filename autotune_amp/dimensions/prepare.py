"""prepare(): apply a config's variants to a model and its optimizer, with the code that the trials run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import torch
from torch import nn

from autotune_amp.core.errors import InvalidRequestError
from autotune_amp.core.setting import Setting
from autotune_amp.dimensions import VARIANTS
from autotune_amp.dimensions.live_training import LiveTraining

Model = TypeVar("Model", bound=nn.Module)
Optimizers = TypeVar("Optimizers", bound=torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None)


def prepare(config: Setting, model: Model, optimizer: Optimizers) -> tuple[Model, Optimizers]:
    """Apply the variants in `config` to a model and its optimizer, or list of optimizers, and return the same objects.

    Sets the dtype and memory format of the model's weights, its fp8 layers, activation checkpointing and compilation,
    the implementation of the optimizer's step, and for the whole process the attention backend, cuDNN's benchmark and
    CUDA's allocator. The other settings are up to the training loop, the data loader and a `PrecisionController`. Call
    it after the model is on its device and before ``DistributedDataParallel``; the optimizer may have taken steps. The
    names in both ``state_dict`` do not change, so that checkpoints load with and without it.

    Variants that are already set are skipped. Raises `InvalidRequestError`, before any change, for a variant that this
    model or optimizer does not support.
    """
    optimizers = [] if optimizer is None else [optimizer] if isinstance(optimizer, torch.optim.Optimizer) else optimizer
    devices = [parameter.device for parameter in model.parameters()]
    # Of a model that is offloaded in part, the device that it trains on.
    device = max(devices, key=lambda device: device.type not in ("cpu", "meta"), default=torch.device("cpu"))
    live = LiveTraining([model], list(optimizers), device)
    variants = {VARIANTS[name]: value for name, value in config.active_variants.items()}
    variants = {variant: value for variant, value in variants.items() if not variant.is_applied(value, live)}
    for variant, value in variants.items():
        if (reason := variant.unsupported_reason(value, live)) is not None:
            raise InvalidRequestError(
                f"The config has {variant.name}={value!r}, which cannot be set up here: {reason}.",
                "Pass the model and the optimizer of the search, or remove it from the config.",
            )
    for variant, value in variants.items():
        variant.change_once(value, live)
    return model, optimizer
