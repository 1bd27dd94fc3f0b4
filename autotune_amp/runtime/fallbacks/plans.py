"""Check of a config's measured fallback plans against this device."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from autotune_amp.core.config import FallbackPlan
from autotune_amp.core.errors import InvalidRequestError
from autotune_amp.hardware import cuda
from autotune_amp.runtime.policy import Policy
from autotune_amp.runtime.status import available_memory_bytes


def withdraw_unfit(
    policy: Policy, plans: Iterable[FallbackPlan], max_slowdown: float | None, device: torch.device
) -> None:
    """Withdraw plans slower than `max_slowdown`, and bf16 if the device only emulates it.

    Raises `InvalidRequestError` for a limit on a slowdown that was not measured.
    """
    for plan in plans:
        if max_slowdown is not None and plan.slowdown is None:
            raise InvalidRequestError(
                f"max_slowdown={max_slowdown} cannot be kept: the speed of {plan.precision} was not measured.",
                "Use a config that a search recommended, or leave max_slowdown out.",
            )
        if max_slowdown is not None and plan.slowdown is not None and plan.slowdown > max_slowdown:
            policy.withdraw(plan.precision, f"{plan.slowdown:.2g} times slower, above {max_slowdown:g}")
        if plan.precision == "bf16" and device.type == "cuda" and not cuda.is_bf16_native(device):
            policy.withdraw("bf16", "this GPU only emulates it")


def why_not_in_memory(plan: FallbackPlan, device: torch.device) -> str | None:
    """Return why the plan's measured peak does not fit into the device's memory, or None if it does."""
    needed = plan.peak_memory_bytes or 0
    available = available_memory_bytes(device) if needed else 0
    if needed <= available:
        return None
    return f"it takes {needed / 2**30:.2f} GiB and {available / 2**30:.2f} GiB can be had"
