"""Equal random draws in every precision: dropout removed, or random numbers drawn in fp32."""

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

# torch's modules look these functions up here at each call, and so do the guards of compiled ones.
_DROPOUTS = ("dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "feature_alpha_dropout")


@contextmanager
def without_dropout(model: nn.Module) -> Iterator[None]:
    """Disable all dropout within the context, including forward passes that a checkpoint recomputes."""
    attend: Any = functional.scaled_dot_product_attention

    def keep(input: Tensor, *_: Any, **__: Any) -> Tensor:  # noqa: A002 # torch's name for it
        return input

    def attend_to_all(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,  # noqa: ARG001 # dropout is disabled
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        return attend(query, key, value, attn_mask, 0.0, *args, **kwargs)

    recurrent = [module for module in model.modules() if isinstance(module, nn.RNNBase)]
    patches = [
        *((functional, name, keep) for name in _DROPOUTS),
        (functional, "scaled_dot_product_attention", attend_to_all),
        *((module, "dropout", 0.0) for module in recurrent),
    ]
    with ExitStack() as stack:
        for owner, name, value in patches:
            stack.callback(setattr, owner, name, getattr(owner, name))
            setattr(owner, name, value)
        yield


_DRAWING = frozenset(
    {
        *("bernoulli", "bernoulli_", "cauchy_", "exponential_", "geometric_", "log_normal_", "multinomial", "normal"),
        *("normal_", "poisson", "rand", "rand_like", "randint", "randint_like", "randn", "randn_like", "uniform"),
        "uniform_",
    }
)
_UNIFORM = ("rand", "rand_like", "uniform", "uniform_")


class DrawnInFp32(TorchDispatchMode):
    """Dispatch mode that draws half-precision random numbers in fp32, rounds them and counts the draws.

    One seed gives other numbers in other dtypes: a CPU draws fp32 in groups of 16 and restarts the last group, so that
    everything after an odd number of draws differs.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch does not type it
        self.num_drawn = 0

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run an operator, in fp32 if it draws half-precision numbers."""
        kwargs = dict(kwargs or {})
        name = func.overloadpacket.__name__
        dtype = kwargs.get("dtype") or next((a.dtype for a in args if isinstance(a, Tensor)), None)
        if name not in _DRAWING or dtype not in HALF_DTYPES or "out" in kwargs:
            return func(*args, **kwargs)
        self.num_drawn += 1
        drawn = func(*tree_map(_in_fp32, args), **tree_map(_in_fp32, kwargs))
        if name in _UNIFORM:  # the end of the range is never drawn, and must not be reached by rounding
            end = torch.tensor(kwargs.get("to", args[2] if len(args) > 2 else 1.0), dtype=dtype)
            drawn = drawn.clamp(max=float(torch.nextafter(end, torch.tensor(-torch.inf, dtype=dtype))))
        if name.endswith("_"):
            return args[0].copy_(drawn)
        return drawn.to(dtype) if drawn.is_floating_point() else drawn


def _in_fp32(leaf: Any) -> Any:
    if isinstance(leaf, Tensor) and leaf.dtype in HALF_DTYPES:
        return leaf.float()
    return torch.float32 if isinstance(leaf, torch.dtype) and leaf in HALF_DTYPES else leaf


@contextmanager
def comparable_draws(model: nn.Module, drawn: DrawnInFp32 | None = None, *, are_alike: bool) -> Iterator[None]:
    """Make dropout equal in every precision within the context.

    Nothing is changed if draws are alike (`are_alike`), as on a CPU, where one seed mostly gives the same numbers in
    every dtype; `drawn` covers the exceptions. Accelerators draw as many numbers at once as the dtype allows: there
    dropout is disabled, since different draws alone give a cosine of 0.88 (a T5, measured).
    """
    with nullcontext() if are_alike else without_dropout(model), drawn or nullcontext():
        yield
