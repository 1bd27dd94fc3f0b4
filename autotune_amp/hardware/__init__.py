"""Identity, capabilities and load of devices. Importing this package does not import torch.

`probe` measures a device in a fresh child process. `identify` reads the static identity of a device in milliseconds,
without using the device.
"""

from autotune_amp.hardware.device import identify, probe

__all__ = ["identify", "probe"]
