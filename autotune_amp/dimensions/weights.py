"""Dtype in which the model's fp32 parameters are stored."""

from __future__ import annotations

from typing import TYPE_CHECKING

from autotune_amp.dimensions.dimension import Variant

if TYPE_CHECKING:
    from torch import nn

    from autotune_amp.dimensions.live_training import LiveTraining


class _Weights(Variant):
    name = "weights"
    why_not_auto = (
        "small updates round away on bf16 weights; --try weights tries it, for example with an optimizer that rounds "
        "stochastically or keeps fp32 copies"
    )

    def is_applied(self, value: str, live: LiveTraining) -> bool:  # noqa: ARG002 - the only value
        import torch

        return not _parameters_to_cast(live) and any(parameter.dtype == torch.bfloat16 for parameter in live.parameters)

    def unsupported_reason(self, value: str, live: LiveTraining) -> str | None:  # noqa: ARG002 - the only value
        import torch

        if any(parameter.dtype == torch.float16 for parameter in live.parameters):
            return "some weights are kept in fp16"
        return None

    def change(self, value: str, live: LiveTraining) -> None:  # noqa: ARG002 - the only value
        """Cast each fp32 parameter to bf16 in place, and the optimizer's state for it.

        Norms with running statistics keep their dtype.
        """
        import torch

        for parameter in _parameters_to_cast(live):
            parameter.grad = None
            parameter.data = parameter.data.to(torch.bfloat16)
        live.convert_optimizer_state()


def _parameters_to_cast(live: LiveTraining) -> list[nn.Parameter]:
    """Return the fp32 parameters, without packed ones and those of norms with running statistics."""
    import torch
    from torch import nn

    from autotune_amp.precision.torch_state import is_packed

    # Running statistics sum up small terms, which bf16 loses. torch requires the norm's weights to have their dtype.
    norms = [module for module in live.modules if isinstance(module, nn.modules.batchnorm._NormBase)]
    kept = {parameter for norm in norms for parameter in norm.parameters()}
    return [p for p in live.parameters if p.dtype == torch.float32 and p not in kept and not is_packed(p)]


WEIGHTS = _Weights()
