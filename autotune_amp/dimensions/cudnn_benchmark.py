"""cuDNN benchmark: timing its algorithms for each new shape of a convolution and using the fastest."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from autotune_amp.dimensions.dimension import Choices, Variant

if TYPE_CHECKING:
    from autotune_amp.dimensions.live_training import LiveTraining


class _CudnnBenchmark(Variant):
    """Variant in which cuDNN times its algorithms for each shape and takes the fastest, instead of using heuristics.

    Not checked against fp32: without it cuDNN may choose any of the same algorithms.
    """

    name = "cudnn_benchmark"
    affects = frozenset({"speed", "memory"})
    removable: ClassVar[Mapping[str, float]] = {"convolutions": 1.0}
    line = "torch.backends.cudnn.benchmark = True"

    def choices(self, hardware: Any, description: Any, options: Any) -> Choices[str]:
        found = super().choices(hardware, description, options)
        varies = description.sample_sizes or description.batch_sizes_seen or description.has_worst_batch
        if options.variants is not None or not varies:
            return found
        reason = f"batches have several shapes, and each would be timed anew; --try {self.name} tries it all the same"
        return Choices((), {**found.left_out, **dict.fromkeys(found.values, reason)})

    def is_applied(self, value: str, live: LiveTraining) -> bool:  # noqa: ARG002 - set for the process
        import torch

        return torch.backends.cudnn.benchmark

    def unsupported_reason(self, value: str, live: LiveTraining) -> str | None:  # noqa: ARG002 - the only value
        from torch.nn.modules.conv import _ConvNd

        if live.device.type != "cuda":
            return "cuDNN is CUDA's"
        if not any(isinstance(module, _ConvNd) for module in live.modules):
            return "the model has no convolution"
        return None

    def change(self, value: str, live: LiveTraining) -> Callable[[], None]:  # noqa: ARG002 - set for the process
        """Switch cuDNN's benchmark on for this process, and return a function that switches it off."""
        import torch

        torch.backends.cudnn.benchmark = True

        def take_back() -> None:
            torch.backends.cudnn.benchmark = False

        return take_back


CUDNN_BENCHMARK = _CudnnBenchmark()
