"""XPUs, Apple's GPUs and AMD's, measured on stand-ins of the interface that PyTorch has for each."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from autotune_amp.hardware import cuda, matmul, measure, nvml

GIB = 1 << 30


@pytest.fixture(autouse=True)
def _no_products(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(matmul, "flops_per_second", lambda *arguments, **options: 1e12)
    monkeypatch.setattr(cuda, "is_built", lambda: False)


@pytest.fixture
def _xpu(monkeypatch: pytest.MonkeyPatch) -> None:
    properties = SimpleNamespace(
        name="Intel(R) Arc(TM) B580 Graphics",
        driver_version="1.6.33184",
        version="12.2",
        total_memory=12 * GIB,
        has_fp16=True,
        has_bfloat16_conversions=True,
        uuid="86800be2-0000-0000-0300-000000000000",
    )
    monkeypatch.setattr(torch.version, "xpu", "20250201")
    stand_ins = {
        "is_available": lambda: True,
        "current_device": lambda: 0,
        "device_count": lambda: 2,
        "get_device_properties": lambda device=None: properties,
        "mem_get_info": lambda device=None: (11 * GIB, 12 * GIB),
    }
    for name, stand_in in stand_ins.items():
        monkeypatch.setattr(torch.xpu, name, stand_in)
    dtypes = {"supported_dtypes": {torch.float32, torch.float16, torch.bfloat16}}
    monkeypatch.setattr(torch.accelerator, "get_device_capability", lambda device: dtypes, raising=False)


@pytest.mark.usefixtures("_xpu")
@pytest.mark.parametrize(("asked", "device"), [("auto", "xpu:0"), ("xpu", "xpu:0"), ("xpu:1", "xpu:1")])
def test_an_xpu(asked: str, device: str) -> None:
    hardware = measure(asked)
    assert (hardware.device, hardware.identity.name) == (device, "Intel(R) Arc(TM) B580 Graphics")
    assert (hardware.memory.free, hardware.memory.total) == (11 * GIB, 12 * GIB)
    native = [precision for precision, capability in hardware.precisions.items() if capability.level == "native"]
    assert native == ["fp32", "bf16", "fp16"]


@pytest.mark.usefixtures("_xpu")
def test_an_xpu_whose_driver_does_not_tell_what_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(device: object = None) -> tuple[int, int]:
        raise RuntimeError("The device doesn't support querying the available free memory.")

    monkeypatch.setattr(torch.xpu, "mem_get_info", refuse)
    hardware = measure("xpu")
    assert hardware.memory.free == 12 * GIB
    assert "all of it is taken to be" in hardware.notes[0]


def test_apples_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("is_built", "is_available", "is_macos_or_newer"):
        monkeypatch.setattr(torch.backends.mps, name, lambda *version: True)
    monkeypatch.setattr(torch.mps, "recommended_max_memory", lambda: 10 * GIB)
    monkeypatch.setattr(torch.mps, "driver_allocated_memory", lambda: 4 * GIB)
    hardware = measure("auto")
    assert (hardware.device, hardware.compute_capability) == ("mps", None)
    assert (hardware.memory.total, hardware.memory.free) == (10 * GIB, 6 * GIB)
    native = [precision for precision, capability in hardware.precisions.items() if capability.level == "native"]
    assert native == ["fp32", "bf16", "fp16"]


def test_amds_gpu_is_asked_of_torch_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch.cuda is its interface too; there is no NVML and no TF32 flag that reaches it."""
    properties = SimpleNamespace(
        name="AMD Instinct MI210", major=9, minor=0, total_memory=64 * GIB, gcnArchName="gfx90a", uuid="gone"
    )
    monkeypatch.setattr(torch.version, "hip", "6.4.43482")
    monkeypatch.setattr(cuda, "is_built", lambda: True)
    monkeypatch.setattr(nvml, "_handle", lambda uuid: None)
    stand_ins = {
        "init": lambda: None,
        "is_available": lambda: True,
        "current_device": lambda: 0,
        "device_count": lambda: 1,
        "device": lambda index: torch.inference_mode(),
        "get_device_properties": lambda device=None: properties,
        "mem_get_info": lambda device=None: (60 * GIB, 64 * GIB),
        "get_arch_list": lambda: ["gfx90a", "gfx942"],
        "is_bf16_supported": lambda including_emulation=True: True,
        "is_tf32_supported": lambda: False,
    }
    for name, stand_in in stand_ins.items():
        monkeypatch.setattr(torch.cuda, name, stand_in)
    monkeypatch.setattr(nvml, "visible_uuids", lambda: ())
    hardware = measure("cuda")
    assert (hardware.device, hardware.compute_capability) == ("cuda:0", "gfx90a")
    assert (hardware.identity.uuid, hardware.identity.driver) == (None, "ROCm 6.4.43482")
    assert hardware.precisions["tf32"].level == "unsupported"
    assert hardware.precisions["bf16"].level == "native"
