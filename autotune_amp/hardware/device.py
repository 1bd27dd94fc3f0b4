"""Kinds of devices: what each answers, and what a user may write. Importing this imports no torch.

Another kind is a module with the functions of `Device` and an entry in `DEVICES`.
"""

from __future__ import annotations

import re
from importlib import import_module
from typing import TYPE_CHECKING, Any, Protocol

from autotune_amp.core.errors import DeviceError

if TYPE_CHECKING:
    from autotune_amp.core.dimensions import Precision
    from autotune_amp.core.hardware import Capability, DeviceIdentity, DeviceMemory

# The module of each kind, in the order in which `auto` tries them.
DEVICES = {kind: f"autotune_amp.hardware.{kind}" for kind in ("cuda", "xpu", "mps", "cpu")}


class Device(Protocol):
    """One kind of device: its module has these functions. A `device` is a name that `resolve` returned."""

    def is_built(self) -> bool:
        """Whether this PyTorch was built for it."""

    def resolve(self, index: int | None) -> str:
        """The device string of an index, None being the current one; raises `DeviceError` with the reason."""

    def identity(self, device: str) -> DeviceIdentity:
        """What the device is."""

    def compute_capability(self, device: str) -> str | None:
        """The maker's version of the instruction set, where there is one."""

    def memory(self, device: str) -> DeviceMemory:
        """The device's memory now, in bytes."""

    def capabilities(self, device: str) -> dict[Precision, Capability]:
        """Every precision with its level and reason, the rates not yet measured."""

    def notes_before(self, device: str) -> tuple[str, ...]:
        """What a user should know, read before the micro-benchmark makes the device busy."""

    def notes_after(self, device: str) -> tuple[str, ...]:
        """What a user should know, read while the device is warm."""


def device_of(kind: str) -> Device:
    """What answers for the devices of a kind; imports torch."""
    module: Any = import_module(DEVICES[kind])
    found: Device = module
    return found


def parse(device: str) -> tuple[str, int | None]:
    """The kind, ``auto`` or one of `DEVICES`, and the index, None where none is given.

    Raises `DeviceError` for what is no device name.
    """
    match = re.fullmatch(rf"(?P<kind>auto|{'|'.join(DEVICES)})(:(?P<index>\d+))?", device)
    if match is None or (match["kind"] == "auto" and match["index"] is not None):
        raise DeviceError(
            f"{device!r} is no device that can be measured; it must be auto, cpu, cuda, cuda:N, xpu, xpu:N or mps.",
            "Pass one of these names, or 'auto' for the first accelerator that can be used.",
        )
    return match["kind"], None if match["index"] is None else int(match["index"])


def only(kind: str, index: int | None) -> str:
    """The name of a kind of which a machine has one; raises `DeviceError` for any index but 0."""
    if index:
        raise DeviceError(
            f"{kind}:{index} was asked for, but there is only one {kind} device.", f"Pass device={kind!r}."
        )
    return kind


def numbered(kind: str, index: int, num_devices: int) -> str:
    """The name of device `index` out of `num_devices`; raises `DeviceError`, saying how many there are."""
    if index >= num_devices:
        last = f"{kind}:0" if num_devices == 1 else f"{kind}:0 to {kind}:{num_devices - 1}"
        raise DeviceError(
            f"{kind}:{index} was asked for, but PyTorch sees {num_devices} {kind} "
            f"device{'s' if num_devices > 1 else ''} here.",
            f"Pass {last}, or check the variables that hide devices (CUDA_VISIBLE_DEVICES, ZE_AFFINITY_MASK).",
        )
    return f"{kind}:{index}"
