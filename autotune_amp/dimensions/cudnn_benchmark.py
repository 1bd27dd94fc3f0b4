"""cuDNN benchmark: cuDNN times its algorithms for each new shape of a convolution and uses the fastest."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from autotune_amp.dimensions.dimension import Choices, Variant

if TYPE_CHECKING:
    from autotune_amp.dimensions.live_training import LiveTraining


class _CudnnBenchmark(Variant):
    """Variant in which cuDNN times its algorithms for each shape, instead of choosing one by heuristics.

    It is not compared with fp32, since the heuristics choose among the same algorithms.
    """

    name = "cudnn_benchmark"
    affects = frozenset({"speed", "memory"})
    removable: ClassVar[Mapping[str, float]] = {"convolutions": 1.0}
    line = "torch.backends.cudnn.benchmark = True"

    def choices(self, hardware: Any, description: Any, options: Any) -> Choices[str]:
        supported = super().choices(hardware, description, options)
        has_several_shapes = description.sample_sizes or description.batch_sizes_seen or description.has_worst_batch
        if options.variants is not None or not has_several_shapes:
            return supported
        reason = f"batches have several shapes, and cuDNN would time each; --try {self.name} tries it nevertheless"
        return Choices((), {**supported.left_out, **dict.fromkeys(supported.values, reason)})

    def is_applied(self, value: str, live: LiveTraining) -> bool:  # noqa: ARG002 - set for the process
        import torch

        return torch.backends.cudnn.benchmark

    def unsupported_reason(self, value: str, live: LiveTraining) -> str | None:  # noqa: ARG002 - the only value
        from torch.nn.modules.conv import _ConvNd

        if live.device.type != "cuda":
            return "cuDNN needs CUDA"
        if not any(isinstance(module, _ConvNd) for module in live.modules):
            return "the model has no convolution"
        return None

    def change(self, value: str, live: LiveTraining) -> Callable[[], None]:  # noqa: ARG002 - set for the process
        """Switch cuDNN's benchmark on for this process, and return a function that switches it off."""
        import torch

        torch.backends.cudnn.benchmark = True

        def switch_off() -> None:
            torch.backends.cudnn.benchmark = False

        return switch_off


CUDNN_BENCHMARK = _CudnnBenchmark()
