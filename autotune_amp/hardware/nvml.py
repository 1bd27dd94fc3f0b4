"""What NVIDIA's management library says of the cards: it creates no context on any of them.

Cards are told apart by UUID: NVML counts them by PCI bus, CUDA by CUDA_VISIBLE_DEVICES.
"""

from __future__ import annotations

import ctypes
import os
import re
import sys
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from autotune_amp.core.hardware import DeviceIdentity
from autotune_amp.hardware import host

# Bits of the clock event reasons that make a card slower than it is (nvml.h, nvmlClocksEventReason*).
_SLOWDOWNS = {
    0x08: "hardware slowdown (heat or power)",
    0x20: "heat, limited by the driver",
    0x40: "heat, limited by the card",
    0x80: "power brake, asked for by the server",
}


def visible_uuids() -> tuple[str, ...]:
    """UUIDs of the cards that CUDA may use, at their CUDA index; empty where there is no NVIDIA driver.

    Cards of different models may stand in another order in CUDA, fastest first, unless CUDA_DEVICE_ORDER is
    PCI_BUS_ID.
    """
    handles = [_ask("nvmlDeviceGetHandleByIndex", index) for index in range(_ask("nvmlDeviceGetCount") or 0)]
    uuids = [_ask("nvmlDeviceGetUUID", handle) for handle in handles if handle is not None]
    return select_visible([uuid for uuid in uuids if uuid is not None], os.environ.get("CUDA_VISIBLE_DEVICES"))


def select_visible(uuids: Sequence[str], visible: str | None) -> tuple[str, ...]:
    """The cards that a value of CUDA_VISIBLE_DEVICES leaves, in its order; None is the variable not set.

    CUDA's rules: the first entry that names no card ends the list, a card named twice empties it, an index ends at
    its first letter, a UUID may be shortened while it stays unique. MIG instances are passed through as named.
    """
    if visible is None:
        return tuple(uuids)
    chosen: list[str] = []
    for entry in visible.split(","):
        uuid = _named(entry.strip(), uuids)
        if uuid is None:
            break
        if uuid in chosen:
            return ()
        chosen.append(uuid)
    return tuple(chosen)


def _named(entry: str, uuids: Sequence[str]) -> str | None:
    if entry.startswith("MIG-"):
        return entry
    if entry.startswith("GPU-"):
        matches = [uuid for uuid in uuids if uuid.startswith(entry)]
        return matches[0] if len(matches) == 1 else None
    number = re.match(r"\+?\d+", entry)
    return uuids[int(number[0])] if number and int(number[0]) < len(uuids) else None


def identity(index: int, uuid: str) -> DeviceIdentity | None:
    """The card of a UUID, with or without its GPU- or MIG- in front; None where NVML does not know it.

    Its memory is 0 where it shares the machine's.
    """
    handle = _handle(uuid)
    if handle is None:
        return None
    memory = _ask("nvmlDeviceGetMemoryInfo", handle)
    return DeviceIdentity(
        type="cuda",
        name=_ask("nvmlDeviceGetName", handle) or "unknown",
        index=index,
        uuid=_ask("nvmlDeviceGetUUID", handle) or uuid,
        driver=_ask("nvmlSystemGetDriverVersion"),
        num_cpus=host.num_cpus(),
        allowed_cpus=host.container_cpus(),
        total_memory_bytes=0 if memory is None else int(memory.total),
    )


def process_notes(uuid: str) -> tuple[str, ...]:
    """Who else computes on the card, with the memory they hold where the driver says: neither this process nor those
    that it descends from, which wait for it."""
    ours = {os.getpid(), *ancestors()}
    return tuple(
        f"Process {pid} holds {'memory' if used is None else f'{used / 2**30:.1f} GiB'} on this card: its work slows "
        "what is measured. In a container it may be the calling one, under another number."
        for pid, used in processes(uuid) or ()
        if pid not in ours
    )


def held_by_caller(uuid: str) -> int:
    """The bytes that the processes which this one descends from hold on the card, as far as the driver says."""
    callers = ancestors()
    return sum(used or 0 for pid, used in processes(uuid) or () if pid in callers)


def ancestors() -> set[int]:
    """The numbers of the processes that this one descends from."""
    import psutil  # takes longer than `identify` may

    return {process.pid for process in psutil.Process().parents()}


def processes(uuid: str) -> tuple[tuple[int, int | None], ...] | None:
    """The processes that compute on the card, ours too, with the bytes they hold; None where the driver does not say.

    Their numbers may be the host's where this process is in a container.
    """
    handle = _handle(uuid)
    found = None if handle is None else _ask("nvmlDeviceGetComputeRunningProcesses", handle)
    return None if found is None else tuple((process.pid, process.usedGpuMemory) for process in found)


def slowdown_names(uuid: str) -> tuple[str, ...] | None:
    """Why the card runs below its clocks at this moment; None where the driver does not say."""
    handle = _handle(uuid)
    # The old name of ...ClocksEventReasons: every driver has it.
    reasons = None if handle is None else _ask("nvmlDeviceGetCurrentClocksThrottleReasons", handle)
    return None if reasons is None else tuple(name for bit, name in _SLOWDOWNS.items() if reasons & bit)


def temperature_and_clock(uuid: str) -> tuple[int | None, int | None]:
    """The card's degrees Celsius and the MHz that its multiprocessors run at; None where the driver does not say."""
    handle = _handle(uuid)
    if handle is None:
        return None, None
    # NVML_TEMPERATURE_GPU is 0, NVML_CLOCK_SM is 1 (nvml.h).
    return _ask("nvmlDeviceGetTemperature", handle, 0), _ask("nvmlDeviceGetClockInfo", handle, 1)


def energy_joules(uuid: str) -> float | None:
    """What the card has drawn since its driver was loaded; None for a card without that counter, a MIG instance too."""
    handle = _handle(uuid)
    millijoules = None if handle is None else _ask("nvmlDeviceGetTotalEnergyConsumption", handle)
    return None if millijoules is None else millijoules / 1e3


def _handle(uuid: str) -> Any | None:
    names = (uuid,) if uuid.startswith(("GPU-", "MIG-")) else (f"GPU-{uuid}", f"MIG-{uuid}")
    handles = (_ask("nvmlDeviceGetHandleByUUID", name) for name in names)
    return next((handle for handle in handles if handle is not None), None)


def _ask(function: str, *arguments: object) -> Any | None:
    """NVML's answer, None where there is no NVML or it cannot say: old drivers, containers, integrated cards."""
    nvml = _library()
    if nvml is None:
        return None
    try:
        return getattr(nvml, function)(*arguments)
    except nvml.NVMLError:
        return None


@lru_cache(maxsize=1)
def _library() -> Any | None:
    """pynvml, initialised for the life of this process, or None."""
    try:
        # Importing pynvml takes 30 ms, most machines without a card need not pay them.
        ctypes.CDLL("nvml.dll" if sys.platform == "win32" else "libnvidia-ml.so.1")
    except OSError:
        return None
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return None
    return pynvml
