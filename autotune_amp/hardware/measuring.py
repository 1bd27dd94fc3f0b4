"""measure(): everything about one device, by using it. Belongs into a child process."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
import torch

from autotune_amp.core.config import PRECISIONS
from autotune_amp.core.errors import DeviceError
from autotune_amp.core.hardware import Capability, Hardware
from autotune_amp.hardware import matmul
from autotune_amp.hardware.device import DEVICES, device_of, parse
from autotune_amp.hardware.identity import identify

if TYPE_CHECKING:
    from autotune_amp.core.config import Precision
    from autotune_amp.hardware.device import Device


def measure(device: str, *, seconds: float = 1.0) -> Hardware:
    """The device, its memory, and each precision's level, reason and matrix-product rate.

    `auto` is the NVIDIA card that `identify` sees, else the first of cuda, xpu, mps and cpu that can be used; a note
    says why it is not one that this PyTorch was built for. `seconds` is shared by the micro-benchmarks of all
    precisions, not counting the start of the device. Raises `DeviceError` with the reason where the device asked for
    cannot be used.
    """
    kind, name, passed_over = _resolve(device)
    notes = (*passed_over, *kind.notes_before(name))  # before the rest makes the device busy
    memory = kind.memory(name)
    precisions = {
        precision: _with_rate(
            capability, name, precision, seconds=seconds / len(PRECISIONS), max_bytes=memory.available // 10
        )
        for precision, capability in kind.capabilities(name).items()
    }
    return Hardware(
        device=name,
        identity=kind.identity(name),
        compute_capability=kind.compute_capability(name),
        memory=memory,
        precisions=precisions,
        notes=(*notes, *kind.notes_after(name)),
    )


def make_current(device: str) -> None:
    """Have "cuda" and .cuda() in this thread mean a device named by a number above 0; others are what they mean anyway.

    No driver is started for those: code that is yet to run may say which devices it shows. Raises `DeviceError` where
    there is no such device.
    """
    kind, index = parse(device)
    if index:
        torch.accelerator.set_device_index(device_of(kind).resolve(index))


def _resolve(device: str) -> tuple[Device, str, tuple[str, ...]]:
    """What answers for it, the device string, and why `auto` passed over an accelerator."""
    kind, index = parse(device)
    if kind == "auto" and identify(device).type == "cuda":
        kind = "cuda"  # a card that cannot be used is an error: another device's answer would be filed under its name
    if kind != "auto":
        return device_of(kind), device_of(kind).resolve(index), ()
    passed_over: list[str] = []
    *accelerators, last = map(device_of, DEVICES)
    for found in accelerators:
        if found.is_built():
            try:
                return found, found.resolve(None), tuple(passed_over)
            except DeviceError as error:
                passed_over.append(error.message)
    return last, last.resolve(None), tuple(passed_over)


def _with_rate(
    capability: Capability, device: str, precision: Precision, *, seconds: float, max_bytes: int
) -> Capability:
    if capability.level == "unsupported":
        return capability
    try:
        rate = matmul.flops_per_second(device, precision, seconds=seconds, max_bytes=max_bytes)
    except torch.OutOfMemoryError:
        return msgspec.structs.replace(
            capability, reason=f"{capability.reason} Its rate was not measured: too little memory is free."
        )
    except RuntimeError as error:
        return Capability(
            level="unsupported", reason=f"PyTorch cannot multiply matrices in it here: {str(error).splitlines()[0]}"
        )
    return msgspec.structs.replace(capability, matmul_flops_per_second=rate)
