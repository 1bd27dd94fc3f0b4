"""torchao's fp8 layer controlled by autocast. In a separate file, so that pickle can import the class by name."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torchao.float8.float8_linear import Float8Linear


class Fp8Linear(Float8Linear):  # type: ignore[misc] # torchao has no types
    """Linear layer that multiplies in fp8 if autocast is on, and in fp32 otherwise, for example if it is pinned."""

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 - Linear's name
        """Map (..., in_features) to (..., out_features), in autocast's dtype if autocast is on."""
        device_type = input.device.type
        if not torch.is_autocast_enabled(device_type):
            return nn.Linear.forward(self, input)
        input = input.to(torch.get_autocast_dtype(device_type))  # noqa: A001 - as above
        # torchao 0.18 would use CUDA's autocast dtype on any device, by a deprecated function of torch.
        with torch.autocast(device_type, enabled=False):
            output: Tensor = super().forward(input)
        return output
