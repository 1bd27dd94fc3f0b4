"""What is found out about one optimizer's gradients, and what `step` tells of it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

# The verdict on one optimizer's gradients. The larger one wins: between optimizers, between ranks.
NO_GRADIENTS, CLEAN, OVERFLOW, BAD_LOSS = -1, 0, 1, 2


class Stepped:
    """What `step` gives back: true if the optimizer stepped. Known at once, or one wait where it is fused.

    `value` is what ``optimizer.step`` returned.
    """

    def __init__(self, verdict: int | Tensor, value: Any = None) -> None:
        self._verdict = verdict
        self.value = value

    def __bool__(self) -> bool:
        return int(self._verdict) == CLEAN

    def __repr__(self) -> str:
        return f"Stepped({bool(self)})"


def makes_buffers_unread(optimizer: torch.optim.Optimizer) -> bool:
    """Whether a first step that the device skips leaves memory behind that nobody wrote: fused SGD's momentum."""
    if not isinstance(optimizer, torch.optim.SGD) or optimizer.state:
        return False
    return any(group.get("fused") and group["momentum"] for group in optimizer.param_groups)
