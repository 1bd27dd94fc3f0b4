"""CUDA's allocator setting without a card: what the variable says, and where it can be had."""

from __future__ import annotations

import sys
from typing import Any

import fp8_samples
import pytest
import torch
from msgspec.structs import replace
from torch import nn

from autotune_amp import AmpConfig
from autotune_amp.core.config import allocator_variable
from autotune_amp.core.evidence import export_lines
from autotune_amp.core.setting import Setting
from autotune_amp.dimensions import ALLOCATOR, COMPILE
from autotune_amp.dimensions.live_training import LiveTraining
from autotune_amp.trial.jobs import Trial
from autotune_amp.trial.training import make_training
from autotune_amp.trial.worker import supported_values

VALUE = "expandable_segments"


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        ({}, {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}),
        ({"PYTORCH_ALLOC_CONF": ""}, {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}),
        (
            {"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:64,expandable_segments:False"},
            {"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:64,expandable_segments:True"},
        ),
    ],
)
def test_the_variable_keeps_what_it_says_already(found: dict[str, str], expected: dict[str, str]) -> None:
    assert allocator_variable(VALUE, found) == expected
    assert allocator_variable("as_found", found) == {}


def test_the_shell_is_told() -> None:
    environment = {"MALLOC_TRIM_THRESHOLD_": "2"}
    config = AmpConfig(precision="bf16", batch_size=4, allocator="expandable_segments", environment=environment)
    assert export_lines(config) == ["export MALLOC_TRIM_THRESHOLD_=2 PYTORCH_ALLOC_CONF=expandable_segments:True"]


def test_where_it_can_be_had(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        monkeypatch.delenv(name, raising=False)
    model = nn.Linear(2, 2)
    on_cpu, on_card = LiveTraining([model], [], torch.device("cpu")), LiveTraining([model], [], torch.device("cuda"))
    assert "CUDA" in str(supported_values(on_cpu)["allocator"][VALUE])
    applied: list[str] = []
    part: Any = torch._C
    monkeypatch.setattr(part, "_accelerator_setAllocatorSettings", applied.append, raising=False)
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(torch.version, "hip", None)
    assert ALLOCATOR.unsupported_reason(VALUE, on_card) is None
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "max_split_size_mb:64")
    undo = ALLOCATOR.change(VALUE, on_card)
    assert applied.pop() == "max_split_size_mb:64,expandable_segments:True"
    undo()
    assert applied.pop() == "max_split_size_mb:64,expandable_segments:False"
    setting = Setting(precision="fp32", batch_size=4, allocator="expandable_segments")
    trial = Trial(candidate=setting, device="cpu")
    make_training(fp8_samples.workload(), fp8_samples.model(), trial).close()
    on, off = applied
    assert (on, off) == tuple(f"max_split_size_mb:64,expandable_segments:{is_on}" for is_on in (True, False))
    applied.clear()
    with monkeypatch.context() as patch:
        patch.setattr(type(COMPILE), "change", lambda *_: 1 // 0)
        broken = Trial(candidate=replace(setting, compile="default"), device="cpu")
        with pytest.raises(ZeroDivisionError):
            make_training(fp8_samples.workload(), fp8_samples.model(), broken)
    assert applied == [on, off], "a process that is kept goes on as before"
    applied.clear()
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "expandable_segments:True,max_split_size_mb:64")
    assert ALLOCATOR.is_applied(VALUE, on_card)
    make_training(fp8_samples.workload(), fp8_samples.model(), trial).close()
    assert applied == [], "what was so before stays so"
    monkeypatch.setattr(sys, "platform", "win32")
    assert "Linux" in str(ALLOCATOR.unsupported_reason(VALUE, on_card))
