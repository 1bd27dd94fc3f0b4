"""torchao's fp8 layer controlled by autocast; a module of its own, so that a pickled model finds it by its name."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torchao.float8.float8_linear import Float8Linear


class Fp8Linear(Float8Linear):  # type: ignore[misc] # torchao has no types
    """Linear layer that multiplies in fp8 if autocast is on, and in fp32 otherwise, as under a pin."""

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 - Linear's name
        """Apply the layer to (..., in_features); return (..., out_features), in autocast's dtype if that is on."""
        device_type = input.device.type
        if not torch.is_autocast_enabled(device_type):
            return nn.Linear.forward(self, input)
        input = input.to(torch.get_autocast_dtype(device_type))  # noqa: A001 - as above
        # torchao would use CUDA's autocast dtype on any device, by a function that torch has deprecated (0.18).
        with torch.autocast(device_type, enabled=False):
            output: Tensor = super().forward(input)
        return output
