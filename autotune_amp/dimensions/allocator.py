"""Mode of CUDA's caching allocator: segments of a fixed size, or expandable segments."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING

from autotune_amp.core.config import ALLOCATOR_VARIABLES, allocator_variable
from autotune_amp.dimensions.dimension import Leader, Variant

if TYPE_CHECKING:
    from autotune_amp.dimensions.live_training import LiveTraining


class _Allocator(Variant):
    """Variant for the allocator's mode, which an environment variable can set before Python starts."""

    name = "allocator"
    affects = frozenset({"speed", "memory"})
    frees_memory = True

    def is_applied(self, value: str, live: LiveTraining) -> bool:  # noqa: ARG002 - set for the process
        return any(f"{value}:True" in os.environ.get(name, "") for name in ALLOCATOR_VARIABLES)

    def unsupported_reason(self, value: str, live: LiveTraining) -> str | None:  # noqa: ARG002 - the only value
        import torch

        if live.device.type != "cuda" or torch.version.hip is not None:
            return "it is an option of CUDA's allocator"
        if not sys.platform.startswith("linux"):
            return "CUDA supports it only on Linux"
        if not hasattr(torch._C, "_accelerator_setAllocatorSettings"):
            return "this version of PyTorch cannot change its allocator in a running process"
        return None

    def change(self, value: str, live: LiveTraining) -> Callable[[], None]:  # noqa: ARG002 - set for the process
        """Switch the allocator to this mode for new allocations, and return a function that switches it off."""
        import torch

        (settings,) = allocator_variable(value, os.environ).values()
        torch._C._accelerator_setAllocatorSettings(settings)
        return lambda: torch._C._accelerator_setAllocatorSettings(settings.removesuffix("True") + "False")

    def reason_against(self, value: str, leader: Leader) -> str | None:  # noqa: ARG002 - the only value
        if leader.effect == "memory":
            return "it does not change the allocated memory, which is the peak that is minimised"
        return None


ALLOCATOR = _Allocator()
