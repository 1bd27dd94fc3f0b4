"""Reproduces errors about operand dtypes that a device raises and tensors without data do not."""

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
_ONE_DTYPE_ON_CUDA: Final = {"native_layer_norm", "native_group_norm"}
_NO_HALF_ANYWHERE: Final = {"_cdist_forward"}  # autocast, if on, casts its operands to fp32
WORKS_IN_BF16: Final = "(bf16 works)"  # appended to the error of an operation that fails in fp16 only
_DTYPE_RULES: Final = (rules.MIXED_OPERANDS, rules.HALF_KERNELS, rules.LINEAR_ALGEBRA, rules.FFT)


class OperandCheck(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch does not type it
    """Mode that raises the error that `device` would raise for an operation's dtypes after autocast's casts.

    Tensors without data accept any dtypes. If the dtypes differ, or if the device is the CPU and a dtype is half
    precision, the operation is run on zeros on the CPU, once for each signature. `last_dtypes` are the floating-point
    dtypes of the last operation that had any.
    """

    def __init__(self, device: AutocastDevice) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.last_dtypes: list[torch.dtype] = []
        self._device = device
        self._known: dict[Any, str | None] = {}  # error of each signature, None if it works

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        dtypes = {tensor.dtype for tensor in tensors if tensor.is_floating_point()}
        self.last_dtypes = list(dtypes) or self.last_dtypes
        has_half = not dtypes.isdisjoint(HALF_DTYPES)
        error, name = None, func.overloadpacket.__name__
        if self._device == "cuda" and name in _ONE_DTYPE_ON_CUDA and len(dtypes) > 1:
            error = f"expected scalar type {tensors[0].dtype} in all of them"
        elif has_half and name in _NO_HALF_ANYWHERE:
            error = f"{name} is not implemented for 'Half'"
        elif len(dtypes) > 1 or (has_half and self._device == "cpu"):
            signature = func, tuple((tensor.dtype, tensor.dim()) for tensor in tensors)
            if signature not in self._known:
                error = _error_on_cpu(func, args, kwargs or {}, torch.float16)
                is_in_bf16 = error is not None and _error_on_cpu(func, args, kwargs or {}, torch.bfloat16) is None
                self._known[signature] = f"{error} {WORKS_IN_BF16}" if is_in_bf16 else error
            error = self._known[signature]
        if error is not None:
            raise RuntimeError(error)
        return func(*args, **(kwargs or {}))


def _error_on_cpu(func: Any, args: Any, kwargs: dict[str, Any], half_dtype: torch.dtype) -> str | None:
    """Return the error about dtypes that the CPU raises for an operation, or None.

    The operation runs on zeros, with `half_dtype` in place of any half-precision dtype. Other errors are ignored:
    the zeros may cause them.
    """
    was_enabled = torch.is_autocast_enabled("cpu")
    torch.set_autocast_enabled("cpu", False)  # the operands are cast already
    try:
        with _disable_current_modes(), torch.no_grad():
            cpu_args, cpu_kwargs = tree_map(lambda leaf: _on_cpu(leaf, half_dtype), (args, kwargs))
            func(*cpu_args, **cpu_kwargs)
    except Exception as error:
        return str(error) if rules.rule_of(str(error)) in _DTYPE_RULES else None
    finally:
        torch.set_autocast_enabled("cpu", was_enabled)
    return None


def _on_cpu(leaf: Any, half_dtype: torch.dtype) -> Any:
    """Return zeros on the CPU for a tensor, and the CPU for a device, with `half_dtype` for any half precision."""
    if isinstance(leaf, Tensor):
        return torch.zeros(leaf.shape, dtype=half_dtype if leaf.dtype in HALF_DTYPES else leaf.dtype)
    if isinstance(leaf, torch.dtype):
        return half_dtype if leaf in HALF_DTYPES else leaf
    return torch.device("cpu") if isinstance(leaf, torch.device) else leaf
