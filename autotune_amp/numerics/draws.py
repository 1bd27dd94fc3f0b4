"""Equal random numbers in every precision: dropout disabled, or random numbers drawn in fp32."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

from autotune_amp.precision.torch_state import HALF_DTYPES

# Functions of torch.nn.functional, which torch's modules and the guards of compiled code look up at each call.
_DROPOUTS = ("dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "feature_alpha_dropout")


@contextmanager
def without_dropout(model: nn.Module) -> Iterator[None]:
    """Disable all dropout within the context, also in forward passes that activation checkpointing recomputes."""
    attention: Any = functional.scaled_dot_product_attention

    def identity(input: Tensor, *_: Any, **__: Any) -> Tensor:  # noqa: A002 # torch's name for it
        return input

    def attend_without_dropout(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,  # noqa: ARG001 # dropout is disabled
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        return attention(query, key, value, attn_mask, 0.0, *args, **kwargs)

    recurrent = [module for module in model.modules() if isinstance(module, nn.RNNBase)]
    patches = [
        *((functional, name, identity) for name in _DROPOUTS),
        (functional, "scaled_dot_product_attention", attend_without_dropout),
        *((module, "dropout", 0.0) for module in recurrent),
    ]
    with ExitStack() as stack:
        for owner, name, value in patches:
            stack.callback(setattr, owner, name, getattr(owner, name))
            setattr(owner, name, value)
        yield


_RANDOM_OPERATORS = frozenset(
    {
        *("bernoulli", "bernoulli_", "cauchy_", "exponential_", "geometric_", "log_normal_", "multinomial", "normal"),
        *("normal_", "poisson", "rand", "rand_like", "randint", "randint_like", "randn", "randn_like", "uniform"),
        "uniform_",
    }
)
_UNIFORM_OPERATORS = ("rand", "rand_like", "uniform", "uniform_")


class Fp32RandomMode(TorchDispatchMode):
    """Dispatch mode that draws half-precision random numbers in fp32 and rounds them; `num_drawn` counts the draws.

    Otherwise one seed gives different numbers in different dtypes: a CPU draws fp32 numbers in groups of 16 and draws
    an incomplete last group anew, so that all later draws differ.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch does not type it
        self.num_drawn = 0

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run an operator, in fp32 if it draws half-precision random numbers."""
        kwargs = dict(kwargs or {})
        name = func.overloadpacket.__name__
        dtype = kwargs.get("dtype") or next((a.dtype for a in args if isinstance(a, Tensor)), None)
        if name not in _RANDOM_OPERATORS or dtype not in HALF_DTYPES or "out" in kwargs:
            return func(*args, **kwargs)
        self.num_drawn += 1
        drawn = func(*tree_map(_to_fp32, args), **tree_map(_to_fp32, kwargs))
        if name in _UNIFORM_OPERATORS:  # the end of the range is excluded, so rounding must not reach it
            end = torch.tensor(kwargs.get("to", args[2] if len(args) > 2 else 1.0), dtype=dtype)
            drawn = drawn.clamp(max=float(torch.nextafter(end, torch.tensor(-torch.inf, dtype=dtype))))
        if name.endswith("_"):
            return args[0].copy_(drawn)
        return drawn.to(dtype) if drawn.is_floating_point() else drawn


def _to_fp32(leaf: Any) -> Any:
    if isinstance(leaf, Tensor) and leaf.dtype in HALF_DTYPES:
        return leaf.float()
    return torch.float32 if isinstance(leaf, torch.dtype) and leaf in HALF_DTYPES else leaf


@contextmanager
def comparable_draws(model: nn.Module, random_mode: Fp32RandomMode | None = None, *, are_alike: bool) -> Iterator[None]:
    """Make dropout equal in every precision within the context.

    On a CPU one seed mostly gives the same numbers in every dtype: pass `are_alike=True`, and `random_mode` for the
    exceptions. On accelerators it does not. There pass `are_alike=False`, which disables dropout: different draws alone
    would give the gradients of a T5 a cosine of 0.88.
    """
    with nullcontext() if are_alike else without_dropout(model), random_mode or nullcontext():
        yield
