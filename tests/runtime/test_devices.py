"""On a card that is not the current one everything happens on that card: tried with made ones, since none is here."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from autotune_amp import AmpConfig, LossScale
from autotune_amp.runtime import controller
from autotune_amp.runtime.controller import PrecisionController
from autotune_amp.runtime.device import Ranks
from autotune_amp.runtime.scaler import LaggedReader

SECOND = torch.device("cuda", 1)


class Cards:
    """Several cards, of which the first is current unless it is told otherwise."""

    def __init__(self) -> None:
        self.current = 0

    @contextmanager
    def make_current(self, device: Any) -> Iterator[None]:
        before, self.current = self.current, device.index if isinstance(device, torch.device) else device
        yield
        self.current = before


@pytest.fixture
def cards(monkeypatch: pytest.MonkeyPatch) -> Cards:
    made = Cards()
    monkeypatch.setattr(torch.cuda, "device", made.make_current)
    monkeypatch.setattr(torch.accelerator, "device_index", made.make_current)
    return made


@pytest.mark.parametrize(("native", "withdrawn"), [(0, ["bf16"]), (1, [])])
def test_bf16_is_withdrawn_where_the_controllers_own_card_only_emulates_it(
    native: int, withdrawn: list[str], cards: Cards, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda *, including_emulation: cards.current == native)
    monkeypatch.setattr(controller, "checked_device", lambda device: device)
    monkeypatch.setattr(torch.cuda.amp.common, "amp_definitely_not_available", lambda: False)
    made = PrecisionController(
        AmpConfig(precision="fp16", batch_size=8, loss_scale=LossScale(), fallback=("bf16", "fp32")), SECOND
    )
    assert list(made._policy.withdrawn) == withdrawn
    assert cards.current == 0


def test_a_number_is_waited_for_on_the_stream_that_copies_it(monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[object] = []

    def stream(device: torch.device) -> Any:
        return SimpleNamespace(record_event=lambda: SimpleNamespace(synchronize=lambda: waited.append(device)))

    sent = SimpleNamespace(device=SECOND)
    pinned = SimpleNamespace(copy_=lambda values, non_blocking: None, tolist=lambda: [3.0])
    monkeypatch.setattr(torch, "empty", lambda size, pin_memory: pinned)
    monkeypatch.setattr(torch.accelerator, "current_stream", stream)
    reader = LaggedReader()
    reader.push([SimpleNamespace(reshape=lambda size: sent)], (7,))  # type: ignore[list-item]
    assert reader.pop() == ([3.0], (7,))
    assert waited == [SECOND]


def test_names_are_gathered_by_way_of_the_ranks_own_card(cards: Cards, monkeypatch: pytest.MonkeyPatch) -> None:
    """NCCL sends objects from the current device, and two ranks on one card hang."""
    used: list[int] = []

    def gather(gathered: list[list[str]], names: list[str], group: object) -> None:
        used.append(cards.current)
        gathered[:] = [["b"], names]

    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_world_size", lambda group: 2)
    monkeypatch.setattr(dist, "all_gather_object", gather)
    assert Ranks(SECOND).union(["a"]) == ("b", "a")
    assert used == [1]
