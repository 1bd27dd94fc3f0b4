"""identify(): which device this is, in milliseconds, in any process."""

from __future__ import annotations

import os
import re
import sys
from importlib.util import find_spec
from pathlib import Path

from autotune_amp.core.hardware import DeviceIdentity
from autotune_amp.hardware import host, nvml
from autotune_amp.hardware.device import parse
from autotune_amp.hardware.host import container_cpus, container_memory


def identify(device: str = "auto") -> DeviceIdentity:
    """The static identity of a device, without importing torch and without touching an accelerator.

    A device that cannot be seen this way (no NVML, ROCm, XPU) is named "unknown" with 0 bytes: what can be used is
    `measure`'s business. `auto` is the NVIDIA card that this PyTorch is built for and that is visible, else Apple's,
    else the CPU; ROCm and XPU must be named. A fingerprint is to be made of this on both sides, not of
    `Hardware.identity`. Raises `DeviceError` only for what is no device name.
    """
    kind, index = parse(device)
    if kind == "auto":
        kind = _auto()
    if kind == "cpu":
        return cpu()
    if kind == "mps":
        return mps()
    is_nvidia = kind == "cuda" and not _torch_is_built_for("hip")
    uuids = nvml.visible_uuids() if is_nvidia else ()
    index = index or 0
    return cuda(index, uuids[index]) if index < len(uuids) else unknown(kind, index)


def cpu() -> DeviceIdentity:
    """The CPU with the memory that this process may use of the machine's."""
    container = container_memory()
    total = host.total_memory_bytes()
    return DeviceIdentity(
        type="cpu",
        name=host.cpu_name(),
        num_cpus=host.num_cpus(),
        allowed_cpus=container_cpus(),
        total_memory_bytes=total if container is None else min(total, container.limit),
    )


def mps() -> DeviceIdentity:
    """Apple's GPU: it has the CPU's name and memory; what of the memory it may use is `measure`'s business."""
    import platform

    return DeviceIdentity(
        type="mps",
        name=host.cpu_name(),
        driver=platform.mac_ver()[0] or None,
        num_cpus=host.num_cpus(),
        total_memory_bytes=host.total_memory_bytes(),
    )


def cuda(index: int, uuid: str) -> DeviceIdentity:
    """The NVIDIA card of a UUID, as NVML names it."""
    card = nvml.card(uuid)
    if card is None:
        return unknown("cuda", index)
    return DeviceIdentity(
        type="cuda",
        name=card.name,
        index=index,
        uuid=card.uuid,
        driver=card.driver,
        num_cpus=host.num_cpus(),
        allowed_cpus=container_cpus(),
        total_memory_bytes=card.total_memory_bytes,
    )


def unknown(kind: str, index: int) -> DeviceIdentity:
    """A device that nothing but its own runtime can see."""
    return DeviceIdentity(type=kind, name="unknown", index=index, num_cpus=host.num_cpus(), total_memory_bytes=0)


def _auto() -> str:
    if _torch_is_built_for("cuda") and nvml.visible_uuids():
        return "cuda"
    if sys.platform == "darwin" and os.uname().machine == "arm64":
        return "mps"
    return "cpu"


def _torch_is_built_for(toolkit: str) -> bool:
    """By torch's own version file: a CPU build beside an NVIDIA card measures the CPU."""
    spec = find_spec("torch")
    if spec is None or spec.origin is None:
        return False
    return names_version(toolkit, Path(spec.origin).with_name("version.py").read_text())


def names_version(toolkit: str, version_file: str) -> bool:
    """Whether the text of torch/version.py names a version of the toolkit, ``cuda`` or ``hip``."""
    return re.search(rf"^{toolkit}\b[^=]*= *['\"]", version_file, re.MULTILINE) is not None
