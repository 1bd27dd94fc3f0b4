"""Lightning: the controller as a Precision plugin, a callback, Trainer arguments, and a workload from a module."""

from autotune_amp.integrations.lightning.plugin import AutotuneCallback, AutotunePrecision, trainer_arguments
from autotune_amp.integrations.lightning.workload import workload

__all__ = ["AutotuneCallback", "AutotunePrecision", "trainer_arguments", "workload"]
