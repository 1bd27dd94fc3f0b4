"""The machine and the container or job that this process lives in: CPUs, memory, and their limits. No torch.

Sources of the limits: Linux's admin-guide/cgroup-v2 (memory.max, memory.current, cpu.max), cgroup-v1/memory
(memory.limit_in_bytes, memory.usage_in_bytes) and scheduler/sched-bwc (cpu.cfs_quota_us, cpu.cfs_period_us).
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterator


def cpu_name(root: Path = Path("/")) -> str:
    """The processor's name as its maker gives it, else its architecture."""
    if sys.platform == "darwin":
        import subprocess

        return subprocess.run(
            ["/usr/sbin/sysctl", "-n", "machdep.cpu.brand_string"], capture_output=True, text=True, check=False
        ).stdout.strip()
    try:
        # Line by line: the kernel makes this file up as it is read, slowly where there are hundreds of CPUs.
        with (root / "proc/cpuinfo").open() as lines:
            for line in lines:
                key, _, value = line.partition(":")
                if key.strip() == "model name":
                    return value.strip()
    except OSError:
        pass
    import platform

    return platform.processor() or platform.machine()


def cpu_flags(root: Path = Path("/")) -> frozenset[str]:
    """The instruction sets in /proc/cpuinfo ("flags" on x86, "Features" on ARM), empty where there is none."""
    try:
        lines = (root / "proc/cpuinfo").read_text().splitlines()
    except OSError:
        return frozenset()
    for line in lines:
        key, _, value = line.partition(":")
        if key.strip() in ("flags", "Features"):
            return frozenset(value.split())
    return frozenset()


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


# --- the container


class ContainerMemory(NamedTuple):
    """Bytes: the lowest limit above this process, and the least that any limit above it leaves free."""

    limit: int
    available: int


class _Files(NamedTuple):
    limit: str
    usage: str
    cache: str  # the entry of memory.stat for file pages that the kernel drops before it kills
    cpu: tuple[str, ...]  # quota and period in microseconds, in one file or in two


_V1 = _Files(
    "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file", ("cpu.cfs_quota_us", "cpu.cfs_period_us")
)
_V2 = _Files("memory.max", "memory.current", "inactive_file", ("cpu.max",))

# Version 1 writes "no limit" as the largest page-aligned number, which depends on the page size.
_NO_LIMIT = 2**60


def container_memory(root: Path = Path("/")) -> ContainerMemory | None:
    """What the cgroups of this process allow, None where nothing limits it; `root` is where proc and sys are found.

    A limit on any ancestor binds too. Inside a container the path in /proc/self/cgroup may be the host's, and only
    the top folder is there: folders that do not exist are passed over.
    """
    found = (_level(folder, files) for folder, files in _folders(root, "memory"))
    levels = [level for level in found if level is not None and level.limit < _NO_LIMIT]
    if not levels:
        return None
    return ContainerMemory(min(level.limit for level in levels), min(level.available for level in levels))


def container_cpus(root: Path = Path("/")) -> float | None:
    """How many CPUs' time the cgroups of this process allow (2.0 of ``docker run --cpus 2``), None without a limit."""
    quotas = []
    for folder, files in _folders(root, "cpu"):
        words = " ".join(_read(folder / name) for name in files.cpu).split()
        if len(words) == 2 and all(word.isdigit() for word in words) and int(words[1]) > 0:  # else "max", or -1
            quotas.append(int(words[0]) / int(words[1]))
    return min(quotas, default=None)


def _folders(root: Path, controller: str) -> Iterator[tuple[Path, _Files]]:
    """Every folder that may limit this process, its own and those above it."""
    for line in _read(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if not controllers:
            base, files = root / "sys/fs/cgroup", _V2
        elif controller in controllers.split(","):
            base, files = root / "sys/fs/cgroup" / controller, _V1
        else:
            continue
        own = base / path.lstrip("/")
        yield from ((folder, files) for folder in (own, *own.parents) if folder.is_relative_to(base))


def _level(folder: Path, files: _Files) -> ContainerMemory | None:
    limit, usage = _read(folder / files.limit).strip(), _read(folder / files.usage).strip()
    if not limit.isdigit() or not usage.isdigit():  # "max", or no such folder
        return None
    stat = dict(line.split(None, 1) for line in _read(folder / "memory.stat").splitlines())
    # Usage counts the page cache: without this a machine that has read a large data set looks full.
    used = int(usage) - int(stat.get(files.cache, 0))
    return ContainerMemory(int(limit), min(int(limit), max(0, int(limit) - used)))


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
