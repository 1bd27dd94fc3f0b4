"""Which processes the jobs of a search are given, by the device."""

from __future__ import annotations

from typing import Any
from unittest.mock import Mock

import pytest

from autotune_amp.core.hardware import DeviceIdentity
from autotune_amp.processes import places
from autotune_amp.processes.places import OneDevice
from autotune_amp.processes.process import Watcher


@pytest.mark.parametrize(("device_type", "isolation"), [("cpu", None), ("cuda", "kept"), ("mps", "kept")])
def test_a_card_has_one_process_that_is_kept_and_a_cpu_what_can_be_forked(
    device_type: Any, isolation: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    identity = DeviceIdentity(type=device_type, name="scripted", num_cpus=2, total_memory_bytes=2**30)
    monkeypatch.setattr(places, "identify", lambda _: identity)
    start = Mock()
    with OneDevice("auto", start, lambda _: Watcher()) as here:
        here.backend()
    (call,) = start.call_args_list
    assert call.args[1] == isolation
