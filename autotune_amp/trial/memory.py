"""Memory of a trial: its peak, its limit, and the heap that it keeps. `judge` decides whether it ran out of memory."""

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
    """CPU memory taken by building the model: the part that stays resident, and the peak."""

    resident_bytes: int
    peak_bytes: int


def build_with_memory(build: Callable[[], Built]) -> tuple[Built, BuildMemory]:
    """Call `build` and return its result and the memory that it took."""
    _forget_peak()
    held, own = psutil.Process().memory_info().rss, _own_resident_bytes()
    built = build()
    peak = _peak_resident_bytes() - held if _IS_LINUX else 0
    _trim_heap()  # memory that building freed is not the model's
    resident_bytes = max(0, _own_resident_bytes() - own)
    return built, BuildMemory(resident_bytes, max(resident_bytes, peak))


class PeakMemory:
    """Watch of one device's peak memory, from its creation on.

    `limit_bytes` is the memory that the trial may take beyond the process's present memory. A model that exists already
    counts as the trial's: `build_memory` is the memory that building it took. `template_file_bytes` is the resident
    memory mapped from files in the process that this one was forked from: a fork begins without it, a process of its
    own would have it.
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
            _forget_peak()  # drop the peak of a kept worker's earlier trial
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
        """Record the current use on devices that keep no peak of their own (MPS)."""
        if self._device.type == "mps":
            self._polled = max(self._polled, _module(self._device).driver_allocated_memory())

    def peak_bytes(self) -> tuple[int, int]:
        """Return the peak to report and the memory that counts against the limit.

        On a CPU they are resident sizes; for a fork, those that a process of its own would have. On an accelerator they
        are allocated and reserved memory.
        """
        if self._device.type == "cpu":
            taken = max(_peak_resident_bytes() - self._resident_bytes_before, self._build_peak_bytes)
            missing = max(0, self._template_file_bytes - file_bytes())
            return self._resident_bytes_before + taken + missing, taken
        if self._device.type == "mps":
            return self._polled, self._polled
        stats = _module(self._device).memory_stats(self._device)
        return stats["allocated_bytes.all.peak"], stats["reserved_bytes.all.peak"]

    def num_allocator_retries(self) -> int:
        """Return CUDA's count of cache flushes to make room: throughput collapses as it rises (composer#1998)."""
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
    """Return the resident memory that is mapped from files, 0 if the system does not say."""
    return _status_bytes("RssFile") if _IS_LINUX else 0


def _own_resident_bytes() -> int:
    """Return the resident memory without files mapped into it, of which a forked child has only a part."""
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
    """Make an allocation beyond the limit fail cleanly, before it triggers the kernel's OOM killer.

    RLIMIT_DATA counts only private writable memory, while RLIMIT_AS counts merely reserved memory too.
    """
    import resource

    allowed = _status_bytes("VmData") + limit_bytes
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (allowed if hard < 0 else min(allowed, hard), hard))


# -- the heap ----------------------------------------------------------------------------------------------------------

# If freed blocks are reused instead of returned to the system and faulted in again at every step, a forked process and
# a fresh one agree, steps on a CPU are up to 1.6 times faster, and processes differ by a few percent
# (studies/README.md). mallopt(3): M_MMAP_THRESHOLD and M_TRIM_THRESHOLD.
_MALLOPT = {-3: 2**30, -1: 2**31 - 1}
HELD_HEAP_ENVIRONMENT = {"MALLOC_MMAP_THRESHOLD_": str(2**30), "MALLOC_TRIM_THRESHOLD_": str(2**31 - 1)}


def recommended_environment(device: str) -> dict[str, str]:
    """Return the environment variables to start a training run with on this device.

    Empty if they are set already or the allocator is not glibc's (musl's, or a preloaded one), which ignores them.
    """
    preloaded = os.environ.get("LD_PRELOAD", "")
    is_replaced = any(name in preloaded for name in ("jemalloc", "tcmalloc", "mimalloc"))
    is_glibc = _IS_LINUX and platform.libc_ver()[0] == "glibc" and not is_replaced
    if device != "cpu" or not is_glibc or any(name in os.environ for name in HELD_HEAP_ENVIRONMENT):
        return {}
    return dict(HELD_HEAP_ENVIRONMENT)


def hold_heap() -> None:
    """Apply to this process the settings that HELD_HEAP_ENVIRONMENT has for a process started with it."""
    libc = ctypes.CDLL(None)
    for option, value in _MALLOPT.items():
        libc.mallopt(option, value)
