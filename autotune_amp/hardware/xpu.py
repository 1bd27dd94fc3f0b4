"""Intel GPUs through SYCL."""

from __future__ import annotations

import torch

from autotune_amp.core.errors import DeviceError
from autotune_amp.core.hardware import Capability, DeviceIdentity, DeviceMemory
from autotune_amp.core.precisions import Precision
from autotune_amp.hardware import host
from autotune_amp.hardware.device import emulated, name_of_numbered_device, native, unsupported


def decide(*, has_fp16: bool, has_bf16: bool, can_hold_bf16: bool) -> dict[Precision, Capability]:
    """Return the capability of every precision from the device's properties; pure."""
    no_bf16 = "The device has no bf16 conversions"
    return {
        "fp32": native("Every XPU computes in fp32."),
        "tf32": unsupported("PyTorch's TF32 flags, as set here, do not reach XPUs."),
        "bf16": native("The device converts bf16 in hardware.")
        if has_bf16
        else emulated(f"{no_bf16}: PyTorch emulates it in fp32.")
        if can_hold_bf16
        else unsupported(f"{no_bf16}, and PyTorch holds no bf16 tensors on it."),
        "fp16": native("The device computes in fp16.") if has_fp16 else unsupported("The device has no fp16."),
        "fp8": unsupported("PyTorch does not train in fp8 on XPUs."),
    }


def is_built() -> bool:
    """Return whether this PyTorch was built for XPU."""
    return torch.version.xpu is not None


def resolve(index: int | None) -> str:
    """Return ``xpu:N``. Raises `DeviceError` if this build or machine has no XPU device, or no device N."""
    if not (is_built() and torch.xpu.is_available()):
        raise DeviceError(
            f"No XPU device: PyTorch {torch.__version__} has no XPU support, or Intel's GPU driver shows none.",
            "Install the XPU build of https://pytorch.org/get-started/locally/ and the driver, or pass device='cpu'.",
        )
    return name_of_numbered_device(
        "xpu", torch.xpu.current_device() if index is None else index, torch.xpu.device_count()
    )


def identity(device: str) -> DeviceIdentity:
    """Return the device's identity from its properties."""
    properties = torch.xpu.get_device_properties(device)
    return DeviceIdentity(
        type="xpu",
        name=properties.name,
        index=torch.device(device).index,
        uuid=str(properties.uuid) if hasattr(properties, "uuid") else None,  # newer than torch 2.9
        driver=properties.driver_version,
        num_cpus=host.num_cpus(),
        total_memory_bytes=properties.total_memory,
    )


def compute_capability(device: str) -> str | None:
    """Return the runtime's version string for the device."""
    return str(torch.xpu.get_device_properties(device).version)


def memory(device: str) -> DeviceMemory:
    """Return the device's memory in bytes; if the driver does not report free memory, all of it counts as free."""
    try:
        free, total = torch.xpu.mem_get_info(device)
    except RuntimeError:
        free = total = torch.xpu.get_device_properties(device).total_memory
    return DeviceMemory(total=total, free=free, available=free)


def capabilities(device: str) -> dict[Precision, Capability]:
    """Return the capability of every precision from the device's properties and, from torch 2.10 on, its dtypes."""
    properties = torch.xpu.get_device_properties(device)
    can_hold_bf16 = True
    if hasattr(torch.accelerator, "get_device_capability"):
        can_hold_bf16 = torch.bfloat16 in torch.accelerator.get_device_capability(device)["supported_dtypes"]
    return decide(
        has_fp16=properties.has_fp16, has_bf16=properties.has_bfloat16_conversions, can_hold_bf16=can_hold_bf16
    )


def notes(_: str) -> tuple[str, ...]:
    """Return no notes: the driver reports nothing about other processes."""
    return ()
