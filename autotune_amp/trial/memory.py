"""Memory of a trial: its peak, its limit, and the heap that it holds; `judge` says what is out of memory."""

from __future__ import annotations

import ctypes
import os
import platform
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import psutil

if TYPE_CHECKING:
    import torch

_STATUS = Path("/proc/self/status")
_IS_LINUX = sys.platform == "linux"
Built = TypeVar("Built")


class BuildMemory(NamedTuple):
    """What building took of a CPU's memory: what it left resident, and its peak."""

    resident_bytes: int
    peak_bytes: int


def watched_build(build: Callable[[], Built]) -> tuple[Built, BuildMemory]:
    """What `build` makes, and the memory that this took."""
    _forget_peak()
    held, own = psutil.Process().memory_info().rss, _own_resident_bytes()
    built = build()
    peak = _peak_resident_bytes() - held if _IS_LINUX else 0
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
        if device.type == "cpu":
            _forget_peak()  # of an earlier trial of a kept worker
            built, self._build_peak_bytes = build_memory or (0, 0)
            self._resident_bytes_before = psutil.Process().memory_info().rss - built
            if limit_bytes is not None and _IS_LINUX:
                _limit_data(max(0, limit_bytes - built))
        elif device.type in ("cuda", "xpu"):
            backend = _module(device)
            backend.reset_peak_memory_stats(device)
            if limit_bytes is not None:
                total = backend.get_device_properties(device).total_memory
                backend.set_per_process_memory_fraction(min(1.0, limit_bytes / total), device)

    def poll(self) -> None:
        """Note the present use where the device keeps no peak of its own (MPS)."""
        if self._device.type == "mps":
            self._polled = max(self._polled, _module(self._device).driver_allocated_memory())

    def peak_bytes(self) -> tuple[int, int]:
        """The peak to report and what counts against the limit: resident size on a CPU, of a fork that which a process
        of its own would have, allocated and reserved memory on an accelerator."""
        if self._device.type == "cpu":
            taken = max(_peak_resident_bytes() - self._resident_bytes_before, self._build_peak_bytes)
            missing = max(0, self._template_file_bytes - file_bytes())
            return self._resident_bytes_before + taken + missing, taken
        if self._device.type == "mps":
            return self._polled, self._polled
        stats = _module(self._device).memory_stats(self._device)
        return stats["allocated_bytes.all.peak"], stats["reserved_bytes.all.peak"]

    def num_allocator_retries(self) -> int:
        """CUDA's count of flushes to make room: throughput collapses as it rises (composer#1998)."""
        if self._device.type != "cuda":
            return 0
        return int(_module(self._device).memory_stats(self._device)["num_alloc_retries"])


def _module(device: torch.device) -> Any:
    import torch

    return torch.get_device_module(device)


def _trim_heap() -> None:
    if _IS_LINUX:
        ctypes.CDLL(None).malloc_trim(0)


def _forget_peak() -> None:
    _trim_heap()
    if _IS_LINUX:
        Path("/proc/self/clear_refs").write_text("5")  # VmHWM, which a fork inherits


def file_bytes() -> int:
    """Resident memory that is mapped from files, 0 where the system does not say."""
    return _status_bytes("RssFile") if _IS_LINUX else 0


def _own_resident_bytes() -> int:
    """Resident memory without what is mapped from files, which a forked child has only in part."""
    return _status_bytes("RssAnon") if _IS_LINUX else psutil.Process().memory_info().rss


def _status_bytes(name: str) -> int:
    line = next(line for line in _STATUS.read_text().splitlines() if line.startswith(f"{name}:"))
    return int(line.split()[1]) * 1024


def _peak_resident_bytes() -> int:
    if _IS_LINUX:
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


# -- the heap ----------------------------------------------------------------------------------------------------------

# Where freed blocks are reused rather than returned to the system and faulted in again at every step, a forked process
# and a fresh one agree, steps on a CPU are up to 1.6 times faster and processes differ by a few percent
# (studies/README.md). mallopt(3): M_MMAP_THRESHOLD and M_TRIM_THRESHOLD.
_MALLOPT = {-3: 2**30, -1: 2**31 - 1}
HELD_HEAP_ENVIRONMENT = {"MALLOC_MMAP_THRESHOLD_": str(2**30), "MALLOC_TRIM_THRESHOLD_": str(2**31 - 1)}


def recommended_environment(device: str) -> dict[str, str]:
    """The variables to start a training on this device with; none where they are set already, or mean nothing to an
    allocator that is not glibc's own (musl's, or one preloaded)."""
    preloaded = os.environ.get("LD_PRELOAD", "")
    is_replaced = any(name in preloaded for name in ("jemalloc", "tcmalloc", "mimalloc"))
    is_glibc = _IS_LINUX and platform.libc_ver()[0] == "glibc" and not is_replaced
    if device != "cpu" or not is_glibc or any(name in os.environ for name in HELD_HEAP_ENVIRONMENT):
        return {}
    return dict(HELD_HEAP_ENVIRONMENT)


def hold_heap() -> None:
    """Do to this process what HELD_HEAP_ENVIRONMENT does to one that starts with it."""
    libc = ctypes.CDLL(None)
    for option, value in _MALLOPT.items():
        libc.mallopt(option, value)
