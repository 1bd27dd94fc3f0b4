"""Peak memory of a trial, and the limit it runs under: one way for each kind of device."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple, TypeVar

import psutil
import torch

_STATUS = Path("/proc/self/status")
_SHORT_SHARE = 0.1
Built = TypeVar("Built")


class BuildMemory(NamedTuple):
    """What building took of a CPU's memory: what it left resident, and its peak."""

    resident_bytes: int
    peak_bytes: int


def watched_build(build: Callable[[], Built]) -> tuple[Built, BuildMemory]:
    """What `build` makes, and the memory that this took."""
    is_linux = sys.platform == "linux"
    if is_linux:
        _trim_heap()
        _reset_peak()
    held, own = psutil.Process().memory_info().rss, _own_resident_bytes()
    built = build()
    peak = _peak_resident_bytes() - held if is_linux else 0
    if is_linux:
        _trim_heap()  # what building freed is not the model's
    resident_bytes = max(0, _own_resident_bytes() - own)
    return built, BuildMemory(resident_bytes, max(resident_bytes, peak))


class PeakMemory:
    """Watches one device from its creation on.

    `limit_bytes` is what the trial may take beyond what the process holds now. A model that is there already counts
    as the trial's: `build_memory` is what building it took. `template_file_bytes` is what the process that this one was
    forked from has of mapped files: a fork begins without them, though a process of its own would have them.
    """

    def __init__(
        self,
        device: torch.device,
        limit_bytes: int | None,
        build_memory: BuildMemory | None = None,
        template_file_bytes: int = 0,
    ) -> None:
        self._device = device
        self._template_file_bytes = template_file_bytes
        self._polled = 0
        self._resident_bytes_before = 0
        self._build_peak_bytes = 0
        if device.type == "cpu":
            if sys.platform == "linux":
                _trim_heap()  # what an earlier trial of a kept worker left
                _reset_peak()
            built, self._build_peak_bytes = build_memory or (0, 0)
            self._resident_bytes_before = psutil.Process().memory_info().rss - built
            if limit_bytes is not None and sys.platform == "linux":
                _limit_data(max(0, limit_bytes - built))
        elif device.type in ("cuda", "xpu"):
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
        """The peak to report and what counts against the limit: resident size on a CPU, of a fork that which a process
        of its own would have, allocated and reserved memory on an accelerator."""
        if self._device.type == "cpu":
            taken = max(_peak_resident_bytes() - self._resident_bytes_before, self._build_peak_bytes)
            missing = max(0, self._template_file_bytes - file_bytes())
            return self._resident_bytes_before + taken + missing, taken
        if self._device.type == "mps":
            return self._polled, self._polled
        stats = getattr(torch, self._device.type).memory_stats(self._device)
        return stats["allocated_bytes.all.peak"], stats["reserved_bytes.all.peak"]

    def num_allocator_retries(self) -> int:
        """CUDA's count of flushes to make room: throughput collapses as it rises (composer#1998)."""
        if self._device.type != "cuda":
            return 0
        return int(torch.cuda.memory_stats(self._device)["num_alloc_retries"])


def is_memory_short() -> bool:
    """Whether less than a tenth of what this process may take of the current CUDA device is left, or once was."""
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]  # torch does not type it
        return False
    try:
        free, total = torch.cuda.mem_get_info()
    except RuntimeError:  # an error of the card itself, which all its calls repeat
        return False
    allowed = total * torch.cuda.memory.get_per_process_memory_fraction()
    return min(free, allowed - torch.cuda.max_memory_reserved()) < _SHORT_SHARE * allowed


def _trim_heap() -> None:
    ctypes.CDLL(None).malloc_trim(0)


def _reset_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")  # VmHWM, which a fork inherits


def file_bytes() -> int:
    """Resident memory that is mapped from files, 0 where the system does not say."""
    return _status_bytes("RssFile") if sys.platform == "linux" else 0


def _own_resident_bytes() -> int:
    """Resident memory without what is mapped from files, which a forked child has only in part."""
    if sys.platform == "linux":
        return _status_bytes("RssAnon")
    return psutil.Process().memory_info().rss


def _status_bytes(name: str) -> int:
    line = next(line for line in _STATUS.read_text().splitlines() if line.startswith(f"{name}:"))
    return int(line.split()[1]) * 1024


def _peak_resident_bytes() -> int:
    if sys.platform == "linux":
        return _status_bytes("VmHWM")
    if sys.platform == "win32":
        return int(psutil.Process().memory_info().peak_wset)
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # bytes on macOS


def _limit_data(limit_bytes: int) -> None:
    """Make an allocation beyond the limit fail cleanly instead of waking the kernel's OOM killer.

    RLIMIT_DATA counts private writable memory alone, where RLIMIT_AS counts what is merely reserved.
    """
    import resource

    allowed = _status_bytes("VmData") + limit_bytes
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (allowed if hard < 0 else min(allowed, hard), hard))
