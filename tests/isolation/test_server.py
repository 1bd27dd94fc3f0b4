from __future__ import annotations

from typing import Any

import pytest
import torch

from autotune_amp.isolation import server


@pytest.mark.parametrize(("device", "tried"), [("cuda:1", "cuda:1"), ("cuda", "cuda"), ("auto", "cuda"), ("cpu", None)])
def test_the_accelerator_that_is_tried_is_the_one_asked_for(
    device: str, tried: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another one may be full, and says nothing of whether children can use this one."""
    devices: list[Any] = []
    ones = torch.ones

    def made(size: int, device: Any = None) -> torch.Tensor:
        devices.append(device)
        return ones(size)

    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cuda"))
    monkeypatch.setattr(torch, "ones", made)
    assert server._try_everything(device, torch.get_num_threads()) == 0
    assert devices[1:] == ([] if tried is None else [torch.device(tried)])
