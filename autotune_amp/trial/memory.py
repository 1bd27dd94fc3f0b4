"""Memory of a trial: its peak and its limit, and malloc settings that keep freed memory in the heap."""

from __future__ import annotations

import contextlib
import ctypes
import os
import platform
import resource
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import psutil

from autotune_amp.core.config import ALLOCATOR_VARIABLES

if TYPE_CHECKING:
    import torch

_STATUS, _CLEAR_REFS = Path("/proc/self/status"), Path("/proc/self/clear_refs")
_IS_LINUX = sys.platform == "linux"
Built = TypeVar("Built")


class BuildMemory(NamedTuple):
    """CPU memory that building the model took: the part that stays resident, and the peak."""

    resident_bytes: int
    peak_bytes: int


def build_with_memory(build: Callable[[], Built]) -> tuple[Built, BuildMemory]:
    """Call `build` and return its result and the memory that it took."""
    has_reset = _reset_peak()
    rss_before, anonymous_before = _resident_bytes(), _own_resident_bytes()
    built = build()
    peak = _peak_resident_bytes() - rss_before if has_reset else 0
    _trim_heap()  # freed memory is not the model's
    resident_bytes = max(0, _own_resident_bytes() - anonymous_before)
    return built, BuildMemory(resident_bytes, max(resident_bytes, peak))


class PeakMemory:
    """Meter of a device's peak memory, which begins when it is created.

    `limit_bytes` is the memory that the trial may take: on an accelerator that of the whole process, on a CPU that in
    addition to the process's present memory, where a model that was built before, with its `build_memory`, counts as
    the trial's. `template_file_bytes` is the resident memory mapped from files in the process that this one was forked
    from: a fork begins without it, a training run has it.

    Only Linux resets the peak of a process, and some sandboxes do not (gVisor). Elsewhere a trial on a CPU that takes
    less than an earlier one of the same process has the largest size seen after a step, which is a lower bound.
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
        self._polled_peak_bytes = 0
        if device.type == "cpu":
            # An earlier trial of a kept worker may have reached it.
            self._earlier_peak_bytes = 0 if _reset_peak() else _peak_resident_bytes()
            model_bytes, self._build_peak_bytes = build_memory or (0, 0)
            self._resident_bytes_before = _resident_bytes() - model_bytes
            if limit_bytes is not None:
                _limit_data_segment(max(0, limit_bytes - model_bytes))
        elif device.type in ("cuda", "xpu"):
            backend = _device_module(device)
            backend.reset_peak_memory_stats(device)
            if limit_bytes is not None:
                total = backend.get_device_properties(device).total_memory
                set_memory_share(device, min(1.0, limit_bytes / total))

    def poll(self) -> None:
        """Record the current use on devices that keep no peak of their own (MPS, and a CPU whose peak is not reset)."""
        present_bytes = 0
        if self._device.type == "mps":
            present_bytes = allocator_bytes(self._device)
        elif self._device.type == "cpu" and self._earlier_peak_bytes:
            present_bytes = _resident_bytes()
        self._polled_peak_bytes = max(self._polled_peak_bytes, present_bytes)

    def peak_bytes(self) -> tuple[int, int]:
        """Return the peak to report and the memory that counts against the limit.

        On a CPU they are resident sizes; for a fork, those of a process that was not forked. On an accelerator they are
        allocated and reserved memory.
        """
        if self._device.type == "cpu":
            peak_bytes = _peak_resident_bytes()
            if peak_bytes <= self._earlier_peak_bytes:
                peak_bytes = self._polled_peak_bytes
            taken_bytes = max(peak_bytes - self._resident_bytes_before, self._build_peak_bytes)
            missing_file_bytes = max(0, self._template_file_bytes - file_bytes())
            return self._resident_bytes_before + taken_bytes + missing_file_bytes, taken_bytes
        if self._device.type == "mps":
            return self._polled_peak_bytes, self._polled_peak_bytes
        stats = _device_module(self._device).memory_stats(self._device)
        return stats["allocated_bytes.all.peak"], stats["reserved_bytes.all.peak"]

    def num_allocator_retries(self) -> int:
        """Return how often CUDA's allocator flushed its cache to make room, which slows training (composer#1998)."""
        if self._device.type != "cuda":
            return 0
        return int(_device_module(self._device).memory_stats(self._device)["num_alloc_retries"])


def set_memory_share(device: torch.device, share: float) -> None:
    """Limit this process to a share of an accelerator's memory, if `can_be_limited`. torch 2.9 cannot limit XPUs."""
    backend = _device_module(device)
    if can_be_limited(os.environ) and hasattr(backend, "set_per_process_memory_fraction"):
        backend.set_per_process_memory_fraction(share, None if device.index is None else device)


def can_be_limited(environment: Mapping[str, str]) -> bool:
    """Whether a limit of its memory leaves a process with this environment as a training run is.

    It does not with a `garbage_collection_threshold`, which CUDA's allocator uses only in a process with such a limit.
    """
    return not any("garbage_collection_threshold" in environment.get(name, "") for name in ALLOCATOR_VARIABLES)


def allocator_bytes(device: torch.device) -> int:
    """Return the memory that this process's allocator holds on an accelerator, 0 for a CPU."""
    if device.type == "cpu":
        return 0
    module = _device_module(device)
    return int(module.driver_allocated_memory() if device.type == "mps" else module.memory_reserved(device))


def _device_module(device: torch.device) -> Any:
    import torch

    return torch.get_device_module(device)


def _trim_heap() -> None:
    if _IS_LINUX:
        ctypes.CDLL(None).malloc_trim(0)


def _reset_peak() -> bool:
    """Reset this process's peak of resident memory, which a fork inherits, and return whether the kernel does that."""
    _trim_heap()
    with contextlib.suppress(OSError):
        _CLEAR_REFS.write_text("5")
        return "VmHWM" in _status_bytes()
    return False


def file_bytes() -> int:
    """Return the resident memory that is mapped from files, 0 if it is unknown (other systems than Linux)."""
    return _status_bytes().get("RssFile", 0)


def _own_resident_bytes() -> int:
    """Return the resident memory without that mapped from files, of which a forked child has only a part.

    It is all resident memory if that part is unknown.
    """
    return _status_bytes().get("RssAnon") or _resident_bytes()


def _resident_bytes() -> int:
    return int(psutil.Process().memory_info().rss)


def _status_bytes() -> dict[str, int]:
    """Return what Linux reports of this process's memory, by its name in /proc/self/status; elsewhere nothing."""
    with contextlib.suppress(OSError):
        entries = (line.split() for line in _STATUS.read_text().splitlines() if line.endswith(" kB"))
        return {name.rstrip(":"): int(kibibytes) * 1024 for name, kibibytes, _ in entries}
    return {}


def _peak_resident_bytes() -> int:
    """Return the peak of the resident memory since it was reset, or of this process's life if it cannot be."""
    peak_bytes = _status_bytes().get("VmHWM")
    if peak_bytes is not None:
        return peak_bytes
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1024 if _IS_LINUX else 1)  # bytes on macOS


def _limit_data_segment(limit_bytes: int) -> None:
    """Make an allocation beyond the limit fail cleanly, before it triggers the kernel's OOM killer.

    RLIMIT_DATA counts only private writable memory, while RLIMIT_AS counts merely reserved memory too.
    """
    data_bytes = _status_bytes().get("VmData")
    if data_bytes is None:  # on macOS
        return
    allowed = data_bytes + limit_bytes
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (allowed if hard < 0 else min(allowed, hard), hard))


# -- the heap ----------------------------------------------------------------------------------------------------------

# With these settings malloc reuses freed blocks, instead of returning them to the system and faulting them in again at
# every step: steps on a CPU are up to 1.6 times faster, and forked and fresh processes differ by a few percent only
# (studies/README.md). Numbers of options from mallopt(3): M_MMAP_THRESHOLD is -3, M_TRIM_THRESHOLD is -1.
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
    """Make malloc keep freed memory in this process, as HELD_HEAP_ENVIRONMENT does for a process started with it."""
    libc = ctypes.CDLL(None)
    for option, value in _MALLOPT.items():
        libc.mallopt(option, value)
