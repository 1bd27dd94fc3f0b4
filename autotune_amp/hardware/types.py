"""Hardware: what the machine can do, as plain data."""

from __future__ import annotations

from typing import Literal, TypeAlias

import msgspec

from autotune_amp.config import Precision

Level: TypeAlias = Literal["native", "emulated", "unsupported"]


class Capability(msgspec.Struct, frozen=True, kw_only=True):
    """What a device can do in one precision: never a bare yes or no, always with the reason.

    `matmul_flops_per_second` is a measured matrix-product rate, None where nothing could be measured.
    """

    level: Level
    reason: str
    matmul_flops_per_second: float | None = None


class DeviceMemory(msgspec.Struct, frozen=True, kw_only=True):
    """Memory in bytes. `available` is the least of the device, the container's limit and what others leave free.

    `container_limit` is the cgroup's limit (CPU only), None where there is none. `held_by_caller` is what the
    calling process itself holds on the device.
    """

    total: int
    free: int
    available: int
    container_limit: int | None = None
    held_by_caller: int = 0


class DeviceIdentity(msgspec.Struct, frozen=True, kw_only=True):
    """What makes two machines the same for a measurement: enters the fingerprint. Read without touching the device."""

    type: str
    name: str
    index: int | None = None
    uuid: str | None = None
    driver: str | None = None
    num_cpus: int
    total_memory_bytes: int


class Hardware(msgspec.Struct, frozen=True, kw_only=True):
    """One device of this machine and what it can do. `device` is a torch device string such as ``cuda:0``."""

    device: str
    identity: DeviceIdentity
    compute_capability: str | None = None
    memory: DeviceMemory
    precisions: dict[Precision, Capability]
    notes: tuple[str, ...] = ()
