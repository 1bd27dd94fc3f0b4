"""What fp32 parameters are kept in."""

from __future__ import annotations

import torch
from torch import nn

from autotune_amp.variants.subject import Trained

# Statistics that run over a training are sums of small parts, which bf16 loses; torch wants the weights beside them
# in the same dtype.
_KEPT = (nn.modules.batchnorm._NormBase,)


def why_not(value: str, trained: Trained) -> str | None:  # noqa: ARG001 - the signature of all
    """Why the parameters cannot be kept so, None where they can."""
    if all(parameter.dtype != torch.float32 for parameter in trained.parameters):
        return "no parameter is in fp32"
    return None


def apply(value: str, trained: Trained) -> None:  # noqa: ARG001 - there is but one
    """Cast each fp32 parameter to bf16, and what an optimizer holds of it, in place; norms with running statistics keep
    theirs.
    """
    kept = {id(p) for module in trained.modules if isinstance(module, _KEPT) for p in module.parameters()}
    for parameter in trained.parameters:
        if parameter.dtype == torch.float32 and id(parameter) not in kept:
            parameter.data = parameter.data.to(torch.bfloat16)
            parameter.grad = None
    trained.follow()
