"""Identity, capabilities and load of devices. Importing this package does not import torch.

`probe` is the function to call: it measures a device in a fresh child process. `measure` runs in that child and uses
the device. `identify` reads the static identity in milliseconds, in any process, without touching the device.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from autotune_amp.hardware.device import identify, probe
    from autotune_amp.hardware.measuring import measure

__all__ = ["identify", "measure", "probe"]

_HOMES = {"identify": "device", "measure": "measuring", "probe": "device"}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}; it exports {', '.join(__all__)}")
    from importlib import import_module

    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
