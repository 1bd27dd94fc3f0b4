"""prepare(): applies a config's variants to live objects; the trials of a search run the same code."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

import torch
from torch import nn

from autotune_amp.core.errors import InvalidRequestError
from autotune_amp.core.setting import Setting
from autotune_amp.core.variants import SO_ALREADY, VARIANTS
from autotune_amp.variants import (
    activation_checkpointing,
    allocator,
    compiling,
    cudnn_benchmark,
    fp8,
    memory_format,
    optimizer_impl,
    weights,
)
from autotune_amp.variants.subject import Trained

Model = TypeVar("Model", bound=nn.Module)
Optimizers = TypeVar("Optimizers", bound=torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None)


class _VariantModule(Protocol):
    def has(self, value: str, trained: Trained) -> bool: ...

    def why_not(self, value: str, trained: Trained) -> str | None: ...

    def apply(self, value: str, trained: Trained) -> Callable[[], None] | None: ...


_PLACES: dict[str, _VariantModule] = {
    "allocator": allocator,
    "weights": weights,
    "memory_format": memory_format,
    "cudnn_benchmark": cudnn_benchmark,
    "fp8_recipe": fp8,
    "activation_checkpointing": activation_checkpointing,
    "optimizer_impl": optimizer_impl,
    "compile": compiling,
}


def prepare(config: Setting, model: Model, optimizer: Optimizers) -> tuple[Model, Optimizers]:
    """Apply the variants in `config` to a model and its optimizer, or list of optimizers, and return the same objects.

    It sets the dtype of the model's weights, their memory format, its fp8 layers, its checkpointed blocks and its
    compilation, the implementation of the optimizer's step, and for the whole process cuDNN's benchmark and CUDA's
    allocator. The other settings are up to the training loop, the loader and a `PrecisionController`. Call it once the
    model is on its device, before ``DistributedDataParallel``; the optimizer may have taken steps. The names in both
    ``state_dict`` do not change, so that a checkpoint loads with and without it. An optimizer's ``state_dict`` contains
    its implementation, which is therefore restored with it.

    Variants that are set already are left alone. Raises `InvalidRequestError` for a variant that this model or
    optimizer does not support, before any change.
    """
    several = [] if optimizer is None else [optimizer] if isinstance(optimizer, torch.optim.Optimizer) else optimizer
    device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
    trained = Trained([model], list(several), device)
    wanted = {name: value for name, value in config.set_up.items() if not _PLACES[name].has(value, trained)}
    for name, value in wanted.items():
        if (reason := _PLACES[name].why_not(value, trained)) is not None:
            raise InvalidRequestError(
                f"The config has {name}={value!r}, which cannot be set up here: {reason}.",
                "Pass the model and the optimizer that were searched, or leave it out of the config.",
            )
    for name, value in wanted.items():
        set_up(name, value, trained)
    return model, optimizer


def set_up(name: str, value: str, trained: Trained) -> Callable[[], None] | None:
    """Apply one variant unless it is set already; return a function that undoes a process-wide change, or None."""
    return None if _PLACES[name].has(value, trained) else _PLACES[name].apply(value, trained)


def values_for(trained: Trained) -> dict[str, dict[str, str | None]]:
    """Return the non-default values of each variant: None if supported, otherwise the reason why not."""

    def why_not(place: _VariantModule, value: str) -> str | None:
        try:
            return SO_ALREADY if place.has(value, trained) else place.why_not(value, trained)
        except Exception as error:  # user code may raise anything; a search can do without the answer
            return f"looking at the model raised {type(error).__name__}: {error}"

    return {v.name: {value: why_not(_PLACES[v.name], value) for value in v.others} for v in VARIANTS}
