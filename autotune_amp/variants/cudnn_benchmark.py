"""cuDNN benchmark: timing its algorithms for each new shape of a convolution and using the fastest."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.nn.modules.conv import _ConvNd

from autotune_amp.variants.subject import Trained


def has(value: str, trained: Trained) -> bool:  # noqa: ARG001 - the interface of a variant
    """Return whether cuDNN's benchmark is on in this process already."""
    return torch.backends.cudnn.benchmark


def why_not(value: str, trained: Trained) -> str | None:  # noqa: ARG001 - the interface of a variant
    """Return the reason why cuDNN's benchmark cannot help, None if it can."""
    if trained.device.type != "cuda":
        return "cuDNN is CUDA's"
    if not any(isinstance(module, _ConvNd) for module in trained.modules):
        return "the model has no convolution"
    return None


def apply(value: str, trained: Trained) -> Callable[[], None]:  # noqa: ARG001 - set for the process
    """Switch cuDNN's benchmark on for this process, and return a function that switches it off."""
    torch.backends.cudnn.benchmark = True

    def take_back() -> None:
        torch.backends.cudnn.benchmark = False

    return take_back
