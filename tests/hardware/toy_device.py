"""A kind of device that only tests have: what a module needs to be one, and no more."""

from __future__ import annotations

from autotune_amp.core.hardware import Capability, DeviceIdentity, DeviceMemory
from autotune_amp.core.precisions import PRECISIONS, Precision
from autotune_amp.hardware.device import name_of_single_device


def is_built() -> bool:
    return True


def resolve(index: int | None) -> str:
    name_of_single_device("toy", index)
    return "cpu"  # torch computes on it


def identity(device: str) -> DeviceIdentity:
    return DeviceIdentity(type="toy", name=device, num_cpus=1, total_memory_bytes=10)


def compute_capability(device: str) -> str | None:
    return f"of {device}"


def memory(device: str) -> DeviceMemory:
    del device
    return DeviceMemory(total=10, free=8, available=6)


def capabilities(device: str) -> dict[Precision, Capability]:
    return dict.fromkeys(PRECISIONS, Capability(level="unsupported", reason=f"{device} is a toy."))


def notes(device: str) -> tuple[str, ...]:
    return ("A toy.",)
