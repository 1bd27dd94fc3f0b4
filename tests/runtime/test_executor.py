"""What the executor asks of a fallback before it is taken."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from autotune_amp.core.config import FallbackPlan
from autotune_amp.runtime import executor

GIB = 2**30


@pytest.mark.parametrize(("needed_bytes", "fits"), [(3 * GIB, True), (3 * GIB + 1, False)])
def test_a_plan_may_use_the_free_memory_and_what_the_process_holds_already(
    needed_bytes: int, fits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    free = SimpleNamespace(memory=lambda device: SimpleNamespace(available=2 * GIB))
    monkeypatch.setattr(executor, "load_device_module", lambda kind: free)
    monkeypatch.setattr(executor, "held_memory_bytes", lambda device: GIB)
    plan = FallbackPlan(precision="fp32", batch_size=4, peak_memory_bytes=needed_bytes)
    assert (executor._why_not_in_memory(plan, torch.device("cpu")) is None) == fits
