"""AMD's, Intel's and Apple's accelerators by stand-ins of the interfaces that torch has for them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import NoReturn

import pytest
import torch

from autotune_amp.core.errors import DeviceError
from autotune_amp.core.precisions import PRECISIONS
from autotune_amp.hardware import cuda, device, host, identify, measuring, nvml
from autotune_amp.hardware.measuring import make_current, measure
from autotune_amp.trial.energy import find_counter

GIB = 2**30


@pytest.fixture(autouse=True)
def _rates(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measuring, "flops_per_second", lambda *given, **options: 1.0)


@pytest.fixture
def current(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The devices that were made the current one."""
    chosen: list[str] = []
    monkeypatch.setattr(torch.accelerator, "set_device_index", lambda device: chosen.append(str(device)))
    monkeypatch.setattr(torch.accelerator, "synchronize", lambda device: None)
    ones = torch.ones
    monkeypatch.setattr(torch, "ones", lambda size, device: ones(size))
    return chosen


@pytest.fixture
def rocm(monkeypatch: pytest.MonkeyPatch) -> None:
    """An MI250X, beside a management library of NVIDIA's that must not be asked."""

    def asked() -> NoReturn:
        raise AssertionError("NVML was asked of a card that is not NVIDIA's")

    properties = SimpleNamespace(
        name="AMD Instinct MI250X", major=9, minor=0, gcnArchName="gfx90a:sramecc+", uuid="a", total_memory=64 * GIB
    )
    monkeypatch.setattr(nvml, "_library", asked)
    monkeypatch.setattr(device, "_torch_is_built_for", lambda toolkit: toolkit == "hip")
    monkeypatch.setattr(torch.version, "hip", "6.4")
    monkeypatch.setattr(torch.version, "cuda", None)
    for name, answer in {
        "init": None,
        "current_device": 0,
        "device_count": 2,
        "get_device_properties": properties,
        "get_arch_list": ["gfx90a"],
        "mem_get_info": (60 * GIB, 64 * GIB),
        "is_bf16_supported": True,
    }.items():
        monkeypatch.setattr(torch.cuda, name, lambda *given, answer=answer, **options: answer)
    monkeypatch.setattr(torch.cuda, "device", lambda device: torch.accelerator.device_index(None))


@pytest.mark.usefixtures("rocm")
@pytest.mark.parametrize("device", ["cuda", "cuda:0", "auto"])
def test_a_card_of_amd_is_measured_without_nvml_and_has_no_tf32(device: str) -> None:
    hardware = measure(device)
    assert (hardware.device, hardware.compute_capability) == ("cuda:0", "gfx90a:sramecc+")
    assert (hardware.identity.name, hardware.identity.uuid) == ("AMD Instinct MI250X", None)
    assert hardware.identity.driver == "ROCm 6.4"
    assert hardware.memory.available == 60 * GIB
    levels = [hardware.precisions[precision].level for precision in PRECISIONS]
    assert levels == ["native", "unsupported", "native", "native", "unsupported"]
    assert find_counter("cuda", None) is None
    assert identify("cuda:0").name == "unknown"


@pytest.fixture
def xpu(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Two of Intel's cards, the first of which is current."""
    properties = SimpleNamespace(name="Intel Arc B580", uuid="b", driver_version="1.6", version="20.1.0")
    vars(properties).update(total_memory=12 * GIB, has_fp16=True, has_bfloat16_conversions=True)
    made = SimpleNamespace(
        is_available=lambda: True,
        current_device=lambda: 0,
        device_count=lambda: 2,
        get_device_properties=lambda device: properties,
        mem_get_info=lambda device: (11 * GIB, 12 * GIB),
    )
    held = {"supported_dtypes": {torch.float32, torch.float16, torch.bfloat16}}
    monkeypatch.setattr(torch, "xpu", made)
    monkeypatch.setattr(torch.version, "xpu", "20250201", raising=False)
    monkeypatch.setattr(torch.accelerator, "get_device_capability", lambda device: held, raising=False)
    monkeypatch.setattr(cuda, "is_built", lambda: False)
    return made


@pytest.mark.parametrize(("device", "found"), [("xpu:1", "xpu:1"), ("xpu", "xpu:0"), ("auto", "xpu:0")])
def test_a_card_of_intels_is_measured(device: str, found: str, xpu: SimpleNamespace) -> None:
    hardware = measure(device)
    assert (hardware.device, hardware.identity.name) == (found, "Intel Arc B580")
    assert (hardware.memory.free, hardware.memory.total) == (11 * GIB, 12 * GIB)
    native = [precision for precision, capability in hardware.precisions.items() if capability.level == "native"]
    assert native == ["fp32", "bf16", "fp16"]
    with pytest.raises(DeviceError, match="PyTorch sees 2 xpu devices"):
        measure("xpu:2")

    def refuse(device: str) -> NoReturn:
        raise RuntimeError("The device does not support querying the available free memory")

    xpu.mem_get_info = refuse
    assert measure(device).memory.free == 12 * GIB


@pytest.mark.parametrize("device", ["mps", "auto"])
def test_apples_gpu_is_measured(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("is_built", "is_available"):
        monkeypatch.setattr(torch.backends.mps, name, lambda: True)
    monkeypatch.setattr(torch.backends.mps, "is_macos_or_newer", lambda major, minor: True)
    monkeypatch.setattr(torch.mps, "recommended_max_memory", lambda: 12 * GIB)
    monkeypatch.setattr(torch.mps, "driver_allocated_memory", lambda: 1 * GIB)
    monkeypatch.setattr(host, "available_memory_bytes", lambda: 10 * GIB)
    monkeypatch.setattr(cuda, "is_built", lambda: False)
    hardware = measure(device)
    assert (hardware.device, hardware.identity.type) == ("mps", "mps")
    assert hardware.compute_capability is None
    assert (hardware.memory.total, hardware.memory.free, hardware.memory.available) == (12 * GIB, 11 * GIB, 10 * GIB)
    native = [precision for precision, capability in hardware.precisions.items() if capability.level == "native"]
    assert native == ["fp32", "bf16", "fp16"]


@pytest.mark.usefixtures("xpu")
def test_another_device_is_made_current_if_it_is_there_and_none_is_started_for_one_that_is_current_anyway(
    current: list[str],
) -> None:
    for name in ("cpu", "auto", "mps", "xpu", "xpu:0", "cuda:0"):
        make_current(name)
    assert current == []
    make_current("xpu:1")
    assert current == ["xpu:1"]
    with pytest.raises(DeviceError, match="PyTorch sees 2 xpu devices"):
        make_current("xpu:2")
