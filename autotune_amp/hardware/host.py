"""The machine and the container or job that this process lives in: CPUs, memory, and their limits. No torch.

Source of the limits: Linux's admin-guide/cgroup-v2 (memory.max, memory.current, cpu.max).
"""

from __future__ import annotations

import contextlib
import os
import platform
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple


def cpu_name(root: Path = Path("/")) -> str:
    """The processor's name as its maker gives it, else its architecture."""
    if sys.platform == "darwin":
        import subprocess

        return subprocess.run(
            ["/usr/sbin/sysctl", "-n", "machdep.cpu.brand_string"], capture_output=True, text=True, check=False
        ).stdout.strip()
    return _cpuinfo(root, "model name") or platform.processor() or platform.machine()


def cpu_flags(root: Path = Path("/")) -> frozenset[str]:
    """The instruction sets in /proc/cpuinfo ("flags" on x86, "Features" on ARM), empty where there is none."""
    return frozenset((_cpuinfo(root, "flags", "Features") or "").split())


def _cpuinfo(root: Path, *keys: str) -> str | None:
    """The first value of one of these keys."""
    with contextlib.suppress(OSError), (root / "proc/cpuinfo").open() as lines:
        # Line by line: the kernel makes this file up as it is read, slowly where there are hundreds of CPUs.
        for line in lines:
            key, _, value = line.partition(":")
            if key.strip() in keys:
                return value.strip()
    return None


def num_cpus() -> int:
    """How many CPUs this process may run on."""
    if sys.platform == "linux":
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def total_memory_bytes() -> int:
    """The machine's memory, whatever a container allows of it."""
    if hasattr(os, "sysconf"):
        return int(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    import psutil

    return int(psutil.virtual_memory().total)


def available_memory_bytes() -> int:
    """What the machine can still give without swapping, whatever a container allows of it."""
    import psutil

    return int(psutil.virtual_memory().available)


def load_notes() -> tuple[str, ...]:
    """That other work keeps this machine busy, by its load average over the last minute."""
    if not hasattr(os, "getloadavg"):
        return ()
    load, num_cores = os.getloadavg()[0], os.cpu_count() or 1
    if load <= 0.5 * num_cores:
        return ()
    return (f"The machine is busy with other work: load average {load:.1f} on {num_cores} CPUs; rates may be too low.",)


class ContainerMemory(NamedTuple):
    """Bytes: the lowest limit above this process, and the least that any limit above it leaves free."""

    limit: int
    available: int


def container_memory(root: Path = Path("/")) -> ContainerMemory | None:
    """What the cgroups of this process allow, None where nothing limits it; `root` is where proc and sys are found.

    A limit on any ancestor binds too. Inside a container the path in /proc/self/cgroup may be the host's, and only
    the top folder is there: folders that do not exist are passed over.
    """
    levels = []
    for folder in _folders(root):
        limit, usage = _read(folder / "memory.max").strip(), _read(folder / "memory.current").strip()
        if limit.isdigit() and usage.isdigit():  # else "max", or no such folder
            stat = dict(line.split(None, 1) for line in _read(folder / "memory.stat").splitlines())
            # Usage counts the page cache: without this a machine that has read a large data set looks full.
            used = int(usage) - int(stat.get("inactive_file", 0))
            levels.append(ContainerMemory(int(limit), min(int(limit), max(0, int(limit) - used))))
    return ContainerMemory(*map(min, zip(*levels, strict=True))) if levels else None


def container_cpus(root: Path = Path("/")) -> float | None:
    """How many CPUs' time the cgroups of this process allow (2.0 of ``docker run --cpus 2``), None without a limit."""
    quotas = []
    for folder in _folders(root):
        quota, _, period = _read(folder / "cpu.max").strip().partition(" ")
        if quota.isdigit() and period.isdigit():  # else "max"
            quotas.append(int(quota) / int(period))
    return min(quotas, default=None)


def _folders(root: Path) -> Iterator[Path]:
    """Every folder that may limit this process, its own and those above it."""
    base = root / "sys/fs/cgroup"
    for line in _read(root / "proc/self/cgroup").splitlines():
        if line.startswith("0::"):
            own = base / line.removeprefix("0::").lstrip("/")
            yield from (folder for folder in (own, *own.parents) if folder.is_relative_to(base))


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
