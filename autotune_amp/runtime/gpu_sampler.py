"""Readings of the GPU's sensors, taken in a thread, so that training never waits for the driver. No torch."""

from __future__ import annotations

import logging
import os
import threading
import weakref
from collections.abc import Callable
from typing import Any

from autotune_amp.hardware import nvml
from autotune_amp.hardware.nvml import GpuSensors

log = logging.getLogger("autotune_amp.runtime")

SAMPLE_SECONDS = 5.0
_END_SECONDS = 5.0  # for a query that the driver does not answer


class _Sampling:
    """State that a sampler shares with its thread, which keeps no reference to the sampler itself."""

    def __init__(self) -> None:
        self.newest = GpuSensors()
        self.is_over = threading.Event()


class GpuSampler:
    """Sampler of one GPU's temperature, clock and power. Logs a warning whenever the GPU begins to be throttled.

    A forked child has no readings; a copy, as of the controller, starts a thread of its own.
    """

    def __init__(self, uuid: str, device: str) -> None:
        self._uuid = uuid
        self._device = device
        self._process = os.getpid()
        self._sampling = _Sampling()
        self._close: Callable[[], object] | None = None  # set while its thread runs

    def __reduce__(self) -> tuple[Any, ...]:
        return GpuSampler, (self._uuid, self._device)

    @property
    def newest(self) -> GpuSensors:
        """Return the newest readings, all of them None unless the thread runs."""
        is_running = self._close is not None and self._process == os.getpid()
        return self._sampling.newest if is_running else GpuSensors()

    def start(self) -> None:
        """Start the thread unless it runs already, or the process was forked."""
        if self._close is not None or self._process != os.getpid():
            return
        self._sampling = _Sampling()
        arguments = self._uuid, self._device, self._sampling
        thread = threading.Thread(target=_sample, args=arguments, name="autotune_amp GPU sampler", daemon=True)
        thread.start()
        self._close = weakref.finalize(self, _end, self._sampling, thread)  # at Python's exit at the latest

    def close(self) -> None:
        """End the thread. A later `start` begins again."""
        if self._close is not None:
            self._close()
            self._close = None


def _sample(uuid: str, device: str, sampling: _Sampling) -> None:
    was_throttled = False
    while True:
        sampling.newest = sensors = nvml.read_sensors(uuid)
        is_throttled = bool(sensors.slowdowns)
        if is_throttled and not was_throttled:
            state = sensors.temperature_celsius, sensors.sm_clock_mhz
            reasons = ", ".join(sensors.slowdowns or ())
            log.warning("%s is throttled at %s degrees Celsius, its clock at %s MHz: %s.", device, *state, reasons)
        was_throttled = is_throttled
        if sampling.is_over.wait(SAMPLE_SECONDS):
            return


def _end(sampling: _Sampling, thread: threading.Thread) -> None:
    if not thread.is_alive():  # in a forked child, where the event may be locked for ever
        return
    sampling.is_over.set()
    if thread is not threading.current_thread():  # which may run the garbage collector
        thread.join(_END_SECONDS)
