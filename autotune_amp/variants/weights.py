"""Data type in which fp32 parameters are kept."""

from __future__ import annotations

import torch
from torch import nn

from autotune_amp.variants.subject import Trained

# Running statistics are sums of small terms, which bf16 loses; torch requires the weights beside them to have the same
# dtype.
_KEPT = (nn.modules.batchnorm._NormBase,)


def has(value: str, trained: Trained) -> bool:  # noqa: ARG001 - the interface of a variant
    """Return whether the parameters are kept in bf16 already."""
    return not _to_cast(trained) and any(parameter.dtype == torch.bfloat16 for parameter in trained.parameters)


def why_not(value: str, trained: Trained) -> str | None:  # noqa: ARG001 - the interface of a variant
    """Return the reason why the parameters cannot be kept in bf16, None if they can."""
    if any(parameter.dtype == torch.float16 for parameter in trained.parameters):
        return "some are kept in fp16"
    return None


def apply(value: str, trained: Trained) -> None:  # noqa: ARG001 - the only value
    """Cast each fp32 parameter to bf16 in place, and the optimizer's state for it.

    Norms with running statistics keep their dtype.
    """
    for parameter in _to_cast(trained):
        parameter.grad = None
        parameter.data = parameter.data.to(torch.bfloat16)
    trained.follow()


def _to_cast(trained: Trained) -> list[nn.Parameter]:
    kept = {p for module in trained.modules if isinstance(module, _KEPT) for p in module.parameters()}
    return [p for p in trained.parameters if p.dtype == torch.float32 and p not in kept]
