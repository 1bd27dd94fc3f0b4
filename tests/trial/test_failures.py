"""Tests for autotune_amp/trial/failures.py."""

from __future__ import annotations

import pytest
import torch

from autotune_amp.trial import failures

GIB = 2**30


def test_the_memory_that_is_left_of_what_one_may_have(monkeypatch: pytest.MonkeyPatch) -> None:
    assert failures.free_memory_share() is None, "a card that was not used"
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    for free, reserved, fraction, share in (
        (30, 10, 1.0, 30 / 40),
        (3, 8, 1.0, 3 / 40),  # others hold the rest
        (30, 37, 1.0, 3 / 40),  # at its peak
        (20, 19, 0.5, 1 / 20),  # of what the trial may have
    ):
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda free=free: (free * GIB, 40 * GIB))
        monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda reserved=reserved: reserved * GIB)
        monkeypatch.setattr(torch.cuda.memory, "get_per_process_memory_fraction", lambda share=fraction: share)
        assert failures.free_memory_share() == share
