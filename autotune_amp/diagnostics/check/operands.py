"""Errors that devices raise for the dtypes of an operation's operands and tensors without data do not raise."""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map

from autotune_amp.precision import rules
from autotune_amp.precision.rules import AutocastDevice
from autotune_amp.precision.torch_state import HALF_DTYPES

# CUDA's kernels read weights in the input's dtype; the CPU's take fp32 weights with a half-precision input too.
_SAME_ON_CUDA: Final = {"native_layer_norm", "native_group_norm"}
_NO_HALF_ANYWHERE: Final = {"_cdist_forward"}  # autocast, if on, casts its operands to fp32
NOT_IN_BF16: Final = "(bf16 works)"
_OF_DTYPES: Final = (rules.MIXED_OPERANDS, rules.HALF_KERNELS, rules.LINEAR_ALGEBRA, rules.FFT)


class OperandCheck(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch does not type it
    """Mode that raises the error that `device` would raise for an operation's dtypes after autocast's casts.

    Tensors without data accept any dtypes. If the dtypes differ, or if the device is the CPU and one is half precision,
    the operation is run on zeros by the CPU's own kernels, once for each signature. `reached` are the floating-point
    dtypes of the last operation that had any.
    """

    def __init__(self, device: AutocastDevice) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.reached: list[torch.dtype] = []
        self._device = device
        self._known: dict[Any, str | None] = {}  # error of each signature, None if it works

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        dtypes = {tensor.dtype for tensor in tensors if tensor.is_floating_point()}
        self.reached = list(dtypes) or self.reached
        takes_half = not dtypes.isdisjoint(HALF_DTYPES)
        error, name = None, func.overloadpacket.__name__
        if self._device == "cuda" and name in _SAME_ON_CUDA and len(dtypes) > 1:
            error = f"expected scalar type {tensors[0].dtype} in all of them"
        elif takes_half and name in _NO_HALF_ANYWHERE:
            error = f"{name} is not implemented for 'Half'"
        elif len(dtypes) > 1 or (takes_half and self._device == "cpu"):
            signature = func, tuple((tensor.dtype, tensor.dim()) for tensor in tensors)
            if signature not in self._known:
                error = _error_on_cpu(func, args, kwargs or {}, torch.float16)
                is_in_bf16 = error is not None and _error_on_cpu(func, args, kwargs or {}, torch.bfloat16) is None
                self._known[signature] = f"{error} {NOT_IN_BF16}" if is_in_bf16 else error
            error = self._known[signature]
        if error is not None:
            raise RuntimeError(error)
        return func(*args, **(kwargs or {}))


def _error_on_cpu(func: Any, args: Any, kwargs: dict[str, Any], low: torch.dtype) -> str | None:
    """Return the error about dtypes that the CPU raises for an operation, or None.

    The operation runs on zeros, with `low` in place of any half-precision dtype. Other errors are ignored, since the
    zeros may cause them.
    """
    was_on = torch.is_autocast_enabled("cpu")
    torch.set_autocast_enabled("cpu", False)  # the operands are cast already
    try:
        with _disable_current_modes(), torch.no_grad():
            given, named = tree_map(lambda leaf: _on_cpu(leaf, low), (args, kwargs))
            func(*given, **named)
    except Exception as error:
        return str(error) if rules.rule_of(str(error)) in _OF_DTYPES else None
    finally:
        torch.set_autocast_enabled("cpu", was_on)
    return None


def _on_cpu(leaf: Any, low: torch.dtype) -> Any:
    if isinstance(leaf, Tensor):
        return torch.zeros(leaf.shape, dtype=low if leaf.dtype in HALF_DTYPES else leaf.dtype)
    if isinstance(leaf, torch.dtype):
        return low if leaf in HALF_DTYPES else leaf
    return torch.device("cpu") if isinstance(leaf, torch.device) else leaf
