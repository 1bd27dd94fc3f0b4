"""Apple GPUs through Metal."""

from __future__ import annotations

import torch

from autotune_amp.core.errors import DeviceError
from autotune_amp.core.hardware import Capability, DeviceIdentity, DeviceMemory
from autotune_amp.core.precisions import Precision
from autotune_amp.hardware import host
from autotune_amp.hardware.device import identify, name_of_single_device, native, unsupported


def decide(*, is_macos_14: bool) -> dict[Precision, Capability]:
    """Return the capability of every precision from the version of macOS; pure."""
    return {
        "fp32": native("Metal computes in fp32."),
        "tf32": unsupported("TF32 is a mode of NVIDIA's tensor cores."),
        "bf16": native("Metal has bf16 from macOS 14 on; the measured rate shows how fast it is.")
        if is_macos_14
        else unsupported("bf16 on MPS needs macOS 14 or newer: update macOS."),
        "fp16": native("Metal computes in fp16."),
        "fp8": unsupported("Metal has no fp8."),
    }


def is_built() -> bool:
    """Return whether this PyTorch was built for MPS."""
    return torch.backends.mps.is_built()


def resolve(index: int | None) -> str:
    """Return ``mps``. Raises `DeviceError` if this build or this machine has no MPS device."""
    if not torch.backends.mps.is_available():
        raise DeviceError(
            "No MPS device: this PyTorch was built without MPS, or this Mac has no GPU that Metal can use.",
            "Pass device='cpu', or use an Apple silicon Mac with the macOS build of PyTorch.",
        )
    return name_of_single_device("mps", index)


def identity(device: str) -> DeviceIdentity:
    """Return the GPU's identity, the same as `identify` does."""
    return identify(device)


def compute_capability(_: str) -> str | None:
    """Return None: Metal has no version of the instruction set."""
    return None


def memory(_: str) -> DeviceMemory:
    """Return Metal's recommended maximum in bytes, less the allocated part, and at most the machine's free memory."""
    total = torch.mps.recommended_max_memory()
    free = max(0, total - torch.mps.driver_allocated_memory())
    return DeviceMemory(total=total, free=free, available=min(free, host.available_memory_bytes()))


def capabilities(_: str) -> dict[Precision, Capability]:
    """Return the capability of every precision from the version of macOS; `autocast("mps")` can be made on any."""
    return decide(is_macos_14=torch.backends.mps.is_macos_or_newer(14, 0))


def notes(_: str) -> tuple[str, ...]:
    """Return no notes: Metal reports nothing about other processes."""
    return ()
