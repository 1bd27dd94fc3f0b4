"""What tests of every adapter share: a config in fp16, what autocast means here, and comparisons of weights."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from autotune_amp.core.config import AmpConfig, LossScale

BATCH = 4
QUIET = [
    pytest.mark.filterwarnings("ignore:.*does not have many workers which may be a bottleneck"),  # tiny data on purpose
    pytest.mark.filterwarnings("ignore:.*isinstance.treespec, LeafSpec"),  # Lightning under this torch
    pytest.mark.filterwarnings("ignore:GPU available but not used"),  # as asked for here
    pytest.mark.filterwarnings("ignore:The number of training batches"),  # and fewer than its logging interval
    pytest.mark.filterwarnings("ignore:You're resuming from a checkpoint that ended before the epoch"),  # as meant here
]


def fp16(*fallback: Any, **options: Any) -> AmpConfig:
    """fp16 in batches of 4, by itself with both fallbacks; `options` replace what is given."""
    given = {"batch_size": 4, "loss_scale": LossScale(init_scale=1024.0), "fallback": fallback or ("bf16", "fp32")}
    return AmpConfig(precision="fp16", **(given | options))  # type: ignore[arg-type]


def ambient(kind: str = "cpu") -> torch.dtype | None:
    """What autocast casts to here, None where it is off."""
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None


def same(one: nn.Module, other: nn.Module) -> bool:
    """Whether their parameters are equal bit for bit."""
    return all(map(torch.equal, one.parameters(), other.parameters()))


def are_finite(model: nn.Module) -> bool:
    return all(bool(value.isfinite().all()) for value in model.state_dict().values())
