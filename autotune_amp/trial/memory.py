"""Peak memory of a trial, and the limit it runs under: one way for each kind of device."""

from __future__ import annotations

import ctypes
import sys
from pathlib import Path

import psutil
import torch

_STATUS = Path("/proc/self/status")


class PeakMemory:
    """Watches one device from its creation on.

    `limit_bytes` is what the trial may take beyond `resident_bytes_before`, by default what the process holds now; a
    kept worker passes what it held before it built the model, so that each of its trials counts the model.
    """

    def __init__(self, device: torch.device, limit_bytes: int | None, resident_bytes_before: int | None) -> None:
        self._device = device
        self._limit_bytes = limit_bytes
        self._polled = 0
        if device.type == "cpu":
            if sys.platform == "linux":
                ctypes.CDLL(None).malloc_trim(0)  # what an earlier trial of a kept worker left in the heap
                Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM, which a fork inherits
            held = psutil.Process().memory_info().rss
            self.resident_bytes_before = held if resident_bytes_before is None else resident_bytes_before
            if limit_bytes is not None and sys.platform == "linux":
                _limit_data(limit_bytes)
        else:
            self.resident_bytes_before = 0
            if device.type in ("cuda", "xpu"):
                backend = getattr(torch, device.type)
                backend.reset_peak_memory_stats(device)
                if limit_bytes is not None:
                    total = backend.get_device_properties(device).total_memory
                    backend.set_per_process_memory_fraction(min(1.0, limit_bytes / total), device)

    def poll(self) -> None:
        """Note the present use where the device keeps no peak of its own (MPS)."""
        if self._device.type == "mps":
            self._polled = max(self._polled, torch.mps.driver_allocated_memory())

    def peak_bytes(self) -> tuple[int, int]:
        """The peak to report and what counts against the limit: resident size on a CPU, allocated and reserved
        memory on an accelerator."""
        if self._device.type == "cpu":
            peak = _peak_resident_bytes()
            return peak, peak - self.resident_bytes_before
        if self._device.type == "mps":
            return self._polled, self._polled
        stats = getattr(torch, self._device.type).memory_stats(self._device)
        return stats["allocated_bytes.all.peak"], stats["reserved_bytes.all.peak"]

    def is_over_limit(self) -> bool:
        """Whether the limit was passed, whether or not anything raised."""
        return self._limit_bytes is not None and self.peak_bytes()[1] > self._limit_bytes

    def num_allocator_retries(self) -> int:
        """CUDA's count of flushes to make room: throughput collapses as it rises (composer#1998)."""
        if self._device.type != "cuda":
            return 0
        return int(torch.cuda.memory_stats(self._device)["num_alloc_retries"])


def _peak_resident_bytes() -> int:
    if sys.platform == "linux":
        for line in _STATUS.read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    if sys.platform == "win32":
        return int(psutil.Process().memory_info().peak_wset)
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # bytes on macOS


def _limit_data(limit_bytes: int) -> None:
    """Make an allocation beyond the limit fail cleanly instead of waking the kernel's OOM killer.

    RLIMIT_DATA counts private writable memory alone, where RLIMIT_AS counts what is merely reserved.
    """
    import resource

    data = next(line for line in _STATUS.read_text().splitlines() if line.startswith("VmData:"))
    allowed = int(data.split()[1]) * 1024 + limit_bytes
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (allowed if hard < 0 else min(allowed, hard), hard))
