"""Facts of the machine itself: its CPU and its memory. No torch."""

from __future__ import annotations

import os
import sys
from pathlib import Path


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


def load_notes() -> tuple[str, ...]:
    """That other work keeps this machine busy, by its load average over the last minute."""
    if not hasattr(os, "getloadavg"):
        return ()
    load, num_cores = os.getloadavg()[0], os.cpu_count() or 1
    if load <= 0.5 * num_cores:
        return ()
    return (f"The machine is busy with other work: load average {load:.1f} on {num_cores} CPUs; rates may be too low.",)
