"""Energy of a device over the measured steps, from its own counter: NVML for an NVIDIA GPU, RAPL for a CPU's packages.

A counter covers the whole device, including other processes on it. Imports no torch, since the parent process asks for
the counter beforehand.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeAlias

from autotune_amp.core.errors import InvalidRequestError
from autotune_amp.hardware import nvml

Counter: TypeAlias = Callable[[], float | None]  # joules since some moment; None if it cannot be read any more

MIN_SECONDS = 0.1  # less is comparable to a counter's update interval (NVML: up to 100 ms, RAPL: 1 ms)
POWERCAP = Path("/sys/class/powercap")

_PACKAGE_ZONE = re.compile(r"intel-rapl:\d+")  # AMD's too; zones within a package have a second number


class EnergyMeter:
    """Meter of the energy per sample over measured steps.

    The counter is read at most every `MIN_SECONDS`, since reading NVML's takes time. Without a counter the energy is
    None.
    """

    def __init__(self, counter: Counter | None) -> None:
        self._counter = counter
        self._joules_before: float | None = None
        self._moment_before = 0.0
        self._number_before = 0
        self._num_compilations_before = 0
        self._joules = 0.0
        self._num_steps = 0

    def step(self, number: int, num_compilations: int = 0) -> None:
        """Record that `number` measured steps are done, 0 while warming up. Steps with a compilation do not count."""
        if self._counter is None:
            return
        moment = time.perf_counter()
        seconds = moment - self._moment_before
        is_measured = number > self._number_before and num_compilations == self._num_compilations_before
        if is_measured and seconds < MIN_SECONDS:
            return
        joules = self._counter()
        if is_measured and joules is not None and self._joules_before is not None:
            self._joules += joules - self._joules_before
            self._num_steps += number - self._number_before
        self._joules_before, self._moment_before = joules, moment
        self._number_before, self._num_compilations_before = number, num_compilations

    def joules_per_sample(self, num_samples_per_step: int) -> float | None:
        """Return the joules per sample; None without a counter, or if it did not change during the measured steps."""
        return self._joules / (self._num_steps * num_samples_per_step) if self._joules > 0 else None


def find_counter(device_type: str, uuid: str | None, powercap: Path = POWERCAP) -> Counter | None:
    """Return a device's energy counter, or None without one that this user may read. `uuid` is an NVIDIA GPU's."""
    if device_type == "cuda" and uuid is not None:
        return None if nvml.energy_joules(uuid) is None else lambda: nvml.energy_joules(uuid)
    if device_type == "cpu":
        # Only zones of CPU packages: the zone called psys is the whole board and includes them.
        zones = [path for path in sorted(powercap.glob("intel-rapl:*")) if _PACKAGE_ZONE.fullmatch(path.name)]
        try:
            packages = [_package_counter(zone) for zone in zones if (zone / "name").read_text().startswith("package")]
        except (OSError, ValueError):
            return None
        return (lambda: sum(joules() for joules in packages)) if packages else None
    return None


def require_counter(device_type: str, uuid: str | None, powercap: Path = POWERCAP) -> None:
    """Raise `InvalidRequestError` with the next step if `find_counter` finds no counter."""
    if find_counter(device_type, uuid, powercap) is None:
        raise InvalidRequestError(
            f"--objective is 'energy', which cannot be measured here: this {device_type} device has no energy counter "
            "that this user may read (MIG instances, older GPUs and most VMs have none, and a CPU's is for root).",
            "Use --objective speed or memory; or, for a CPU, run "
            f"`chmod a+r {powercap}/intel-rapl:*/energy_uj` as root.",
        )


def _package_counter(zone: Path) -> Callable[[], float]:
    """Return a function that reads the joules used by one CPU package since this call.

    It has to be called more often than the counter wraps around (minutes). Raises `OSError` if the counter cannot be
    read.
    """
    largest = int((zone / "max_energy_range_uj").read_text())
    before, microjoules = int((zone / "energy_uj").read_text()), 0

    def joules() -> float:
        nonlocal before, microjoules
        now = int((zone / "energy_uj").read_text())
        microjoules += (now - before) % (largest + 1)
        before = now
        return microjoules / 1e6

    return joules
