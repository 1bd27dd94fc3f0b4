"""Queries to NVIDIA's management library (NVML), which create no CUDA context.

GPUs are identified by UUID: NVML counts them by PCI bus, CUDA by CUDA_VISIBLE_DEVICES.
"""

from __future__ import annotations

import ctypes
import os
import re
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

from autotune_amp.core.hardware import DeviceIdentity
from autotune_amp.hardware import host

# Bits of the clock event reasons that lower a GPU's clocks (nvml.h, nvmlClocksEventReason*).
_SLOWDOWNS = {
    0x08: "hardware slowdown (heat or power)",
    0x20: "heat, limited by the driver",
    0x40: "heat, limited by the GPU",
    0x80: "power brake, requested by the server",
}


def visible_uuids() -> tuple[str, ...]:
    """Return the UUIDs of the GPUs that CUDA may use, by CUDA index; empty without an NVIDIA driver.

    GPUs of different models may have another order in CUDA, fastest first, unless CUDA_DEVICE_ORDER is PCI_BUS_ID.
    """
    return select_visible(host_uuids(), os.environ.get("CUDA_VISIBLE_DEVICES"))


def host_uuids() -> tuple[str, ...]:
    """Return the UUIDs of all GPUs of this host, by PCI bus; empty without an NVIDIA driver."""
    handles = [_query("nvmlDeviceGetHandleByIndex", index) for index in range(_query("nvmlDeviceGetCount") or 0)]
    uuids = [_query("nvmlDeviceGetUUID", handle) for handle in handles if handle is not None]
    return tuple(uuid for uuid in uuids if uuid is not None)


def select_visible(uuids: Sequence[str], visible: str | None) -> tuple[str, ...]:
    """Return the GPUs that a value of CUDA_VISIBLE_DEVICES selects, in its order; None: the variable is not set.

    CUDA's rules: the first entry that names no GPU ends the list, a GPU named twice empties it, an index ends at its
    first letter, a UUID may be shortened while it stays unique. MIG instances are passed through as named.
    """
    if visible is None:
        return tuple(uuids)
    selected: list[str] = []
    for entry in visible.split(","):
        uuid = _uuid_of_entry(entry.strip(), uuids)
        if uuid is None:
            break
        if uuid in selected:
            return ()
        selected.append(uuid)
    return tuple(selected)


def _uuid_of_entry(entry: str, uuids: Sequence[str]) -> str | None:
    if entry.startswith("MIG-"):
        return entry
    if entry.startswith("GPU-"):
        matches = [uuid for uuid in uuids if uuid.startswith(entry)]
        return matches[0] if len(matches) == 1 else None
    number = re.match(r"\+?\d+", entry)
    return uuids[int(number[0])] if number and int(number[0]) < len(uuids) else None


def identity(index: int, uuid: str) -> DeviceIdentity | None:
    """Return the identity of the GPU with this UUID, with or without the prefix GPU- or MIG-; None if NVML has none.

    Memory is 0 for a GPU that shares the machine's.
    """
    handle = _device_handle(uuid)
    if handle is None:
        return None
    memory = _query("nvmlDeviceGetMemoryInfo", handle)
    return DeviceIdentity(
        type="cuda",
        name=_query("nvmlDeviceGetName", handle) or "unknown",
        index=index,
        uuid=_query("nvmlDeviceGetUUID", handle) or uuid,
        driver=_query("nvmlSystemGetDriverVersion"),
        num_cpus=host.num_cpus(),
        allowed_cpus=host.container_cpus(),
        total_memory_bytes=0 if memory is None else int(memory.total),
    )


def process_notes(uuid: str) -> tuple[str, ...]:
    """Return a warning for each other process that computes on the GPU, with its memory if the driver reports it.

    This process and its ancestors, which wait for it, are left out.
    """
    own_pids = {os.getpid(), *ancestors()}
    return tuple(
        f"Process {pid} holds {'memory' if num_bytes is None else f'{num_bytes / 2**30:.1f} GiB'} on this GPU: its "
        "work slows the measurement. In a container it may be the calling process, under another number."
        for pid, num_bytes in processes(uuid) or ()
        if pid not in own_pids
    )


def held_by_caller(uuid: str) -> int:
    """Return the bytes that the ancestors of this process hold on the GPU, as far as the driver reports them."""
    caller_pids = ancestors()
    return sum(num_bytes or 0 for pid, num_bytes in processes(uuid) or () if pid in caller_pids)


def ancestors() -> set[int]:
    """Return the process ids of the ancestors of this process."""
    import psutil  # its import takes longer than `identify` may take

    return {process.pid for process in psutil.Process().parents()}


def processes(uuid: str) -> tuple[tuple[int, int | None], ...] | None:
    """Return (pid, bytes held) of all processes that compute on the GPU, this one too; None if the driver has no list.

    Inside a container the process ids may be the host's.
    """
    handle = _device_handle(uuid)
    running = None if handle is None else _query("nvmlDeviceGetComputeRunningProcesses", handle)
    return None if running is None else tuple((process.pid, process.usedGpuMemory) for process in running)


class GpuSensors(NamedTuple):
    """Present readings of a GPU's sensors; None for those that the driver does not report.

    `slowdowns` are the reasons why the GPU runs below its clocks, empty if it does not.
    """

    temperature_celsius: int | None = None
    sm_clock_mhz: int | None = None
    power_watts: float | None = None
    slowdowns: tuple[str, ...] | None = None


def read_sensors(uuid: str) -> GpuSensors:
    """Return the sensors' present readings; for a MIG instance those of the whole GPU."""
    handle = _sensor_handle(uuid)
    if handle is None:
        return GpuSensors()
    milliwatts = _query("nvmlDeviceGetPowerUsage", handle)
    return GpuSensors(
        # NVML_TEMPERATURE_GPU is 0, NVML_CLOCK_SM is 1 (nvml.h).
        temperature_celsius=_query("nvmlDeviceGetTemperature", handle, 0),
        sm_clock_mhz=_query("nvmlDeviceGetClockInfo", handle, 1),
        power_watts=None if milliwatts is None else milliwatts / 1e3,
        slowdowns=_slowdowns(handle),
    )


def slowdown_names(uuid: str) -> tuple[str, ...] | None:
    """Return the reasons why the GPU runs below its clocks at present; None if the driver does not report them."""
    handle = _sensor_handle(uuid)
    return None if handle is None else _slowdowns(handle)


def _slowdowns(handle: Any) -> tuple[str, ...] | None:
    # The former name of nvmlDeviceGetCurrentClocksEventReasons, which old drivers have too.
    reasons = _query("nvmlDeviceGetCurrentClocksThrottleReasons", handle)
    return None if reasons is None else tuple(name for bit, name in _SLOWDOWNS.items() if reasons & bit)


def energy_joules(uuid: str) -> float | None:
    """Return the energy in joules drawn since the driver was loaded; None without a counter, as on MIG instances."""
    handle = _device_handle(uuid)
    millijoules = None if handle is None else _query("nvmlDeviceGetTotalEnergyConsumption", handle)
    return None if millijoules is None else millijoules / 1e3


def _device_handle(uuid: str) -> Any | None:
    names = (uuid,) if uuid.startswith(("GPU-", "MIG-")) else (f"GPU-{uuid}", f"MIG-{uuid}")
    handles = (_query("nvmlDeviceGetHandleByUUID", name) for name in names)
    return next((handle for handle in handles if handle is not None), None)


def _sensor_handle(uuid: str) -> Any | None:
    """Return the handle of the GPU that has the sensors: a MIG instance has none of its own."""
    handle = _device_handle(uuid)
    whole_gpu = None if handle is None else _query("nvmlDeviceGetDeviceHandleFromMigDeviceHandle", handle)
    return handle if whole_gpu is None else whole_gpu


def _query(function: str, *arguments: object) -> Any | None:
    """Call an NVML function; None without NVML or if it fails, as with old drivers, containers and integrated GPUs."""
    nvml = _library()
    if nvml is None:
        return None
    try:
        return getattr(nvml, function)(*arguments)
    except nvml.NVMLError:
        return None


@lru_cache(maxsize=1)
def _library() -> Any | None:
    """Return the pynvml module, initialised once per process, or None without NVML."""
    try:
        # Importing pynvml takes 30 ms, which machines without a GPU need not spend.
        ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return None
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return None
    return pynvml
