from __future__ import annotations

import psutil
import pytest
import torch

from autotune_amp.core.errors import DeviceError
from autotune_amp.core.precisions import PRECISIONS
from autotune_amp.hardware import cpu, cuda, host, identify, measuring, nvml
from autotune_amp.hardware.device import DEVICES
from autotune_amp.hardware.host import ContainerMemory
from autotune_amp.hardware.measuring import measure


def test_the_cpu_is_measured() -> None:
    hardware = measure("cpu", seconds=0.1)
    assert hardware.device == "cpu"
    assert hardware.identity == identify("cpu")
    assert tuple(hardware.precisions) == PRECISIONS
    for precision, capability in hardware.precisions.items():
        if capability.level == "unsupported":
            assert capability.matmul_flops_per_second is None, precision
        else:
            assert (capability.matmul_flops_per_second or 0) > 0, precision
    assert hardware.precisions["fp32"].level == "native"
    assert 0 < hardware.memory.available <= hardware.memory.total == psutil.virtual_memory().total


@pytest.mark.parametrize(
    ("container", "available", "limit"),
    [(None, 1000, None), (ContainerMemory(700, 300), 300, 700), (ContainerMemory(9000, 8000), 1000, 9000)],
)
def test_available_memory_is_the_least_of_machine_and_container(
    monkeypatch: pytest.MonkeyPatch, container: ContainerMemory | None, available: int, limit: int | None
) -> None:
    monkeypatch.setattr(host, "container_memory", lambda: container)
    monkeypatch.setattr(host, "available_memory_bytes", lambda: 1000)
    memory = cpu.memory("cpu")
    assert (memory.free, memory.available, memory.container_limit) == (1000, available, limit)
    assert identify("cpu").total_memory_bytes == (limit or host.total_memory_bytes())


@pytest.mark.parametrize(
    ("error", "level", "words"),
    [
        (RuntimeError("no kernel image\nand a stack trace"), "unsupported", "no kernel image"),
        (torch.OutOfMemoryError("CUDA out of memory"), "native", "too little memory is free"),
    ],
)
def test_what_torch_cannot_multiply_is_unsupported_in_its_own_words_but_on_a_full_device(
    monkeypatch: pytest.MonkeyPatch, error: Exception, level: str, words: str
) -> None:
    def refuse(*arguments: object, **options: object) -> float:
        del arguments, options
        raise error

    monkeypatch.setattr(measuring, "flops_per_second", refuse)
    capability = measure("cpu").precisions["fp32"]
    assert (capability.level, capability.matmul_flops_per_second) == (level, None)
    assert words in capability.reason
    assert "stack trace" not in capability.reason


@pytest.mark.skipif(cuda.is_built(), reason="this PyTorch is built for CUDA")
def test_cuda_without_a_cuda_build() -> None:
    with pytest.raises(DeviceError, match="built without CUDA") as caught:
        measure("cuda:7")
    assert "pytorch.org/get-started" in caught.value.next_step


@pytest.fixture
def too_old(monkeypatch: pytest.MonkeyPatch) -> None:
    """A driver that CUDA refuses, while NVML, which torch.cuda.is_available() asks in trials, answers."""

    def refuse() -> int:
        raise RuntimeError("The NVIDIA driver on your system is too old (found version 12080).\nand a stack trace")

    monkeypatch.setattr(cuda, "is_built", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "init", refuse)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")


@pytest.mark.usefixtures("too_old")
def test_auto_takes_no_other_device_for_a_card_that_is_there_and_cannot_be_used(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What is measured would be filed under the card, which `identify` names."""
    monkeypatch.setattr("autotune_amp.hardware.device._torch_is_built_for", lambda toolkit: toolkit == "cuda")
    monkeypatch.setattr(nvml, "visible_uuids", lambda: ("GPU-a",))
    with pytest.raises(DeviceError, match=r"too old \(found version 12080\)\. CUDA_VISIBLE_DEVICES is ''") as caught:
        measure("auto")
    assert "--device cpu" in caught.value.next_step
    monkeypatch.setattr(nvml, "visible_uuids", tuple)  # a CUDA build on a machine without a card
    hardware = measure("auto", seconds=0.0)
    assert any("too old" in note for note in hardware.notes)
    assert not hardware.device.startswith("cuda")


def test_another_kind_of_device_is_a_module_and_an_entry(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(DeviceError):
        measure("toy")
    monkeypatch.setitem(DEVICES, "toy", "toy_device")
    found = measure("toy:0", seconds=0.01)
    assert (found.identity.type, found.compute_capability, found.memory.available) == ("toy", "of cpu", 6)
    assert {capability.level for capability in found.precisions.values()} == {"unsupported"}
    assert found.notes == ("A toy.",)
    with pytest.raises(DeviceError, match="sees 1 toy"):
        measure("toy:1")
