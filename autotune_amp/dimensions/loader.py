"""Arguments of the DataLoader: the number of its worker processes, pinned memory and prefetched batches."""

from __future__ import annotations

from collections.abc import Mapping
from statistics import median
from typing import TYPE_CHECKING, Any, ClassVar

from msgspec.structs import replace

from autotune_amp.dimensions.dimension import Choices, Dimension, Leader, Variant

if TYPE_CHECKING:
    from autotune_amp.dimensions.live_training import LiveTraining

SHORT_WAIT = 0.05  # share of a step spent waiting for data below which a faster loader has little to gain
_DEFAULT_PREFETCH_FACTOR = 2  # of a DataLoader with workers


class _NumWorkers(Dimension[int | None]):
    """Number of worker processes, None for the user's own. Others are tried if the loader limits the speed.

    See `search.stages.workers`.
    """

    name = "num_workers"
    affects = frozenset({"speed"})
    found_by = None
    removable: ClassVar[Mapping[str, float]] = {"loader": 1.0}

    def risk(self, value: int | None) -> int:
        return 0 if value is None else 1 + value


class _LoaderArgument(Variant):
    """Argument of the DataLoader. A trial opens its data with it, and `loader_options` of a config has it.

    ``prepare()`` leaves it to the training script, which makes the loader.
    """

    affects = frozenset({"speed"})

    def choices(self, hardware: Any, description: Any, options: Any) -> Choices[str]:
        """Return the values to try if the data are a DataLoader that may gain by them.

        Values that gain nothing have a reason only if the user named this dimension.
        """
        why = None if self._may_gain(hardware, description) else "nothing to gain with this loader on this device"
        if why is not None and self.name not in (options.variants or ()):
            return Choices()
        values = dict.fromkeys(self.others, why)
        own = replace(description, variants={**description.variants, self.name: values})
        return super().choices(hardware, own, options)

    def _may_gain(self, hardware: Any, description: Any) -> bool:
        raise NotImplementedError

    def apply(self, training: Any, value: str) -> None:
        """Do nothing: the training has opened its data with the setting's values."""

    def is_applied(self, value: str, live: LiveTraining) -> bool:  # noqa: ARG002 - it is set in the loader
        return True


class _PinMemory(_LoaderArgument):
    """Whether batches are copied to pinned memory, from which a CUDA device reads faster."""

    name = "pin_memory"

    def _may_gain(self, hardware: Any, description: Any) -> bool:
        return hardware.identity.type == "cuda" and description.pins_memory is False


class _PrefetchFactor(_LoaderArgument):
    """Number of batches that each worker loads ahead, tried where steps wait for data in spite of workers."""

    name = "prefetch_factor"

    def _may_gain(self, hardware: Any, description: Any) -> bool:  # noqa: ARG002 - on any device
        has_loader = description.num_workers is not None and description.pins_memory is not None  # not of a command
        own = description.prefetch_factor or _DEFAULT_PREFETCH_FACTOR
        return has_loader and all(own < int(value) for value in self.others)

    def reason_against(self, value: str, leader: Leader) -> str | None:  # noqa: ARG002 - the only value
        if not leader.num_workers:
            return "the loader has no workers"
        waits = [measured.data_seconds / measured.step_seconds for measured in leader.measurements[leader.setting]]
        return None if median(waits) > SHORT_WAIT else "steps hardly wait for data"


NUM_WORKERS = _NumWorkers()
PIN_MEMORY = _PinMemory()
PREFETCH_FACTOR = _PrefetchFactor()
