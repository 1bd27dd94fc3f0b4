"""Mode of CUDA's caching allocator: segments of a fixed size, or expandable ones."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable

import torch

from autotune_amp.core.variants import ALLOCATOR, ALLOCATOR_VARIABLES
from autotune_amp.variants.subject import Trained


def has(value: str, trained: Trained) -> bool:  # noqa: ARG001 - the interface of a variant
    """Return whether this process was started in this mode."""
    return any(f"{value}:True" in os.environ.get(name, "") for name in ALLOCATOR_VARIABLES)


def why_not(value: str, trained: Trained) -> str | None:  # noqa: ARG001 - the interface of a variant
    """Return the reason why the allocator cannot use this mode, None if it can."""
    if trained.device.type != "cuda" or torch.version.hip is not None:
        return "it is of CUDA's allocator"
    if not sys.platform.startswith("linux"):
        return "CUDA has it on Linux alone"
    if not hasattr(torch._C, "_accelerator_setAllocatorSettings"):
        return "this PyTorch cannot set its allocator in a process that runs"
    return None


def apply(value: str, trained: Trained) -> Callable[[], None]:  # noqa: ARG001 - set for the process
    """Switch the allocator to this mode for new allocations, and return a function that switches it off."""
    (settings,) = ALLOCATOR.environment(value, os.environ).values()
    torch._C._accelerator_setAllocatorSettings(settings)
    return lambda: torch._C._accelerator_setAllocatorSettings(settings.removesuffix("True") + "False")
