"""Memory format of convolution weights. A convolution's output has the format of its weight, as do later layers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from autotune_amp.dimensions.dimension import Variant

if TYPE_CHECKING:
    from torch import Tensor

    from autotune_amp.dimensions.live_training import LiveTraining

_NUM_SPATIAL_DIMENSIONS = {"channels_last": 2, "channels_last_3d": 3}


class _MemoryFormat(Variant):
    name = "memory_format"
    removable: ClassVar[Mapping[str, float]] = {"convolutions": 1.0}
    line = "model = model.to(memory_format=torch.{})  # a convolution's output follows"

    def is_applied(self, value: str, live: LiveTraining) -> bool:
        """Return whether all convolution weights already have this format."""
        weights, memory_format = _convolution_weights(value, live), _torch_format(value)
        return bool(weights) and all(weight.is_contiguous(memory_format=memory_format) for weight in weights)

    def unsupported_reason(self, value: str, live: LiveTraining) -> str | None:
        if not _convolution_weights(value, live):
            return f"the model has no convolution over {_NUM_SPATIAL_DIMENSIONS[value]} dimensions"
        return None

    def change(self, value: str, live: LiveTraining) -> None:
        """Convert weights of the format's number of dimensions in place, and the optimizer's state for them."""
        for parameter in live.parameters:
            if parameter.dim() == _NUM_SPATIAL_DIMENSIONS[value] + 2:
                parameter.data = parameter.data.contiguous(memory_format=_torch_format(value))
        live.convert_optimizer_state()


def _torch_format(value: str) -> Any:
    import torch

    return getattr(torch, value)


def _convolution_weights(value: str, live: LiveTraining) -> list[Tensor]:
    from torch import nn

    kinds = (nn.Conv2d, nn.ConvTranspose2d) if value == "channels_last" else (nn.Conv3d, nn.ConvTranspose3d)
    return [module.weight for module in live.modules if isinstance(module, kinds)]


MEMORY_FORMAT = _MemoryFormat()
