"""Identity, capabilities and load of devices. Importing this package does not import torch.

`probe` measures a device in a fresh child process, in which `measure` runs. `identify` reads the static identity of a
device in milliseconds, without using the device.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from autotune_amp.hardware.device import identify, probe
    from autotune_amp.hardware.measuring import measure

__all__ = ["identify", "measure", "probe"]

_SUBMODULES = {"identify": "device", "measure": "measuring", "probe": "device"}


def __getattr__(name: str) -> object:
    if name not in _SUBMODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}; it exports {', '.join(__all__)}")
    from importlib import import_module

    return getattr(import_module(f"{__name__}.{_SUBMODULES[name]}"), name)
