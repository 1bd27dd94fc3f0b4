"""CPUs and memory of this machine, and the limits set by a container or job. No torch.

Source of the limits: Linux's admin-guide/cgroup-v2 (memory.max, memory.current, cpu.max), admin-guide/cgroup-v1/memory
and scheduler/sched-bwc (cpu.cfs_quota_us).
"""

from __future__ import annotations

import contextlib
import math
import os
import platform
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple


def cpu_name(root: Path = Path("/")) -> str:
    """Return the processor's name as given by its maker, or its architecture."""
    if sys.platform == "darwin":
        import subprocess

        return subprocess.run(
            ["/usr/sbin/sysctl", "-n", "machdep.cpu.brand_string"], capture_output=True, text=True, check=False
        ).stdout.strip()
    return _cpuinfo(root, "model name") or platform.processor() or platform.machine()


def cpu_flags(root: Path = Path("/")) -> frozenset[str]:
    """Return the instruction sets in /proc/cpuinfo ("flags" on x86, "Features" on ARM), empty if it does not exist."""
    return frozenset((_cpuinfo(root, "flags", "Features") or "").split())


def _cpuinfo(root: Path, *keys: str) -> str | None:
    """Return the first value in /proc/cpuinfo for one of these keys, None if there is none."""
    with contextlib.suppress(OSError), (root / "proc/cpuinfo").open() as lines:
        # Read line by line: the kernel generates this file on reading, slowly on hosts with hundreds of CPUs.
        for line in lines:
            key, _, value = line.partition(":")
            if key.strip() in keys:
                return value.strip()
    return None


def num_cpus() -> int:
    """Return the number of CPUs that this process may run on."""
    if sys.platform == "linux":
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def usable_cores() -> int:
    """Return the number of whole CPUs that this process may use: those it may run on, within the container's limit."""
    return int(min(num_cpus(), container_cpus() or math.inf))


def total_memory_bytes() -> int:
    """Return the machine's memory in bytes, ignoring container limits."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def available_memory_bytes() -> int:
    """Return the machine's memory in bytes that is available without swapping, ignoring container limits."""
    import psutil

    return int(psutil.virtual_memory().available)


def free_memory_bytes() -> int:
    """Return the memory in bytes that is available without swapping, within the container's limit."""
    container = container_memory()
    available_bytes = available_memory_bytes()
    return available_bytes if container is None else min(available_bytes, container.available)


def load_notes() -> tuple[str, ...]:
    """Return a warning if the load average over the last minute shows that other work keeps the machine busy."""
    load, num_cores = os.getloadavg()[0], os.cpu_count() or 1
    if load <= 0.5 * num_cores:
        return ()
    return (f"The machine is busy with other work: load average {load:.1f} on {num_cores} CPUs; rates may be too low.",)


# Files with a cgroup's limit and usage, and what the lines of memory.stat begin with: in version 2, in version 1.
_MEMORY_FILES = (
    ("memory.max", "memory.current", ""),
    ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_"),
)


class ContainerMemory(NamedTuple):
    """Memory in bytes: the lowest limit of this process's cgroups, and the least memory that any leaves free."""

    limit: int
    available: int


def container_memory(root: Path = Path("/")) -> ContainerMemory | None:
    """Return the memory limit of this process's cgroups, None without one. `root` contains proc and sys.

    Limits of ancestors apply too. Inside a container the path in /proc/self/cgroup may be the host's, while only the
    top folder exists: folders that do not exist are skipped.
    """
    levels = []
    for folder in _cgroup_folders(root, "memory"):
        for limit_file, usage_file, prefix in _MEMORY_FILES:
            limit, usage = _read_text(folder / limit_file).strip(), _read_text(folder / usage_file).strip()
            # Without a limit there is "max" or, in version 1, a number beyond any memory; or the folder does not exist.
            if limit.isdigit() and usage.isdigit() and int(limit) < total_memory_bytes():
                stat = dict(line.split(None, 1) for line in _read_text(folder / "memory.stat").splitlines())
                # Usage includes the page cache, which can be freed: after reading a large dataset all would seem used.
                # What was read twice is active.
                used = int(usage) - sum(int(stat.get(f"{prefix}{kind}_file", 0)) for kind in ("active", "inactive"))
                levels.append(ContainerMemory(int(limit), min(int(limit), max(0, int(limit) - used))))
    return ContainerMemory(*map(min, zip(*levels, strict=True))) if levels else None


def container_cpus(root: Path = Path("/")) -> float | None:
    """Return the CPU time, in CPUs, that this process's cgroups allow (2.0 with ``--cpus 2``), None without a limit."""
    quotas = []
    for folder in _cgroup_folders(root, "cpu"):
        version_1 = " ".join(_read_text(folder / f"cpu.cfs_{name}_us").strip() for name in ("quota", "period"))
        quota, _, period = (_read_text(folder / "cpu.max").strip() or version_1).partition(" ")
        if quota.isdigit() and period.isdigit():  # else "max" or "-1"
            quotas.append(int(quota) / int(period))
    return min(quotas, default=None)


def _cgroup_folders(root: Path, controller: str) -> Iterator[Path]:
    """Yield the cgroup folders whose limits apply to this process: its own and its ancestors'.

    In version 1 each controller, or several joined such as "cpu,cpuacct", has a hierarchy of its own.
    """
    base = root / "sys/fs/cgroup"
    for line in _read_text(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        for top in [base / controllers, base / controller] if controllers else [base]:
            own = top / path.lstrip("/")
            yield from (folder for folder in (own, *own.parents) if folder.is_relative_to(top))


def _read_text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
