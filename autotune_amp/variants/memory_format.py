"""Memory format of convolution weights; a convolution's output has its weight's format, and so do later layers."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from autotune_amp.variants.subject import Trained

_FORMATS = {
    "channels_last": (torch.channels_last, 4, (nn.Conv2d, nn.ConvTranspose2d)),
    "channels_last_3d": (torch.channels_last_3d, 5, (nn.Conv3d, nn.ConvTranspose3d)),
}


def has(value: str, trained: Trained) -> bool:
    """Return whether all convolution weights have this format already."""
    memory_format, weights = _FORMATS[value][0], _weights(value, trained)
    return bool(weights) and all(weight.is_contiguous(memory_format=memory_format) for weight in weights)


def why_not(value: str, trained: Trained) -> str | None:
    """Return the reason why no weight can have this format, None if some can."""
    if not _weights(value, trained):
        return f"the model has no convolution over {_FORMATS[value][1] - 2} dimensions"
    return None


def apply(value: str, trained: Trained) -> None:
    """Convert the weights of these convolutions in place, and the optimizer's state for them."""
    memory_format, num_dimensions, _ = _FORMATS[value]
    for parameter in trained.parameters:
        if parameter.dim() == num_dimensions:
            parameter.data = parameter.data.contiguous(memory_format=memory_format)
    trained.follow()


def _weights(value: str, trained: Trained) -> list[Tensor]:
    return [module.weight for module in trained.modules if isinstance(module, _FORMATS[value][2])]
