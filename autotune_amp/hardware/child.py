"""The probe's child process: ``python -m autotune_amp.hardware.child DEVICE ANSWER_FILE``."""

from __future__ import annotations

import sys
from pathlib import Path

import msgspec

from autotune_amp.core.errors import DeviceError
from autotune_amp.core.hardware import Hardware


class NoDevice(msgspec.Struct, frozen=True, kw_only=True):
    """A `DeviceError` on its way to the parent."""

    message: str
    next_step: str


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """What the child writes: one of the two."""

    hardware: Hardware | None = None
    no_device: NoDevice | None = None


def answer(device: str) -> Answer:
    """Measure the device; a `DeviceError` becomes part of the answer, all else ends this process."""
    from autotune_amp.hardware.measuring import measure

    try:
        return Answer(hardware=measure(device))
    except DeviceError as error:
        return Answer(no_device=NoDevice(message=error.message, next_step=error.next_step))


if __name__ == "__main__":
    Path(sys.argv[2]).write_bytes(msgspec.json.encode(answer(sys.argv[1])))
